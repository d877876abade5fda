"""tools/gpu_all.py: order, time limits and the table; tools/gpu_check.sh: a failure is seen and stops nobody else.

Shell scripts take the place of parts, tests and sanitizers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.programs import ROOT, importable

with importable("tools"):
    import gpu_all
    from gpu_all import Part

SCRIPT = """#!/usr/bin/env bash
echo "$1 begins, built ${ECHO_BUILT:-not}"
case "$1" in
  slow) timeout 60 sleep 60 ;;
  stubborn) trap '' TERM; (setsid true; timeout 60 bash -c "trap '' TERM; sleep 1; sleep 60") ;;
  wrong) echo oh; exit 7 ;;
  *) sleep 0.3; echo "$@ is done" ;;
esac
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A tree whose gpu_check.sh has parts of its own."""
    script = tmp_path / "tools/gpu_check.sh"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    script.chmod(0o755)
    monkeypatch.setattr(gpu_all, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_all.record, "RESULTS", tmp_path / "results")
    return tmp_path


def test_parts_end_in_time_and_say_how(root):
    parts = [Part("slow", 0.5, alone=False), Part("stubborn", 0.5, alone=False), Part("wrong", 5), Part("fine", 5)]
    started = time.monotonic()
    outcomes = gpu_all.run_all(parts, root / "logs", 100)
    assert time.monotonic() - started < 20
    assert [one.result for one in outcomes] == ["timed out", "timed out", "failed (7)", "ok"]
    assert outcomes[2].said == "oh" and outcomes[3].said == "fine is done"
    assert (root / "logs/slow.log").read_text().startswith("slow begins")
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/environ") if readable(path)]
    assert not any(f"PWD={root}".encode() in each for each in commands), "something is left"


def readable(path):
    try:
        return bool(path.read_bytes())
    except OSError:
        return False


def test_neighbours_share_the_gpu_and_others_do_not(root):
    parts = [Part("a", 5, alone=False), Part("b", 5, alone=False), Part("c", 5), Part("d", 5, alone=False)]
    assert [[part.name for part in group] for group in gpu_all.together(parts)] == [["a", "b"], ["c"], ["d"]]
    assert [one.name for one in gpu_all.run_all(parts, root / "logs", 100)] == ["a", "b", "c", "d"]


def test_nothing_runs_without_a_build_or_after_the_limit(root):
    build, part = Part("build", 5), Part("fine", 5)
    assert [one.result for one in gpu_all.run_all([Part("wrong", 5), part], root / "logs", 100)] == ["failed (7)", "ok"]
    assert [one.result for one in gpu_all.run_all([build, part], root / "logs", 0.1)] == ["timed out", "not run"]
    assert gpu_all.run_all([build, part], root / "logs", 100)[1].result == "ok"


def test_baselines_are_updated_by_benchmarks_alone(root, capsys, monkeypatch):
    parts = [Part("tests", 5), Part("bench-x", 5, baseline=True), Part("more", 5, chosen=False)]
    monkeypatch.setattr(gpu_all, "PARTS", parts)
    monkeypatch.delenv("ECHO_BUILT", raising=False)
    monkeypatch.setenv("ECHO_BUILT", "")  # so that it is put back
    assert gpu_all.main(["--update-baseline"]) == 0
    out = capsys.readouterr().out
    assert "tests is done" in out and "bench-x --update-baseline is done" in out and "more" not in out
    assert "2 of 2 parts are fine" in out and re.search(r"^bench-x  ok +0$", out, re.M)
    cases = json.loads((root / "results/check.json").read_text())["cases"]
    assert [(case["case"]["part"], case["result"]) for case in cases] == [("tests", "ok"), ("bench-x", "ok")]
    assert "built 1" in (root / "results/all/bench-x.log").read_text()
    assert gpu_all.main(["--only", "more,tests", "--skip", "tests"]) == 0
    with pytest.raises(SystemExit):
        gpu_all.main(["--only", "everything"])


def test_gpu_check_has_all_parts():
    script = (ROOT / "tools/gpu_check.sh").read_text()
    for part in gpu_all.PARTS:
        name = part.name.removeprefix("bench-")
        if part.name == name:
            assert f"\n  {name}) " in script or f"\n  {name})\n" in script
        else:
            assert (ROOT / "bench" / f"test_{name}.py").exists() == part.baseline
            assert part.baseline or (ROOT / "bench" / f"{name}.py").exists()


@pytest.fixture
def check(tmp_path):
    """Runs a part of a copy of gpu_check.sh, with these programs on the path."""
    for name in ("tools/gpu_check.sh", "bench/record.py"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)

    def run(part: str, programs: dict[str, str], **environment: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "bin").mkdir(exist_ok=True)
        for name, text in programs.items():
            (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}")
            (tmp_path / "bin" / name).chmod(0o755)
        own = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "ECHO_BUILT": "1",
            "ECHO_CPP_TESTS": str(tmp_path / "bin/echo_tests"),
            "ECHO_RESULTS": str(tmp_path / "results"),
        }
        command = [str(tmp_path / "tools/gpu_check.sh"), part]
        given = {name: value for name, value in os.environ.items() if not name.startswith("ECHO_")}
        return subprocess.run(command, capture_output=True, text=True, env={**given, **own, **environment})

    return run


MPS = {"nvidia-cuda-mps-control": 'cat >>"$ASKED" <<<"${1:-$(cat)}"'}


def test_cpp_tests_are_dealt_out_and_one_that_fails_is_seen(check, tmp_path):
    asked = tmp_path / "asked"
    tests = 'echo "$GTEST_SHARD_INDEX of $GTEST_TOTAL_SHARDS"; exit $((GTEST_SHARD_INDEX == BAD))'
    for bad in ("1", "9"):
        done = check("cpp-tests", {**MPS, "echo_tests": tests}, ECHO_WORKERS="3", BAD=bad, ASKED=str(asked))
        assert done.returncode == (bad == "1"), done.stderr
        assert sorted(done.stdout.splitlines()) == ["0: 0 of 3", "1: 1 of 3", "2: 2 of 3"]
    assert asked.read_text().split() == ["-d", "quit"] * 2
    assert check("cpp-tests", {"echo_tests": tests}, ECHO_WORKERS="1", BAD="9", ASKED=str(asked)).returncode == 0
    assert asked.read_text().split() == ["-d", "quit"] * 2, "one process shares the GPU with nobody"


def test_every_sanitizer_ends_and_says_how(check, tmp_path):
    tool = """echo "[       OK ] A.B (3 ms)"
