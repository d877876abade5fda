"""Fixtures of the contract suite."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.rig import Rig, small_shape
from support.session_checks import INTEGERS

import echo


@pytest.fixture(autouse=True, params=["prefetch", "forecast", "neither"])
def prefetch(request: pytest.FixtureRequest, no_settings_from_outside: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """They hold with prefetches and forecasts, as many as there can be, with the latter alone, and with none."""
    if request.param == "prefetch":
        monkeypatch.setenv("ECHO_PREFETCH_CAP", "1000")
    else:
        monkeypatch.setenv("ECHO_PREFETCH", "off")
    monkeypatch.setenv("ECHO_FORECAST_CAP", "0" if request.param == "neither" else "65536")
    return request.param


@pytest.fixture
def make_both(make_rig) -> Callable[..., tuple[Rig, Rig]]:
    """A rig with the least pool, and one of the same model where all is resident and nothing ever forks."""

    def make(shape: echo.ModelShape | None = None, **settings) -> tuple[Rig, Rig]:
        rig = make_rig(shape or small_shape(), model=INTEGERS, **settings)
        plain = make_rig(shape or small_shape(), model=rig.model, gpu_slots=2048)
        return rig, plain

    return make
