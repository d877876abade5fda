"""Selection: exactly the k best, ties to the smaller position, the same bits wherever a row is computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.formats import join_index_blocks
from support.oracle import top_k
from support.rig import assert_same_bits, check_cache, small_shape

import echo

K = 16
INF, NAN, HUGE = float("inf"), float("nan"), 3e38


def index_key_of(scores: np.ndarray) -> torch.Tensor:
    """Keys [tokens, 16] whose score against `one_query` is the given one; they are finite even where it is not.

    Head 0 adds relu(4 key[0]) / 4, head 1 subtracts relu(4 key[1]) / 4; a sum that overflows gives infinities, and both
    at once NaN.
    """
    keys = np.zeros((len(scores), 16), np.float32)
    keys[:, 0] = np.where(np.isnan(scores) | (scores == INF), HUGE, np.where(scores > 0, scores, 0.0))
    keys[:, 1] = np.where(np.isnan(scores) | (scores == -INF), HUGE, np.where(scores < 0, -scores, 0.0))
    return torch.from_numpy(keys)


def one_query(rows: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The index query and weights of `index_key_of`."""
    q = torch.zeros(rows, 8, 16, device=device)
    q[:, 0, 0] = q[:, 1, 1] = 4.0
    weights = torch.zeros(rows, 8, device=device)
    weights[:, 0], weights[:, 1] = 0.25, -0.25
    return q, weights


class ChosenScores:
    """A one-layer model in which the token at each position has the score that a test wants."""

    def __init__(self, scores: np.ndarray, device: str) -> None:
        self.keys = index_key_of(scores).to(device)
        self.device = device

    def __call__(self, p: echo.ForwardPass) -> torch.Tensor:
        """Selections of all rows."""
        positions = torch.from_dlpack(p.positions).long()
        rows = positions.clamp(min=0)
        kv = torch.zeros(p.rows, 16, dtype=torch.uint8, device=self.device)
        p.append(0, kv, self.keys[rows])
        for block in p.blocks:
            p.score(0, *one_query(p.rows, self.device), block)
            p.select(0, block)
            p.recall(0, None, block)
        return torch.from_dlpack(p.selection).clone()


def raw_shape(**changes) -> echo.ModelShape:
    """One layer with rows of 16 bytes: selection is what is tested."""
    return small_shape(**{"layers": 1, "row_format": "raw", "raw_row_bytes": 16, "top_k": K, **changes})


def selected_after(runtime: echo.Runtime, scores: np.ndarray, device: str) -> list[int]:
    """Selection of the last token of a session with these scores; all tokens but the last are imported."""
    session = runtime.open_session(len(scores))
    if len(scores) > 1:
        rows = np.zeros((len(scores) - 1, 16), np.uint8)
        blocks = join_index_blocks(index_key_of(scores[:-1]), runtime.shape)
        runtime.import_kv(session, echo.KvRuns.from_arrays([rows], [blocks]))
    selection = runtime.step(echo.Batch([session], [0]), ChosenScores(scores, device))
    session.close()
    return selection[0].tolist()


