"""Selections from a model of index scores, with the miss rates or overlaps that were published for real ones.

The score of token i in step t is

    s_i(t) = b_i + slow * a_i(t) + fast * e_i(t) + g(t) + bonus_i(t)

b: what a token is worth throughout; a: AR(1) with coefficient `rho`, what it is worth to the passage being written; e:
noise, new in each step; all standard normal. g moves all scores of a layer alike: it changes no selection, but
without it the k-th score would be steadier than any real one, and predictors of it would look perfect. The bonus is for
sinks and for recent tokens, where asked for. A turn draws a anew: a topic ends, and many selections change at once.

Left out: prefixes that sessions share, and that the first layers of a model select by position; here those just select
almost anew in each step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echo import CapacityError, InvalidArgument, machine_limits
from echo.traces.ranking import rank
from echo.traces.trace import Trace

ALL = -1  # as `ranks`
_BYTES_PER_RANK = 16  # position and score, and as much again while they are checked
_SHIFT_SIZE = 0.5  # standard deviation of g, made of an AR(1) and of jumps
_SHIFT_RHO = 0.98
_JUMP_CHANCE = 0.01  # of a step
_JUMP_SIZE = 1.5
_SINK_BONUS = 20.0  # enough to be selected always
_RECENT_BONUS = 4.0  # of the newest token; older ones have less, by exp(-age / recency)


@dataclass(frozen=True)
class Regime:
    """Parameters of the scores.

    Attributes:
        tokens_per_k: context length that the miss rates are for, in multiples of top_k.
        slow: standard deviation of the part that changes slowly, next to that of b, 1.
        rho: its correlation from step to step.
        fast: standard deviation of the noise.
    """

    tokens_per_k: int
    slow: float
    rho: float
    fast: float


REGIMES = {
    "glm": Regime(tokens_per_k=16, slow=1.10, rho=0.937, fast=0.326),
    "long_context": Regime(tokens_per_k=45, slow=0.40, rho=0.937, fast=0.20),
    "v32_68k": Regime(tokens_per_k=16, slow=1.10, rho=0.937, fast=1.0),
    "low_overlap": Regime(tokens_per_k=16, slow=1.10, rho=0.937, fast=0.8),
    "first_layers": Regime(tokens_per_k=16, slow=1.10, rho=0.937, fast=3.0),
}


def generate(
    regime: str,
    steps: int,
    top_k: int,
    tokens: int | None = None,
    seed: int = 0,
    layers: int = 1,
    ranks: int = 0,
    sinks: int = 0,
    recency: int = 0,
    turn_every: int = 0,
) -> Trace:
    """A trace of layers that are independent of each other.

    Regimes, and what they miss under LRU, in % of top_k, at pools of 1, 2, 4 top_k:

    - "glm": 31 / 13 / 7 (the HiSparse paper on GLM-5.1, k = 2048: 30 / 13.4 / 6.7);
    - "long_context": 27 / 8 / 3 (100K tokens and more);
    - "v32_68k": 62 / 39 / 20 (NVIDIA on DeepSeek-V3.2 after a prompt of 68K: neighbouring steps share 35
      to 50 % of their selections in layers 20 to 60; here 40 %);
    - "low_overlap": 54 / 31 / 15 (nothing published; between "glm" and "v32_68k");
    - "first_layers": 88 / 77 / 58 (nothing published; selections that hardly overlap).

    Args:
        regime: a key of `REGIMES`.
        steps: decode steps.
        top_k: positions selected in each; equal scores go to the smaller position.
        tokens: length of the context, of the first step where it grows; default the regime's `tokens_per_k` times
            `top_k`.
        seed: of all random numbers.
        layers: layers of the trace.
        ranks: tokens whose scores are kept, at least top_k; 0 for none, `ALL` for the whole context of the last step.
        sinks: first tokens that are always selected.
        recency: recent tokens score higher, the less the older; their bonus falls to 1/e in so many tokens. The context
            then grows by a token in each step. 0 for neither.
        turn_every: steps after which what tokens are worth to the passage is drawn anew; 0 for never.

    Raises:
        InvalidArgument: naming the argument.
        CapacityError: naming `top_k`, if this machine has not the memory.
    """
    if regime not in REGIMES:
        raise InvalidArgument(f"regime: {regime!r} given, expected one of {', '.join(REGIMES)}")
    parameters = REGIMES[regime]
    length = parameters.tokens_per_k * top_k if tokens is None else tokens
    limit = (1 << 31) - 1
    for name, value, least, most in (
        ("steps", steps, 1, limit),
        ("top_k", top_k, 1, limit),
        ("seed", seed, 0, (1 << 63) - 1),
        ("tokens", length, top_k, limit - steps),
        ("layers", layers, 1, limit),
        ("ranks", ranks, top_k if ranks not in (0, ALL) else ALL, limit),
        ("sinks", sinks, 0, top_k),
        ("recency", recency, 0, limit),
        ("turn_every", turn_every, 0, limit),
    ):
        if not least <= value <= most:
            raise InvalidArgument(f"{name}: {value} given, expected {least} to {most}")
    last = length + steps - 1 if recency else length
    kept = last if ranks == ALL else min(max(ranks, top_k), last)
    needed, free = _BYTES_PER_RANK * steps * layers * kept, machine_limits("cpu").host_bytes
    if free and needed > free:
        raise CapacityError(
            f"top_k: {top_k} given with {steps} steps, which take {needed / 2**30:,.0f} GiB here, there are "
            f"{free / 2**30:,.0f}"
        )
    context = np.full(steps, length, np.int32)
    if recency:
        context += np.arange(steps, dtype=np.int32)
    ranked = np.full((steps, layers, kept), -1, np.int32)
    scores = np.full((steps, layers, kept), np.nan, np.float32)
    for layer in range(layers):
        draws = np.random.default_rng([seed, layer])
        all_scores = _Scores(parameters, int(context[-1]), steps, turn_every, draws)
        for t in range(steps):
            now = all_scores.step()[: context[t]]
            now[:sinks] += _SINK_BONUS
            if recency:
                now += _RECENT_BONUS * np.exp(np.arange(1 - len(now), 1, dtype=np.float32) / np.float32(recency))
            order = rank(now, kept)
            ranked[t, layer, : len(order)], scores[t, layer, : len(order)] = order, now[order]
    return Trace(
        positions=np.sort(ranked[..., :top_k], axis=2),
        context=context,
        kth_score=scores[..., top_k - 1].copy(),
        ranked=ranked if ranks else None,
        scores=scores if ranks else None,
        model=f"synthetic:{regime}",
        notes=f"sinks {sinks}, recency {recency}, a turn every {turn_every} steps (0: none)",
        seed=seed,
    )


class _Scores:
    """The scores of a layer, step by step."""

    def __init__(
        self, parameters: Regime, tokens: int, steps: int, turn_every: int, draws: np.random.Generator
    ) -> None:
        self._parameters = parameters
        self._turn_every = turn_every
        self._draws = draws
        self._shifts = _shifts(steps, draws)
        self._worth = draws.standard_normal(tokens, np.float32)
        self._passage = draws.standard_normal(tokens, np.float32)
        self._now = -1

    def step(self) -> NDArray[np.float32]:
        """float32 [tokens], of the next step."""
        self._now += 1
        rho, fresh = self._parameters.rho, self._normal
        if self._turn_every and self._now and self._now % self._turn_every == 0:
            self._passage = fresh()
        elif self._now:
            self._passage = np.float32(rho) * self._passage + np.float32((1 - rho**2) ** 0.5) * fresh()
        slow, fast = np.float32(self._parameters.slow), np.float32(self._parameters.fast)
        scores: NDArray[np.float32] = self._worth + slow * self._passage + fast * fresh() + self._shifts[self._now]
        return scores

    def _normal(self) -> NDArray[np.float32]:
        return self._draws.standard_normal(len(self._worth), np.float32)


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
