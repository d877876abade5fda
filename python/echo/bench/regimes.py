"""How much selections of neighbouring steps overlap.

A query of a layer, a request and a head is

    q(t) = topic + slow * s(t) + fast * e(t)

topic: standard normal, drawn when the request starts; s: an AR(1) with coefficient `rho`; e: noise, new in each step.
Keys are standard normal, too. The indexer's score is a sum over heads of relu(q . key), so what a token is worth
changes as slowly as queries do: what `echo.traces.synthetic` draws as scores, here comes out of the score kernel.

The regimes were fitted with exact LRU pools for one session: 64 heads of 128 dimensions, equal weights, k = 372 of
16,384 tokens, misses after 130 steps in % of top-k, at pools of 1, 2, 4, 8 top-k:

    glm       29.8 / 13.2 / 7.2 / 3.1     published for GLM-5.1: 30 / 13.4 / 6.7
    v32_68k   61.0 / 40.5 / 23.9 / 13.7   neighbouring steps share 39 %; published for DeepSeek-V3.2: 35 to 50 %

With k = 2,048 of 90,112 tokens "glm" misses 30.3 / 13.5 / 7.6 / 3.4. Shorter contexts (in top-k) miss less. All
layers and requests are alike, which those of a model are not; neighbouring tokens have nothing in common, so misses
are spread over the host's memory as widely as they can be.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Regime:
    """How queries change.

    Attributes:
        slow: standard deviation of the part that changes slowly, next to that of the topic, 1.
        rho: its correlation from step to step.
        fast: standard deviation of the noise.
    """

    slow: float
    rho: float
    fast: float


REGIMES = {"glm": Regime(slow=0.7, rho=0.937, fast=0.2), "v32_68k": Regime(slow=1.0, rho=0.937, fast=0.7)}