case "$2-$GOOD" in
  memcheck-*) echo "$@" ;;
  racecheck-) echo "========= Error: Race reported between two"; exit 99 ;;
  initcheck-) sleep 60 ;;
  synccheck-) echo "[  FAILED  ] C.D (1 ms)"; exit 1 ;;
esac
echo "========= ERROR SUMMARY: 0 errors"
"""
    programs = {"compute-sanitizer": tool}
    done = check("sanitize", programs, ECHO_SANITIZE_SECONDS="2", GOOD="", FILTER="Some.*")
    assert done.returncode == 1 and "Race reported between two" in done.stdout and "C.D" in done.stdout
    results = tmp_path / "results"
    assert "--gtest_filter=Some.*" in (results / "sanitize-memcheck.log").read_text()
    said = {
        case["case"]["tool"]: case["status"] for case in json.loads((results / "sanitize.json").read_text())["cases"]
    }
    assert said == {
        "memcheck": "clean, 1 tests passed; ERROR SUMMARY: 0 errors",
        "racecheck": "exit status 99, 1 tests passed; ",
        "initcheck": "out of time, 1 tests passed; ",
        "synccheck": "exit status 1, 1 tests passed; ",
    }
    assert check("sanitize", programs, GOOD="yes").returncode == 0


def test_scripts_work_from_any_folder(tmp_path):
    told = subprocess.run(
        [os.path.relpath(ROOT / "tools/gpu_check.sh", tmp_path)], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "ECHO_RESULTS": str(tmp_path)},
    )  # fmt: skip
    assert told.returncode == 2 and "#   py-tests-alone" in told.stdout and not told.stderr
    (tmp_path / "bin").mkdir()
    for program in ("clang-format", "ruff"):
        (tmp_path / "bin" / program).symlink_to("/bin/true")
    subprocess.run(["bash", ROOT / "tools/lint.sh", "format", "bin"], cwd=tmp_path, check=True)
