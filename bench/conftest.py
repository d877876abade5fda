"""Fixtures of the benchmarks: `pytest bench --benchmark-only`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import record
from gates import Gates
from native.step_binding import Case, StepBench, skip_reason

_GATES = pytest.StashKey[dict[str, Gates]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """How a baseline is changed."""
    parser.addoption("--update-baseline", action="store_true", help="let this run's figures be the baseline")


@pytest.fixture
def gates(request: pytest.FixtureRequest) -> Callable[[str], Gates]:
    """The gates of a benchmark by name. What they took is written when all tests are done."""
    made = request.config.stash.setdefault(_GATES, {})

    def by_name(name: str) -> Gates:
        if name not in made:
            made[name] = Gates(name, record.machine()["gpu"], request.config.getoption("--update-baseline"))
        return made[name]

    return by_name


@pytest.fixture(scope="session")
def step_bench(request: pytest.FixtureRequest) -> Iterator[StepBench]:
    """What times decode steps, with as much pinned host memory as the largest of the chosen cases needs."""
    if (reason := skip_reason()) is not None:
        pytest.skip(reason)
    chosen = [item.callspec.params.get("case") for item in request.session.items if hasattr(item, "callspec")]
    made = StepBench(max(case.host_bytes for case in chosen if isinstance(case, Case)))
    yield made
    made.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Writes the results, and shows them."""
    for name, gate in config.stash.get(_GATES, {}).items():
        terminalreporter.section(f"{name} -> {gate.write()}")
        for entry in gate.cases:
            numbers = {key: value for key, value in entry.items() if isinstance(value, float | int)}
            case = ", ".join(f"{key} {value}" for key, value in entry["case"].items())
            terminalreporter.write_line(f"{case}: " + ", ".join(f"{key} {value:.4g}" for key, value in numbers.items()))
