"""`echo-kv demo`: a long text is read once, then several sessions continue it, with and without offloading.

The same model decodes the same sessions twice: once with a GPU pool that holds every token, once with a pool of a
tenth of them. Tokens and selections must be equal; the table says how often a row had to be fetched for that.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import echo
from echo import settings

if TYPE_CHECKING:
    from echo.hf import DsaModel, LayerTensors

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
    """An observer of the model that keeps the selections of the last decode step.

    Attributes:
        buffer: int32 tensor [layers, sessions, top_k], at a fixed address so that a graph can fill it.
    """

    buffer: Any = None

    def __call__(self, p: echo.ForwardPass, tensors: LayerTensors) -> None:
        """Copies the selection of one layer."""
        import torch

        if not p.is_prefill:
            self.buffer[tensors.layer].copy_(torch.from_dlpack(p.selection))


def add_command(commands: Any) -> None:
    """Adds `demo` to the commands."""
    parser = commands.add_parser(
        "demo", help="decode a long text with its KV offloaded, and compare with everything resident"
    )
    parser.add_argument("--tokens", type=int, metavar="N", help="length of the text (default 8192, on a GPU 32768)")
    parser.add_argument("--sessions", type=int, default=4, metavar="N", help="sessions in one batch (default 4)")
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N", help="tokens each generates (default 64)")
    parser.add_argument(
        "--pool",
        type=float,
        default=0.1,
        metavar="PART",
        help="part of all tokens that the small GPU pool holds (default 0.1)",
    )
    parser.add_argument("--row-format", choices=("fp8_656", "bf16_1152", "fp32"), default="fp8_656")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto)")
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
        from rich.console import Console

        from echo import hf
    except ImportError as error:
        raise echo.NotSupported(f"demo: {error.name} is missing; pip install 'echo-kv[demo]'") from error
    _check(options)
    console = Console()
    device = _device(options.device)
    text = _text(options.tokens or (8192 if device == "cpu" else 32768))
    recorder = SelectionRecorder()
    model = hf.DsaModel(hf.tiny_model(seed=0, device=device), observer=recorder)
    shape = model.shape(options.row_format, "fp32" if options.row_format == "fp32" else "fp8")
    console.print(f"[bold]{echo.build_info()}[/], running on [bold]{device}[/]")
    console.print(
        f"model: {shape.layers} layers, {shape.query_heads} heads, top-{shape.top_k}, random weights (so it babbles); "
        f"text: {len(text):,} "
        f"byte tokens, {options.sessions} sessions, {options.new_tokens} new tokens each"
    )
    started = time.perf_counter()
    kv, prefill_seconds = _read(text, model, shape, device)
    total = options.sessions * (len(text) + 64 + options.new_tokens)
    least = options.sessions * (shape.top_k + 1)
    small = max(least, int(options.pool * total))
    resident = _decode(kv, total, options, model, shape, device, recorder, "everything fits")
    offloaded = _decode(kv, small, options, model, shape, device, recorder, "small pool")
    seconds = {"prefill": prefill_seconds, "total": time.perf_counter() - started}
    report = _report(resident, offloaded, seconds, len(text), device)
    _print_tables(console, resident, offloaded, report)
    _plot(options.plot, resident, offloaded)
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
    for path, name in ((options.json, "json"), (options.plot, "plot")):
        if path is not None and not path.parent.is_dir():
            raise echo.InvalidArgument(f"{name}: there is no folder {str(path.parent)!r}")
    if not 0 < options.pool <= 1:
        raise echo.InvalidArgument(f"pool: {options.pool} given, expected more than 0, at most 1")


def _device(name: str) -> str:
    """The device that a runtime would take, 'cpu' or 'cuda:N'."""
    with echo.Runtime(echo.ModelShape.tiny(), device=name, host_tokens=64, max_batch=1) as runtime:
        return runtime.device


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
        shape,
        device=device,
        host_tokens=len(text),
        max_context=len(text),
        max_batch=1,
        gpu_slots=max(len(text), 64 * (shape.top_k + 1)),
        prefill_chunk=chunk,
    ) as runtime:
        session = runtime.open_session(len(text))
        for first in track(range(0, len(text), chunk), description="reading the text         "):
            runtime.prefill(session, list(text[first : first + chunk]), model.forward)
        return runtime.export_kv(session), time.perf_counter() - started


def _decode(
    kv: echo.KvRuns,
    slots: int,
    options: argparse.Namespace,
    model: DsaModel,
    shape: echo.ModelShape,
    device: str,
    recorder: SelectionRecorder,
    label: str,
) -> Decoded:
    """Continues the text in all sessions at once, greedily, with a pool of `slots` rows per layer."""
    import torch
    from rich.progress import track

    count = options.sessions
    capacity = kv.length + 64 + options.new_tokens
    recorder.buffer = torch.full((shape.layers, count, shape.top_k), -1, dtype=torch.int32, device=device)
    with echo.Runtime(
        shape,
        device=device,
        host_tokens=count * (capacity + 63),
        max_context=capacity,
        max_sessions=count,
        max_batch=count,
        gpu_slots=slots,
        prefill_chunk=64,
    ) as runtime:
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
        for _ in track(range(options.new_tokens), description=f"decoding, {label:<15}"):
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
                [b.misses - a.misses for a, b in zip(first.layers, before.layers, strict=True)],
                dtype=np.int64,
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
    resident: Decoded, offloaded: Decoded, seconds: dict[str, float], text_tokens: int, device: str
) -> dict[str, Any]:
    shape = offloaded.plan.shape
    runs = {"resident": resident, "offloaded": offloaded}
    steps, sessions = offloaded.tokens.shape
    return {
        "device": device,
        "build": echo.build_info(),
        "row_format": shape.row_format,
        "layers": shape.layers,
        "top_k": shape.top_k,
        "text_tokens": text_tokens,
        "sessions": sessions,
        "new_tokens": steps,
        "tokens_equal": bool(np.array_equal(resident.tokens, offloaded.tokens)),
        "selections_equal": bool(np.array_equal(resident.selections, offloaded.selections)),
        "pool_slots": {name: one.pool for name, one in runs.items()},
        "gpu_pool_bytes": {name: one.pool * shape.row_bytes * shape.layers for name, one in runs.items()},
        "host_pool_bytes": offloaded.plan.host_bytes,
        "hit_rate": [float(rate) for rate in offloaded.hit_rate.mean(axis=0)],
        "recalled_rows": [int(rows) for rows in offloaded.misses],
        # Where everything stays, a row is fetched when it is used first and never again.
        "recalled_again": [int(rows) for rows in offloaded.misses - resident.misses],
        "recalled_bytes": int(offloaded.misses.sum()) * shape.row_bytes,
        "step_ms": {name: float(np.median(one.step_ms)) for name, one in runs.items()},
        "prefill_seconds": seconds["prefill"],
        "seconds": seconds["total"],
        "generated": [bytes(session.tolist()).decode("latin-1") for session in offloaded.tokens.T.astype(np.uint8)],
    }


def _print_tables(console: Any, resident: Decoded, offloaded: Decoded, report: dict[str, Any]) -> None:
    from rich.table import Table

    def verdict(equal: bool) -> str:
        return "[green]equal[/]" if equal else "[red]DIFFERENT[/]"

    def row(what: str, *cells: Any) -> None:
        both.add_row(what, *(f"{cell:,}" if isinstance(cell, int) else cell for cell in cells))

    size = settings.readable
    row_bytes = offloaded.plan.shape.row_bytes
    fetched = [int(one.misses.sum()) for one in (resident, offloaded)]
    both = Table(title="the same decoding with two GPU pools")
    both.add_column("")
    both.add_column("pool for everything", justify="right")
    both.add_column(f"pool for {offloaded.pool / resident.pool:.0%}", justify="right")
    row("slots per layer", resident.pool, offloaded.pool)
    row("GPU pool, all layers", *(size(report["gpu_pool_bytes"][name]) for name in ("resident", "offloaded")))
    row("host pool", *[size(report["host_pool_bytes"])] * 2)
    row("hit rate", f"{resident.hit_rate.mean():.1%}", f"{offloaded.hit_rate.mean():.1%}")
    row("rows fetched", *fetched)
    row("of them again, after eviction", 0, sum(report["recalled_again"]))
    row("bytes fetched", *(size(rows * row_bytes) for rows in fetched))
    row("time per step, median", *(f"{report['step_ms'][name]:.1f} ms" for name in ("resident", "offloaded")))
    row("generated tokens", "", verdict(report["tokens_equal"]))
    row("selections", "", verdict(report["selections_equal"]))
    both.caption = (
        "Both start with an empty pool: what is used for the first time is fetched in any case. "
        "Only what is fetched again is the price of the small pool."
    )
    console.print(both)

    layers = Table(title=f"pool for {offloaded.pool / resident.pool:.0%}, by layer")
    for name in ("layer", "hit rate", "rows fetched", "again", "per step", "selections, all steps"):
        layers.add_column(name, justify="right")
    steps = len(offloaded.tokens)
    for layer, rate in enumerate(report["hit_rate"]):
        misses, again = report["recalled_rows"][layer], report["recalled_again"][layer]
        same = np.array_equal(resident.selections[:, layer], offloaded.selections[:, layer])
        layers.add_row(str(layer), f"{rate:.1%}", f"{misses:,}", f"{again:,}", f"{misses / steps:.1f}", verdict(same))
    console.print(layers)
    if report["device"] == "cpu":
        console.print("(times on the CPU, where host memory is as near as the pool, say nothing about a GPU)")
    console.print(f"reading {report['prefill_seconds']:.1f} s, everything {report['seconds']:.1f} s")


def _plot(path: Path, resident: Decoded, offloaded: Decoded) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    layers = np.arange(offloaded.hit_rate.shape[1])
    hits = 100 * offloaded.hit_rate.mean(axis=0)
    first_uses = 100 - 100 * resident.hit_rate.mean(axis=0)
    left.bar(layers, hits, 0.6, label="in the pool", color="#1f6f8b")
    left.bar(layers, first_uses, 0.6, bottom=hits, label="fetched, first use", color="#b8c4d0")
    left.bar(layers, np.maximum(0, 100 - hits - first_uses), 0.6, bottom=hits + first_uses,
             label="fetched again", color="#c0392b")  # fmt: skip
    left.set(xlabel="layer", ylabel="selected rows, %", xticks=layers, ylim=(0, 100))
    left.set_title(f"Hit rate per layer, pool of {offloaded.pool:,} slots")
    left.legend(loc="lower right", framealpha=1.0)
    for layer, counts in enumerate(working_set(offloaded.selections).T):
        color = pyplot.get_cmap("viridis")(layer / len(layers))
        right.plot(counts, label=f"layer {layer}", color=color)
    right.axhline(offloaded.pool, color="#c0392b", linestyle="--", label="slots in the pool")
    right.set(xlabel="step", ylabel="rows", ylim=(0, 1.35 * offloaded.pool))
    right.set_title(f"Working set: rows selected in the last {_WINDOW} steps")
    right.legend(loc="upper right", ncols=2, frameon=False, fontsize="small")
    sessions = offloaded.tokens.shape[1]
    figure.suptitle(
        f"{sessions} sessions, {resident.pool:,} tokens, {offloaded.pool / resident.pool:.0%} of them in the pool"
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
