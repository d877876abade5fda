"""What the benchmark of the indexer computes without a GPU: its cases and its picture."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the folder."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


def test_misses_are_a_share_of_what_is_selected(bench: Any) -> None:
    case = bench("native.step_binding").Case
    assert case(13, 102_400).misses(0.02) == 533
    assert case(1, 102_400).misses(0.02) == 41
    assert case(2, 32_768).misses(1.0) == 2 * 2047  # the new tokens' rows are never missed


def test_layers_are_as_many_as_fit(bench: Any) -> None:
    module = bench("test_indexer")
    assert all(case.host_bytes <= module.HOST_BYTES and case.layers >= 8 for case in module.CASES)


def test_picture(bench: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cases = [
        {
            "case": {"batch": batch, "length": length, "hit_rate": rate, "row_bytes": 656, "path": path},
            "us": 50.0,
            "us_allowed": 60.0,
            "speedup": 1.2,
        }
        for batch, length, rate, path in itertools.product((1, 13), (32_768, 102_400), (0.5, 0.9), ("off", "on"))
    ]
    bench("prefetch_plot").draw(cases, tmp_path / "prefetch.png")
    assert (tmp_path / "prefetch.png").stat().st_size > 0