def adversarial(length: int) -> dict[str, np.ndarray]:
    """Scores that trip up histograms, comparisons and orderings."""
    rng = np.random.default_rng(length)
    mixed = rng.choice(np.array([0.0, -1.5, 1e-40, 65504.0, 1e5, 3e5, INF, -INF, NAN], np.float32), length)
    sparse = np.zeros(length, np.float32)
    sparse[rng.integers(length, size=K // 2)] = 1.0
    one_bin = rng.uniform(1.0, 1.245, length).astype(np.float32)
    return {
        "all zero": np.zeros(length, np.float32),
        "all equal": np.full(length, 7.5, np.float32),
        "fewer than k above zero": sparse,
        "one coarse bin": one_bin,
        "neighbouring floats": (np.float32(1.0).view(np.int32) + rng.integers(4, size=length))
        .astype(np.int32)
        .view(np.float32),
        "beyond fp16": rng.uniform(6e4, 1e6, length).astype(np.float32),
        "negative": -one_bin,
        "subnormal": (rng.integers(1, 1000, size=length) * 1e-43).astype(np.float32),
        "all infinite": np.full(length, INF, np.float32),
        "all minus infinite": np.full(length, -INF, np.float32),
        "all NaN": np.full(length, NAN, np.float32),
        "NaN but for k - 1": np.where(np.arange(length) % max(1, length // (K - 1)) == 0, one_bin, NAN).astype(
            np.float32
        ),
        "infinities and NaN": mixed,
        "rising": np.arange(length, dtype=np.float32),
        "falling": np.arange(length, 0, -1).astype(np.float32),
    }


@pytest.mark.parametrize("kind", adversarial(1))
def test_exactly_the_k_best_for_adversarial_scores(make_runtime, device, kind):
    """Pitfall 9: min(length, k) distinct positions, ties to the smaller one (pitfall 10), NaN last."""
    runtime = make_runtime(raw_shape(), host_tokens=8192, max_context=8192, max_batch=1, prefill_chunk=1)
    for length in (1, 2, K - 1, K, K + 1, 63, 64, 65, 255, 257, 1000, 4095, 4097):
        scores = adversarial(length)[kind]
        if device == "cuda" and kind == "subnormal":
            scores = scores * np.float32(1e30)  # a GPU may flush scores this small to zero
        with np.errstate(invalid="ignore"):
            count = min(length, K)
            expected = top_k(scores, count) + [-1] * (K - count)
        assert selected_after(runtime, scores, device) == expected, f"length {length}"


@pytest.mark.parametrize("k", [1, 31, 32, 33, 64, 255, 256, 257])
def test_any_k_at_any_power_of_two(make_runtime, device, k):
    """Pitfall 9: lengths around powers of two, with plenty of ties at the k-th score."""
    runtime = make_runtime(raw_shape(top_k=k), host_tokens=32768, max_context=32768, max_batch=1, prefill_chunk=1)
    rng = np.random.default_rng(k)
    for length in [2**power + d for power in (5, 8, 9, 11, 13, 14) for d in (-1, 0, 1)]:
        scores = rng.integers(0, max(2, length // k), size=length).astype(np.float32)
        count = min(length, k)
        expected = top_k(scores, count) + [-1] * (k - count)
        assert selected_after(runtime, scores, device) == expected, f"length {length}"


def test_long_contexts_are_selected_from_exactly(make_runtime, device):
    """Pitfall 9: 128 Ki and 1 Mi tokens."""
    longest = (1 << 20) + 64
    runtime = make_runtime(
        raw_shape(top_k=2048), host_tokens=longest, max_context=longest, max_batch=1, prefill_chunk=1
    )
    rng = np.random.default_rng(0)
    for length in ((1 << 17) - 1, 1 << 17, (1 << 17) + 1, 1 << 20):
        scores = rng.integers(0, length // 100, size=length).astype(np.float32)
        assert selected_after(runtime, scores, device) == top_k(scores, 2048)


def test_minus_zero_ties_with_zero(make_runtime, device):
    """Pitfall 9: a product that underflows gives -0.0, which ranks with +0.0 by position."""
    runtime = make_runtime(raw_shape(index_key_format="fp8"), max_batch=1)

    def forward(p: echo.ForwardPass) -> torch.Tensor:
        positions = torch.from_dlpack(p.positions)
        keys = torch.zeros(p.rows, 16, device=device)
        keys[:, 0] = torch.where(positions % 2 == 0, 2.0**-118, 0.0)  # scale 2^-126; even tokens give -0.0
        p.append(0, torch.zeros(p.rows, 16, dtype=torch.uint8, device=device), keys)
        q = torch.zeros(p.rows, 8, 16, device=device)
        q[:, 0, 0] = 1.0
        weights = torch.full((p.rows, 8), -(2.0**-40), device=device)
        for block in p.blocks:
            p.score(0, q, weights, block)
            p.select(0, block)
        return torch.from_dlpack(p.selection).clone()

    selections = runtime.prefill(runtime.open_session(64), list(range(64)), forward)
    assert selections[-1].tolist() == list(range(K))


@pytest.mark.parametrize("key_format", ["fp32", "fp8"])
def test_the_same_bits_in_any_batch_row_and_company(make_rig, key_format):
    """Pitfall 10: one query, repeated 100 times at any place among any other sessions."""
    rig = make_rig(small_shape(index_key_format=key_format), max_sessions=16, host_tokens=4096, query_rows=2)
    rng = np.random.default_rng(4)
    base = rig.open(192)
    rig.prefill(base, rng.integers(61, size=140).tolist())
    kv = rig.runtime.export_kv(base.session)
    others = [rig.open(640) for _ in range(3)]
    for i, other in enumerate(others):
        rig.prefill(other, rng.integers(61, size=1 + 37 * i).tolist())
    expected = None
    for repeat in range(100):
        twin = rig.open(192)
        rig.runtime.import_kv(twin.session, kv)
        twin.oracle = base.oracle.copy()
        company = [(others[i], rng.integers(61, size=2).tolist()) for i in rng.permutation(3)[: repeat % 4]]
        place = int(rng.integers(len(company) + 1))
        entries = [*company[:place], (twin, [17, 18]), *company[place:]]
        outputs, selections = rig.step(entries, verify=repeat % 25 == 0)
        mine = slice(2 * place, 2 * place + 2)
        if expected is None:
            expected = outputs[mine], selections[mine]
        assert_same_bits((outputs[mine], selections[mine]), expected)
        rig.close(twin)


def test_scores_past_the_length_are_never_selected(make_runtime, device):
    """Pitfall 11: keys left by a closed session and scores left by a longer row are the highest there are."""
    runtime = make_runtime(raw_shape(), max_batch=2, host_tokens=1024)
    loud = np.full(512, INF, np.float32)
    left_behind = runtime.open_session(512)
    for first in range(0, 512, 64):
        runtime.prefill(left_behind, list(range(first, first + 64)), ChosenScores(loud, device))
    blocks = left_behind.blocks
    left_behind.close()
    runtime.synchronize()  # no step in flight can touch its blocks any more

    quiet = np.linspace(1.0, 0.5, 512, dtype=np.float32)
    session = runtime.open_session(512)
    assert session.blocks == blocks
    selections = runtime.prefill(session, list(range(40)), ChosenScores(quiet, device))
    for row, selection in enumerate(selections.tolist()):
        count = min(row + 1, K)
        assert selection == list(range(count)) + [-1] * (K - count)

    long_session = runtime.open_session(512)
    for first in range(0, 448, 64):
        runtime.prefill(long_session, list(range(first, first + 64)), ChosenScores(loud, device))
    both = ChosenScores(quiet, device)
    for sessions in ([long_session, session], [session, long_session], [session]):
        selections = runtime.step(echo.Batch(sessions, [0] * len(sessions)), both)
        assert selections[sessions.index(session)].tolist() == list(range(K))


def test_thresholds_follow_finite_kth_scores_alone(make_runtime, device):
    """Pitfall 9: a moving average would never forget an infinity; NaN and infinite k-th scores are skipped."""
    runtime = make_runtime(raw_shape(), max_batch=1)
    session = runtime.open_session(64)

    def append(scores: list[float]) -> float:
        before = session.length
        values = np.concatenate([np.zeros(before), np.array(scores)]).astype(np.float32)
        runtime.prefill(session, [0] * len(scores), ChosenScores(values, device))
        return float(runtime.thresholds(session)[0])

    assert np.isnan(append([INF] * (K - 1)))
    assert np.isnan(append([INF]))  # the k-th score is infinite
    assert np.isnan(append([NAN]))
    session.truncate(0)
    assert append([8.0] * K) == 8.0
    assert append([16.0]) == 8.0  # the k-th of them is still 8
    assert append([16.0] * (K - 1)) == 12.0  # it was 8 up to the last of them
    assert 12.0 < append([INF] * (K - 1)) < 16.0
    last = float(runtime.thresholds(session)[0])
    assert append([INF]) == last  # from here on it is infinite
    assert append([NAN, INF, -INF]) == last


def test_lengths_around_k_define_every_word(make_rig):
    """Pitfall 8: lengths 1, k - 1, k, k + 1 from an empty session on; outputs were poisoned before."""
    rig = make_rig(small_shape(), max_batch=2)
    rig.runtime.capture(rig.model, [2])
    pair = rig.open(64)
    for length in range(1, K + 3):
        outputs, selections = rig.step([(pair, length)], captured=True)
        assert outputs.isfinite().all()
        assert (selections[0, :, : min(length, K)] >= 0).all() and (selections[0, :, min(length, K) :] == -1).all()
    rig.check()


def test_minus_one_anywhere_in_a_selection_is_skipped(make_rig, device):
    """Pitfall 8: a selection of one's own, with -1 anywhere, also everywhere."""
    rig = make_rig(small_shape(), max_batch=3)
    rng = np.random.default_rng(5)
    pairs = [rig.open(128) for _ in range(3)]
    for pair in pairs:
        rig.prefill(pair, rng.integers(61, size=70).tolist())
    slots: list[torch.Tensor] = []

    def forward(p: echo.ForwardPass) -> torch.Tensor:
        outputs = []
        for layer in range(rig.model.shape.layers):
            x = rig.model.inputs(layer, torch.from_dlpack(p.tokens), torch.from_dlpack(p.positions))
            p.append(layer, x.kv, x.index_key)
            slots.append(torch.from_dlpack(p.recall(layer, selection)).clone())
            outputs.append(rig.model.empty_output(p.rows))
            p.attend(layer, x.q, rig.model.scale, outputs[-1])
        return torch.stack(outputs, 1)

    for holes in (0, 1, 5, K - 1, K):
        given = np.stack([rng.permutation(71)[:K] for _ in pairs]).astype(np.int32)
        for row in given:
            row[rng.permutation(K)[:holes]] = -1
        selection = torch.from_numpy(given).to(device)
        slots.clear()
        batch = echo.Batch([pair.session for pair in pairs], [1, 2, 3])
        outputs = rig.runtime.step(batch, forward)
        for row, pair in enumerate(pairs):
            pair.oracle.append([row + 1])
            chosen = [s for s in given[row].tolist() if s != -1]
            for layer in range(rig.model.shape.layers):
                out = outputs[row, layer].double().cpu().numpy()
                np.testing.assert_array_equal(slots[layer][row].cpu().numpy() == -1, given[row] == -1)
                if not chosen:
                    assert (out == 0.0).all()
                    continue
                expected = pair.oracle.output(layer, pair.session.length - 1, chosen)
                assert np.abs(out - expected).max() <= 1e-4 * np.abs(pair.oracle.layers[layer].values).max()
    check_cache(rig.runtime, [pair.session for pair in pairs])
