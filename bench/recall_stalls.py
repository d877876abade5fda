"""What the warps of a recall wait for: Nsight Compute samples a call of some cases of test_recall.py.

A call of the first replay, in which as much is missing as in any other. ncu empties all caches before it, that of
instructions too, as they are in a step. It also copies the host pool before each call that it profiles, half a minute
for 50 GB, so that is one.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gates
import record
from native.binding import Bench, Case, Kind

NAME = "recall_stalls"
CASES = [Case(1, 0), Case(64, 2624, length=20_000), Case(1, 1024), Case(13, 533)]
SKIPPED = 10  # calls
CALLS = 1  # profiled behind them
SECONDS = 120  # for a case
_REASON = "smsp__pcsamp_warps_issue_stalled_"
_METRICS = "group:smsp__pcsamp_warp_stall_reasons"


def replay(case: Case) -> None:
    """What ncu runs, until it has seen enough: a graph of recalls."""
    bench = Bench(case.host_bytes)
    bench.create(case)
    bench.replay(Kind.RECALL)


def profile(number: int, report: Path) -> list[dict[str, str]]:
    """Rows of ncu's table, one a call. RuntimeError with its output where it fails, TimeoutExpired where it hangs."""
    options = ["--kernel-name", "regex:recall", "--launch-skip", str(SKIPPED), "--launch-count", str(CALLS)]
    options += ["--kill", "on"]
    options += ["--metrics", _METRICS, "--warp-sampling-interval", "0", "--clock-control", "none"]
    command = ["ncu", "-f", "-o", str(report), *options, sys.executable, __file__, "--replay", str(number)]
    lazily = {**os.environ, "CUDA_MODULE_LOADING": "LAZY"}  # ncu looks at all that is loaded
    report.unlink(missing_ok=True)  # of the case before
    # In a process group: what ncu runs must not outlive it, holding the host pool.
    ran = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=lazily, start_new_session=True
    )
    try:
        said, _ = ran.communicate(timeout=SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ran.pid, signal.SIGKILL)
    if not report.exists():  # what is killed counts as failed
        raise RuntimeError(f"ncu failed:\n{said[-2000:]}")
    table = subprocess.run(
        ["ncu", "-i", str(report), "--page", "raw", "--csv"], capture_output=True, text=True, check=True
    ).stdout
    rows = list(csv.DictReader(table[table.index('"ID"') :].splitlines()))
    return rows[1:]  # the first one has the units


def value(row: dict[str, str], name: str) -> float:
    """A number of ncu's table."""
    return float(row[name].replace(",", "") or 0)


def figures(rows: list[dict[str, str]]) -> dict[str, Any]:
    """Shares of samples by what a warp waited for, the largest first; `selected` is one that issues."""
    reasons = {
        name.removeprefix(_REASON): sum(value(row, name) for row in rows)
        for name in rows[0]
        if name.startswith(_REASON) and not name.endswith("_not_issued")
    }
    samples = sum(reasons.values())
    shares = sorted(((count / samples, name) for name, count in reasons.items() if count > 0), reverse=True)
    return {
        "calls": len(rows),
        "samples": samples,
        "stalls": {name: round(share, 3) for share, name in shares},
    }


def main() -> None:
    """Profiles the cases and records them in `recall_stalls.json`, which keeps those that are not profiled now."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replay", type=int, help=argparse.SUPPRESS)
    numbers = range(len(CASES))
    parser.add_argument("--only", type=int, nargs="*", choices=numbers, default=numbers, help="numbers of cases")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what runs is ended, too
    if options.replay is not None:
        replay(CASES[options.replay])
        return
    has_run = (record.RESULTS / f"{NAME}.json").exists()  # of a run before this one, whose cases are kept, too
    baselines = record.RESULTS if has_run else gates.BASELINES
    results = gates.Gates(NAME, record.machine()["gpu"], update=True, baselines=baselines)
    with tempfile.TemporaryDirectory() as folder:
        for number in dict.fromkeys(options.only):
            rows = profile(number, Path(folder, "recall.ncu-rep"))
            results.add(CASES[number].keys(), figures(rows))
            print(results.cases[-1], flush=True)
            results.write()  # what there is, should the next one hang


if __name__ == "__main__":
    main()
