"""Whole steps under random settings: what comes out has the same bits whatever may be set and whoever is in the batch.

A world fixes what bits may depend on: the model, its formats, the kernels, the splits of attention. Its histories are
read once by a runtime that keeps everything on the GPU and prefetches nothing, one session at a time, eagerly. A
scenario draws all the rest: pools, prefetching, who decodes with whom and when, replayed or eager, with pauses, forks
and cuts on the way. Every output and selection of every layer is compared with that of its history, and so are the
host rows in the end. Nothing is looked at before a scenario is over: its steps do not wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import echo
from support.rig import bits, full_width_shape, host_rows, small_shape
from support.synthetic import FusedModel, SyntheticModel

LENGTH, HISTORIES = 200, 3
DECODED = 14  # tokens at the end of a history that decode steps may append
MOST_SESSIONS = 4

SETTINGS: dict[str, tuple[Any, ...]] = {
    "prefetch": ("on", "off"),
    "prefetch_cap": (-1.0, 0.0, 10.0, 1000.0),
    "forecast_cap": (-1, 0, 5, 65536),
    "threshold_alpha": (0.0, 0.5, 0.9),
    "prefill_chunk": (17, 64, 96),
}
"""What changes no bit, besides sizes."""


@dataclass(frozen=True)
class World:
    """What bits may depend on."""

    shape: echo.ModelShape
    dtype: torch.dtype = torch.bfloat16
    splits: int = 4
    kernels: str = "auto"
    shared: tuple[int, ...] = ()
    fused: bool = True


WORLDS = [
    # Sizes that kernels for Hopper take, and the same with the generic ones.
    World(full_width_shape("fp8_656", index_dim=128, query_heads=64, top_k=64)),
    World(full_width_shape("bf16_1152", index_dim=128, query_heads=64, top_k=64), splits=8),
    World(full_width_shape("fp8_656", index_dim=128, query_heads=8, top_k=64), kernels="generic"),
    World(full_width_shape("fp8_656", index_dim=128, query_heads=8, top_k=64, layers=3), shared=(1,), fused=False),
    World(small_shape(top_k=24), dtype=torch.float32, splits=3),
    World(full_width_shape("bf16_1152", top_k=12), splits=5, fused=False),
]


@dataclass(frozen=True)
class History:
    """Tokens, and what each of them gives.

    Attributes:
        tokens: ids.
        outputs: [tokens, layers, heads, latent_dim].
        selections: int32 [tokens, layers, top_k].
        rows: by layer, uint8 [tokens, row_bytes].
    """

    tokens: list[int]
    outputs: torch.Tensor
    selections: torch.Tensor
    rows: list[np.ndarray]


@dataclass
class Reference:
    """A world's model and histories."""

    world: World
    model: SyntheticModel
    histories: list[History]

    @classmethod
    def of(cls, number: int, device: str) -> Reference:
        """Reads the histories of world `number`."""
        world = WORLDS[number]
        kind = FusedModel if world.fused else SyntheticModel
        model = kind(world.shape, seed=number, device=device, dtype=world.dtype, shared=world.shared, positions=256)
        rng = np.random.default_rng([number, 1])
        with echo.Runtime(
            world.shape, device=device, host_tokens=256, gpu_slots=256, max_batch=1, max_context=256, prefill_chunk=64,
            attention_splits=world.splits, kernels=world.kernels, prefetch="off", forecast_cap=0,
        ) as runtime:  # fmt: skip
            histories = []
            for _ in range(HISTORIES):
                tokens = rng.integers(model.vocab, size=LENGTH).tolist()
                histories.append(read(runtime, model, tokens))
            assert all(layer.evictions == 0 for layer in runtime.stats().layers)
        return cls(world, model, histories)


def pick(rng: np.random.Generator, values: Sequence[Any]) -> Any:
    """One of them."""
    return values[int(rng.integers(len(values)))]


