"""What programs that decode with a model of torch share; `read` and the devices need no torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from echo import Forward, ModelShape, Runtime, RuntimeConfig, Session

if TYPE_CHECKING:
    import torch
    from torch import Tensor

TEMPERATURE = 0.8  # below, a small model repeats itself; above, it drops the thread
_LEAST_TEMPERATURE = 1e-30  # divided by less, logits would be infinite


def device_of(name: str) -> str:
    """The device that a runtime would take, 'cpu' or 'cuda:N'.

    Raises:
        InvalidArgument: naming `device`.
        NotSupported: naming `device`, if it is not there.
    """
    sizes = {"host_tokens": 64, "max_batch": 1, "gpu_slots": 0, "host_row_stride": 0}  # variables mean other shapes
    with Runtime(ModelShape.tiny(), device=name, **sizes) as runtime:
        return runtime.device


def runtime_device() -> str:
    """The device of a runtime that is told none: that of ECHO_DEVICE, else the first GPU, else the CPU."""
    return device_of(RuntimeConfig().device)


def read(rt: Runtime, session: Session, tokens: Sequence[int], forward: Forward | None = None) -> Any:
    """Prefills tokens, chunk by chunk.

    Args:
        rt: the runtime.
        session: of it.
        tokens: at least one.
        forward: default the captured one.

    Returns:
        What the forward returned for the last chunk.
    """
    chunk = rt.plan.config.prefill_chunk
    for first in range(0, len(tokens), chunk):
        result = rt.prefill(session, tokens[first : first + chunk], forward)
    return result


def draw(
    logits: Tensor, temperature: float, draws: Sequence[torch.Generator], without: Collection[int] = ()
) -> list[int]:
    """The next token of each row, drawn on the host: equal logits and generators give equal tokens on any device.

    Args:
        logits: [rows, vocab].
        temperature: divides the logits; 0, or next to nothing, takes the likeliest token, of equal ones the first.
        draws: a generator for each row.
        without: tokens that are not taken.
    """
    import torch

    if without:
        logits = logits.index_fill(1, torch.tensor(list(without), device=logits.device), -math.inf)
    if temperature < _LEAST_TEMPERATURE:
        likeliest: list[int] = logits.argmax(dim=-1).tolist()
        return likeliest
    chances = torch.softmax(logits.float().cpu() / temperature, dim=-1)
    return [int(torch.multinomial(row, 1, generator=own)) for row, own in zip(chances, draws, strict=True)]


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """For models too small for several threads: where cores are busy, those would mostly wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
