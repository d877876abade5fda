"""Export and import of a session's KV, with and without copies."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from support.rig import assert_same_bits, fill, full_width_shape, host_rows, small_shape, tokens_of

import echo

SHAPES = {"fp32": small_shape(), "fp8_656": full_width_shape("fp8_656")}


def adopt(rig, pair, kv: echo.KvRuns):
    """A new session of the rig that continues `pair`."""
    twin = rig.open(pair.session.capacity)
    twin.oracle = pair.oracle.copy()
    rig.runtime.import_kv(twin.session, kv)
    return twin


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 200])
@pytest.mark.parametrize("name", SHAPES)
def test_a_session_goes_on_in_another_runtime(make_rig, name, length):
    """Pitfall 21: any length, no multiples of 64; bytes and thresholds round-trip and later steps are the same."""
    source = make_rig(SHAPES[name], model={"seed": 4})
    target = make_rig(SHAPES[name], model=source.model, gpu_slots=1024, host_row_stride=SHAPES[name].row_bytes + 16)
    pair = source.open(256)
    source.prefill(pair, tokens_of(length, length))
    twin = adopt(target, pair, source.runtime.export_kv(pair.session))
    assert twin.session.length == length
    np.testing.assert_array_equal(source.runtime.thresholds(pair.session), target.runtime.thresholds(twin.session))
    target.check()
    for token in tokens_of(0, 20):
        assert_same_bits(target.step([(twin, token)]), source.step([(pair, token)]))
    more = tokens_of(1, 30)
    assert_same_bits(target.prefill(twin, more), source.prefill(pair, more))
    target.check()
    source.check()


def fragmented(rig, tokens: int):
    """A session whose blocks lie in several runs."""
    spacers = [rig.open(64) for _ in range(rig.stats().free_host_tokens // 64)]
    for spacer in spacers[::2]:
        rig.close(spacer)
    pair = rig.open(tokens)
    for spacer in spacers[1::2]:
        rig.close(spacer)
    return pair


def test_sessions_in_fragments_are_exported_run_by_run(make_rig):
    rig = make_rig(small_shape(), host_tokens=1024, max_sessions=16)
    pair = fragmented(rig, 300)
    assert len(pair.session.blocks) == 5 and np.diff(pair.session.blocks).max() > 1
    prompt = tokens_of(3, 290)
    results = rig.prefill(pair, prompt)
    kv = rig.runtime.export_kv(pair.session)
    assert [len(run) for run in kv.rows(0)] == [64, 64, 64, 64, 34]
    whole = adopt(rig, pair, kv)  # from runs into one run ...
    whole_kv = rig.runtime.export_kv(whole.session)
    assert [len(run) for run in whole_kv.rows(0)] == [290]
    rig.close(pair)
    del kv  # its views hold the rows
    again = fragmented(rig, 300)  # ... and back into runs
    rig.runtime.import_kv(again.session, whole_kv)
    again.oracle = whole.oracle.copy()
    assert len(rig.runtime.export_kv(again.session).rows(2)) > 1
    for token in (4, 5, 6):
        assert_same_bits(rig.step([(again, token)]), rig.step([(whole, token)]))
    rig.check()
    fresh = rig.open(300)
    assert_same_bits(rig.prefill(fresh, prompt), results)


def test_an_import_without_a_copy(make_rig):
    """begin_import gives views of the session's own host rows; nothing counts before finish_import."""
    source, target = make_rig(small_shape()), make_rig(small_shape(), host_tokens=1024)
    pair = source.open(200)
    source.prefill(pair, tokens_of(5, 140))
    kv = source.runtime.export_kv(pair.session)
    twin = fragmented(target, 200)
    filled = target.runtime.begin_import(twin.session, 140)
    assert twin.session.length == 0 and filled.length == 140
    assert sum(len(view) for view in filled.rows(0)) == 140 and len(filled.rows(0)) > 1
    fill(filled, kv)
    assert twin.session.length == 0
    target.runtime.finish_import(twin.session, filled)
    twin.oracle = pair.oracle.copy()
    target.check()
    assert_same_bits(target.step([(twin, 7)]), source.step([(pair, 7)]))
    target.check()


def test_import_from_arrays(make_rig):
    rig = make_rig(small_shape())
    pair = rig.open(128)
    rig.prefill(pair, tokens_of(6, 100))
    kv = rig.runtime.export_kv(pair.session)
    rows = [host_rows(kv, layer) for layer in range(3)]
    keys = [torch.from_numpy(kv.index_keys(layer)) for layer in range(3)]
    given = echo.KvRuns.from_arrays(rows, keys)
    assert np.isnan(given.thresholds).all()
    for others in (tuple(rows), np.stack(rows)):  # any sequence of layers
        same = echo.KvRuns.from_arrays(others, tuple(keys))
        assert all(np.array_equal(host_rows(same, layer), rows[layer]) for layer in range(3))
    given.thresholds = kv.thresholds
    given.deviations = kv.deviations
    twin = adopt(rig, pair, given)
    assert_same_bits(rig.step([(twin, 3)]), rig.step([(pair, 3)]))
    rig.check()


