"""What is held by whom, and for how long: views of rows, captured models, results of overlapping calls."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from support.rig import assert_same_bits, host_rows, small_shape, tokens_of

import echo


def test_an_export_keeps_its_rows_when_the_session_is_gone(make_rig):
    """Preemption by export, close, and import into other blocks; others take the freed blocks meanwhile."""
    rig = make_rig(small_shape(), host_tokens=512, max_context=256)
    a = rig.open(128)
    rig.prefill(a, tokens_of(1, 100))
    twin = rig.fork(a, 128)
    kv = rig.runtime.export_kv(a.session)
    oracle = a.oracle
    rig.close(a)
    c = rig.open(64)
    rig.prefill(c, tokens_of(2, 64))
    b = rig.open(128)
    rig.runtime.import_kv(b.session, kv)
    b.oracle = oracle.copy()
    del kv
    for token in (5, 6, 7):
        outputs, selections = rig.step([(b, token), (twin, token)])
        assert torch.equal(selections[0], selections[1]) and torch.equal(outputs[0], outputs[1])
    rig.check()


def test_an_export_of_a_session_that_is_gone_is_no_forks_to_write_to(make_rig):
    """A fork that shares its blocks and forgets some of their tokens gets others for those, or is refused."""
    rig = make_rig(small_shape(), host_tokens=640, max_context=256)
    a = rig.open(192)
    rig.prefill(a, tokens_of(1, 192))
    b = rig.fork(a, 256)
    kv = rig.runtime.export_kv(a.session)
    expected = [host_rows(kv, layer).copy() for layer in range(3)]
    oracle = a.oracle
    rig.close(a)
    with rig.runtime.open_session(256), pytest.raises(echo.CapacityError, match="^length: .* needs 3 blocks"):
        b.session.truncate(10)
    rig.truncate(b, 70)
    rig.prefill(b, tokens_of(2, 100))
    for layer in range(3):
        np.testing.assert_array_equal(host_rows(kv, layer), expected[layer])
    rig.truncate(b, 40)
    rig.prefill(b, tokens_of(3, 10))
    c = rig.open(192)
    rig.runtime.import_kv(c.session, kv)
    c.oracle = oracle.copy()
    del kv
    rig.step([(b, 4)])
    rig.check()
    blocks = b.session.blocks
    own = rig.runtime.export_kv(b.session)
    rig.truncate(b, 5)  # its own export shows what it does, as it always has
    assert b.session.blocks == blocks and own.length == 51
    del own
    rig.check()


def test_dropping_an_export_gives_its_rows_back(make_rig):
    rig = make_rig(small_shape(), host_tokens=256, max_context=256)
    pair = rig.open(256)
    rig.prefill(pair, tokens_of(1, 200))
    kv = rig.runtime.export_kv(pair.session)
    view = kv.rows(0)[0]
    rig.close(pair)
    del kv
    with pytest.raises(echo.CapacityError, match="^max_tokens: "):
        rig.open(256)  # one array of it is enough
    assert rig.stats().free_host_tokens == rig.runtime.free_host_tokens == 0
    del view
    assert rig.runtime.free_host_tokens == 256
    assert rig.stats().free_host_tokens == 256
    rig.open(256)


def test_an_engine_that_captures_its_own_method_is_collected(make_runtime, device):
    class Engine:
        def __init__(self) -> None:
            self.runtime = echo.Runtime(small_shape(), device=device, host_tokens=256, max_batch=1)
            self.runtime.capture(self.forward, [1])

        def forward(self, p: echo.ForwardPass) -> None:
            kv = torch.zeros(p.rows, 80, device=device)
            q, out = torch.zeros(p.rows, 4, 80, device=device), torch.zeros(p.rows, 4, 64, device=device)
            key, index_q = torch.zeros(p.rows, 16, device=device), torch.zeros(p.rows, 8, 16, device=device)
            weights = torch.zeros(p.rows, 8, device=device)
            for layer in range(3):
                p.attention(
                    layer, kv=kv, q=q, scale=1.0, out=out, index_key=key, index_q=index_q, index_weights=weights
                )  # fmt: skip

    engine = Engine()
    core = weakref.ref(engine.runtime)
    del engine
    gc.collect()
    assert core() is None


def test_captures_for_several_query_rows_live_side_by_side(make_rig):
    rig = make_rig(small_shape(), query_rows=2)
    rig.runtime.capture(rig.model, [1, 2], query_rows=1)
    rig.runtime.capture(rig.model, [2], query_rows=2)
    pair = rig.open(64)
    rig.prefill(pair, tokens_of(3, 20))
    twin = rig.fork(pair)
    one = rig.step([(pair, 4)], captured=True)
    two = rig.step([(pair, (5, 6))], captured=True)
    parts = [rig.step([(twin, token)]) for token in (4, 5, 6)]
    assert_same_bits(one, parts[0])
    assert_same_bits(two, (torch.cat([p[0] for p in parts[1:]]), torch.cat([p[1] for p in parts[1:]])))


def test_only_padding_is_cut_off(make_rig):
    rig = make_rig(small_shape())

    def forward(p: echo.ForwardPass) -> Any:
        outputs, selections = rig.model(p)
        return {"rows": outputs, "list": [selections], "other": torch.zeros(7, 5)[: p.rows + 3]}

    pair = rig.open(64)
    rig.prefill(pair, tokens_of(4, 10))
    eager = rig.runtime.step(echo.Batch([pair.session], [1]), forward)
    assert eager["other"].shape[0] == 4  # no padding, nothing to cut
    rig.runtime.capture(forward, [4])
    replayed = rig.runtime.step(echo.Batch([pair.session], [1]))
    assert replayed["rows"].shape[0] == 1 and replayed["list"][0].shape[0] == 1


def test_a_refused_overlapping_call_leaves_the_other_its_result(make_rig):
    rig = make_rig(small_shape())
    pair, other = rig.open(64), rig.open(64)
    refused: list[BaseException] = []

    def overlap() -> None:
        try:
            rig.runtime.step(echo.Batch([other.session], [1]), rig.model)
        except echo.StateError as error:
            refused.append(error)

    def forward(p: echo.ForwardPass) -> Any:
        result = rig.model(p)
        thread = threading.Thread(target=overlap)
        thread.start()
        thread.join(60)
        return result

    result = rig.runtime.step(echo.Batch([pair.session], [1]), forward)
    assert result is not None and len(refused) == 1
    assert other.session.length == 0 and pair.session.length == 1


def test_a_layer_that_shares_a_selection_that_is_not_there_changes_nothing(make_rig, device):
    rig = make_rig(small_shape())
    pair = rig.open(64)

    def forward(p: echo.ForwardPass) -> Any:
        zeros = {"kv": (80,), "q": (4, 80), "out": (4, 64)}
        arrays: dict[str, Any] = {name: torch.zeros(p.rows, *size, device=device) for name, size in zeros.items()}
        with pytest.raises(echo.StateError, match="^index_q: "):
            p.attention(0, scale=1.0, **arrays)
        return rig.model(p)  # appends to layer 0 as if nothing had happened

    rig.runtime.prefill(pair.session, [1, 2], forward)
    assert pair.session.length == 2


def test_a_session_of_a_dropped_runtime_is_closed(make_runtime):
    runtime = echo.Runtime(small_shape(), device="cpu", host_tokens=256, max_batch=1)
    session = runtime.open_session(10)
    assert not session.closed
    del runtime
    gc.collect()
    assert session.closed
    session.close()
