"""Hand-made traces of torch's profiler: kernels of decode steps, as CUPTI names them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

OWN = "echo::(anonymous namespace)::"
GENERIC = {
    "begin": [f"{OWN}begin_pass(echo::BeginParams, {OWN}BeginGrid, echo::KernelErrorView)"],
    "append": [f"{OWN}append(echo::AppendParams, echo::KernelErrorView)"],
    "score": [
        f"{OWN}index_queries(echo::ScoreParams, echo::IndexQueryView)",
        f"void {OWN}score<(echo::IndexKeyFormat)1>(echo::ScoreParams, echo::IndexQueryView, echo::KernelErrorView)",
    ],
    "select": [f"{OWN}select_rows(echo::SelectParams, echo::KernelErrorView)"],
    "recall": [f"void {OWN}recall<2, false>(echo::RecallParams, int, int, echo::KernelErrorView)"],
    "attend": 2
    * [
        f"void {OWN}attend_splits<(echo::RowFormat)0, 2>(echo::AttendParams, int, echo::AttendPartials, "
        "echo::KernelErrorView)",
        f"{OWN}attend_combine(echo::AttendParams, int, echo::AttendPartials)",
    ],
    "commit": [f"{OWN}fold(echo::CommitParams)", f"{OWN}forget(float*, long)"],
}
"""Kernels of each verb, those for any GPU; attention in two portions of rows."""

HOPPER = {
    **GENERIC,
    "append": [],  # score does it
    "score": [
        f"void {OWN}score_sm90<64, 128, true>(CUtensorMap_st, echo::ScoreParams, echo::RowGroups, "
        "echo::KernelErrorView)"
    ],
    "attend": [
        f"void {OWN}attend_sm90<(echo::RowFormat)0, (echo::mla::Teams)1>(echo::AttendParams, echo::mla::Work, "
        "echo::AttendExchange, echo::KernelErrorView)"
    ],
}
MODEL = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3>>"
LAYER = ("append", "score", "select", "recall", "attend")


def event(category: str, name: str, start: float, length: float, stream: int = 7) -> dict[str, Any]:
    """One line of a trace."""
    place = {"args": {"stream": stream}} if category in ("kernel", "gpu_memcpy", "gpu_memset") else {}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "pid": 0, "tid": stream, **place}


def step_names(kernels: dict[str, list[str]], layers: int, model: Iterable[str] = (MODEL,)) -> list[str]:
    """Kernels of a step in order, with the model's own before each layer."""
    names = [*kernels["begin"]]
    for _ in range(layers):
        names += [*model, *(name for verb in LAYER for name in kernels[verb])]
    return [*names, *kernels["commit"]]


def step_events(
    names: Iterable[str], start: float, length: float = 3.0, gap: float = 1.0, host: float = 50.0
) -> list[dict[str, Any]]:
    """A replayed step: the host's call `host` microseconds earlier, the upload, and its kernels one by one."""
    called = start - host
    events = [
        event("user_annotation", "echo step", called, 20.0),
        event("cuda_runtime", "cudaMemcpyAsync", called + 2, 3.0),
        event("cuda_runtime", "cudaGraphLaunch", called + 8, 9.0),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", start, length),
    ]
    for number, name in enumerate(names, 1):
        events.append(event("kernel", name, start + number * (length + gap), length))
    return events
