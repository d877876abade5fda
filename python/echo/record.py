"""`echo-kv record`: the selections of a small model as a file."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import echo
from echo import settings, trace_options
from echo.decoding import TEMPERATURE, device_of, draw, read
from echo.extras import load_hf
from echo.traces import SelectionRecorder, Trace

_CHUNK = 512
_RANKS = 8  # x top_k: the runtime's rule in pools of up to a quarter of that


def add_command(commands: Any) -> None:
    """Adds `record` to the commands."""
    parser = commands.add_parser(
        "record",
        help="write the selections and scores of a small model to a file",
        description="Reads a text, decodes what follows it, and writes what each decode step selects, with the best "
        "scores: a trace for policies, predictor and replay.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the trace goes, a .npz")
    parser.add_argument(
        "--model",
        choices=("trained", "random"),
        default="trained",
        help="the trained model that ships, or a smaller one with random weights that reads bytes (default trained)",
    )
    parser.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="what is read, in this order (default an essay that ships)"
    )
    parser.add_argument(
        "--tokens", type=int, default=4096, metavar="N", help="tokens that are prefilled (default 4096)"
    )
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N", help="decode steps (default 128)")
    parser.add_argument(
        "--continue",
        dest="following",
        choices=("text", "model"),
        default="text",
        help="what the steps decode: the text as it goes on, or what the model writes (default text)",
    )
    parser.add_argument(
        "--turn-every",
        type=int,
        default=0,
        metavar="N",
        help="of several texts each gives a part of the prompt, and they go on in turn, N steps each",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what the model writes (default 0)")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help=f"of what the model writes, 0 for the likeliest tokens (default {TEMPERATURE})",
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help=f"tokens whose scores are kept, 0 for none (default {_RANKS} x top-k)"
    )
    parser.add_argument("--layers", metavar="LIST", help="layers that are kept, 0 is the first (default: all)")
    settings.add_device(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Reads a text, decodes what follows it, and saves the selections of the decode steps."""
    _check(options)
    hf = load_hf()
    texts = _texts(options.text)
    device = device_of(settings.device(options))
    config, encode, load = _model(options.model, device)
    layers = _layers(options.layers, config.num_hidden_layers)
    top_k, capacity = config.index_topk, options.tokens + options.new_tokens
    if capacity > config.max_position_embeddings:
        given = f"{options.tokens} and {options.new_tokens} new ones given"
        raise echo.InvalidArgument(f"tokens: {given}, but the model reads {config.max_position_embeddings:,} at most")
    ranks = _RANKS * top_k if options.ranks is None else options.ranks
    if ranks and not top_k <= ranks < 1 << 31:
        raise echo.InvalidArgument(f"ranks: {ranks} given, expected 0 or at least {top_k} (top-k)")
    encoded = [(name, encode(text)) for name, text in texts]
    prompt, following = (_turns if options.turn_every else _joined)(options, encoded)
    print(f"{echo.build_info()}, on {device}: {options.tokens:,} tokens, then {options.new_tokens} steps", flush=True)
    recorder = SelectionRecorder(config.num_hidden_layers, min(ranks, max(top_k, capacity)))
    model = hf.DsaModel(load(), observer=recorder)
    nats = _decode(model, device, prompt, None if options.following == "model" else following, options, recorder)
    trace = recorder.trace(
        model="tiny_dsa" if options.model == "trained" else "tiny_model",
        text=_origin(options, encoded),
        notes=_notes(options, nats, layers),
        seed=options.seed,
    )
    trace = _with_layers(trace, layers)
    trace.save(options.out)
    print(f"{options.out}, {options.out.stat().st_size:,} B: {trace.summary()}; {trace.notes}")
    return 0


def _check(options: argparse.Namespace) -> None:
    if options.temperature is None:
        options.temperature = TEMPERATURE
    elif options.following == "text":
        raise echo.InvalidArgument("temperature: given for steps that decode the text; see --continue")
    settings.check_seed(options.seed)
    for name, least in (("tokens", 1), ("new_tokens", 1), ("turn_every", 0)):
        if getattr(options, name) < least:
            raise echo.InvalidArgument(f"{name}: {getattr(options, name)} given, expected at least {least}")
    if options.turn_every and (options.following != "text" or len(options.text or ()) < 2):
        raise echo.InvalidArgument("turn_every: expected several texts, and steps that follow them")
    if not 0 <= options.temperature < math.inf:
        raise echo.InvalidArgument(f"temperature: {options.temperature} given, expected at least 0")
    trace_options.check_files(options, ("out",), read=options.text or ())


def _texts(files: Sequence[Path] | None) -> list[tuple[str, str]]:
    """Names and contents."""
    if files is None:
        essay = resources.files("echo") / "data" / "memory.txt"
        return [("memory.txt", essay.read_text(encoding="utf-8"))]
    try:
        return [(file.name, file.read_text(encoding="utf-8")) for file in files]
    except (OSError, UnicodeDecodeError) as error:
        raise echo.InvalidArgument(f"text: expected files of UTF-8 text: {error}") from error


