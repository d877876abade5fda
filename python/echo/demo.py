"""`echo-kv demo`: a long text is read once, then several sessions continue it, with and without offloading.

The same model decodes the same sessions twice: once with a GPU pool that holds every token, once with a pool of a
tenth of them. Tokens and selections must be equal; the table says how often a row had to be fetched for that.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import echo
from echo import settings

if TYPE_CHECKING:
    from echo.hf import DsaModel

# What each session reads after the text, so that they part ways. Bytes are tokens.
_QUESTIONS = (
    b"\n\nWhat the tablets kept: ",
    b"\n\nThe library burned, and yet ",
    b"\n\nA cache is a wager that ",
    b"\n\nTo forget well means ",
    b"\n\nBelady knew the future; ",
    b"\n\nThe monk at his desk wrote: ",
    b"\n\nOf attention it can be said ",
    b"\n\nIn the palace of memory, ",
)
_WINDOW = 16  # steps over which the working set is counted


@dataclass
class Decoded:
    """What one run of decoding gave.

    Attributes:
        pool: slots per layer.
        tokens: int32 [steps, sessions].
        selections: int32 [steps, layers, sessions, top_k].
        hit_rate: float64 [steps, layers], of single steps.
        misses: int64 [layers], rows fetched over all steps.
        step_ms: float64 [steps].
        plan: sizes of the runtime.
    """

    pool: int
    tokens: NDArray[np.int32]
    selections: NDArray[np.int32]
    hit_rate: NDArray[np.float64]
    misses: NDArray[np.int64]
    step_ms: NDArray[np.float64]
    plan: echo.Plan


@dataclass
class SelectionRecorder:
    """Keeps the selections of the pass that runs now, at a fixed address so that a graph can fill it.

    Attributes:
        buffer: int32 tensor [layers, rows, top_k].
    """

    buffer: Any = field(default=None)

    def __call__(self, layer: int, selection: Any) -> None:
        """Takes over the selection (int32 tensor [rows, top_k]) of one layer."""
        rows = selection.shape[0]
        if rows <= self.buffer.shape[1]:
            self.buffer[layer, :rows].copy_(selection)


def add_command(commands: Any) -> None:
    """Adds `demo` to the commands."""
    parser = commands.add_parser(
        "demo", help="decode a long text with its KV offloaded, and compare with everything resident"
    )
    parser.add_argument("--tokens", type=int, metavar="N", help="length of the text (default 8192, on a GPU 32768)")
    parser.add_argument("--sessions", type=int, default=4, metavar="N", help="sessions in one batch (default 4)")
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N", help="tokens each generates (default 64)")
    parser.add_argument("--pool", type=float, default=0.1, metavar="PART", help="part of all tokens that the small "
                        "GPU pool holds (default 0.1)")  # fmt: skip
    parser.add_argument("--row-format", choices=("fp8_656", "bf16_1152", "fp32"), default="fp8_656")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--plot", type=Path, default=Path("echo-demo.png"), metavar="FILE", help="where the picture "
                        "goes (default echo-demo.png)")  # fmt: skip
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the demonstration; status 1 if the two runs differ."""
    try:
        from rich.console import Console

        from echo import hf
    except ImportError as error:
        raise echo.NotSupported(f"demo: {error.name} is missing; pip install 'echo-kv[demo]'") from error
    _check(options)
    console = Console()
    device = "cuda" if echo.machine_limits(options.device).device_bytes else "cpu"
    text = _text(options.tokens or (32768 if device == "cuda" else 8192))
    recorder = SelectionRecorder()
    model = hf.DsaModel(hf.tiny_model(seed=0, device=device), observer=recorder)
    shape = hf.shape_of(
        model.config,
        row_format=options.row_format,
        index_key_format="fp32" if options.row_format == "fp32" else "fp8",
    )
    console.print(f"[bold]{echo.build_info()}[/], running on [bold]{device}[/]")
    console.print(
        f"model: {shape.layers} layers, {shape.query_heads} heads, top-{shape.top_k}, random weights (so it babbles); "
        f"text: {len(text):,} byte tokens, {options.sessions} sessions, {options.new_tokens} new tokens each"
    )
    started = time.perf_counter()
    kv, prefill_seconds = _read(text, model, shape, device)
    total = options.sessions * (len(text) + 64 + options.new_tokens)
    least = options.sessions * (shape.top_k + 1)
    runs = [
        _decode(kv, slots, options, model, shape, device, recorder, label)
        for label, slots in (("resident", total), ("offloaded", max(least, int(options.pool * total))))
    ]
    report = _report(*runs, prefill_seconds, time.perf_counter() - started, text, options, device)
    _print_tables(console, *runs, report)
    _plot(options.plot, *runs, options)
    console.print(f"picture: {options.plot}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
        console.print(f"figures: {options.json}")
    return 0 if report["tokens_equal"] and report["selections_equal"] else 1


def _check(options: argparse.Namespace) -> None:
    if options.tokens is not None and options.tokens < 1:
        raise echo.InvalidArgument(f"tokens: {options.tokens} given, expected at least 1")
    if not 1 <= options.sessions <= 64:
        raise echo.InvalidArgument(f"sessions: {options.sessions} given, expected 1 to 64")
    if options.new_tokens < 1:
        raise echo.InvalidArgument(f"new_tokens: {options.new_tokens} given, expected at least 1")
    if not 0 < options.pool <= 1:
        raise echo.InvalidArgument(f"pool: {options.pool} given, expected more than 0, at most 1")


def _text(tokens: int) -> bytes:
    text = (resources.files("echo") / "data" / "memory.txt").read_bytes()
    if tokens > len(text):
        raise echo.InvalidArgument(f"tokens: {tokens} given, the text that ships has {len(text)}")
    return text[:tokens]


def _read(text: bytes, model: DsaModel, shape: echo.ModelShape, device: str) -> tuple[echo.KvRuns, float]:
    """Prefills the text once; its KV outlives the runtime."""
    from rich.progress import track

    chunk = 512
    started = time.perf_counter()
    with echo.Runtime(
        shape, device=device, host_tokens=len(text), max_context=len(text), max_batch=1,
        gpu_slots=max(len(text), 64 * (shape.top_k + 1)), prefill_chunk=chunk,
    ) as runtime:  # fmt: skip
        session = runtime.open_session(len(text))
        for first in track(range(0, len(text), chunk), description="reading the text  "):
            runtime.prefill(session, list(text[first : first + chunk]), model.forward)
        return runtime.export_kv(session), time.perf_counter() - started


def _decode(
    kv: echo.KvRuns, slots: int, options: argparse.Namespace, model: DsaModel, shape: echo.ModelShape, device: str,
    recorder: SelectionRecorder, label: str,
) -> Decoded:  # fmt: skip
    """Continues the text in all sessions at once, greedily, with a pool of `slots` rows per layer."""
    import torch
    from rich.progress import track

    count = options.sessions
    capacity = kv.length + 64 + options.new_tokens
    recorder.buffer = torch.full((shape.layers, count, shape.top_k), -1, dtype=torch.int32, device=device)
    with echo.Runtime(
        shape, device=device, host_tokens=count * (capacity + 63), max_context=capacity, max_sessions=count,
        max_batch=count, gpu_slots=slots, prefill_chunk=64,
    ) as runtime:  # fmt: skip
        runtime.capture(model.forward, batch_sizes=[count])
        sessions, following = [], []
        for i in range(count):
            session = runtime.open_session(capacity)
            runtime.import_kv(session, kv)
            logits = runtime.prefill(session, list(_QUESTIONS[i % len(_QUESTIONS)]))
            sessions.append(session)
            following.append(int(logits[-1].argmax()))
        tokens, selections, hit_rate, step_ms = [], [], [], []
        before = runtime.stats()
        first = before
        for _ in track(range(options.new_tokens), description=f"decoding, {label:<9}"):
            started = time.perf_counter()
            logits = runtime.step(echo.Batch(list(sessions), list(following)))
            runtime.synchronize()
            step_ms.append(1e3 * (time.perf_counter() - started))
            tokens.append(following)
            following = logits.argmax(dim=-1).tolist()
            selections.append(recorder.buffer.cpu().numpy().copy())
            after = runtime.stats()
            hit_rate.append([_rate(a, b) for a, b in zip(before.layers, after.layers, strict=True)])
            before = after
        return Decoded(
            pool=slots,
            tokens=np.asarray(tokens, dtype=np.int32),
            selections=np.stack(selections),
            hit_rate=np.asarray(hit_rate),
            misses=np.asarray(
                [b.misses - a.misses for a, b in zip(first.layers, before.layers, strict=True)], dtype=np.int64
            ),
            step_ms=np.asarray(step_ms),
            plan=runtime.plan,
        )


def _rate(before: echo.LayerStats, after: echo.LayerStats) -> float:
    hits, misses = after.hits - before.hits, after.misses - before.misses
    return hits / (hits + misses) if hits + misses else 1.0


def working_set(selections: NDArray[np.int32], window: int = _WINDOW) -> NDArray[np.int64]:
    """Distinct rows that all sessions selected in the last `window` steps.

    Args:
        selections: int32 [steps, layers, sessions, top_k], -1 for none.
        window: steps.

    Returns:
        int64 [steps, layers].
    """
    steps, layers, sessions, _ = selections.shape
    counts = np.zeros((steps, layers), dtype=np.int64)
    for step in range(steps):
        recent = selections[max(0, step - window + 1) : step + 1]
        for layer in range(layers):
            per_session = (np.unique(recent[:, layer, s]) for s in range(sessions))
            counts[step, layer] = sum(int((rows >= 0).sum()) for rows in per_session)
    return counts


def _report(
    resident: Decoded, offloaded: Decoded, prefill_seconds: float, seconds: float, text: bytes,
    options: argparse.Namespace, device: str,
) -> dict[str, Any]:  # fmt: skip
    shape = offloaded.plan.shape
    return {
        "device": device,
        "build": echo.build_info(),
        "row_format": shape.row_format,
        "layers": shape.layers,
        "top_k": shape.top_k,
        "text_tokens": len(text),
        "sessions": options.sessions,
        "new_tokens": options.new_tokens,
        "tokens_equal": bool(np.array_equal(resident.tokens, offloaded.tokens)),
        "selections_equal": bool(np.array_equal(resident.selections, offloaded.selections)),
        "pool_slots": {"resident": resident.pool, "offloaded": offloaded.pool},
        "hit_rate": [float(rate) for rate in offloaded.hit_rate.mean(axis=0)],
        "recalled_rows": [int(rows) for rows in offloaded.misses],
        "recalled_bytes": int(offloaded.misses.sum()) * shape.row_bytes,
        "gpu_pool_bytes": {name: one.pool * shape.row_bytes * shape.layers
                           for name, one in (("resident", resident), ("offloaded", offloaded))},
        "host_pool_bytes": offloaded.plan.host_bytes,
        "step_ms": {"resident": float(np.median(resident.step_ms)),
                    "offloaded": float(np.median(offloaded.step_ms))},
        "prefill_seconds": prefill_seconds,
        "seconds": seconds,
        "generated": [bytes(session.tolist()).decode("latin-1") for session in offloaded.tokens.T.astype(np.uint8)],
    }  # fmt: skip


def _print_tables(console: Any, resident: Decoded, offloaded: Decoded, report: dict[str, Any]) -> None:
    from rich.table import Table

    def verdict(equal: bool) -> str:
        return "[green]equal[/]" if equal else "[red]DIFFERENT[/]"

    both = Table(title="the same decoding with two GPU pools")
    for name in ("", "everything resident", "offloaded"):
        both.add_column(name, justify="left" if not name else "right")
    part = offloaded.pool / resident.pool
    rows = report["gpu_pool_bytes"]
    both.add_row("GPU pool, slots per layer", f"{resident.pool:,}", f"{offloaded.pool:,} ({part:.0%})")
    both.add_row("GPU pool, all layers", settings.readable(rows["resident"]), settings.readable(rows["offloaded"]))
    both.add_row("host pool", settings.readable(report["host_pool_bytes"]), settings.readable(report["host_pool_bytes"]))
    both.add_row("hit rate", f"{resident.hit_rate.mean():.1%}", f"{offloaded.hit_rate.mean():.1%}")
    both.add_row("rows fetched", f"{int(resident.misses.sum()):,}", f"{int(offloaded.misses.sum()):,}")
    both.add_row("bytes fetched", settings.readable(int(resident.misses.sum()) * offloaded.plan.shape.row_bytes),
                 settings.readable(report["recalled_bytes"]))  # fmt: skip
    both.add_row("time per step, median", f"{report['step_ms']['resident']:.1f} ms",
                 f"{report['step_ms']['offloaded']:.1f} ms")  # fmt: skip
    both.add_row("generated tokens", "", verdict(report["tokens_equal"]))
    both.add_row("selections", "", verdict(report["selections_equal"]))
    console.print(both)

    layers = Table(title="offloaded, by layer")
    for name in ("layer", "hit rate", "rows fetched", "fetched per step", "selections, all steps"):
        layers.add_column(name, justify="right")
    steps = len(offloaded.tokens)
    for layer, (rate, misses) in enumerate(zip(report["hit_rate"], report["recalled_rows"], strict=True)):
        same = np.array_equal(resident.selections[:, layer], offloaded.selections[:, layer])
        layers.add_row(str(layer), f"{rate:.1%}", f"{misses:,}", f"{misses / steps:.1f}", verdict(same))
    console.print(layers)
    console.print(f"reading {report['prefill_seconds']:.1f} s, everything {report['seconds']:.1f} s")


def _plot(path: Path, resident: Decoded, offloaded: Decoded, options: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    rates = offloaded.hit_rate
    layers = np.arange(rates.shape[1])
    left.bar(layers - 0.2, 100 * resident.hit_rate.mean(axis=0), 0.4, label="everything resident", color="#b8c4d0")
    left.bar(layers + 0.2, 100 * rates.mean(axis=0), 0.4, label=f"pool of {offloaded.pool:,} slots", color="#1f6f8b")
    left.set(xlabel="layer", ylabel="hit rate, %", title="Hit rate per layer", xticks=layers, ylim=(0, 105))
    left.legend(loc="lower right", frameon=False)
    for layer, counts in enumerate(working_set(offloaded.selections).T):
        right.plot(counts, label=f"layer {layer}", color=pyplot.get_cmap("viridis")(layer / max(1, len(layers))))
    right.axhline(offloaded.pool, color="#c0392b", linestyle="--", label="slots in the small pool")
    right.set(xlabel="step", ylabel="rows", title=f"Working set: rows selected in the last {_WINDOW} steps")
    right.set_ylim(bottom=0)
    right.legend(frameon=False, fontsize="small")
    total = resident.pool
    figure.suptitle(f"{options.sessions} sessions, {total:,} tokens in all, pool of {offloaded.pool / total:.0%}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
