"""The gates of the benchmarks: planted regressions fail, and say what to do."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parent.parent / "bench"
CASE = {"batch": 13, "misses": 533}
OLD = {"us_per_call": 20.0, "us_without_copy": None, "launches_per_call": 1}


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module, with results written to a folder of its own."""
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("gates")
    monkeypatch.setattr(module.record, "RESULTS", tmp_path / "results")
    return module


@pytest.fixture
def baselines(tmp_path: Path) -> Path:
    """A folder with a baseline of two cases."""
    folder = tmp_path / "results"
    folder.mkdir()
    cases = [{"case": CASE, **OLD}, {"case": {"batch": 1, "misses": 41}, "us_per_call": 8.0}]
    baseline = {"machine": {"gpu": "H200"}, "commit": "c0ffee", "command": "bench it", "cases": cases}
    (folder / "recall.json").write_text(json.dumps(baseline))
    return folder


def check(gates: ModuleType, folder: Path, gpu: str = "H200", **figures: Any) -> str:
    """What is said about a run of the first case whose figures differ from the baseline's in these."""
    made = gates.Gates("recall", gpu, baselines=folder)
    same_case = dict(reversed(CASE.items()))
    times = ["us_per_call", "us_without_copy"]
    problems = made.add(same_case, OLD | figures, exact=["launches_per_call"], times=times)
    return "\n".join(problems)


def test_the_same_figures_pass(gates: ModuleType, baselines: Path) -> None:
    assert check(gates, baselines) == ""


@pytest.mark.parametrize("us", [1.0, 19.0, 22.9])
def test_times_within_the_tolerance_pass(gates: ModuleType, baselines: Path, us: float) -> None:
    assert check(gates, baselines, us_per_call=us) == ""


def test_a_slower_run_fails_and_says_what_to_do(gates: ModuleType, baselines: Path) -> None:
    problem = check(gates, baselines, us_per_call=24.0)
    assert "us_per_call is 24.00, the baseline has 20.00: +20%" in problem
    for told in ("'misses': 533", "--update-baseline", "c0ffee", "bench it"):
        assert told in problem


@pytest.mark.parametrize("launches", [0.5, 2])
def test_another_count_fails_in_either_direction(gates: ModuleType, baselines: Path, launches: float) -> None:
    assert f"launches_per_call is {launches}" in check(gates, baselines, launches_per_call=launches)


def test_times_of_another_gpu_are_not_compared_but_counts_are(gates: ModuleType, baselines: Path) -> None:
    assert check(gates, baselines, gpu="H100", us_per_call=99.0) == ""
    assert check(gates, baselines, gpu="H100", launches_per_call=3) != ""


def test_a_figure_that_one_run_lacks_is_not_compared(gates: ModuleType, baselines: Path) -> None:
    assert check(gates, baselines, us_without_copy=5.0) == ""
    assert check(gates, baselines, us_per_call=None) == ""


def test_without_a_baseline_everything_passes_and_becomes_it(gates: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    made = gates.Gates("recall", "H200", baselines=folder)
    assert made.add(CASE, OLD, exact=["launches_per_call"], times=["us_per_call"]) == []
    assert made.write() == folder / "recall.json"
    assert check(gates, folder, launches_per_call=2) != ""


def test_a_run_leaves_the_baseline_alone(gates: ModuleType, baselines: Path) -> None:
    before = (baselines / "recall.json").read_bytes()
    made = gates.Gates("recall", "H200", baselines=baselines)
    made.add(CASE, {"us_per_call": 30.0}, times=["us_per_call"])
    assert made.write() == baselines / "recall.new.json"
    assert (baselines / "recall.json").read_bytes() == before


def test_results_for_another_folder_keep_their_name(gates: ModuleType, baselines: Path, tmp_path: Path) -> None:
    gates.record.RESULTS = tmp_path / "elsewhere"
    made = gates.Gates("recall", "H200", baselines=baselines)
    made.add(CASE, OLD)
    assert made.write() == tmp_path / "elsewhere" / "recall.json"


def test_an_update_replaces_what_was_measured_and_keeps_the_rest(gates: ModuleType, baselines: Path) -> None:
    made = gates.Gates("recall", "H200", update=True, baselines=baselines)
    assert made.add(CASE, {"us_per_call": 30.0}, times=["us_per_call"]) == []
    written = json.loads(made.write().read_text())
    assert (baselines / "recall.json").exists()
    assert [entry["us_per_call"] for entry in written["cases"]] == [30.0, 8.0]
    assert [entry.get("commit") for entry in written["cases"]] == [None, "c0ffee"]


def test_nothing_measured_writes_nothing(gates: ModuleType, baselines: Path) -> None:
    assert gates.Gates("recall", "H200", baselines=baselines).write() is None
    assert [path.name for path in baselines.iterdir()] == ["recall.json"]


def test_the_cases_of_recall_fit_the_host_pool_and_differ(gates: ModuleType) -> None:
    recall = importlib.import_module("test_recall")
    assert max(case.host_bytes for case in recall.CASES) < 49 * 2**30
    assert len({gates.case_key(case.keys()) for case in recall.CASES}) == len(recall.CASES)
    assert set(recall.PEERS) <= {(case.batch, case.misses, case.row_bytes) for case in recall.CASES}
