"""Random traffic: whatever sessions do, in whatever order, the runtime does what a dictionary of tokens would.

Hypothesis draws sequences of calls, some of which must be refused or fail half-way, over a pool that is hardly larger
than one step needs. After every call all invariants are checked: host rows, slots and index keys byte for byte, maps
and free counts, thresholds, selections and outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.rig import Pair, Rig, small_shape
from support.synthetic import ForwardFailed, SyntheticModel, fail_at

import echo

SHAPE = small_shape(layers=2, query_heads=2, latent_dim=32, top_k=8)
HOST_BLOCKS, MAX_SESSIONS, MAX_CONTEXT, MAX_BATCH = 14, 6, 192, 2
STAGES = ("append", "score", "select", "recall", "attend", "end")

PREFETCH = ({"prefetch_cap": 1000}, {"prefetch_cap": 10}, {"prefetch_cap": 0}, {"prefetch": "off"})
FORECAST = (0, 1, 3, 1000)

# Of the k-th score: near to what the model has, and anything.
predictions = st.floats(-40, 40, width=32) | st.floats(width=32)
numbers = st.integers(0, 1 << 16)
capacities = st.integers(0, MAX_CONTEXT - 1).map(lambda n: n + 1)


def token_ids(seed: int, count: int) -> list[int]:
    """Hypothesis need not draw, and shrink, each of them."""
    return np.random.default_rng(seed).integers(61, size=count).tolist()


def model_on(device: str) -> SyntheticModel:
    """Integer scores, so that selections are exact and full of ties."""
    return SyntheticModel(SHAPE, seed=7, device=device, integers=True, positions=256)


class Traffic(RuleBasedStateMachine):
    """Calls to one runtime, each followed by its effect on the oracles."""

    def __init__(self, model: SyntheticModel) -> None:
        super().__init__()
        self.model = model
        self.rig: Rig | None = None

    def teardown(self) -> None:
        """Everything is given back."""
        if self.rig is None:
            return
        for pair in list(self.rig.pairs):
            self.rig.close(pair)
        stats = self.rig.stats()
        assert stats.free_host_tokens == stats.host_tokens
        assert all(layer.used_slots == 0 for layer in stats.layers)
        self.rig.runtime.close()

    @property
    def free_blocks(self) -> int:
        """By the model's own count."""
        return HOST_BLOCKS - len({block for pair in self.rig.pairs for block in pair.session.blocks})

    def some(self, number: int, fits: Callable[[Pair], bool] = lambda pair: True) -> Pair | None:
        """One of the sessions that fit, or None."""
        fitting = [pair for pair in self.rig.pairs if fits(pair)]
        return fitting[number % len(fitting)] if fitting else None

    def ready(self, count: int) -> Callable[[Pair], bool]:
        """Whether a session can take so many tokens."""
        return lambda pair: not pair.session.paused and pair.session.capacity - pair.session.length >= count

    @initialize(
        capacities=st.lists(capacities, min_size=2, max_size=4),
        lengths=numbers,
        prefetch=st.sampled_from(PREFETCH),
        forecast=st.sampled_from(FORECAST),
    )
    def start(self, capacities: list[int], lengths: int, prefetch: dict[str, Any], forecast: int) -> None:
        """Some sessions with some tokens, so that every rule has something to work on."""
        runtime = echo.Runtime(
            SHAPE,
            device=self.model.device,
            host_tokens=64 * HOST_BLOCKS,
            gpu_slots=MAX_BATCH * 2 * 9 + 3,
            max_batch=MAX_BATCH,
            query_rows=2,
            max_sessions=MAX_SESSIONS,
            max_context=MAX_CONTEXT,
            prefill_chunk=40,
            forecast_cap=forecast,
            **prefetch,
        )
        self.rig = Rig(runtime, self.model)
        runtime.capture(self.model, [MAX_BATCH])
        for i, capacity in enumerate(capacities):
            self.open(capacity)
            self.rig.prefill(self.rig.pairs[-1], token_ids(lengths, 1 + lengths * (i + 1) % capacity), verify=False)

    @rule(capacity=capacities)
    def open(self, capacity: int) -> None:
        """Admission is by blocks and sessions, no more and no less."""
        if len(self.rig.pairs) == MAX_SESSIONS or -(-capacity // 64) > self.free_blocks:
            with pytest.raises(echo.CapacityError, match=r"^max_(sessions|tokens): "):
                self.rig.runtime.open_session(capacity)
        else:
            self.rig.open(capacity)

    @rule(number=numbers)
    def close(self, number: int) -> None:
        """Closing twice is closing once."""
        if pair := self.some(number):
            self.rig.close(pair)
            pair.session.close()
            with pytest.raises(echo.StateError, match="^session: .* is closed"):
                self.rig.runtime.thresholds(pair.session)

    @rule(number=numbers, count=st.integers(1, 40))
    def prefill(self, number: int, count: int) -> None:
        """A chunk of any size."""
        if pair := self.some(number, self.ready(count)):
            self.rig.prefill(pair, token_ids(number, count))

    @rule(first=numbers, second=numbers, query_rows=st.sampled_from([1, 1, 2]), captured=st.booleans())
    def step(self, first: int, second: int, query_rows: int, captured: bool) -> None:
        """One or two sessions, in any order, eager or replayed with padding."""
        ids = token_ids(first ^ second, 4)
        pairs = [pair for n in (first, second) if (pair := self.some(n, self.ready(query_rows)))]
        batch = list({id(pair): pair for pair in pairs}.values())
        if batch:
            entries = [(pair, ids[2 * i : 2 * i + query_rows]) for i, pair in enumerate(batch)]
            self.rig.step(entries, captured=captured and query_rows == 1)

    @rule()
    def step_of_padding(self) -> None:
        """A replay without any session."""
        self.rig.step([], captured=True)

    @rule(
        number=numbers,
        count=st.integers(1, 12),
        stage=st.sampled_from(STAGES),
        layer=st.integers(0, 1),
        decode=st.booleans(),
    )
    def fail(self, number: int, count: int, stage: str, layer: int, decode: bool) -> None:
        """A forward that raises half-way leaves everything as it was."""
        ids = token_ids(number, 1 if decode else count)
        if pair := self.some(number, self.ready(len(ids))):
            self.rig.model.on_stage = fail_at(stage, layer)
            try:
                with pytest.raises(ForwardFailed):
                    if decode:
                        self.rig.step([(pair, ids[0])])
                    else:
                        self.rig.prefill(pair, ids)
            finally:
                self.rig.model.on_stage = None

    @rule(number=numbers, extra=st.integers(0, 70), wrong=st.none() | st.lists(predictions, min_size=2, max_size=2))
    def copy(self, number: int, extra: int, wrong: list[float] | None) -> None:
        """Export, and import into a new session, with its predictions or with wrong ones."""
        pair = self.some(number, lambda pair: pair.session.length > 0)
        if pair is None or len(self.rig.pairs) == MAX_SESSIONS:
            return
        capacity = min(MAX_CONTEXT, pair.session.length + extra)
        if -(-capacity // 64) <= self.free_blocks:
            twin = self.rig.open(capacity)
            kv = self.rig.runtime.export_kv(pair.session)
            twin.oracle = pair.oracle.copy()
            if wrong is not None:
                kv.thresholds, kv.deviations = wrong, wrong[::-1]
                for layer, value in zip(twin.oracle.layers, wrong, strict=True):
                    layer.threshold = value if math.isfinite(value) else math.nan
            self.rig.runtime.import_kv(twin.session, kv)

    @rule(number=numbers, extra=st.integers(0, 70))
    def fork(self, number: int, extra: int) -> None:
        """A fork takes only the blocks that it does not share."""
        if (pair := self.some(number)) is None:
            return
        capacity = min(MAX_CONTEXT, max(1, pair.session.length + extra))
        needed = -(-capacity // 64) - pair.session.length // 64
        if len(self.rig.pairs) == MAX_SESSIONS or needed > self.free_blocks:
            with pytest.raises(echo.CapacityError, match=r"^max_(sessions|tokens): "):
                pair.session.fork(capacity)
        else:
            self.rig.fork(pair, capacity)

    @rule(number=numbers, cut=numbers)
    def truncate(self, number: int, cut: int) -> None:
        """Forgets from anywhere; blocks that forks still hold are replaced."""
        if (pair := self.some(number)) is None:
            return
        length = cut % (pair.session.length + 1)
        others = [other for other in self.rig.pairs if other is not pair]
        held = {block for other in others for block in other.session.blocks}
        needed = sum(block in held for block in pair.session.blocks[length // 64 :])
        if needed > self.free_blocks:
            with pytest.raises(echo.CapacityError, match="^length: "):
                pair.session.truncate(length)
        else:
            self.rig.truncate(pair, length)

    @rule(number=numbers)
    def pause(self, number: int) -> None:
        """Until it is resumed, a session is refused."""
        if pair := self.some(number):
            self.rig.pause(pair)
            with pytest.raises(echo.StateError, match="^session: .* is paused"):
                self.rig.step([(pair, 0)])

    @precondition(lambda self: any(pair.session.paused for pair in self.rig.pairs))
    @rule(number=numbers)
    def resume(self, number: int) -> None:
        """Goes on where it was."""
        self.some(number, lambda pair: pair.session.paused).session.resume()

    @rule(number=numbers)
    def overfill(self, number: int) -> None:
        """One token too many is refused."""
        pair = self.some(number, lambda pair: not pair.session.paused)
        if pair and (room := pair.session.capacity - pair.session.length) < 40:
            with pytest.raises(echo.CapacityError, match="^tokens: "):
                self.rig.prefill(pair, [1] * (room + 1))

    @invariant()
    def everything_holds(self) -> None:
        """After every call."""
        if self.rig is not None:
            self.rig.check()
            assert self.rig.inexact == 0


def test_random_traffic(device, one_torch_thread):
    """Every sequence of calls leaves the state that the oracles have."""
    model = model_on(device)
    run_state_machine_as_test(lambda: Traffic(model), settings=settings())
