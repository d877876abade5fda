"""The command: its options, and what is done with them in which order."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import echo
from echo import files, settings, trace_options
from echo.decoding import device_of, one_torch_thread
from echo.demo import text as texts
from echo.demo.decode import LastSelections, Workload
from echo.demo.figures import figures
from echo.demo.picture import save_picture
from echo.demo.tables import print_tables, print_texts
from echo.extras import DEMO, lacking, load_hf

_TOKENS_ON_CPU = 8192  # a few seconds on two cores; a GPU reads as much as the model's context holds


def add_command(commands: Any) -> None:
    """Adds `demo` to the commands."""
    parser = commands.add_parser(
        "demo",
        help="continue a long text with its KV offloaded, and compare with everything resident",
        description="A small trained model that ships reads source code, and several sessions continue it: once with a "
        "GPU pool for every token, once with a small one. Tokens and selections must be equal; tables say how often a "
        "row had to be fetched for that. Exit status 1 if anything differs.",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        metavar="N",
        help=f"length of the text (default {_TOKENS_ON_CPU}, on a GPU what the model's context of 16384 holds)",
    )
    parser.add_argument("--sessions", type=int, default=4, metavar="N", help="sessions in one batch (default 4)")
    parser.add_argument("--new-tokens", type=int, default=160, metavar="N", help="tokens each generates (default 160)")
    parser.add_argument(
        "--pool",
        type=float,
        default=0.1,
        metavar="PART",
        help="part of all tokens that the small GPU pool holds (default 0.1)",
    )
    settings.add_row_format(parser)
    settings.add_device(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument(
        "--plot",
        type=Path,
        default=Path("echo-demo.png"),
        metavar="FILE",
        help="where the picture goes (default echo-demo.png)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the demonstration; status 1 if the two runs differ."""
    try:
        import matplotlib  # noqa: F401  needed at the end, missed now
        from rich.console import Console
    except ImportError as error:
        raise lacking(error, DEMO) from error
    hf = load_hf(DEMO)
    _check(options)
    console = Console()
    device = device_of(settings.device(options))
    tokenizer: Any = hf.tiny_dsa_tokenizer()
    observed = LastSelections()
    model = hf.DsaModel(hf.tiny_dsa_model(device=device), observer=observed)
    openings = [texts.opening(number) for number in range(options.sessions)]
    opening_ids = [tokenizer(opening)["input_ids"] for opening in openings]
    room = model.config.max_position_embeddings - max(map(len, opening_ids)) - options.new_tokens
    work = Workload(
        model=model,
        observed=observed,
        shape=model.shape(options.row_format, "fp32" if options.row_format == "fp32" else "fp8"),
        device=device,
        text=texts.read_text(tokenizer, _text_tokens(options, device, room)),
        openings=opening_ids,
        new_tokens=options.new_tokens,
    )
    console.print(f"[bold]{echo.build_info()}[/], running on [bold]{device}[/]")
    console.print(
        f"model: tiny_dsa, trained on code, {work.shape.layers} layers, {work.shape.query_heads} heads, "
        f"top-{work.shape.top_k}; text: {len(work.text):,} tokens of echo's own source; "
        f"{settings.counted(options.sessions, 'session')}, {settings.counted(options.new_tokens, 'new token')} each"
    )
    started = time.perf_counter()
    with one_torch_thread():
        kv, prefill_seconds = work.read()
        resident = work.decode(kv, work.all_slots, "everything fits")
        offloaded = work.decode(kv, max(work.least_slots, int(options.pool * work.all_slots)), "small pool")
    seconds = {"prefill": prefill_seconds, "total": time.perf_counter() - started}
    report = figures(resident, offloaded, seconds, len(work.text), device)
    report["openings"] = openings
    report["generated"] = [tokenizer.decode(ids) for ids in offloaded.tokens.T.tolist()]
    report["looked_up"] = texts.answers(report["generated"][0])
    print_texts(console, openings, report["generated"])
    console.print(
        f"session 0 was asked for what stands at the beginning of the text, {len(work.text):,} tokens back, "
        f"and wrote it: [bold]{'yes' if report['looked_up'] else 'no'}[/]"
    )
    print_tables(console, resident, offloaded, report)
    save_picture(options.plot, resident, offloaded)
    console.print(f"picture: {options.plot}")
    if options.json:
        files.write_text(options.json, json.dumps(report, indent=2) + "\n")
        console.print(f"figures: {options.json}")
    return 0 if report["tokens_equal"] and report["selections_equal"] else 1


def _check(options: argparse.Namespace) -> None:
    if not 1 <= options.sessions <= 64:
        raise echo.InvalidArgument(f"sessions: {options.sessions} given, expected 1 to 64")
    if options.new_tokens < 1:
        raise echo.InvalidArgument(f"new_tokens: {options.new_tokens} given, expected at least 1")
    trace_options.check_files(options)
    if not 0 < options.pool <= 1:
        raise echo.InvalidArgument(f"pool: {options.pool} given, expected more than 0, at most 1")


def _text_tokens(options: argparse.Namespace, device: str, room: int) -> int:
    """How much is read, given what an opening and the new tokens leave of the model's context."""
    if room < 1:
        raise echo.InvalidArgument(
            f"new_tokens: {options.new_tokens} given, the model's context has room for {room + options.new_tokens - 1}"
        )
    if options.tokens is None:
        return min(_TOKENS_ON_CPU, room) if device == "cpu" else room
    if options.tokens > room:
        raise echo.InvalidArgument(
            f"tokens: {options.tokens} given, the model's context has room for {room} besides openings and new tokens"
        )
    tokens: int = options.tokens
    return tokens
