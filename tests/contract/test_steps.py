"""Steps: captured and eager, with padding, empty and full."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.rig import assert_same_bits, host_rows, small_shape

import echo


def snapshot(runtime: echo.Runtime) -> list[dict[str, np.ndarray]]:
    """All residency state."""
    return [runtime.cache_state(layer) for layer in range(runtime.shape.layers)]


def assert_same_state(a: list[dict[str, np.ndarray]], b: list[dict[str, np.ndarray]]) -> None:
    """Nothing has moved."""
    for old, new in zip(a, b, strict=True):
        for name in ("slot_of", "host_of", "stamp", "slots"):
            np.testing.assert_array_equal(old[name], new[name], err_msg=name)


@pytest.mark.parametrize("query_rows", [1, 2])
def test_eager_and_replayed_steps_agree(make_rig, query_rows):
    """Pitfall 3: outputs, selections and host mirrors have the same bits, whatever the padding."""
    shape = small_shape()
    eager = make_rig(shape, model={"dtype": torch.bfloat16}, query_rows=query_rows)
    replayed = make_rig(shape, model=eager.model, query_rows=query_rows)
    replayed.runtime.capture(replayed.model, [1, 3, 4], query_rows)
    rng = np.random.default_rng(0)
    own = [[rig.open(128) for _ in range(4)] for rig in (eager, replayed)]
    for step in range(24):
        who = rng.permutation(4)[: step % 4 + 1]
        tokens = rng.integers(61, size=(4, query_rows)).tolist()
        expected = eager.step([(own[0][i], tokens[i]) for i in who])
        given = replayed.step([(own[1][i], tokens[i]) for i in who], captured=True)
        assert_same_bits(given, expected)
    for a, b in zip(*own, strict=True):
        for layer in range(3):
            np.testing.assert_array_equal(
                host_rows(eager.runtime.export_kv(a.session), layer),
                host_rows(replayed.runtime.export_kv(b.session), layer),
            )
    eager.check()
    replayed.check()


def test_the_smallest_captured_size_that_holds_the_batch_is_replayed(make_rig):
    rig = make_rig(small_shape())
    rig.runtime.capture(rig.model, [4, 2])
    pairs = [rig.open(64) for _ in range(4)]
    rig.model.last.clear()
    sizes = []
    rig.model.on_stage = lambda stage, layer, p: sizes.append(p.rows) if (stage, layer) == ("append", 0) else None
    for count, padded in ((1, 2), (2, 2), (3, 4), (4, 4)):
        outputs, _ = rig.step([(pair, 1) for pair in pairs[:count]], captured=True)
        assert len(outputs) == count
        if rig.kind == "cpu":  # a GPU replays without running Python
            assert sizes.pop() == padded


def test_padding_rows_write_minus_one_and_zero_and_change_nothing(make_rig):
    """Pitfalls 8 and 14: a batch of padding alone, and padding beside a session; padding is fed NaN."""
    rig = make_rig(small_shape())
    pair = rig.open(128)
    rig.prefill(pair, [(3 * i) % 61 for i in range(70)])
    before, counters = snapshot(rig.runtime), rig.stats()
    rig.runtime.capture(rig.model, [4])
    assert_same_state(before, snapshot(rig.runtime))  # warming up changes nothing either
    for batch in (echo.Batch(), echo.Batch([], [])):
        outputs, selections = rig.runtime.step(batch)
        assert len(outputs) == len(selections) == 0
        padded_outputs, padded_selections = rig.model.last[4]
        assert (padded_selections == -1).all() and (padded_outputs == 0.0).all()
    assert_same_state(before, snapshot(rig.runtime))
    after = rig.stats()
    assert after.steps == counters.steps + 2
    for old, new in zip(counters.layers, after.layers, strict=True):
        assert (old.hits, old.misses, old.appended) == (new.hits, new.misses, new.appended)
    rig.check()

    rig.step([(pair, 7)], captured=True)
    padded_outputs, padded_selections = rig.model.last[4]
    assert (padded_selections[1:] == -1).all() and (padded_outputs[1:] == 0.0).all()
    assert (padded_selections[0] >= 0).all()
    rig.check()


def test_what_a_selection_says_for_padding_rows_is_ignored(make_rig, device):
    """Pitfall 8: a forward's own selection holds positions everywhere; padding rows recall nothing."""
    rig = make_rig(small_shape(), max_batch=3)
    pair = rig.open(128)
    rig.prefill(pair, list(range(40)))
    selection = torch.arange(16, dtype=torch.int32, device=device).repeat(3, 1)
    kept: dict[str, list[torch.Tensor]] = {}

    def forward(p: echo.ForwardPass) -> torch.Tensor:
        outputs, slots = [], []
        for layer in range(3):
            x = rig.model.inputs(layer, torch.from_dlpack(p.tokens), torch.from_dlpack(p.positions))
            p.append(layer, x.kv, x.index_key)
            slots.append(torch.from_dlpack(p.recall(layer, selection)).clone())
            outputs.append(rig.model.empty_output(p.rows))
            p.attend(layer, x.q, rig.model.scale, outputs[-1])
        kept.update(outputs=outputs, slots=slots)
        return outputs[-1]

    rig.runtime.capture(forward, [3])
    rig.runtime.step(echo.Batch([pair.session], [1]))
    for slots, outputs in zip(kept["slots"], kept["outputs"], strict=True):
        assert (slots[0] >= 0).all() and (slots[1:] == -1).all()
        assert outputs[0].isfinite().all() and (outputs[1:] == 0.0).all()


