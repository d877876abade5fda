"""What a device can do of what systems are made for: `bench decode` leaves out the others and says so."""

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
    switch = systems.SWITCHES.get(name)
    if switch is None or _does(name, switch, shape, device, settings):
        return None
    return f"with {switch.setting} = {switch.on(shape)} this device fetches nothing ahead"


def _does(name: str, switch: systems.Switch, shape: echo.ModelShape, device: str, settings: dict[str, Any]) -> bool:
    """Whether a few steps, in a pool that is too small for their context, are counted by what the switch turns on."""
    from echo.bench.serve import Server

    load = Load((2 * shape.top_k,), (8,))
    slots = shape.top_k + shape.top_k // 4 + 1
    own = {**settings, **systems.settings_of(name, shape)}
    with Server(shape, load, 1, REGIMES["glm"], device=device, gpu_slots=slots, **own) as server:
        server.serve(schedule(load, 1), [0], resident=False)
        server.runtime.synchronize()
        layers = server.runtime.stats().layers
        return any(getattr(layer, counter) for layer in layers for counter in switch.counters)
