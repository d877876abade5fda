"""`echo-kv record` and `echo-kv replay`: selections of a model as a file; what pools and policies make of them."""

from __future__ import annotations

import argparse
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import echo
from echo.traces import SelectionRecorder, Trace, policies, synthetic

_CHUNK = 512
_STEPS, _TOP_K = 400, 256  # of a generated trace


def add_commands(commands: Any) -> None:
    """Adds `record` and `replay` to the commands."""
    parser = commands.add_parser("record", help="write the selections of a small model to a file")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the trace goes, a .npz")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="length of the text (default 4096)")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N", help="decode steps (default 128)")
    parser.set_defaults(run=record)
    parser = commands.add_parser("replay", help="count the misses of pools and policies on selections")
    parser.add_argument(
        "trace", metavar="FILE_OR_REGIME", help=f"a file of `record`, or one of {', '.join(synthetic.REGIMES)}"
    )
    parser.add_argument(
        "--pools", default="1,2,4", metavar="LIST", help="sizes of the pool in multiples of top-k (default 1,2,4)"
    )
    parser.set_defaults(run=replay)


def record(options: argparse.Namespace) -> int:
    """Reads the text that ships, continues it greedily, and saves the selections of the decode steps."""
    try:
        from echo import hf
    except ImportError as error:
        raise echo.NotSupported(f"record: {error.name} is missing; pip install 'echo-kv[hf]'") from error
    text = (resources.files("echo") / "data" / "memory.txt").read_bytes()
    if not 1 <= options.tokens <= len(text):
        raise echo.InvalidArgument(f"tokens: {options.tokens} given, expected 1 to {len(text)}, the text that ships")
    if options.new_tokens < 1:
        raise echo.InvalidArgument(f"new_tokens: {options.new_tokens} given, expected at least 1")
    if not options.out.parent.is_dir() or options.out.is_dir():
        raise echo.InvalidArgument(f"out: {str(options.out)!r} given, expected a file in a folder that exists")
    network = hf.tiny_model(seed=0)
    recorder = SelectionRecorder(network.config.num_hidden_layers)
    model = hf.DsaModel(network, observer=recorder)
    capacity = options.tokens + options.new_tokens
    shape = model.shape("fp8_656", "fp8")
    with echo.Runtime(
        shape,
        device="cpu",
        host_tokens=capacity,
        max_context=capacity,
        max_batch=1,
        gpu_slots=max(capacity, 64 * (shape.top_k + 1)),
        prefill_chunk=_CHUNK,
        threshold_alpha=0.0,
    ) as runtime:
        session = runtime.open_session(capacity)
        for first in range(0, options.tokens, _CHUNK):
            chunk = list(text[first : min(first + _CHUNK, options.tokens)])
            logits = runtime.prefill(session, chunk, model.forward)
        runtime.capture(model.forward, batch_sizes=[1])
        for _ in range(options.new_tokens):
            logits = runtime.step(echo.Batch([session], [int(logits[-1].argmax())]))
            recorder.kth_scores(runtime.thresholds(session))
    trace = recorder.trace(model="echo.hf.tiny_model", text=f"memory.txt, {options.tokens} bytes", seed=0)
    trace.save(options.out)
    print(f"{_words(trace)}: {options.out}, {options.out.stat().st_size:,} B")
    return 0


def replay(options: argparse.Namespace) -> int:
    """Prints misses in percent of the selected rows, policies down, pools across."""
    pools = _pools(options.pools)
    if options.trace in synthetic.REGIMES:
        trace = synthetic.generate(options.trace, steps=_STEPS, top_k=_TOP_K)
    else:
        trace = Trace.load(options.trace)
    print(f"{trace.model}: {_words(trace)}")
    print(f"misses, % of selected rows, after a warm-up of {trace.steps // 4} steps\n")
    print(f"{'pool / top-k':<14}" + "".join(f"{pool:>9g}" for pool in pools))
    for policy in policies.POLICIES:
        rates = (miss_rate(trace, _slots(trace, pool), policy) for pool in pools)
        print(f"{policy:<14}" + "".join(f"{100 * rate:>9.1f}" for rate in rates))
    return 0


def miss_rate(trace: Trace, pool: int, policy: str) -> float:
    """Misses per selected row, all layers together, without the first quarter of the steps.

    Args:
        trace: the selections.
        pool: slots of each layer.
        policy: one of `policies.POLICIES`.
    """
    warm = trace.steps // 4
    fetched = sum(
        int(policies.misses(trace.positions[:, layer], pool, policy, trace.context)[warm:].sum())
        for layer in range(trace.layers)
    )
    selected: NDArray[np.bool_] = trace.positions[warm:] >= 0
    return fetched / max(1, int(selected.sum()))


def _slots(trace: Trace, multiple: float) -> int:
    """A step needs one slot besides its selection, so that a pool of 1 x top_k has one more."""
    return max(trace.top_k + 1, int(multiple * trace.top_k))


def _pools(text: str) -> list[float]:
    try:
        pools = [float(word) for word in text.split(",")]
    except ValueError as error:
        raise echo.InvalidArgument(f"pools: {text!r} given, expected numbers such as 1,2,4") from error
    if not all(1 <= pool <= 1 << 16 for pool in pools):
        raise echo.InvalidArgument(f"pools: {text!r} given, expected multiples of top-k from 1 to {1 << 16}")
    return pools


def _words(trace: Trace) -> str:
    lengths = sorted({int(trace.context[0]), int(trace.context[-1])})
    tokens = " to ".join(f"{length:,}" for length in lengths)
    layers = f"{trace.layers} layer" + "s" * (trace.layers != 1)
    return f"{trace.steps} steps, {layers}, top-{trace.top_k} of {tokens} tokens"