def test_arrays_of_an_import_are_kept_alive(make_rig):
    """What from_arrays was given may be dropped, or taken out of the lists, before it is used."""
    rig = make_rig(small_shape())
    pair = rig.open(1024)
    rig.prefill(pair, tokens_of(7, 1000), verify=False)
    kv = rig.runtime.export_kv(pair.session)
    rows = [host_rows(kv, layer) for layer in range(3)]
    keys = [kv.index_keys(layer).copy() for layer in range(3)]
    given = echo.KvRuns.from_arrays(rows, keys)
    given.thresholds = kv.thresholds
    given.deviations = kv.deviations
    rows.clear()
    keys.clear()
    gc.collect()
    scratch = [np.full((1000, 320), 0xAA, np.uint8) for _ in range(16)]  # takes memory that was let go
    adopt(rig, pair, given)
    del scratch
    rig.check()


def test_views_stay_valid_and_read_only(make_rig):
    rig = make_rig(small_shape())
    pair = rig.open(128)
    rig.prefill(pair, tokens_of(8, 70))
    kv = rig.runtime.export_kv(pair.session)
    view = kv.rows(1)[0]
    expected = view.copy()
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1
    own_keys = kv.index_keys(1)
    own_keys[:] = 0  # a copy: the session's keys are untouched
    rig.check()
    keys_again = rig.runtime.export_kv(pair.session).index_keys(1)
    rig.runtime.close()
    del pair, rig
    gc.collect()
    np.testing.assert_array_equal(view, expected)
    np.testing.assert_array_equal(kv.rows(1)[0], expected)
    assert keys_again.any()


def test_exporting_moves_and_changes_nothing(make_rig):
    rig = make_rig(small_shape())
    pair = rig.open(128)
    rig.prefill(pair, tokens_of(9, 70))
    rig.step([(pair, 1)])
    before = [rig.runtime.cache_state(layer) for layer in range(3)]
    for _ in range(3):
        rig.runtime.export_kv(pair.session)
    for layer, old in enumerate(before):
        new = rig.runtime.cache_state(layer)
        assert all(np.array_equal(old[name], new[name]) for name in old)


def test_an_empty_session_exports_nothing_and_cannot_be_imported(make_rig):
    rig = make_rig(small_shape())
    pair = rig.open(64)
    kv = rig.runtime.export_kv(pair.session)
    assert kv.length == 0 and kv.rows(0) == [] and len(kv.index_keys(0)) == 0
    with pytest.raises(echo.InvalidArgument, match="^source: it holds 0 tokens"):
        rig.runtime.import_kv(rig.open(64).session, kv)
    rig.check()


def kv_of(layers: int = 3, tokens: int = 70, row: int = 320, blocks: int = 2, block: int = 4096) -> echo.KvRuns:
    """Zeros; the defaults fit `small_shape()`."""
    rows = [np.zeros((tokens, row), np.uint8) for _ in range(layers)]
    keys = [np.zeros((blocks, block), np.uint8) for _ in range(layers)]
    return echo.KvRuns.from_arrays(rows, keys)


MISFITS = {
    "too few layers": {"layers": 2},
    "too many layers": {"layers": 4},
    "shorter rows": {"row": 304},
    "longer rows": {"row": 336},
    "too few key blocks": {"blocks": 1},
    "too many key blocks": {"blocks": 3},
    "another key format": {"block": 1280},
}


@pytest.mark.parametrize("what", MISFITS)
def test_sources_that_do_not_fit_are_refused(make_rig, what):
    """Pitfall 23: the message names the argument, and the session is as before."""
    rig = make_rig(small_shape())
    pair = rig.open(128)
    with pytest.raises(echo.InvalidArgument, match="^source: .* expected "):
        rig.runtime.import_kv(pair.session, kv_of(**MISFITS[what]))
    few_thresholds = kv_of()
    few_thresholds.thresholds = [1.0]
    with pytest.raises(echo.InvalidArgument, match="^source: .*thresholds"):
        rig.runtime.import_kv(pair.session, few_thresholds)
    few_deviations = kv_of()
    few_deviations.deviations = []
    with pytest.raises(echo.InvalidArgument, match="^source: .*deviations"):
        rig.runtime.import_kv(pair.session, few_deviations)
    with pytest.raises(echo.CapacityError, match="^tokens: session 0 holds 0 of 128 tokens, no room for 129"):
        rig.runtime.import_kv(pair.session, kv_of(tokens=129, blocks=3))
    assert pair.session.length == 0
    rig.check()
    rig.prefill(pair, tokens_of(10, 20))
    with pytest.raises(echo.StateError, match="^session: .*holds 20 tokens"):
        rig.runtime.import_kv(pair.session, kv_of())
    rig.check()
    empty = rig.open(128)
    rig.runtime.import_kv(empty.session, kv_of())  # so it was not refused for another reason
    assert empty.session.length == 70


