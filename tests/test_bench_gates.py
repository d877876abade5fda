"""The gates of the benchmarks: planted regressions fail, and say what to do."""

from __future__ import annotations

import ast
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import ANY

import pytest

BENCH = Path(__file__).parent.parent / "bench"
BENCHMARKS = sorted(BENCH.glob("test_*.py"))
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
    baseline = {"machine": {"gpu": "H200"}, "commit": "c0ffee", "date": "2026", "command": "bench it"}
    (folder / "recall.json").write_text(json.dumps({**baseline, "cases": cases}))
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


def test_a_count_that_is_gone_and_a_time_that_is_none_fail(gates: ModuleType, baselines: Path) -> None:
    made = gates.Gates("recall", "H200", baselines=baselines)
    (problem, _) = made.add(CASE, {"us_per_call": 20.0}, exact=["launches_per_call"], times=["us_per_call"])
    assert "launches_per_call is None, the baseline has 1" in problem
    assert "us_per_call is nan" in check(gates, baselines, us_per_call=float("nan"))


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


def test_a_run_that_is_ended_while_it_writes_leaves_the_baseline_whole(
    gates: ModuleType, baselines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (baselines / "recall.json").read_bytes()
    made = gates.Gates("recall", "H200", update=True, baselines=baselines)
    made.add(CASE, OLD)
    whole = Path.write_text

    def half(path: Path, text: str) -> int:
        whole(path, text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        made.write()
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
    assert [entry.get("date") for entry in written["cases"]] == [None, "2026"]


def test_updates_in_another_folder_add_up(
    gates: ModuleType, baselines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates.record, "RESULTS", tmp_path / "elsewhere")
    for case, us in ((CASE, 18.0), ({"batch": 8, "misses": 328}, 13.0)):
        made = gates.Gates("recall", "H200", update=True, baselines=baselines)
        made.add(case, {"us_per_call": us})
        made.write()
    entries = json.loads((tmp_path / "elsewhere" / "recall.json").read_text())["cases"]
    assert [entry["us_per_call"] for entry in entries] == [13.0, 18.0, 8.0]


def test_what_is_kept_again_is_still_of_its_own_run(gates: ModuleType, baselines: Path) -> None:
    for us, misses in ((30.0, 533), (5.0, 0)):
        made = gates.Gates("recall", "H200", update=True, baselines=baselines)
        made.add({"batch": 13, "misses": misses}, {"us_per_call": us})
        written = json.loads(made.write().read_text())
    assert [entry["us_per_call"] for entry in written["cases"]] == [5.0, 30.0, 8.0]
    assert [entry.get("date") for entry in written["cases"]] == [None, ANY, "2026"]
    assert written["cases"][1]["date"] != "2026"


def test_profiles_of_recall_keep_the_cases_that_are_not_profiled(
    gates: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalls = importlib.import_module("recall_stalls")
    monkeypatch.setattr(stalls.signal, "signal", lambda *_: None)
    monkeypatch.setattr(gates, "BASELINES", tmp_path / "baselines")
    waits = {"smsp__pcsamp_warps_issue_stalled_wait": "1,000"}
    monkeypatch.setattr(stalls, "profile", lambda *_: [waits])
    for only in (["0", "2"], ["2", "1"], ["3", "3"]):
        monkeypatch.setattr(sys, "argv", ["recall_stalls.py", "--only", *only])
        stalls.main()
    written = json.loads((tmp_path / "results" / "recall_stalls.json").read_text())["cases"]
    assert [entry["case"] for entry in written] == [stalls.CASES[number].keys() for number in (3, 2, 1, 0)]
    assert ["commit" in entry and "date" in entry for entry in written] == [False, True, True, True]
    assert written[-1]["stalls"] == {"wait": 1.0} and written[-1]["samples"] == 1000


def test_a_profile_that_fails_does_not_count_as_the_one_before(
    gates: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalls = importlib.import_module("recall_stalls")
    ncu = tmp_path / "ncu"
    ncu.write_text(
        """#!/bin/sh
case "$*" in
*"--page raw"*) printf '"ID","figure"\\n"","unit"\\n"0","7"\\n' ;;
*"--replay 1") : >"$3" ;;
*) exit 1 ;;
esac
"""
    )
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    report = tmp_path / "report"
    assert stalls.profile(1, report) == [{"ID": "0", "figure": "7"}]
    with pytest.raises(RuntimeError, match="ncu failed"):
        stalls.profile(2, report)


def test_what_is_kept_is_still_of_its_own_gpu(
    gates: ModuleType, baselines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = gates.Gates("recall", "B200", update=True, baselines=baselines)
    made.add(CASE, {"us_per_call": 30.0})
    monkeypatch.setattr(gates.record, "machine", lambda: {"gpu": "B200"})
    kept = json.loads(made.write().read_text())["cases"][1]
    assert kept["gpu"] == "H200"
    for gpu, problems in (("B200", False), ("H200", True)):
        again = gates.Gates("recall", gpu, baselines=baselines)
        assert bool(again.add(kept["case"], {"us_per_call": 99.0}, times=["us_per_call"])) == problems
        assert bool(again.add(CASE, {"us_per_call": 99.0}, times=["us_per_call"])) != problems


def test_nothing_measured_writes_nothing(gates: ModuleType, baselines: Path) -> None:
    assert gates.Gates("recall", "H200", baselines=baselines).write() is None
    assert [path.name for path in baselines.iterdir()] == ["recall.json"]


def test_the_cases_of_recall_fit_the_host_pool_and_differ(gates: ModuleType) -> None:
    recall = importlib.import_module("test_recall")
    assert max(case.host_bytes for case in recall.CASES) < 49 * 2**30
    assert len({gates.case_key(case.keys()) for case in recall.CASES}) == len(recall.CASES)
    assert set(recall.PEERS) <= {(case.batch, case.misses, case.row_bytes) for case in recall.CASES}


def test_nodes_of_steady_steps_are_counted_by_verb(gates: ModuleType, tmp_path: Path) -> None:
    layer = ["append", "score_sm90", "select_cluster", "recall", "recall", "attend_sm90"]
    names = [f"void echo::(anonymous namespace)::{name}<64>(Params)" for name in ["begin", *2 * layer, "commit"]]
    events = [{"ph": "X", "cat": "kernel", "name": name} for name in 3 * names]
    events += [{"ph": "X", "cat": "gpu_memset", "name": "Memset"}] * 6 + [{"ph": "i", "cat": "kernel", "name": "x"}]
    events += [{"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD"}] * 3
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    found = importlib.import_module("test_steady").nodes_of(trace, steps=3, layers=2)
    assert found["nodes_per_layer"] == 6 and found["nodes_besides"] == {"begin": 1, "commit": 1, "other": 2}
    assert found["nodes_by_verb"] == {"append": 1, "attend": 1, "recall": 2, "score": 1, "select": 1}


# --- what all benchmarks do -------------------------------------------------------------------------------------------


def gated(path: Path) -> tuple[str, dict[str, tuple[str, ...]]]:
    """The name of a benchmark's results, and the figures that it has compared, by how."""
    tree = ast.parse(path.read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    added = [call for call in calls if ast.unparse(call.func).startswith("gates(") and call.func.attr == "add"]
    assert len(added) == 1, f"{path.name} has its figures compared in {len(added)} places"
    asserted = [ast.unparse(node.test) for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert "not problems" in asserted, f"{path.name} does not fail by what is worse"
    named: dict[str, tuple[str, ...]] = {}
    for keyword in [keyword for call in calls for keyword in call.keywords]:
        if keyword.arg in ("exact", "times") and isinstance(keyword.value, ast.Tuple):
            named[keyword.arg] = named.get(keyword.arg, ()) + ast.literal_eval(keyword.value)
    return ast.literal_eval(added[0].func.value.args[0]), named


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_every_benchmark_compares_counts_or_times(path: Path) -> None:
    name, named = gated(path)
    assert set(named) <= {"exact", "times"}
    if path.stem != "test_steady":  # all of whose figures are counts
        assert named["exact"] and named["times"]
    assert name in {path.stem.removeprefix("test_"), "prefetch"}


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_regressions_against_the_recorded_baselines_fail(gates: ModuleType, path: Path) -> None:
    """In every case: a time that is a fifth longer, a count that is another."""
    name, named = gated(path)
    if not (BENCH / "results" / f"{name}.json").exists():
        pytest.skip(f"no {name}.json has been recorded")
    baseline = json.loads((BENCH / "results" / f"{name}.json").read_text())
    for entry in baseline["cases"]:
        figures = {key: value for key, value in entry.items() if key != "case"}
        made = gates.Gates(name, baseline["machine"]["gpu"])
        assert made.add(entry["case"], figures, **named) == []
        timed = [figure for figure in named.get("times", ()) if figures.get(figure) is not None]
        assert timed or not named.get("times"), f"{entry['case']}: no time would be compared"
        for figure in timed:
            slower = {**figures, figure: 1.2 * figures[figure]}
            assert "--update-baseline" in "".join(made.add(entry["case"], slower, **named))
        for figure in named.get("exact", ()):
            if figure in figures:
                other = {**figures, figure: figures[figure] + 1}
                assert f"{figure} is {other[figure]}" in "".join(made.add(entry["case"], other, **named))


A_BENCHMARK = """
import pytest

@pytest.mark.benchmark(group="recall")
def test_recall(benchmark, gates):
    benchmark.pedantic(lambda: None, rounds=1)
    figures = {"us_per_call": US, "launches_per_call": 1}
    problems = gates("recall").add(CASE, figures, exact=("launches_per_call",), times=("us_per_call",))
    assert not problems, "\\n".join(problems)
"""


def ran(folder: Path, us: float, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`pytest bench --benchmark-only` with one benchmark, on a machine whose GPU is none."""
    bench = folder / "bench"
    shutil.copytree(BENCH, bench, ignore=shutil.ignore_patterns("test_*.py", "results"), dirs_exist_ok=True)
    (bench / "test_recall.py").write_text(A_BENCHMARK.replace("US", str(us)).replace("CASE", str(CASE)))
    (bench / "results").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "bench", "--benchmark-only", *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "ECHO_RESULTS"}
    return subprocess.run(
        command, cwd=folder, env={**environment, "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=120
    )


def test_a_run_of_pytest_fails_by_a_regression_until_the_baseline_is_updated(tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark")
    baseline = tmp_path / "bench" / "results" / "recall.json"
    first = ran(tmp_path, 20.0)
    assert first.returncode == 0, first.stdout + first.stderr
    assert json.loads(baseline.read_text())["cases"][0]["us_per_call"] == 20.0
    assert ran(tmp_path, 22.0).returncode == 0
    slower = ran(tmp_path, 24.0)
    assert slower.returncode == 1 and "us_per_call is 24.00, the baseline has 20.00: +20%" in slower.stdout
    assert "--update-baseline" in slower.stdout and "recall.new.json" in slower.stdout
    assert ran(tmp_path, 24.0, "--update-baseline").returncode == 0
    assert json.loads(baseline.read_text())["cases"][0]["us_per_call"] == 24.0
    assert ran(tmp_path, 24.0).returncode == 0
