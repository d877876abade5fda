"""Fixtures of the benchmarks: `pytest bench --benchmark-only`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import record
from gates import Gates

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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Writes the results, and shows them."""
    for name, gate in config.stash.get(_GATES, {}).items():
        terminalreporter.section(f"{name} -> {gate.write()}")
        for entry in gate.cases:
            numbers = {key: value for key, value in entry.items() if isinstance(value, float | int)}
            case = ", ".join(f"{key} {value}" for key, value in entry["case"].items())
            terminalreporter.write_line(f"{case}: " + ", ".join(f"{key} {value:.4g}" for key, value in numbers.items()))
