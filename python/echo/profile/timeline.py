"""What a profile holds: pieces of time with their verb and layer, and sums over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echo.profile.kernels import BEGIN, COMMIT, FORECAST, GAPS, OTHER, UPLOAD, VERBS

_ORDER = (UPLOAD, BEGIN, *VERBS, FORECAST, COMMIT)


@dataclass(frozen=True)
class Span:
    """One kernel, copy, verb or call.

    Attributes:
        part: verb, or another name of `echo.profile.kernels`; of calls of the host their name.
        start, end: microseconds.
        track: where it ran: "stream 7", "cpu", "host".
        layer: of the model, None for what belongs to none.
        detail: the kernel's whole name.
    """

    part: str
    start: float
    end: float
    track: str
    layer: int | None = None
    detail: str = ""

    @property
    def name(self) -> str:
        """For people: "score layer 7"."""
        return self.part if self.layer is None else f"{self.part} layer {self.layer}"

    def moved(self, by: float) -> Span:
        """So many microseconds later."""
        return replace(self, start=self.start + by, end=self.end + by)


@dataclass(frozen=True)
class Step:
    """One decode step.

    Attributes:
        start, end: microseconds.
        spans: what ran, by start.
        host: calls of the host for it.
    """

    start: float
    end: float
    spans: list[Span]
    host: list[Span] = field(default_factory=list)

    def moved(self, by: float, host_by: float | None = None) -> Step:
        """So many microseconds later, and the calls of the host by as many or by others."""
        host_by = by if host_by is None else host_by
        spans, host = [span.moved(by) for span in self.spans], [call.moved(host_by) for call in self.host]
        return Step(self.start + by, self.end + by, spans, host)

    def own_times(self) -> NDArray[np.float64]:
        """Microseconds of each span; an instant in which several run counts for the one that began first.

        For forecasts it counts only where nothing else runs.
        """
        times = np.zeros(len(self.spans))
        busy: list[tuple[float, float]] = []  # of all others, apart from each other
        covered = self.start
        for i, span in enumerate(self.spans):
            if span.part != FORECAST and span.end > covered:
                begin = max(span.start, covered)
                times[i] = span.end - begin
                busy.append((begin, span.end))
                covered = span.end
        covered = self.start
        for i, span in enumerate(self.spans):
            if span.part == FORECAST and span.end > covered:
                begin = max(span.start, covered)
                beside = sum(max(0.0, min(end, span.end) - max(start, begin)) for start, end in busy)
                times[i] = span.end - begin - beside
                covered = span.end
        return times


@dataclass(frozen=True)
class Part:
    """A line of the table; times are means over the steps.

    Attributes:
        name: verb, or another name of `echo.profile.kernels`.
        us: of a step.
        us_per_layer: None for what does not belong to layers.
        share: of the step.
        launches: of kernels or copies in a step; on the CPU, calls.
    """

    name: str
    us: float
    us_per_layer: float | None
    share: float
    launches: float


@dataclass(frozen=True)
class Profile:
    """Steps, and what was measured beside them.

    Attributes:
        workload: in words.
        device: 'cpu' or 'cuda:N'.
        layers: of the model.
        steps: at least one.
        step_us: of a step, measured without a profiler.
        call_us: how long the call of `step` kept the host; None on the CPU, where it is the step.
        hits, misses: float64 [layers], selected rows per step; misses are those that a recall fetched.
        prefetched, prefetched_used: float64 [layers], rows per step that were fetched while scoring, and those of them
            that were selected in the same step.
        forecast, forecast_used: float64 [layers], rows per step that were fetched for the next one, and earlier ones of
            them that were selected for the first time.
    """

    workload: str
    device: str
    layers: int
    steps: list[Step]
    step_us: float
    call_us: float | None
    hits: NDArray[np.float64]
    misses: NDArray[np.float64]
    prefetched: NDArray[np.float64]
    prefetched_used: NDArray[np.float64]
    forecast: NDArray[np.float64]
    forecast_used: NDArray[np.float64]

    def parts(self) -> list[Part]:
        """The step divided up. The last part are gaps: what `step_us` has besides, if it has more."""
        us: dict[str, float] = {}
        pieces: dict[str, int] = {}
        layered: set[str] = set()
        for step in self.steps:
            for span, own in zip(step.spans, step.own_times(), strict=True):
                us[span.part] = us.get(span.part, 0.0) + own / len(self.steps)
                pieces[span.part] = pieces.get(span.part, 0) + 1
                if span.layer is not None:
                    layered.add(span.part)
        gaps = self.step_us - sum(us.values())
        if gaps > 1e-6 * self.step_us:  # more than rounding
            us[GAPS] = gaps
        total = sum(us.values())
        return [
            Part(
                name=name,
                us=us[name],
                us_per_layer=us[name] / self.layers if name in layered | {OTHER, GAPS} else None,
                share=us[name] / total,
                launches=pieces.get(name, 0) / len(self.steps),
            )
            for name in sorted(us, key=_place)
        ]

    def by_layer(self, part: str) -> NDArray[np.float64]:
        """float64 [layers], mean microseconds of a step; kernels that do the work of several verbs count for each."""
        sums = np.zeros(self.layers)
        for step in self.steps:
            for span, own in zip(step.spans, step.own_times(), strict=True):
                if span.layer is not None and (part == span.part or part in span.part.split("+")):
                    sums[span.layer] += own
        return sums / len(self.steps)

    def hit_rate(self) -> NDArray[np.float64]:
        """float64 [layers], 1 where nothing was selected."""
        selected = self.hits + self.misses
        return np.where(selected > 0, self.hits / np.maximum(selected, 1e-9), 1.0)

    def report(self) -> dict[str, Any]:
        """What `--json` writes."""
        return {
            "workload": self.workload,
            "device": self.device,
            "layers": self.layers,
            "steps": len(self.steps),
            "step_us": self.step_us,
            "call_us": self.call_us,
            "parts": [vars(part) for part in self.parts()],
            "by_layer": {
                **{f"{verb}_us": self.by_layer(verb).tolist() for verb in VERBS},
                "missed_rows": self.misses.tolist(),
                "prefetched_rows": self.prefetched.tolist(),
                "prefetched_used": self.prefetched_used.tolist(),
                "forecast_rows": self.forecast.tolist(),
                "forecast_used": self.forecast_used.tolist(),
                "hit_rate": self.hit_rate().tolist(),
            },
        }


def sorted_spans(spans: Iterable[Span]) -> list[Span]:
    """By start; of those that start together the longest first."""
    return sorted(spans, key=lambda span: (span.start, -span.end))


def part_names(steps: Sequence[Step]) -> list[str]:
    """All parts of the steps, in the order of tables."""
    return sorted({span.part for step in steps for span in step.spans}, key=_place)


def _place(part: str) -> tuple[int, str]:
    if part in (OTHER, GAPS):
        return len(_ORDER) + 1 + (part == GAPS), part
    first = part.split("+")[0]
    return (_ORDER.index(first) if first in _ORDER else len(_ORDER)), part