def _model(name: str, device: str) -> tuple[Any, Callable[[str], list[int]], Callable[[], Any]]:
    """The network's configuration, what makes tokens of a text, and what loads the network."""
    from transformers import AutoConfig

    from echo import hf

    if name == "random":
        random = hf.tiny_config()
        return random, lambda text: list(text.encode()), lambda: hf.tiny_model(seed=0, config=random, device=device)
    config = AutoConfig.from_pretrained(hf.tiny_dsa_path(), local_files_only=True)
    tokenizer: Any = hf.tiny_dsa_tokenizer()
    end = tokenizer.eos_token_id  # in front of each file, as in training
    return config, lambda text: [end, *tokenizer(text)["input_ids"]], lambda: hf.tiny_dsa_model(device=device)


def _layers(text: str | None, every: int) -> list[int]:
    if text is None:
        return list(range(every))
    words = text.split(",")
    if not all(word.isdecimal() and int(word) < every for word in words):
        raise echo.InvalidArgument(f"layers: {text!r} given, expected numbers from 0 to {every - 1} such as 0,2")
    return sorted({int(word) for word in words})


def _with_layers(trace: Trace, layers: list[int]) -> Trace:
    return replace(
        trace,
        positions=trace.positions[:, layers],
        kth_score=trace.kth_score[:, layers],
        ranked=None if trace.ranked is None else trace.ranked[:, layers],
        scores=None if trace.scores is None else trace.scores[:, layers],
    )


def _joined(options: argparse.Namespace, texts: list[tuple[str, list[int]]]) -> tuple[list[int], list[int]]:
    """The prompt, and what follows it."""
    whole = [token for _, text in texts for token in text]
    end = options.tokens + options.new_tokens
    _require(len(whole), end if options.following == "text" else options.tokens, "the text has")
    return whole[: options.tokens], whole[options.tokens : end]


def _turns(options: argparse.Namespace, texts: list[tuple[str, list[int]]]) -> tuple[list[int], list[int]]:
    """The same where each text gives a part of the prompt and they go on in turn."""
    prompt: list[int] = []
    following: list[int] = []
    places = []
    for i, (name, text) in enumerate(texts):
        part = options.tokens * (i + 1) // len(texts) - options.tokens * i // len(texts)
        _require(len(text), part, f"{name} has")
        prompt += text[:part]
        places.append(part)
    for first in range(0, options.new_tokens, options.turn_every):
        turn = first // options.turn_every % len(texts)
        name, text = texts[turn]
        end = places[turn] + min(options.turn_every, options.new_tokens - first)
        _require(len(text), end, f"{name} has")
        following += text[places[turn] : end]
        places[turn] = end
    return prompt, following


def _require(length: int, needed: int, what: str) -> None:
    if needed > length:
        raise echo.InvalidArgument(f"tokens: {needed:,} are needed with the new ones, {what} {length:,}")


def _origin(options: argparse.Namespace, texts: list[tuple[str, list[int]]]) -> str:
    """What was read: the names of the texts that the tokens reach into."""
    left = options.tokens if options.following == "model" else options.tokens + options.new_tokens
    names = []
    for name, text in texts:
        if left > 0 or options.turn_every:
            names.append(name)
        left -= len(text)
    return f"{', '.join(names)}; {options.tokens:,} tokens prefilled"


def _notes(options: argparse.Namespace, nats: float, layers: list[int]) -> str:
    if options.following == "model":
        notes = [f"steps decode what the model writes at temperature {options.temperature:g}"]
    else:
        notes = [f"steps decode the text, {nats:.2f} nats per token"]
    if options.turn_every:
        notes.append(f"the next text every {options.turn_every} steps")
    if options.layers is not None:
        notes.append(f"layers {', '.join(map(str, layers))}")
    return "; ".join(notes)


def _decode(
    model: Any,
    device: str,
    prompt: list[int],
    following: list[int] | None,
    options: argparse.Namespace,
    recorder: SelectionRecorder,
) -> float:
    """Prefills and decodes; nats per token of what the steps decoded. Without `following`, the model writes it."""
    import torch

    capacity = len(prompt) + options.new_tokens
    shape = model.shape("fp8_656", "fp8")
    draws = torch.Generator().manual_seed(options.seed)
    nats: float = 0.0
    with echo.Runtime(
        shape,
        device=device,
        host_tokens=capacity,
        max_context=capacity,
        max_batch=1,
        query_rows=1,
        gpu_slots=max(capacity, 64 * (shape.top_k + 1)),
        prefill_chunk=_CHUNK,
        threshold_alpha=0.0,
    ) as runtime:
        session = runtime.open_session(capacity)
        logits = read(runtime, session, prompt, model.forward)
        for step in range(options.new_tokens):
            row = logits[-1].float().cpu()
            if following is None:
                (token,) = draw(row[None], options.temperature, [draws], without=model.stop_tokens)
            else:
                token = following[step]
            nats -= float(torch.log_softmax(row, dim=-1)[token])
            logits = runtime.step(echo.Batch([session], [token]), model.forward)  # a graph would not ask the recorder
            if options.ranks == 0:
                recorder.kth_scores(runtime.thresholds(session))
    return nats / int(options.new_tokens)
