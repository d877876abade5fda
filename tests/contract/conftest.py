"""Fixtures of the contract suite."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.rig import Rig, small_shape
from support.session_checks import INTEGERS

import echo


@pytest.fixture
def make_both(make_rig) -> Callable[..., tuple[Rig, Rig]]:
    """A rig with the least pool, and one of the same model where all is resident and nothing ever forks."""

    def make(shape: echo.ModelShape | None = None, **settings) -> tuple[Rig, Rig]:
        rig = make_rig(shape or small_shape(), model=INTEGERS, **settings)
        plain = make_rig(shape or small_shape(), model=rig.model, gpu_slots=2048)
        return rig, plain

    return make
