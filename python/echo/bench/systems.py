"""The systems that are compared, and the GPU memory that each may use.

All run the same kernels through the same runtime. They differ in how many slots the pool has, how many requests are in
the batch at once, and whether rows are all in the pool from the beginning:

    resident         no offloading: a request runs while its whole context has slots. It pays for the look-up of rows
                     that are all there, as a paged cache pays for its page table.
    resident-total   the same with as much GPU memory as echo takes at this pool in all: for rows, for the index keys
                     of all requests, and for maps.
    per-request      2 top-k slots for each request and no more requests than have them, as SGLang's HiSparse has it.
                     The slots are one pool here, of that size.
    echo             one pool for all requests, as many of them as the host holds. Nothing travels but what is missed.
    echo-prefetch    the same, and rows that will probably be selected travel while the indexer scores.
    echo-forecast    the same as echo, and rows that were nearly selected travel before the next step asks for them: for
                     each request a tenth of top-k, what -1 means to a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import echo
from echo.bench.schedule import Load, Stretch, blocks, schedule


@dataclass(frozen=True)
class Switch:
    """A setting of the runtime that has it fetch rows before they are missed.

    Attributes:
        setting: its name.
        off: its value for systems that do without.
        on: its value else, by shape of the model.
        counters: of `echo.LayerStats`; all 0 where a device does nothing of the kind.
    """

    setting: str
    off: Any
    on: Callable[[echo.ModelShape], Any]
    counters: tuple[str, ...]


SWITCHES = {
    "echo-prefetch": Switch("prefetch", "off", lambda _: "on", ("candidates", "full_selects")),
    "echo-forecast": Switch("forecast_cap", 0, lambda shape: max(1, shape.top_k // 10), ("forecast",)),
}
"""By the system that has it on; all others have it off."""

SYSTEMS = ("resident", "resident-total", "per-request", "echo", *SWITCHES)
_MAPS = ("slot_of", "host_of", "stamp", "free_slots")


@dataclass(frozen=True)
class System:
    """One system at one size of the pool.

    Attributes:
        name: one of `SYSTEMS`.
        pool: slots per layer that were asked for.
        slots: slots per layer that it uses.
        most: requests at once, for slots and contexts.
        tokens: of all running requests, where all rows are resident; else None.
        settings: of the runtime.
    """

    name: str
    pool: int
    slots: int
    most: int
    tokens: int | None
    settings: tuple[tuple[str, Any], ...]

    @property
    def resident(self) -> bool:
        """Whether rows are all in the pool from the beginning."""
        return self.tokens is not None

    def stretches(self, load: Load) -> list[Stretch]:
        """Its schedule."""
        return schedule(load, self.most, self.tokens)


def settings_of(name: str, shape: echo.ModelShape) -> dict[str, Any]:
    """Of the runtime of a system: its own switch is on, all others are off."""
    return {switch.setting: switch.on(shape) if system == name else switch.off for system, switch in SWITCHES.items()}


def make_system(name: str, pool: int, load: Load, shape: echo.ModelShape) -> System:
    """A system with `pool` slots per layer; InvalidArgument naming `pools` if that holds no request."""
    contexts, k = len(load.lengths), shape.top_k
    if name.startswith("resident"):
        least = max(load.lengths) + max(load.outputs)
    else:
        least = 2 * k if name == "per-request" else k + 1
    if pool < least:
        raise echo.InvalidArgument(f"pools: {pool:,} slots given, {name} needs {least:,} for a request")
    settings = tuple(settings_of(name, shape).items())
    if name == "resident":
        return System(name, pool, pool, contexts, pool, settings)
    if name == "resident-total":
        used = gpu_bytes(make_system("echo", pool, load, shape), load, shape)
        total = sum(used.values()) // (shape.layers * (shape.row_bytes + shape.index_block_bytes // 64))
        return System(name, pool, total, contexts, total, settings)
    most = min(contexts, pool // least)
    return System(name, pool, 2 * k * most if name == "per-request" else pool, most, None, settings)


def gpu_bytes(system: System, load: Load, shape: echo.ModelShape) -> dict[str, int]:
    """What its requests take of the GPU, all layers: `rows`, `index_keys` and `maps` (what says which row is where)."""
    if system.resident:
        held = slots = max(_held(load, stretch) for stretch in system.stretches(load))
        maps = 0
    else:
        held = sum(sorted((blocks(length + max(load.outputs)) for length in load.lengths), reverse=True)[: system.most])
        slots = system.slots
        config = echo.RuntimeConfig(
            device="cpu", host_tokens=held, max_context=held, max_batch=system.most, query_rows=1, gpu_slots=slots
        )
        plan = echo.make_plan(shape, config)
        maps = sum(item.total for item in plan.items if item.name in _MAPS)
    return {
        "rows": slots * shape.row_bytes * shape.layers,
        "index_keys": held * shape.index_block_bytes // 64 * shape.layers,
        "maps": maps,
    }


def _held(load: Load, stretch: Stretch) -> int:
    return sum(load.lengths[one.context] + load.outputs[one.request] for one in stretch.running)
