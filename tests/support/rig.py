"""A runtime, the synthetic model and an oracle for each session, moved forward together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import echo
from support.formats import encode_index_keys, split_index_blocks
from support.oracle import OracleSession
from support.synthetic import SyntheticModel

# Absolute, of moving averages of k-th scores by backend and format of index keys. FP8 tensor cores add products up with
# some 14 bits, and a score is a difference of sums that are several times as large.
THRESHOLD_TOLERANCE = {("cpu", "fp8"): 1e-3, ("cpu", "fp32"): 1e-3, ("cuda", "fp8"): 3e-2, ("cuda", "fp32"): 1e-3}

Results = tuple[torch.Tensor, torch.Tensor]


def small_shape(**changes: Any) -> echo.ModelShape:
    """Three small layers with fp32 rows and fp32 index keys."""
    sizes: dict[str, Any] = {
        "layers": 3,
        "index_heads": 8,
        "index_dim": 16,
        "query_heads": 4,
        "latent_dim": 64,
        "rope_dim": 16,
        "top_k": 16,
        "row_format": "fp32",
        "index_key_format": "fp32",
    }
    return echo.ModelShape(**{**sizes, **changes})


def full_width_shape(row_format: str, **changes: Any) -> echo.ModelShape:
    """Two layers with rows of 512 + 64 and FP8 index keys."""
    sizes = {"layers": 2, "query_heads": 2, "latent_dim": 512, "rope_dim": 64, "index_key_format": "fp8"}
    return small_shape(row_format=row_format, **{**sizes, **changes})


def tokens_of(seed: int, count: int) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(61, size=count).tolist()


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor, so that equal means equal in every bit, NaN included."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy()


def assert_same_bits(a: Results, b: Results) -> None:
    """Asserts equal selections and bit-identical outputs."""
    np.testing.assert_array_equal(a[1].cpu().numpy(), b[1].cpu().numpy(), err_msg="selections")
    np.testing.assert_array_equal(bits(a[0]), bits(b[0]), err_msg="outputs")


def fill(filled: echo.KvRuns, kv: echo.KvRuns) -> None:
    """Writes all of an export into what `begin_import` gave."""
    for layer in range(kv.layers):
        first = 0
        for view in filled.rows(layer):
            view[:] = host_rows(kv, layer)[first : first + len(view)]
            first += len(view)
        filled.index_keys(layer)[:] = kv.index_keys(layer)
    filled.thresholds = kv.thresholds
    filled.deviations = kv.deviations


def host_rows(kv: echo.KvRuns, layer: int) -> np.ndarray:
    """uint8 [tokens, row_bytes] of an export."""
    runs = kv.rows(layer)
    return np.concatenate(runs) if runs else np.empty((0, kv.row_bytes), np.uint8)


def host_row_of(session: echo.Session, position: int) -> int:
    """Host row of a token, by the documented rule."""
    return session.blocks[position // 64] * 64 + position % 64


def host_rows_of(session: echo.Session) -> np.ndarray:
    """Those of all its tokens, in order."""
    blocks = np.array(session.blocks, np.int64).reshape(-1, 1)
    return (64 * blocks + np.arange(64)).reshape(-1)[: session.length]


@dataclass
class Pair:
    """A session and what it must hold."""

    session: echo.Session
    oracle: OracleSession


@dataclass
class Rig:
    """Drives a runtime and checks everything it does."""

    runtime: echo.Runtime
    model: SyntheticModel
    pairs: list[Pair] = field(default_factory=list)
    inexact: int = 0  # selections that differ from the oracle's within rounding
    rows: int = 0

    @property
    def kind(self) -> str:
        """'cpu' or 'cuda'."""
        return self.runtime.device.split(":")[0]

    def open(self, max_tokens: int) -> Pair:
        """A new session."""
        pair = Pair(self.runtime.open_session(max_tokens), self.new_oracle())
        self.pairs.append(pair)
        return pair

    def new_oracle(self) -> OracleSession:
        """The oracle of an empty session."""
        return OracleSession(self.model, self.runtime.plan.config.threshold_alpha)

    def stats(self) -> echo.RuntimeStats:
        """Counters with all steps in them: on a GPU they lag behind otherwise."""
        self.runtime.synchronize()
        return self.runtime.stats()

    def close(self, pair: Pair) -> None:
        """Closes one session."""
        pair.session.close()
        self.pairs.remove(pair)

    def fork(self, pair: Pair, max_tokens: int = 0) -> Pair:
        """A session with the same context and its own future."""
        child = Pair(pair.session.fork(max_tokens), pair.oracle.copy())
        self.pairs.append(child)
        return child

    def pause(self, pair: Pair) -> None:
        """Pauses a session; none of the rows that it alone holds stays resident.

        Rows that it came to hold alone while it was paused may stay until their slots are taken.
        """
        was_paused = pair.session.paused
        pair.session.pause()
        if was_paused:
            return
        others = {block for other in self.pairs if other is not pair for block in other.session.blocks}
        rows = host_rows_of(pair.session)
        own = rows[~np.isin(rows // 64, list(others))]
        for layer in range(self.model.shape.layers):
            assert (self.runtime.cache_state(layer)["slot_of"][own] == -1).all()

    def truncate(self, pair: Pair, length: int) -> None:
        """Forgets the tokens from `length` on."""
        pair.session.truncate(length)
        pair.oracle.truncate(length)

    def prefill(self, pair: Pair, tokens: Sequence[int], verify: bool = True) -> Results:
        """Appends tokens, in chunks as long as the runtime takes."""
        most = self.runtime.plan.config.prefill_chunk
        parts = []
        for first in range(0, len(tokens), most):
            chunk = list(tokens[first : first + most])
            parts.append(self.runtime.prefill(pair.session, chunk, self.model))
        results = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
        self._follow(pair, tokens, results, verify)
        return results

    def step(self, entries: Sequence[tuple[Pair, Any]], *, captured: bool = False, verify: bool = True) -> Results:
        """One decode step, eager or replayed; a session's entry is a token or several."""
        batch = echo.Batch()
        for pair, token in entries:
            batch.add(pair.session, token)
        outputs, selections = self.runtime.step(batch, None if captured else self.model)
        results = outputs.clone(), selections.clone()  # a replay writes to the same memory again
        first = 0
        for pair, token in entries:
            tokens = [token] if isinstance(token, int) else list(token)
            part = slice(first, first + len(tokens))
            self._follow(pair, tokens, (results[0][part], results[1][part]), verify)
            first += len(tokens)
        assert first == len(results[0])
        return results

    def _follow(self, pair: Pair, tokens: Sequence[int], results: Results, verify: bool) -> None:
        start = len(pair.oracle.tokens)
        pair.oracle.append(list(tokens))
        assert pair.session.length == start + len(tokens)
        if verify:
            outputs, selections = results[0].cpu(), results[1].cpu()  # at once: each copy waits for the device
            for i in range(len(tokens)):
                self.rows += 1
                self.inexact += pair.oracle.check_row(start + i, outputs[i], selections[i], self.kind)

    def check(self, mirrors: bool = True, thresholds: bool = True) -> None:
        """Asserts every invariant between steps."""
        self.runtime.synchronize()
        exports = [self.runtime.export_kv(pair.session) for pair in self.pairs]
        if mirrors:
            for pair, kv in zip(self.pairs, exports, strict=True):
                check_mirror(pair, kv, self.model.shared)
        if thresholds:
            for pair in self.pairs:
                self.check_thresholds(pair)
        check_books(self.runtime, [pair.session for pair in self.pairs])
        check_cache(self.runtime, [pair.session for pair in self.pairs], exports)

    def check_thresholds(self, pair: Pair) -> None:
        """The moving average is that of the exact k-th scores."""
        given = self.runtime.thresholds(pair.session)
        assert given.shape == (self.model.shape.layers,)
        expected = np.array([layer.threshold for layer in pair.oracle.layers])
        tolerance = THRESHOLD_TOLERANCE[self.kind, self.model.shape.index_key_format]
        np.testing.assert_allclose(given, expected, rtol=1e-3, atol=tolerance)


