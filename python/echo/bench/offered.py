"""What a build and a device can do of what systems are made for: `bench decode` leaves out the others and says so."""

from __future__ import annotations

from typing import Any

import echo
from echo.bench import systems
from echo.bench.regimes import REGIMES
from echo.bench.schedule import Load, schedule


def why_not(name: str, shape: echo.ModelShape, device: str, settings: dict[str, Any]) -> str | None:
    """Why a system cannot be measured here, None if it can.

    Args:
        name: of the system.
        shape: of a layer of the model.
        device: as of `echo.Runtime`.
        settings: of the runtime besides.
    """
    switch = systems.switch_of(name)
    if switch is None:
        return None
    if switch not in systems.switches():
        return f"this build's runtimes have no setting {switch}"
    if switch == "prefetch" and not _sifts(shape, device, settings):
        return "this device fetches no rows while it scores these"
    return None


def _sifts(shape: echo.ModelShape, device: str, settings: dict[str, Any]) -> bool:
    """Whether a few steps say what they listed: one that does not sift counts nothing."""
    from echo.bench.serve import Server

    load = Load((2 * shape.top_k,), (4,))
    on = {**settings, **dict.fromkeys(systems.switches(), "off"), "prefetch": "on"}
    with Server(shape, load, 1, REGIMES["glm"], device=device, gpu_slots=2 * shape.top_k, **on) as server:
        server.serve(schedule(load, 1), [0], resident=False)
        server.runtime.synchronize()
        return any(layer.candidates + layer.full_selects for layer in server.runtime.stats().layers)
