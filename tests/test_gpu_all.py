"""tools/gpu_all.py: order, time limits and the table, with parts that are shell scripts."""

from __future__ import annotations

import json
import re
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
