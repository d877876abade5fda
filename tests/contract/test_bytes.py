"""Bytes, layers and addresses: what is written where, and what must never be read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.rig import check_cache, full_width_shape, host_row_of, host_rows, small_shape

import echo

ROW_BYTES = {
    "fp8_656": (656, full_width_shape("fp8_656")),
    "bf16_1152": (1152, full_width_shape("bf16_1152")),
    "raw 576": (576, small_shape(row_format="raw", raw_row_bytes=576)),
    "raw 512": (512, small_shape(row_format="raw", raw_row_bytes=512)),
    "raw 640": (640, small_shape(row_format="raw", raw_row_bytes=640)),
    "raw 16": (16, small_shape(row_format="raw", raw_row_bytes=16)),
}


def marked_rows(layer: int, positions: torch.Tensor, row_bytes: int) -> torch.Tensor:
    """uint8 [rows, row_bytes] that name their layer and token in every 8 bytes."""
    words = torch.full((len(positions), row_bytes // 4), layer + 1, dtype=torch.int32, device=positions.device)
    words[:, 1::2] = positions.int()[:, None] + 1
    return words.view(torch.uint8)


def test_layers_never_overwrite_each_other(make_runtime, device):
    """Pitfall 1: rows hold bytes that name layer and token; all host rows and slots of all layers are read back."""
    shape = small_shape(layers=5, row_format="raw", raw_row_bytes=48)
    runtime = make_runtime(shape, max_batch=2)

    def forward(p: echo.ForwardPass) -> None:
        positions = torch.from_dlpack(p.positions)
        ones = torch.ones(p.rows, 8, 16, device=device)
        for layer in range(shape.layers):
            p.append(layer, marked_rows(layer, positions, 48), ones[:, 0].contiguous())
            for block in p.blocks:
                p.score(layer, ones, torch.ones(p.rows, 8, device=device), block)
                p.select(layer, block)
                p.recall(layer, None, block)

    sessions = [runtime.open_session(200), runtime.open_session(90)]
    for session, length in zip(sessions, (130, 40), strict=True):
        for first in range(0, length, 64):
            runtime.prefill(session, list(range(first, min(first + 64, length))), forward)
    for token in range(40):
        runtime.step(echo.Batch(sessions, [token, token]), forward)

    for session in sessions:
        kv = runtime.export_kv(session)
        for layer in range(shape.layers):
            expected = marked_rows(layer, torch.arange(session.length), 48).numpy()
            np.testing.assert_array_equal(host_rows(kv, layer), expected)
    token_of = {host_row_of(session, p): p for session in sessions for p in range(session.length)}
    for layer in range(shape.layers):
        state = runtime.cache_state(layer)
        held = np.flatnonzero(state["host_of"] != -1)
        assert len(held) > 16
        words = state["slots"][held].view(np.int32)
        assert (words[:, ::2] == layer + 1).all()
        tokens = np.array([token_of[row] for row in state["host_of"][held]])
        assert (words[:, 1::2] == tokens[:, None] + 1).all()


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_the_host_copy_of_every_new_token_is_right_after_replay_and_eviction(make_rig, captured):
    """Pitfall 2: the smallest pool evicts all the time; every row written by a replay is on the host."""
    rig = make_rig(small_shape(top_k=8), model={"seed": 3}, max_batch=2)
    if captured:
        rig.runtime.capture(rig.model, [2])
    rng = np.random.default_rng(0)
    a, b = rig.open(200), rig.open(200)
    rig.prefill(a, rng.integers(61, size=50).tolist())
    for step in range(90):
        entries = [(a, int(rng.integers(61)))] + [(b, int(rng.integers(61)))] * (step % 3 != 0)
        rig.step(entries, captured=captured)
        if step % 6 == 0:
            rig.check()
    for layer in range(3):
        slot_of = rig.runtime.cache_state(layer)["slot_of"]
        evicted = [p for p in range(50, 140) if slot_of[host_row_of(a.session, p)] == -1]
        assert len(evicted) > 60  # so most of the rows just compared had lost their slots
    rig.check()


@pytest.mark.parametrize("name", ROW_BYTES)
def test_row_bytes_have_one_source_and_prompts_any_length(make_rig, name):
    """Pitfall 6: sizes, strides and views agree for every row size; prompts need be no multiple of 64."""
    expected, shape = ROW_BYTES[name]
    rig = make_rig(shape, host_row_stride=expected + 48)
    assert shape.row_bytes == rig.stats().row_bytes == expected
    rng = np.random.default_rng(1)
    for length in (1, 63, 64, 65, 127, 129):
        pair = rig.open(length + 3)
        rig.prefill(pair, rng.integers(61, size=length).tolist(), verify=False)
        rig.step([(pair, 5)])
        rig.step([(pair, 6)])
        kv = rig.runtime.export_kv(pair.session)
        assert kv.row_bytes == expected and all(rows.strides == (expected + 48, 1) for rows in kv.rows(0))
    assert rig.runtime.cache_state(0)["slots"].shape[1] == expected
    rig.check()


@pytest.mark.parametrize("row_format", ["fp8_656", "bf16_1152"])
def test_rows_that_are_encoded_already_are_stored_as_they_are(make_runtime, make_rig, device, row_format):
    shape = full_width_shape(row_format)
    rig = make_rig(shape)
    runtime = make_runtime(shape)
    plain = rig.open(40)
    expected = rig.prefill(plain, list(range(30)))
    encoded = [torch.from_numpy(layer.rows).to(device) for layer in plain.oracle.layers]

    def forward(p: echo.ForwardPass):
        rows = torch.from_dlpack(p.positions).long()
        outputs = []
        for layer in range(shape.layers):
            x = rig.model.inputs(layer, torch.from_dlpack(p.tokens), torch.from_dlpack(p.positions))
            out = rig.model.empty_output(p.rows)
            p.attention(
                layer,
                kv=encoded[layer][rows],
                q=x.q,
                scale=rig.model.scale,
                out=out,
                index_key=x.index_key,
                index_q=x.index_q,
                index_weights=x.index_weights,
            )
            outputs.append(out)
        return torch.stack(outputs, 1)

    given = runtime.prefill(runtime.open_session(40), list(range(30)), forward)
    assert torch.equal(given, expected[0])


@pytest.mark.parametrize("row_format", ["fp32", "fp8_656", "bf16_1152"])
def test_rows_that_are_not_selected_poison_nothing(make_rig, row_format):
    """Pitfall 7: NaN in rows that are cached but not selected, in free slots and in free host rows stays there."""
    shape = full_width_shape(row_format, top_k=8) if row_format != "fp32" else small_shape(top_k=8)
    rig = make_rig(shape, model={"integers": True, "dtype": torch.bfloat16})
    for layer in range(shape.layers):
        tables = rig.model.tables[layer]
        tables["kv"][0][60] = float("nan")  # token 60: its row is NaN ...
        tables["index_key"][0][60] = 0.0  # ... and scores 0, below whatever a selected token scores
        tables["index_key"][1][:] = 0.0
        tables["index_key"][0][:60] = 2.0
        tables["index_q"][0][:], tables["index_q"][1][:] = 1.0, 0.0
        tables["index_weights"][0][:], tables["index_weights"][1][:] = 1.0, 0.0
    pair = rig.open(128)
    prompt = [60, *range(1, 20), 60, *range(20, 40), 60, *range(40, 58), 60]
    outputs, _ = rig.prefill(pair, prompt, verify=False)
    assert outputs[:8].isnan().any(), "the first rows select every token there is, poison included"
    assert outputs[12:].isfinite().all()
    for token in (1, 60, 2, 3, 60, 4):  # a new row sits in a slot, poisoned or not
        out, selections = rig.step([(pair, token)], verify=False)
        assert out.isfinite().all()
        assert all(pair.oracle.tokens[s] != 60 for s in selections.flatten().tolist())
    check_cache(rig.runtime, [pair.session])


def test_byte_offsets_beyond_2_to_the_31_reach_their_rows(make_rig):
    """Pitfall 5: host row x row bytes > 2^31; rows at both ends of a slab are written, evicted and recalled."""
    needed = 4 << 30
    if echo.machine_limits("cpu").host_bytes < needed:
        pytest.skip("needs 4 GiB of memory")
    tokens = 3_400_000 // 64 * 64
    shape = small_shape(layers=1, top_k=8, row_format="raw", raw_row_bytes=656, index_key_format="fp8", query_heads=1)
    rig = make_rig(
        shape,
        host_tokens=tokens,
        max_context=tokens,
        max_batch=1,
        prefill_chunk=64,
        max_sessions=3,
        model={"positions": 256},
    )
    assert tokens * 656 > 2**31
    low = rig.open(192)
    middle = rig.runtime.open_session(tokens - 2 * 192)
    high = rig.open(192)
    assert host_row_of(low.session, 0) == 0
    assert host_row_of(high.session, 0) * 656 > 2**31
    for pair in (low, high):
        rig.prefill(pair, [(7 * i) % 61 for i in range(130)])
    for token in range(20):
        rig.step([(high, token)])
        rig.step([(low, token)])
    middle.close()
    rig.check()
    assert rig.stats().layers[0].misses > 50


def test_score_offsets_beyond_2_to_the_31_bytes(make_rig):
    """Pitfall 5: query rows x longest context > 2^31 bytes of scores; the last rows of a block are right."""
    if echo.machine_limits("cpu").host_bytes < (5 << 30):
        pytest.skip("needs 5 GiB of memory")
    tokens = 9_000_000 // 64 * 64
    shape = small_shape(layers=1, top_k=8, row_format="raw", raw_row_bytes=16, index_key_format="fp8")
    rig = make_rig(
        shape,
        model={"positions": 256},
        host_tokens=tokens,
        max_context=tokens,
        max_batch=1,
        gpu_slots=64 * 9,
        prefill_chunk=64,
        max_sessions=2,
    )
    assert rig.runtime.plan.block_rows * tokens * 4 > 2**31
    pair = rig.open(128)
    rig.prefill(pair, [(11 * i) % 61 for i in range(128)])
    rig.check()