def check_mirror(pair: Pair, kv: echo.KvRuns, shared: frozenset[int] = frozenset()) -> None:
    """Host rows and index keys of a session are, byte for byte, the oracle's."""
    shape, length = pair.oracle.shape, len(pair.oracle.tokens)
    assert kv.length == length == pair.session.length
    assert kv.row_bytes == shape.row_bytes and kv.layers == shape.layers
    for number, layer in enumerate(pair.oracle.layers):
        if length == 0:
            assert kv.rows(number) == [] and len(kv.index_keys(number)) == 0
            continue
        np.testing.assert_array_equal(host_rows(kv, number), layer.rows, err_msg=f"host rows of layer {number}")
        if number in shared:
            continue
        blocks = kv.index_keys(number)
        assert blocks.shape == (-(-length // 64), shape.index_block_bytes)
        given = split_index_blocks(blocks, shape)
        for name, part, expected in zip(("keys", "scales"), given, encode_index_keys(layer.keys, shape), strict=True):
            np.testing.assert_array_equal(part[:length], expected, err_msg=f"index {name} of layer {number}")


def check_books(runtime: echo.Runtime, sessions: Sequence[echo.Session]) -> None:
    """Free host blocks are counted; only whole blocks are shared, at the same place in each table."""
    stats = runtime.stats()
    places: dict[int, int] = {}
    for session in sessions:
        blocks = session.blocks
        assert len(blocks) == -(-session.capacity // 64)
        for place, block in enumerate(blocks):
            assert 0 <= block < runtime.plan.host_blocks
            assert places.setdefault(block, place) == place, "a host block is in two places"
            if sum(block in other.blocks for other in sessions) > 1:
                assert 64 * (place + 1) <= session.length, "a block that is still written to is shared"
    assert stats.sessions == len(sessions)
    assert stats.free_host_tokens == stats.host_tokens - 64 * len(places)


def check_prefetches(runtime: echo.Runtime, layer: echo.LayerStats) -> None:
    """What was fetched ahead was used or wasted, and where nothing is fetched ahead nothing was."""
    assert layer.prefetched_wasted == layer.prefetched - layer.prefetched_used
    assert 0 <= layer.prefetched_used <= min(layer.prefetched, layer.hits)
    assert layer.prefetched_bytes == layer.prefetched * runtime.shape.row_bytes
    config = runtime.plan.config
    if config.prefetch == "off" or config.prefetch_cap == 0:
        assert layer.prefetched == layer.prefetches_capped == 0
    if config.prefetch == "off":
        assert layer.candidates == layer.full_selects == 0
    assert layer.forecast_wasted == layer.forecast - layer.forecast_used
    assert 0 <= layer.forecast_used <= min(layer.forecast, layer.hits)
    assert layer.forecast_bytes == layer.forecast * runtime.shape.row_bytes
    assert layer.forecast == 0 or config.forecast_cap > 0


def check_cache(
    runtime: echo.Runtime, sessions: Sequence[echo.Session], exports: Sequence[echo.KvRuns] | None = None
) -> None:
    """Maps are each other's inverse, free slots are counted, and every slot holds its host row's bytes."""
    if exports is None:
        exports = [runtime.export_kv(session) for session in sessions]
    runtime.synchronize()  # counters lag behind
    stats = runtime.stats()
    own_rows = [host_rows_of(session) for session in sessions]
    for layer in range(runtime.shape.layers):
        state = runtime.cache_state(layer)
        slot_of, host_of, stamp = state["slot_of"], state["host_of"], state["stamp"]
        assert slot_of.shape == (stats.host_tokens,) and host_of.shape == (runtime.plan.config.gpu_slots,)
        mapped_rows = np.flatnonzero(slot_of != -1)
        mapped_slots = np.flatnonzero(host_of != -1)
        np.testing.assert_array_equal(host_of[slot_of[mapped_rows]], mapped_rows)
        np.testing.assert_array_equal(slot_of[host_of[mapped_slots]], mapped_slots)
        assert len(mapped_rows) == len(mapped_slots) == stats.layers[layer].used_slots
        assert ((stamp == -1) == (host_of == -1)).all(), "a slot is free if and only if it has no stamp"
        check_prefetches(runtime, stats.layers[layer])
        # Even ones below -1 say when a row was prefetched, odd ones when it was forecast.
        ahead = stamp[mapped_slots][stamp[mapped_slots] < 1]
        assert (ahead <= -4).all()
        if runtime.plan.config.prefetch == "off":
            assert (ahead % 2 == 1).all()
        if runtime.plan.config.forecast_cap == 0:
            assert (ahead % 2 == 0).all()
        owned = np.zeros(stats.host_tokens, bool)
        contents = np.empty((stats.host_tokens, runtime.shape.row_bytes), np.uint8)
        for rows, kv in zip(own_rows, exports, strict=True):
            owned[rows] = True
            contents[rows] = host_rows(kv, layer)
        assert owned[mapped_rows].all(), "a row that belongs to no token is resident"
        np.testing.assert_array_equal(state["slots"][mapped_slots], contents[host_of[mapped_slots]])