def test_an_import_is_not_finished_over_another_one(make_rig):
    rig = make_rig(small_shape())
    first, second = rig.open(128), rig.open(128)
    rig.prefill(second, tokens_of(4, 80))
    filled = rig.runtime.begin_import(first.session, 80)
    rig.runtime.import_kv(first.session, rig.runtime.export_kv(second.session))
    first.session.truncate(0)
    with pytest.raises(echo.InvalidArgument, match="^filled: "):
        rig.runtime.finish_import(first.session, filled)  # its rows are the other session's
    assert first.session.length == 0


def test_imports_are_finished_only_with_what_was_begun(make_rig):
    rig = make_rig(small_shape())
    first, second = rig.open(128), rig.open(128)
    filled = rig.runtime.begin_import(first.session, 70)
    for bad in (0, -1, 129):
        with pytest.raises((echo.InvalidArgument, echo.CapacityError), match="^tokens: "):
            rig.runtime.begin_import(first.session, bad)
    with pytest.raises(echo.InvalidArgument, match="^filled: "):
        rig.runtime.finish_import(second.session, filled)  # views of another session's rows
    with pytest.raises(echo.InvalidArgument, match="^filled: "):
        rig.runtime.finish_import(second.session, rig.runtime.export_kv(second.session))
    filled.thresholds = [0.0]
    with pytest.raises(echo.InvalidArgument, match="^filled: .*thresholds"):
        rig.runtime.finish_import(first.session, filled)
    rig.prefill(first, [1, 2])
    filled.thresholds = [0.0] * 3
    with pytest.raises((echo.InvalidArgument, echo.StateError), match="^filled: |^session: "):
        rig.runtime.finish_import(first.session, filled)
    rig.truncate(first, 0)  # empty again, but the prefill wrote to the rows
    with pytest.raises(echo.InvalidArgument, match="^filled: .*used since"):
        rig.runtime.finish_import(first.session, filled)
    again = rig.runtime.begin_import(first.session, 80)
    with pytest.raises(echo.InvalidArgument, match="^filled: "):
        rig.runtime.finish_import(first.session, filled)
    again.thresholds = again.deviations = [0.0] * 3
    rig.runtime.finish_import(first.session, again)
    assert first.session.length == 80
    del again
    first.session.close()
    with pytest.raises(echo.StateError, match="^session: "):
        rig.runtime.finish_import(first.session, filled)
    rig.pairs.remove(first)
    del filled  # its views hold the rows
    rig.check()


@pytest.mark.parametrize(
    ("rows", "keys", "name"),
    [
        ([], [], "rows"),
        ([np.zeros((4, 320), np.uint8)], [], "rows"),
        ([np.zeros((4, 320), np.int8)], [np.zeros((1, 64), np.uint8)], "rows"),
        ([np.zeros((4, 320), np.float32)], [np.zeros((1, 64), np.uint8)], "rows"),
        ([np.zeros((8, 320), np.uint8)[::2]], [np.zeros((1, 64), np.uint8)], "rows"),
        ([np.zeros(320, np.uint8)], [np.zeros((1, 64), np.uint8)], "rows"),
        ([[1, 2, 3]], [np.zeros((1, 64), np.uint8)], "rows"),
        ([None], [np.zeros((1, 64), np.uint8)], "rows"),
        ([np.zeros((0, 320), np.uint8)], [np.zeros((0, 64), np.uint8)], "rows"),
        ([np.zeros((4, 320), np.uint8)], [np.zeros((1, 64), np.float32)], "index_keys"),
        ([np.zeros((4, 320), np.uint8)], [np.zeros(64, np.uint8)], "index_keys"),
        ([np.zeros((4, 320), np.uint8)], [None], "index_keys"),
        ([np.zeros((4, 320), np.uint8), np.zeros((5, 320), np.uint8)], [np.zeros((1, 64), np.uint8)] * 2, "rows"),
        ([np.zeros((4, 320), np.uint8), np.zeros((4, 336), np.uint8)], [np.zeros((1, 64), np.uint8)] * 2, "rows"),
    ],
)  # fmt: skip
def test_arrays_that_are_no_kv_are_refused(rows, keys, name):
    """Pitfall 23: dtype, dimensions, stride, lists and None."""
    with pytest.raises(echo.InvalidArgument, match=f"^{name}: "):
        echo.KvRuns.from_arrays(rows, keys)
