"""Random scenarios: whatever sessions do, and however small the pool, results are those of their plain histories.

A scenario draws sizes and a course of events for a runtime with little room. A second runtime, where everything is
resident, only ever sees plain histories: tokens, one session and one step at a time, eagerly. It knows no forks, cuts,
pauses or imports; where a history changes it reads the new one from its start. Every selection and output must have the
same bits in both, and so must the host mirrors in the end. ECHO_SCENARIOS sets how many scenarios there are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from support.formats import split_index_blocks
from support.rig import Results, assert_same_bits, check_books, check_cache, full_width_shape, host_rows, small_shape
from support.synthetic import FusedModel, SyntheticModel

import echo

SCENARIOS = int(os.environ.get("ECHO_SCENARIOS", "24"))
SHAPES = [
    small_shape(layers=2),
    full_width_shape("fp8_656", top_k=12),
    full_width_shape("bf16_1152", top_k=8),
]
EVENTS = 200
MOST_SESSIONS = 8
MAX_CONTEXT = 224
WEIGHTS = {
    "open": 3,
    "close": 2,
    "fork": 5,
    "truncate": 5,
    "pause": 3,
    "resume": 3,
    "prefill": 6,
    "step": 28,
    "copy": 2,
    "park": 2,
    "capture": 1,
    "pad": 1,
}


@dataclass
class Life:
    """A session, its tokens so far, and the session that only ever saw these tokens."""

    session: echo.Session
    twin: echo.Session
    tokens: list[int] = field(default_factory=list)
    straight: bool = True  # nothing was ever cut off, so moving averages must agree too


class Scenario:
    """One course of events in both runtimes."""

    def __init__(self, seed: int, make_runtime: Callable[..., echo.Runtime], device: str) -> None:
        rng = self.rng = np.random.default_rng([seed, 20])
        self.shape = SHAPES[seed % len(SHAPES)]
        self.max_batch, self.query_rows = int(rng.integers(1, 5)), int(rng.integers(1, 3))
        least = self.max_batch * self.query_rows * (self.shape.top_k + 1)
        self.host_tokens = 64 * int(rng.integers(12, 21))
        splits = int(rng.integers(1, 6))
        self.settings = {
            "host_tokens": self.host_tokens,
            "gpu_slots": int(rng.choice([least, least + rng.integers(64), rng.integers(least, self.host_tokens + 1)])),
            "max_batch": self.max_batch,
            "query_rows": self.query_rows,
            "max_context": MAX_CONTEXT,
            "max_sessions": MOST_SESSIONS,
            "prefill_chunk": int(rng.integers(8, 80)),
            "host_row_stride": self.shape.row_bytes + 16 * int(rng.integers(3)),
            "attention_splits": splits,
        }
        kind = FusedModel if rng.random() < 0.5 else SyntheticModel
        self.model = kind(
            self.shape,
            seed=seed,
            device=device,
            dtype=torch.bfloat16 if rng.random() < 0.5 else torch.float32,
            integers=bool(rng.random() < 0.5),
            shared=[1] if rng.random() < 0.3 else [],
            positions=256,
        )
        print(f"scenario {seed}: {self.settings} {kind.__name__} {self.model.dtype} shared {set(self.model.shared)}")
        self.runtime = make_runtime(self.shape, **self.settings)
        self.plain = make_runtime(
            self.shape, host_tokens=2048, gpu_slots=4096, max_batch=1, max_context=256, attention_splits=splits
        )
        self.lives: list[Life] = []
        self.sizes: list[int] = []
        self.capture()

    # --- both runtimes ---

    def feed(self, session: echo.Session, tokens: list[int]) -> Results:
        """Tokens into a session of the plain runtime, as prefill."""
        parts = [self.plain.prefill(session, tokens[i : i + 64], self.model) for i in range(0, len(tokens), 64)]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def new_life(self, session: echo.Session, tokens: list[int], straight: bool) -> None:
        """A session of the runtime begins with these tokens."""
        twin = self.plain.open_session(256)
        if tokens:
            self.feed(twin, tokens)
        self.lives.append(Life(session, twin, list(tokens), straight))
        assert session.length == len(tokens)

    # --- choices ---

    def ids(self, count: int) -> list[int]:
        """Random tokens."""
        return self.rng.integers(61, size=count).tolist()

    def some(self, fits: Callable[[Life], bool] = lambda life: True) -> Life | None:
        """One of the sessions that fit, if there is any."""
        fitting = [life for life in self.lives if fits(life)]
        return fitting[self.rng.integers(len(fitting))] if fitting else None

    def room(self, count: int) -> Callable[[Life], bool]:
        """Whether a session runs and can take so many tokens."""
        return lambda life: not life.session.paused and life.session.capacity - len(life.tokens) >= count

    def blocks_but(self, left_out: Life | None = None) -> set[int]:
        """Host blocks of all sessions but one."""
        return {block for life in self.lives if life is not left_out for block in life.session.blocks}

    def fits(self, blocks: int, sessions: int = 1) -> bool:
        """Whether there is room for a new session, or a block."""
        free = self.host_tokens // 64 - len(self.blocks_but())
        return blocks <= free and len(self.lives) + sessions <= MOST_SESSIONS

    def new_session(self, fits: bool, make: Callable[[], echo.Session]) -> echo.Session | None:
        """A session, or a refusal if it cannot be had."""
        if fits:
            return make()
        with pytest.raises(echo.CapacityError, match=r"^max_(tokens|sessions): "):
            make()
        return None

    # --- events ---

    def open(self) -> None:
        """An empty session."""
        capacity = int(self.rng.integers(1, 65) if self.rng.random() < 0.2 else self.rng.integers(65, MAX_CONTEXT + 1))
        session = self.new_session(self.fits(-(-capacity // 64)), lambda: self.runtime.open_session(capacity))
        if session:
            self.new_life(session, [], True)

    def close(self) -> None:
        """A session goes, paused or not."""
        if len(self.lives) > 2 and (life := self.some()):
            self.lives.remove(life)
            life.session.close()
            life.twin.close()

    def fork(self) -> None:
        """The same past once more."""
        if life := self.some():
            length = len(life.tokens)
            capacity = int(self.rng.integers(max(1, length), MAX_CONTEXT + 1))
            fits = self.fits(-(-capacity // 64) - length // 64)
            if session := self.new_session(fits, lambda: life.session.fork(capacity)):
                self.new_life(session, life.tokens, life.straight)

    def truncate(self) -> None:
        """Part of the past goes: often a few tokens, sometimes to a block's border, sometimes all."""
        if life := self.some():
            length = len(life.tokens)
            few = min(length, int(self.rng.integers(4)))
            cuts = [length - few, length - few, length // 64 * 64, int(self.rng.integers(length + 1))]
            cut = int(self.rng.choice(cuts))
            others = self.blocks_but(life)
            if self.fits(sum(block in others for block in life.session.blocks[cut // 64 :]), sessions=0):
                life.session.truncate(cut)
                if cut < length:
                    del life.tokens[cut:]
                    life.straight = False
                    life.twin.close()
                    life.twin = self.plain.open_session(256)
                    if cut:
                        self.feed(life.twin, life.tokens)
            else:
                with pytest.raises(echo.CapacityError, match="^length: "):
                    life.session.truncate(cut)
            assert life.session.length == len(life.tokens)

    def pause(self) -> None:
        """A session's GPU rows go; it is refused until it is resumed."""
        if life := self.some():
            was_paused = life.session.paused
            life.session.pause()
            own = sorted(set(life.session.blocks) - self.blocks_but(life))
            for layer in range(0 if was_paused else self.shape.layers):
                slot_of = self.runtime.cache_state(layer)["slot_of"].reshape(-1, 64)
                assert (slot_of[own] == -1).all(), "a paused session's own rows are resident"
            with pytest.raises(echo.StateError, match="^session: .* is paused"):
                self.runtime.prefill(life.session, [1], self.model)
            with pytest.raises(echo.StateError, match="^session: .* is paused"):
                self.runtime.step(echo.Batch([life.session], [1]), self.model)

    def resume(self) -> None:
        """A pause ends."""
        if life := self.some(lambda life: life.session.paused):
            life.session.resume()

    def prefill(self) -> None:
        """A prompt, or more of it."""
        count = int(self.rng.integers(1, 100))
        if life := self.some(self.room(count)):
            tokens, chunk = self.ids(count), self.settings["prefill_chunk"]
            model = None if self.rng.random() < 0.3 else self.model  # None: the captured one
            parts = [self.runtime.prefill(life.session, tokens[i : i + chunk], model) for i in range(0, count, chunk)]
            given = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
            assert_same_bits(given, self.feed(life.twin, tokens))
            life.tokens += tokens

    def step(self) -> None:
        """A batch decodes: eagerly, or replayed with padding."""
        rows = int(self.rng.integers(1, self.query_rows + 1))
        ready = [life for life in self.lives if self.room(rows)(life)]
        order = self.rng.permutation(len(ready))[: self.rng.integers(1, self.max_batch + 1)]
        batch = [ready[i] for i in order]
        if not batch:
            return
        tokens = [self.ids(rows) for _ in batch]
        replayed = rows == self.captured_rows and len(batch) <= max(self.sizes) and self.rng.random() < 0.6
        outputs, selections = self.runtime.step(
            echo.Batch([life.session for life in batch], tokens), None if replayed else self.model
        )
        given = outputs.clone(), selections.clone()
        expected = []
        for life, own in zip(batch, tokens, strict=True):
            expected += [self.plain.step(echo.Batch([life.twin], [token]), self.model) for token in own]
            life.tokens += own
        assert_same_bits(given, (torch.cat([e[0] for e in expected]), torch.cat([e[1] for e in expected])))

    def copy(self) -> None:
        """A session's KV goes into a new one, which goes on beside it."""
        if life := self.some(lambda life: len(life.tokens) > 0):
            capacity = int(self.rng.integers(len(life.tokens), MAX_CONTEXT + 1))
            if self.fits(-(-capacity // 64)):
                session = self.runtime.open_session(capacity)
                self.runtime.import_kv(session, self.runtime.export_kv(life.session))
                self.new_life(session, life.tokens, life.straight)

    def park(self) -> None:
        """A session is stored elsewhere and closed; it comes back to other host rows."""
        if life := self.some(lambda life: len(life.tokens) > 0):
            kv, layers = self.runtime.export_kv(life.session), range(self.shape.layers)
            stored = echo.KvRuns.from_arrays(
                [host_rows(kv, layer).copy() for layer in layers], [kv.index_keys(layer).copy() for layer in layers]
            )
            stored.thresholds = kv.thresholds
            stored.deviations = kv.deviations
            del kv  # which keeps the rows of a session that closes
            capacity = life.session.capacity
            life.session.close()
            self.lives.remove(life)
            guest = self.runtime.open_session(64) if self.fits(1 - (-capacity // 64), sessions=2) else None
            if self.fits(-(-capacity // 64)):
                life.session = self.runtime.open_session(capacity)
                self.runtime.import_kv(life.session, stored)
                self.lives.append(life)
            else:
                life.twin.close()
            if guest:
                guest.close()

    def capture(self) -> None:
        """Other sizes are captured."""
        self.captured_rows = int(self.rng.integers(1, self.query_rows + 1))
        self.sizes = sorted({int(self.rng.integers(1, self.max_batch + 1)), self.max_batch})
        self.runtime.capture(self.model, self.sizes, self.captured_rows)

    def pad(self) -> None:
        """A replay of padding alone."""
        if self.captured_rows == 1:
            outputs, _ = self.runtime.step(echo.Batch())
            assert len(outputs) == 0

    # --- the course ---

    def run(self) -> None:
        """All events, and what must hold in the end."""
        names, weights = list(WEIGHTS), np.array(list(WEIGHTS.values()), float)
        for number in range(EVENTS):
            name = str(self.rng.choice(names, p=weights / weights.sum())) if len(self.lives) > 1 else "open"
            print(number, name, [(life.session.id, len(life.tokens)) for life in self.lives])
            getattr(self, name)()
        sessions = [life.session for life in self.lives]
        self.runtime.synchronize()
        check_books(self.runtime, sessions)
        check_cache(self.runtime, sessions)
        for life in self.lives:
            self.check_mirror(life)
        self.plain.synchronize()
        assert all(layer.evictions == 0 for layer in self.plain.stats().layers)
        for life in self.lives:
            life.session.close()
        self.runtime.synchronize()
        stats = self.runtime.stats()
        assert (stats.sessions, stats.free_host_tokens) == (0, stats.host_tokens)
        assert all(layer.used_slots == 0 for layer in stats.layers)

    def check_mirror(self, life: Life) -> None:
        """Host rows, index keys and, if nothing was cut off, moving averages are those of the twin."""
        given, expected = self.runtime.export_kv(life.session), self.plain.export_kv(life.twin)
        assert given.length == expected.length == len(life.tokens)
        for layer in range(self.shape.layers):
            np.testing.assert_array_equal(host_rows(given, layer), host_rows(expected, layer))
            if layer in self.model.shared or not life.tokens:
                continue
            parts = (split_index_blocks(kv.index_keys(layer), self.shape) for kv in (given, expected))
            for one, other in zip(*parts, strict=True):
                np.testing.assert_array_equal(one[: given.length], other[: given.length])
        if life.straight:
            np.testing.assert_array_equal(given.thresholds, expected.thresholds)
            np.testing.assert_array_equal(given.deviations, expected.deviations)


@pytest.mark.parametrize("seed", range(SCENARIOS))
def test_a_scenario_gives_what_plain_histories_give(make_runtime, device, one_torch_thread, seed):
    Scenario(seed, make_runtime, device).run()
