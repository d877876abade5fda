"""Gates: figures of this run against the baseline, `bench/results/NAME.json`.

Counts have to be what they were, times may be 15 % longer. Cases that the baseline does not have pass, and times of
another GPU are not compared. A run never changes a baseline that is there, unless it is told to.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import record

BASELINES = Path(__file__).parent / "results"
TOLERANCE = 0.15


def case_key(case: dict[str, Any]) -> str:
    """The same for the same case, whatever the order of its keys."""
    return json.dumps(case, sort_keys=True)


class Gates:
    """The results of one benchmark, checked as they come in and written at the end.

    Args:
        name: of the benchmark.
        gpu: the machine's, as `record.machine()` names it.
        update: this run is to be the baseline: nothing is compared.
        baselines: folder of the baseline.
    """

    def __init__(self, name: str, gpu: str, update: bool = False, baselines: Path = BASELINES) -> None:
        self.name = name
        self.update = update
        self.path = baselines / f"{name}.json"
        updated = record.RESULTS / f"{name}.json"
        path = updated if update and updated.exists() else self.path
        self.old: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.old_cases = {case_key(entry["case"]): entry for entry in self.old.get("cases", [])}
        self.gpu = gpu
        self.cases: list[dict[str, Any]] = []

    def add(
        self, case: dict[str, Any], figures: dict[str, Any], exact: Iterable[str] = (), times: Iterable[str] = ()
    ) -> list[str]:
        """Takes the figures of a case; says what is worse than in the baseline, and what to do then.

        Args:
            case: its keys.
            figures: by name.
            exact: names of counts.
            times: names of times; None in either run is not compared.
        """
        self.cases.append({"case": case, **figures})
        if self.update:
            return []
        old = self.old_cases.get(case_key(case), {})
        problems = [
            f"{name} is {figures.get(name)}, the baseline has {old[name]}"
            for name in exact
            if name in old and figures.get(name) != old[name]
        ]
        for name in times if self._gpu_of(old) == self.gpu else ():
            before, now = old.get(name), figures.get(name)
            # NaN, which is no time, is not at most anything.
            if before is not None and now is not None and not now <= before * (1 + TOLERANCE):
                problems.append(
                    f"{name} is {now:.2f}, the baseline has {before:.2f}: {now / before - 1:+.0%}, "
                    f"allowed are {TOLERANCE:+.0%}"
                )
        if problems:
            problems = [f"{self.name} {case}: {problem}" for problem in problems]
            problems.append(
                f"Find the change that did it (the baseline is of commit {self.old.get('commit', 'unknown')}, measured "
                f"with `{self.old.get('command', 'unknown')}`). If it is meant, run the benchmark again with "
                f"--update-baseline and commit bench/results/{self.name}.json with the reason."
            )
        return problems

    def write(self) -> Path | None:
        """Writes what was measured, if anything was, and returns where.

        That is NAME.json in the folder of results, or NAME.new.json where this would overwrite the baseline. An update
        is always NAME.json, and also holds the cases that it had, or else the baseline, and that were not measured now,
        each with the commit and the date of its run, and its GPU where that is another one.
        """
        if not self.cases:
            return None
        if not self.update:
            is_baseline = self.path.exists() and record.RESULTS.resolve() == self.path.parent.resolve()
            return record.write(f"{self.name}.new" if is_baseline else self.name, self.cases)
        measured = {case_key(entry["case"]) for entry in self.cases}
        run = {name: self.old.get(name, "unknown") for name in ("commit", "date")}
        left = [entry for key, entry in self.old_cases.items() if key not in measured]
        kept = [entry if "commit" in entry else {**run, **entry} for entry in left]
        return record.write(self.name, self.cases + [self._with_gpu(entry) for entry in kept])

    def _gpu_of(self, entry: dict[str, Any]) -> str | None:
        """Of a case of the baseline."""
        gpu: str | None = entry.get("gpu", self.old.get("machine", {}).get("gpu"))
        return gpu

    def _with_gpu(self, entry: dict[str, Any]) -> dict[str, Any]:
        gpu = self._gpu_of(entry)
        return entry if gpu == self.gpu else {"gpu": gpu, **entry}
