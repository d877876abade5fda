"""Random scenarios of whole steps, those of tests/test_whole_steps.py, as a case of lossless.json.

Each world is played by a process of its own where there are many: models are small, and steps wait for the host.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

TESTS = str(Path(__file__).resolve().parents[1] / "tests")
_WORTH = 12  # scenarios that take as long as a process takes to start


def run(device: str, count: int) -> tuple[dict[str, Any], list[str]]:
    """The case of so many scenarios, in whole rounds over all worlds, and what differed."""
    started = time.perf_counter()
    sys.path.insert(0, TESTS)  # also of the processes
    try:
        from support.whole_steps import WORLDS, Tally, play

        worlds = [[number] for number in range(len(WORLDS))]
        part = partial(play, device, -(-count // len(WORLDS)))
        processes = max(1, min(len(WORLDS), os.cpu_count() or 1, count // _WORTH))
        if processes == 1:
            tallies = list(map(part, worlds))
        else:
            spawn = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(processes, spawn, torch.set_num_threads, (1,)) as pool:
                tallies = list(pool.map(part, worlds))
    finally:
        sys.path.remove(TESTS)
    tally = sum(tallies, Tally())
    case = {
        "case": {"device": device, "setup": "random scenarios of whole steps"},
        "scenarios": tally.scenarios,
        "worlds": len(WORLDS),
        "processes": processes,
        "rows": {"compared": tally.rows, "differences": len(tally.differences)},
        "events": dict(sorted(tally.done.items())),
        "seconds": time.perf_counter() - started,
    }
    return case, tally.differences
