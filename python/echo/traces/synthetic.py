"""Selections from a model of index scores, with the miss rates that were published for real ones.

The score of token i in step t is

    s_i(t) = b_i + slow * a_i(t) + fast * e_i(t) + g(t)

b: what a token is worth throughout; a: AR(1) with coefficient `rho`, what it is worth to the passage being written; e:
noise, new in each step; all standard normal. g moves all scores of a layer alike: it changes no selection, but
without it the k-th score would be steadier than any real one, and predictors of it would look perfect.

Left out: sinks, a recency window, shared prefixes, turns that change the topic. The first layers of a model select by
position; here they just select almost anew in each step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echo import InvalidArgument
from echo.traces.trace import Trace

_SHIFT_SIZE = 0.5  # standard deviation of g, made of an AR(1) and of jumps
_SHIFT_RHO = 0.98
_JUMP_CHANCE = 0.01  # of a step
_JUMP_SIZE = 1.5


@dataclass(frozen=True)
class Regime:
    """Parameters of the scores.

    Attributes:
        tokens_per_k: context length for which the miss rates are known, in multiples of top_k.
        slow: standard deviation of the part that changes slowly, next to that of b, 1.
        rho: its correlation from step to step.
        fast: standard deviation of the noise.
    """

    tokens_per_k: int
    slow: float
    rho: float
    fast: float


# "v32_68k" as it is misses 54 / 31 / 15 % at pools of 1, 2, 4 k; published are 60 / 40 / 23 %. With noise of 1.0 it
# would be 62 / 40 / 20 %.
REGIMES = {
    "glm": Regime(tokens_per_k=16, slow=1.10, rho=0.937, fast=0.326),
    "long_context": Regime(tokens_per_k=45, slow=0.40, rho=0.937, fast=0.20),
    "v32_68k": Regime(tokens_per_k=16, slow=1.10, rho=0.937, fast=0.8),
    "first_layers": Regime(tokens_per_k=16, slow=1.10, rho=0.937, fast=3.0),
}


def generate(regime: str, steps: int, top_k: int, tokens: int | None = None, seed: int = 0, layers: int = 1) -> Trace:
    """A trace over a context of constant length. Layers are independent of each other.

    Args:
        regime: a key of `REGIMES`: "glm" (GLM-5.1), "long_context" (100K tokens and more), "v32_68k" (DeepSeek-V3.2
            after a prompt of 68K), "first_layers".
        steps: decode steps.
        top_k: positions selected in each; equal scores go to the smaller position.
        tokens: context length; default the regime's `tokens_per_k` times `top_k`.
        seed: of all random numbers.
        layers: layers of the trace.

    Raises:
        InvalidArgument: naming the argument.
    """
    if regime not in REGIMES:
        raise InvalidArgument(f"regime: {regime!r} given, expected one of {', '.join(REGIMES)}")
    for name, value in (("steps", steps), ("top_k", top_k), ("layers", layers)):
        if value < 1:
            raise InvalidArgument(f"{name}: {value} given, expected at least 1")
    parameters = REGIMES[regime]
    length = parameters.tokens_per_k * top_k if tokens is None else tokens
    if not top_k <= length < 1 << 31:
        raise InvalidArgument(f"tokens: {length} given, expected {top_k} (top_k) to {(1 << 31) - 1}")
    positions = np.empty((steps, layers, top_k), np.int32)
    kth_score = np.empty((steps, layers), np.float32)
    for layer in range(layers):
        draws = np.random.default_rng([seed, layer])
        shift = _shifts(steps, draws)
        worth = draws.standard_normal(length, np.float32)
        passage = draws.standard_normal(length, np.float32)
        for t in range(steps):
            if t:
                change = np.sqrt(1 - parameters.rho**2) * draws.standard_normal(length, np.float32)
                passage = (parameters.rho * passage + change).astype(np.float32)
            noise = draws.standard_normal(length, np.float32)
            scores = worth + parameters.slow * passage + parameters.fast * noise + shift[t]
            positions[t, layer], kth_score[t, layer] = select(scores.astype(np.float32), top_k)
    context = np.full(steps, length, np.int32)
    return Trace(positions, context, kth_score, model=f"synthetic:{regime}", text="", seed=seed)


def select(scores: NDArray[np.float32], top_k: int) -> tuple[NDArray[np.int32], np.float32]:
    """The exact selection of the product.

    Args:
        scores: float32 [tokens], no NaN.
        top_k: at most `tokens`.

    Returns:
        int32 [top_k] positions, ascending, of the largest scores, of equal ones the smaller positions; and the smallest
        of these scores.
    """
    kth: np.float32 = np.partition(scores, len(scores) - top_k)[len(scores) - top_k]
    above = np.flatnonzero(scores > kth)
    ties = np.flatnonzero(scores == kth)[: top_k - len(above)]
    return np.sort(np.concatenate([above, ties])).astype(np.int32), kth


def _shifts(steps: int, draws: np.random.Generator) -> NDArray[np.float32]:
    """g, float32 [steps]."""
    shifts = np.empty(steps, np.float32)
    shift = _SHIFT_SIZE * draws.standard_normal()
    for t in range(steps):
        shifts[t] = shift
        shift = _SHIFT_RHO * shift + _SHIFT_SIZE * np.sqrt(1 - _SHIFT_RHO**2) * draws.standard_normal()
        if draws.random() < _JUMP_CHANCE:
            shift += _JUMP_SIZE * draws.standard_normal()
    return shifts
