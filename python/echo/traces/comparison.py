"""Policies side by side on one trace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echo import InvalidArgument
from echo.traces.layer_steps import LayerSteps
from echo.traces.policies import POLICIES, make_pool
from echo.traces.trace import Trace


@dataclass(frozen=True)
class Comparison:
    """Misses per selected row in the second half of a trace.

    The first half fills the pool. In one that is not full by then, nothing was evicted yet: what it misses are first
    uses, and all policies are the same until it is.

    Attributes:
        slots: of each pool.
        layers: of the trace, those that were replayed.
        rates: by policy, float64 [pools, layers].
        full: bool [pools, layers], whether the pool was full when counting began.
    """

    slots: tuple[int, ...]
    layers: tuple[int, ...]
    rates: dict[str, NDArray[np.float64]]
    full: NDArray[np.bool_]

    def mean(self, policy: str) -> NDArray[np.float64]:
        """float64 [pools], over layers."""
        mean: NDArray[np.float64] = self.rates[policy].mean(axis=1)
        return mean


def compare(
    trace: Trace,
    slots: Iterable[int],
    policies: Iterable[str] = POLICIES,
    layers: Iterable[int] | None = None,
    seed: int = 0,
) -> Comparison:
    """Replays a trace through pools.

    Args:
        trace: the selections.
        slots: of each pool, at least top_k + 1.
        policies: of `POLICIES`.
        layers: of the trace, each with a pool of its own; default all.
        seed: of "random".

    Raises:
        InvalidArgument: naming `slots`, `policies` or `layers`.
    """
    pools, names = tuple(slots), tuple(policies)
    chosen = tuple(range(trace.layers) if layers is None else layers)
    check_policies(names)
    if not chosen or not all(0 <= layer < trace.layers for layer in chosen):
        raise InvalidArgument(f"layers: {list(chosen)} given, expected numbers from 0 to {trace.layers - 1}")
    warm = trace.steps // 2
    rates = {name: np.zeros((len(pools), len(chosen))) for name in names}
    full = np.zeros((len(pools), len(chosen)), np.bool_)
    for j, layer in enumerate(chosen):
        steps = LayerSteps(trace, layer)
        selected = max(1, int((steps.selected[warm:] >= 0).sum()))
        for i, name in ((i, name) for i in range(len(pools)) for name in names):
            pool = make_pool(steps, pools[i], name, seed)
            for _ in range(warm):
                pool.step()
            full[i, j] = pool.used == pools[i]
            rates[name][i, j] = sum(len(pool.step()) for _ in range(warm, trace.steps)) / selected
    return Comparison(pools, chosen, rates, full)


def check_policies(names: Iterable[str]) -> None:
    """InvalidArgument naming `policies` and the first name that is none."""
    for name in names:
        if name not in POLICIES:
            raise InvalidArgument(f"policies: {name!r} given, expected some of {', '.join(POLICIES)}")


def slots_of(trace: Trace, multiple: float) -> int:
    """Slots of a pool of `multiple` x top_k; a step needs one more than it selects, so 1 x top_k has one more."""
    return max(trace.top_k + 1, int(multiple * trace.top_k))