def read(runtime: echo.Runtime, model: SyntheticModel, tokens: list[int]) -> History:
    """A history, decoded token by token where scenarios decode."""
    prompt = len(tokens) - DECODED
    with runtime.open_session(len(tokens)) as session:
        parts = [runtime.prefill(session, tokens[i : min(i + 64, prompt)], model) for i in range(0, prompt, 64)]
        for token in tokens[prompt:]:
            outputs, selections = runtime.step(echo.Batch([session], [token]), model)
            parts.append((outputs.clone(), selections.clone()))
        kv = runtime.export_kv(session)
        rows = [host_rows(kv, layer).copy() for layer in range(kv.layers)]
    return History(tokens, torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]), rows)


@dataclass
class Life:
    """A session on its way through a history."""

    session: echo.Session
    history: History
    rewinds: int = 1

    @property
    def left(self) -> int:
        """Tokens that it has not read."""
        return len(self.history.tokens) - self.session.length

    def next(self, count: int) -> list[int]:
        """The tokens that come now."""
        return self.history.tokens[self.session.length : self.session.length + count]


@dataclass
class Scenario:
    """One course of events.

    Attributes:
        done: how often what happened.
        compared: rows (a token of a session in a pass) whose results were kept.
    """

    reference: Reference
    seed: int
    done: Counter[str] = field(default_factory=Counter)
    compared: int = 0

    def __post_init__(self) -> None:
        """Draws the settings; those of `SETTINGS` apart, so that a course does not depend on how many there are."""
        world = self.reference.world
        values = np.random.default_rng([self.seed, 3])
        drawn = {name: pick(values, choices) for name, choices in SETTINGS.items()}
        self.rng = np.random.default_rng([self.seed, 2])
        self.max_batch, self.query_rows = (int(self.rng.integers(1, most + 1)) for most in (4, 2))
        least = self.max_batch * self.query_rows * (world.shape.top_k + 1)
        pools = (least, least + int(self.rng.integers(1, 64)), least + 256, 2048)
        self.settings = {
            **drawn,
            "gpu_slots": pools[self.seed // len(WORLDS) % len(pools)],
            "max_batch": self.max_batch,
            "query_rows": self.query_rows,
            "host_row_stride": world.shape.row_bytes + pick(self.rng, (0, 16, 48)),
        }
        self.lives: list[Life] = []
        self.to_open = int(self.rng.integers(2, MOST_SESSIONS + 1))
        self._kept: list[tuple[torch.Tensor, torch.Tensor, History, int]] = []

    def run(self) -> list[str]:
        """Everything; says what differs."""
        world, model = self.reference.world, self.reference.model
        with echo.Runtime(
            world.shape, device=model.device, host_tokens=2048, max_context=256, max_sessions=2 * MOST_SESSIONS,
            attention_splits=world.splits, kernels=world.kernels, **self.settings,
        ) as self.runtime:  # fmt: skip
            self.sizes = sorted({int(self.rng.integers(1, self.max_batch + 1)), self.max_batch})
            self.runtime.capture(model, self.sizes, self.query_rows)
            while self.to_open or any(life.left for life in self.lives):
                self.event()
            differences = list(self.differences())
            layers = self.runtime.stats().layers
            for name in ("misses", "evictions", "prefetched", "forecast"):
                self.done[name] += sum(getattr(layer, name) for layer in layers)
        return [f"scenario {self.seed} ({self.settings}): {one}" for one in differences]

    def event(self) -> None:
        """The next thing that happens."""
        if self.to_open and (not self.lives or self.rng.random() < 0.15):
            self.open()
            return
        name = pick(self.rng, ("step",) * 10 + ("pause", "resume", "resume", "rewind", "fork"))
        life = self.lives[int(self.rng.integers(len(self.lives)))]
        if name == "step":
            self.step()
        elif name == "pause":
            self.done["pauses"] += not life.session.paused
            life.session.pause()
        elif name == "resume":
            life.session.resume()
        elif name == "rewind" and life.rewinds and life.left < DECODED:
            life.rewinds -= 1
            life.session.truncate(life.session.length - int(self.rng.integers(1, 9)))
            self.done["rewinds"] += 1
        elif name == "fork" and len(self.lives) < 2 * MOST_SESSIONS and self.done["forks"] < 2:
            self.lives.append(Life(life.session.fork(LENGTH), life.history, rewinds=0))
            self.done["forks"] += 1

    def open(self) -> None:
        """A session reads most of a history."""
        self.to_open -= 1
        life = Life(self.runtime.open_session(LENGTH), pick(self.rng, self.reference.histories))
        self.lives.append(life)
        prompt = LENGTH - int(self.rng.integers(1, DECODED + 1))
        model = pick(self.rng, (None, self.reference.model))  # None: the captured one
        while life.session.length < prompt:
            start = life.session.length
            tokens = life.next(min(int(self.settings["prefill_chunk"]), prompt - start))
            outputs, selections = self.runtime.prefill(life.session, tokens, model)
            self.keep(outputs, selections, life.history, start)

    def step(self) -> None:
        """Some of those that can go on do, together and in any order."""
        rows = int(self.rng.integers(1, self.query_rows + 1))
        ready = [life for life in self.lives if life.left >= rows and not life.session.paused]
        order = self.rng.permutation(len(ready))[: self.rng.integers(1, self.max_batch + 1)]
        batch = [ready[i] for i in order]
        if not batch:
            return
        replayed = rows == self.query_rows and bool(self.rng.random() < 0.6)
        starts = [life.session.length for life in batch]
        given = echo.Batch([life.session for life in batch], [life.next(rows) for life in batch])
        outputs, selections = self.runtime.step(given, None if replayed else self.reference.model)
        outputs, selections = outputs.clone(), selections.clone()
        for i, (life, start) in enumerate(zip(batch, starts, strict=True)):
            part = slice(i * rows, (i + 1) * rows)
            self.keep(outputs[part], selections[part], life.history, start)
        self.done["replayed steps" if replayed else "eager steps"] += 1

    def keep(self, outputs: torch.Tensor, selections: torch.Tensor, history: History, start: int) -> None:
        """Results to be compared in the end."""
        self._kept.append((outputs, selections, history, start))
        self.compared += len(outputs)

    def differences(self) -> Iterator[str]:
        """What is not as in its history."""
        for outputs, selections, history, start in self._kept:
            part = slice(start, start + len(outputs))
            for name, given, wanted in (
                ("selections", selections, history.selections[part]),
                ("outputs", outputs, history.outputs[part]),
            ):
                if not torch.equal(_words(given), _words(wanted)):
                    row, layer = np.argwhere((bits(given) != bits(wanted)).reshape(*given.shape[:2], -1).any(2))[0]
                    yield f"{name} of position {start + row}, layer {layer}"
        for life in self.lives:
            kv = self.runtime.export_kv(life.session)
            for layer, wanted in enumerate(life.history.rows):
                if not np.array_equal(host_rows(kv, layer), wanted[: kv.length]):
                    yield f"host rows of layer {layer}"


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Integers of the same bits: those of NaN are equal, too."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


@dataclass
class Tally:
    """What scenarios came to.

    Attributes:
        scenarios: how many.
        rows: compared.
        done: how often what happened.
        differences: all of them, for people.
    """

    scenarios: int = 0
    rows: int = 0
    done: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def add(self, scenario: Scenario) -> None:
        """Runs one more."""
        self.differences += scenario.run()
        self.scenarios += 1
        self.rows += scenario.compared
        self.done += scenario.done

    def __add__(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(
            self.scenarios + other.scenarios,
            self.rows + other.rows,
            self.done + other.done,
            self.differences + other.differences,
        )

    def __str__(self) -> str:
        """For people."""
        what = ", ".join(f"{count:,} {name}" for name, count in sorted(self.done.items()))
        return f"{self.scenarios} scenarios, {self.rows:,} rows compared, {len(self.differences)} differences; {what}"


def play(device: str, count: int, worlds: Sequence[int] = range(len(WORLDS))) -> Tally:
    """So many scenarios of each of these worlds."""
    tally = Tally()
    for number in worlds:
        reference = Reference.of(number, device)
        for seed in range(count):
            tally.add(Scenario(reference, len(WORLDS) * seed + number))
    return tally
