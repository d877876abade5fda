"""Everything that needs a GPU, in one go: `tools/gpu_check.sh all`.

Parts that neither count memory nor measure time share the GPU; after them come, one by one, the tests that want it for
themselves and the benchmarks. Each part has a time limit, and so has the whole; what a part says is in
$ECHO_RESULTS/all/PART.log. Ends with a table, which is also in check.json.

    tools/gpu_check.sh all                          everything but indexer and decode
    tools/gpu_check.sh all --only build,bench-layer --update-baseline
    tools/gpu_check.sh all --skip sanitize --limit 300
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))
import record  # noqa: E402

sys.path.pop(0)


@dataclass(frozen=True)
class Part:
    """A part of tools/gpu_check.sh.

    Attributes:
        name: of the part.
        limit: seconds after which it is ended.
        alone: nothing else may run beside it.
        baseline: it can be told to be the new baseline.
        chosen: whether it runs unless it is named.
    """

    name: str
    limit: float
    alone: bool = True
    baseline: bool = False
    chosen: bool = True


@dataclass(frozen=True)
class Outcome:
    """How a part went.

    Attributes:
        name: of the part.
        result: "ok", "failed (N)", "timed out", or "not run".
        seconds: that it took.
        said: its last line.
    """

    name: str
    result: str
    seconds: float = 0.0
    said: str = ""


PARTS = [
    Part("build", 300),
    # Side by side with the sanitizers, whose kernels take a hundred times as long, tests would not end in time.
    Part("py-tests", 200, alone=False),
    Part("cpp-tests", 200, alone=False),
    Part("sanitize", 160),
    Part("bench-lossless", 120),
    Part("py-tests-alone", 90),
    *(
        Part(f"bench-{name}", limit, baseline=True)
        for name, limit in (
            ("recall", 60), ("score", 60), ("select", 60), ("attention", 45), ("layer", 60), ("steady", 30),
        )
    ),
    Part("bench-indexer", 120, baseline=True, chosen=False),
    Part("bench-decode", 240, chosen=False),
]  # fmt: skip


def run(part: Part, logs: Path, seconds: float, update: bool = False) -> Outcome:
    """One part, for so long at most; whatever it started is ended with it."""
    command = [
        str(ROOT / "tools/gpu_check.sh"),
        part.name,
        *(["--update-baseline"] if update and part.baseline else []),
    ]
    log = logs / f"{part.name}.log"
    started = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(min(part.limit, seconds))
            result = "ok" if status == 0 else f"failed ({status})"
        except subprocess.TimeoutExpired:
            result = "timed out"
        finally:
            end(process)
    lines = log.read_text(errors="replace").split("\n")
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return Outcome(part.name, result, time.monotonic() - started, said)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a part: all of its session, since programs like timeout(1) make groups of their own."""
    for how, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
        until = time.monotonic() + patience
        left = session_of(process)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
        while left and time.monotonic() < until:
            time.sleep(0.05)
            left = session_of(process)
        if not left:
            break


def session_of(process: subprocess.Popen[bytes]) -> list[int]:
    """Processes of the session that this one leads or led."""
    process.poll()  # a child that has ended is none
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            pid = int(folder.name)
            if os.getsid(pid) == process.pid:
                found.append(pid)
    return found


def run_all(parts: Sequence[Part], logs: Path, limit: float, update: bool = False) -> list[Outcome]:
    """All parts: neighbours that need not be alone together. None begins after the limit, and none without a build."""
    logs.mkdir(parents=True, exist_ok=True)
    over = time.monotonic() + limit
    outcomes: list[Outcome] = []
    for group in together(parts):
        left = over - time.monotonic()
        built = all(outcome.result == "ok" for outcome in outcomes if outcome.name == "build")
        if left <= 0 or not built:
            outcomes += [Outcome(part.name, "not run") for part in group]
            continue
        print(f"{', '.join(part.name for part in group)} ...", flush=True)
        with ThreadPoolExecutor(len(group)) as pool:
            for outcome in pool.map(partial(run, logs=logs, seconds=left, update=update), group):
                outcomes.append(outcome)
                print(f"  {outcome.name}: {outcome.result}, {outcome.seconds:.0f} s; {outcome.said}", flush=True)
    return outcomes


def together(parts: Sequence[Part]) -> list[list[Part]]:
    """Groups in order; whoever is alone is a group of his own."""
    groups: list[list[Part]] = []
    for part in parts:
        if groups and not part.alone and not groups[-1][0].alone:
            groups[-1].append(part)
        else:
            groups.append([part])
    return groups


def table(outcomes: Sequence[Outcome], seconds: float) -> str:
    """For people."""
    rows = [("part", "result", "seconds"), *((one.name, one.result, f"{one.seconds:.0f}") for one in outcomes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{name:<{widths[0]}}  {result:<{widths[1]}}  {took:>{widths[2]}}" for name, result, took in rows]
    good = sum(one.result == "ok" for one in outcomes)
    return "\n".join([*lines, f"{good} of {len(outcomes)} parts are fine; {seconds:.0f} s"])


def choose(only: str | None, skip: str | None) -> list[Part]:
    """Those that are named, in their order; ValueError naming one that there is none of."""
    named, left_out = ([name for name in (text or "").split(",") if name] for text in (only, skip))
    known = [part.name for part in PARTS]
    for name in (*named, *left_out):
        if name not in known:
            raise ValueError(f"{name!r} is no part; there are {', '.join(known)}")
    return [part for part in PARTS if (part.name in named if named else part.chosen) and part.name not in left_out]


def main(arguments: Sequence[str] | None = None) -> int:
    """Status 0 if every part was fine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(part.name for part in PARTS)
    parser.add_argument("--only", metavar="PARTS", help=f"of {names}")
    parser.add_argument("--skip", metavar="PARTS", help="leave these out")
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="for everything (default 600)")
    parser.add_argument("--update-baseline", action="store_true", help="let the benchmarks' figures be the baselines")
    options = parser.parse_args(arguments)
    try:
        parts = choose(options.only, options.skip)
    except ValueError as error:
        parser.error(str(error))
    started = time.monotonic()
    # Parts take what the first one built, or what is there.
    os.environ["ECHO_BUILT"] = "1"
    outcomes = run_all(parts, record.RESULTS / "all", options.limit, options.update_baseline)
    print(f"\n{table(outcomes, time.monotonic() - started)}")
    cases = [{"case": {"part": one.name}, "result": one.result, "seconds": round(one.seconds, 1)} for one in outcomes]
    print(record.write("check", cases))
    return 0 if all(one.result == "ok" for one in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
