"""Whether replayed traces miss what the runtime misses: the trained model decodes the texts of two traces that ship.

Prefill happens once, in a runtime of its own; its rows are imported into runtimes with small pools, which start empty
as a replay does. Selections must be those of the trace, else text or arithmetic have changed and nothing is compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
from numpy.typing import NDArray

import echo
from echo import hf
from echo.decoding import read
from echo.traces import Trace, shipped
from echo.traces.comparison import compare, slots_of
from echo.traces.drive import Counters

ROOT = Path(__file__).parents[1]
TEXTS = {"code": "models/tiny_dsa/*.py", "prose": "python/echo/data/memory.txt"}


def tokens_of(pattern: str) -> list[int]:
    """Of files of the repository in order, each after an end of text, as `echo-kv record` reads them."""
    tokenizer: Any = hf.tiny_dsa_tokenizer()
    texts = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob(pattern))]
    return [token for text in texts for token in (tokenizer.eos_token_id, *tokenizer(text)["input_ids"])]


def prefilled(model: hf.DsaModel, prompt: list[int]) -> echo.KvRuns:
    """The prompt's rows."""
    shape = model.shape()
    with echo.Runtime(
        shape, device="cpu", host_tokens=len(prompt), max_context=len(prompt), max_batch=1,
        gpu_slots=64 * (shape.top_k + 1), prefill_chunk=512,
    ) as runtime:  # fmt: skip
        session = runtime.open_session(len(prompt))
        read(runtime, session, prompt, model.forward)
        return runtime.export_kv(session)


def decoded(
    network: Any, kv: echo.KvRuns, prompt: int, following: list[int], slots: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Misses [steps, layers] and selections [steps, layers, top_k] with a pool of so many slots."""
    seen: list[NDArray[np.int32]] = []
    model = hf.DsaModel(network, observer=lambda p, _: seen.append(torch.from_dlpack(p.selection)[0].numpy().copy()))
    capacity = prompt + len(following)
    with echo.Runtime(
        model.shape(), device="cpu", host_tokens=capacity, max_context=capacity, max_batch=1, gpu_slots=slots,
        prefetch="off",
    ) as runtime:  # fmt: skip
        session = runtime.open_session(capacity)
        runtime.import_kv(session, kv)
        counters = Counters(runtime)
        for token in following:
            runtime.step(echo.Batch([session], [token]), model.forward)
            counters.note()
    misses = counters.steps()["misses"]
    return misses, np.stack(seen).reshape(*misses.shape, -1)


def cases_of(name: str, trace: Trace, tokens: list[int], pools: Sequence[float]) -> list[dict[str, Any]]:
    """One case for each pool; ValueError if the selections are not those of the trace."""
    prompt = int(trace.context[0]) - 1
    network = hf.tiny_dsa_model(device="cpu")
    kv = prefilled(hf.DsaModel(network), tokens[:prompt])
    following = tokens[prompt : prompt + trace.steps]
    slots = [slots_of(trace, pool) for pool in pools]
    replayed = compare(trace, slots, ("lru", "echo"))
    cases = []
    for i, (pool, size) in enumerate(zip(pools, slots, strict=True)):
        misses, selections = decoded(network, kv, prompt, following, size)
        if not np.array_equal(np.sort(selections, axis=2), trace.positions):
            raise ValueError(f"{name}: the selections are not those of the trace; record it anew")
        counted = misses[trace.steps // 2 :]
        cases.append(
            {
                "case": {"trace": name, "pool": pool},
                "runtime": counted.sum(axis=0) / (len(counted) * trace.top_k),
                "replayed": replayed.rates["echo"][i],
                "lru": replayed.rates["lru"][i],
                "ranks": trace.ranks // trace.top_k,
            }
        )
    return [{key: part.tolist() if isinstance(part, np.ndarray) else part for key, part in c.items()} for c in cases]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares and records the cases; misses are shares of selected rows, by layer."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--pools", type=float, nargs="+", default=[1.5, 2, 3, 4, 8], metavar="X", help="multiples of top-k"
    )
    parser.add_argument("--result", default="trace_pools", metavar="NAME", help="results go to NAME.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cases = []
    for name, pattern in TEXTS.items():
        cases += cases_of(name, Trace.load(shipped.path_of(name)), tokens_of(pattern), options.pools)
        print(*cases[-len(options.pools) :], sep="\n", flush=True)
    print(record.write(options.result, cases))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