def test_sizes_that_were_not_planned_or_captured_are_refused(make_rig):
    """Pitfall 14: a batch larger than planned, or than any captured size, is refused; the next step is right."""
    rig = make_rig(small_shape(), max_batch=3)
    pairs = [rig.open(64) for _ in range(4)]
    entries = [(pair, 1) for pair in pairs]
    with pytest.raises(echo.StateError, match="^forward: "):
        rig.step(entries[:1], captured=True)
    for model in (None, rig.model):
        with pytest.raises(echo.InvalidArgument, match="^sessions: 4 given.*max_batch = 3"):
            rig.runtime.step(echo.Batch([p.session for p in pairs], [1] * 4), model)
    for sizes in ([4], [0], [-1], [2, 4]):
        with pytest.raises(echo.InvalidArgument, match="^batch_sizes: "):
            rig.runtime.capture(rig.model, sizes)
    with pytest.raises(echo.StateError, match="^forward: "):  # nothing was captured by those
        rig.step(entries[:1], captured=True)
    rig.runtime.capture(rig.model, [2])
    with pytest.raises(echo.StateError, match="^forward: .*3 sessions"):
        rig.step(entries[:3], captured=True)
    with pytest.raises(echo.InvalidArgument, match="^query_rows: 2 given"):
        rig.runtime.step(echo.Batch([pairs[0].session], [[1, 2]]))
    with pytest.raises(echo.InvalidArgument, match="^sessions: none"):
        rig.runtime.step(echo.Batch(), rig.model)
    for pair in pairs:
        assert pair.session.length == 0
    rig.step(entries[:2], captured=True)
    rig.step(entries[1:])
    rig.check()


def test_capturing_again_replaces_the_model(make_rig):
    rig = make_rig(small_shape())
    pair = rig.open(64)
    rig.runtime.capture(rig.model, [2])
    rig.step([(pair, 1)], captured=True)
    with pytest.raises(ZeroDivisionError):
        rig.runtime.capture(lambda p: 1 // 0, [1])
    rig.step([(pair, 2)], captured=True)  # a capture that fails leaves the old one
    rig.runtime.capture(rig.model, [1])
    rig.step([(pair, 3)], captured=True)
    with pytest.raises(echo.StateError, match="^forward: "):
        rig.step([(pair, 1), (rig.open(64), 1)], captured=True)
    outputs, _ = rig.runtime.prefill(pair.session, [5, 6])  # prefill uses the captured model
    assert len(outputs) == 2
    pair.oracle.append([5, 6])
    rig.check()


def test_a_step_before_any_prefill_and_single_token_sessions(make_rig):
    """Pitfall 15: lengths of 0 before the step, several of them at once."""
    rig = make_rig(small_shape())
    pairs = [rig.open(1) for _ in range(4)]
    rig.step([(pair, 9) for pair in pairs])
    rig.check()
    for pair in pairs:
        with pytest.raises(echo.CapacityError, match="^tokens: "):
            rig.step([(pair, 9)])
