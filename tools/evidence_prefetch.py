"""Tables of docs/evidence.md on prefetches: what they would fetch in vain, and what would still be missed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from evidence_measure import ALPHAS, CAPS, SAMPLE, Driven, Measured
from evidence_tables import SHOWN, percents, table

from echo.traces.predictor import Guess


def prefetches(real: Sequence[Measured], made: Sequence[Measured]) -> str:
    """What prefetches above thresholds bring."""
    rows = []
    for one in [*real, *made]:
        cells = []
        for alpha in SHOWN:
            now = [foretold[ALPHAS.index(alpha)] for foretold in one.forecasts]
            cells.append(_pair(np.mean([f.wasted for f in now]), np.mean([f.misses_left for f in now])))
        cells.append(_pair(np.mean([s.wasted for s in one.sampled]), np.mean([s.left for s in one.sampled])))
        rows.append([f"`{one.name}`", *percents([np.mean([f[0].misses for f in one.forecasts])]), *cells])
    missed, wasted, left = (
        np.mean([[getattr(f[ALPHAS.index(0.5)], name) for f in one.forecasts] for one in real])
        for name in ("misses", "wasted", "misses_left")
    )
    own = [np.mean([[getattr(s, name) for s in one.sampled] for one in real]) for name in ("wasted", "left")]
    head = (
        f"Means over the four traces: of {100 * missed:.1f} % that are missed, a moving average with alpha 0.5 leaves "
        f"{100 * left:.1f} % and fetches {100 * wasted:.1f} % in vain; a threshold from one in {SAMPLE} blocks of the "
        f"step's own scores leaves {100 * own[1]:.1f} % and fetches {100 * own[0]:.1f} % in vain."
    )
    columns = ["% of k: in vain / still missed", "missed without", *(f"alpha {alpha:g}" for alpha in SHOWN)]
    return f"{head}\n\n{table([*columns, f'one block in {SAMPLE}'], rows)}"


def predictors(real: Sequence[Measured], made: Sequence[Measured]) -> str:
    """The product's rule beside others."""
    rows = [predictor_row(one.name, one.guesses, one.driven) for one in [*real, *made]]
    full, full_made = (float(np.mean([one.driven.full for one in some])) for some in (real, made))
    sample, sample_made = (
        float(np.mean([guess.full for one in some for guess in one.guesses if guess.name == "sample"]))
        for some in (real, made)
    )
    head = (
        f"Over the four traces the runtime searched all scores of {100 * full:.1f} % of its query rows, since their "
        f"candidates did not do, over the generated ones {100 * full_made:.1f} %; with a sample it would be "
        f"{100 * sample:.1f} and {100 * sample_made:.1f} %."
    )
    columns = [
        "",
        "missed without",
        "alpha 0.5: error, candidates / k",
        *(f"cap {cap:g}" for cap in CAPS),
        "rescore: candidates / k",
        "sample: error, candidates / k",
        *(f"cap {cap:g}" for cap in CAPS),
        "the runtime, no cap",
    ]
    return f"{head}\n\n{table(columns, rows)}"


def predictor_row(name: str, guesses: Sequence[Guess], driven: Driven) -> list[str]:
    """Of one trace."""
    average, rescore, sample = (
        [guess for guess in guesses if guess.name == way] for way in ("alpha 0.5", "rescore", "sample")
    )
    return [
        f"`{name}`",
        *percents([average[0].misses]),
        f"{average[0].error:.2f}, {average[0].candidates:.2f}",
        *(_pair(guess.wasted, guess.left) for guess in average),
        f"{rescore[0].candidates:.1f}",
        f"{sample[0].error:.2f}, {sample[0].candidates:.2f}",
        *(_pair(guess.wasted, guess.left) for guess in sample),
        _pair(driven.wasted, driven.left),
    ]


def _pair(wasted: Any, left: Any) -> str:
    return " / ".join(percents([wasted, left]))
