"""Random scenarios of whole steps, those of tests/test_whole_steps.py, as a case of lossless.json."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"


def run(device: str, count: int) -> tuple[dict[str, Any], list[str]]:
    """The case of so many scenarios, in whole rounds over all worlds, and what differed."""
    sys.path.insert(0, str(TESTS))
    try:
        from support.whole_steps import WORLDS, play
    finally:
        sys.path.remove(str(TESTS))
    started = time.perf_counter()
    tally = play(device, -(-count // len(WORLDS)))
    case = {
        "case": {"device": device, "setup": "random scenarios of whole steps"},
        "scenarios": tally.scenarios,
        "worlds": len(WORLDS),
        "rows": {"compared": tally.rows, "differences": len(tally.differences)},
        "events": dict(sorted(tally.done.items())),
        "seconds": time.perf_counter() - started,
    }
    return case, tally.differences
