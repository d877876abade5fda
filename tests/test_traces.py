"""Traces: what is generated, ranked and kept in files."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from support.traces import growing

import echo
from echo.traces import Trace, synthetic
from echo.traces.comparison import compare
from echo.traces.ranking import rank

ARRAYS = ("positions", "context", "kth_score", "ranked", "scores")
TEXTS = ("model", "text", "notes", "seed")


def same(a: Trace, b: Trace) -> bool:
    arrays = [(getattr(a, name), getattr(b, name)) for name in ARRAYS]
    return all(getattr(a, name) == getattr(b, name) for name in TEXTS) and all(
        x is y is None or (x.dtype == y.dtype and np.array_equal(x, y, equal_nan=x.dtype == np.float32))
        for x, y in arrays
    )


def test_regimes_are_repeatable_and_checked():
    one = synthetic.generate("v32_68k", steps=20, top_k=32, seed=5, layers=2, ranks=64)
    assert same(one, synthetic.generate("v32_68k", steps=20, top_k=32, seed=5, layers=2, ranks=64))
    assert not np.array_equal(one.positions[:, 0], one.positions[:, 1]) and one.context.tolist() == [512] * 20
    assert one.kth_score.std() > 0.1  # the common shift moves it
    for arguments, named in (
        (("nothing", 1, 1), "regime"),
        (("glm", 0, 1), "steps"),
        (("glm", 1, 0), "top_k"),
        (("glm", 1, 4, 3), "tokens"),
        (("glm", 1, 4, 8, 0, 0), "layers"),
        (("glm", 1, 4, 8, 0, 1, 3), "ranks"),
        (("glm", 1, 4, 8, 0, 1, 4, 5), "sinks"),
        (("glm", 1, 4, 8, 0, 1, 4, 1, -1), "recency"),
        (("glm", 1, 4, 8, 0, 1, 4, 1, 1, -1), "turn_every"),
    ):
        with pytest.raises(echo.InvalidArgument, match=f"^{named}: "):
            synthetic.generate(*arguments)


def test_ranks_change_no_selection():
    plain = synthetic.generate("glm", steps=10, top_k=16)
    some = synthetic.generate("glm", steps=10, top_k=16, ranks=40)
    everything = synthetic.generate("glm", steps=10, top_k=16, ranks=synthetic.ALL)
    assert (plain.ranks, some.ranks, everything.ranks) == (0, 40, 256) and plain.scores is None
    for trace in (some, everything):
        np.testing.assert_array_equal(trace.positions, plain.positions)
        np.testing.assert_array_equal(trace.kth_score, plain.kth_score)
        np.testing.assert_array_equal(trace.ranked[..., :40], some.ranked)
    assert synthetic.generate("glm", steps=2, top_k=16, ranks=9999).ranks == 256


def test_sinks_recent_tokens_and_turns():
    trace = synthetic.generate("first_layers", steps=30, top_k=64, tokens=500, sinks=5, recency=20, ranks=synthetic.ALL)
    assert trace.context.tolist() == list(range(500, 530)) and trace.ranks == 529
    assert (trace.ranked[0, 0, 500:] == -1).all() and np.isnan(trace.scores[0, 0, 500:]).all()
    assert (trace.positions[..., :5] == np.arange(5)).all()
    age = trace.context[:, None] - 1 - trace.positions[:, 0]
    assert (age < 10).sum() > 4 * ((age >= 100) & (age < 110)).sum()
    assert "sinks 5, recency 20" in trace.notes
    constant = synthetic.generate("glm", steps=30, top_k=64, sinks=5)
    assert (constant.context == 1024).all() and (constant.positions[..., :5] == np.arange(5)).all()


def test_equal_scores_go_to_the_smaller_position():
    scores = np.array([1, 5, 3, 3, -0.0, 3, 0, 7], np.float32)
    assert rank(scores, 4).tolist() == [7, 1, 2, 3]
    assert rank(scores, 7).tolist() == [7, 1, 2, 3, 5, 0, 4]
    assert rank(scores, 8).tolist() == rank(scores, 99).tolist() == [7, 1, 2, 3, 5, 0, 4, 6]
    lowest = np.array([np.nan, -np.inf, np.nan, np.inf], np.float32)
    assert [rank(lowest, count).tolist() for count in (2, 3, 4)] == [[3, 1], [3, 1, 0], [3, 1, 0, 2]]


@given(arrays_of.arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32)), st.integers(1, 45))
def test_ranks_are_a_sort(scores, count):
    order = sorted(range(len(scores)), key=lambda i: (np.isnan(scores[i]), 0 if np.isnan(scores[i]) else -scores[i], i))
    assert rank(scores, count).tolist() == order[:count]


@pytest.mark.parametrize("far", [0, 1 << 30])
def test_a_file_holds_a_trace(tmp_path, far):
    trace = growing(steps=30, top_k=8, first=6, layers=3)
    trace.positions[5, 1] = -1
    moved = Trace(
        np.where(trace.positions >= 0, trace.positions + far, -1).astype(np.int32),
        trace.context + np.int32(far), trace.kth_score, None, None, *(getattr(trace, name) for name in TEXTS),
    )  # fmt: skip
    moved.save(tmp_path / "trace.any")
    assert same(Trace.load(tmp_path / "trace.any"), moved)


@pytest.mark.parametrize("ranks", [8, 9, 20, 100])
def test_a_file_holds_ranks_on_a_grid(tmp_path, ranks):
    trace = growing(steps=30, top_k=8, first=6, layers=3, ranks=ranks)
    trace.scores[20, 1, 8:][-2:] = np.nan
    trace.scores[21, 1, 10:12] = -np.inf  # then NaN would have to follow
    trace.scores[21, 1, 12:] = np.nan
    trace.scores[22, 1, 0] = np.inf
    path = tmp_path / "trace.npz"
    trace.save(path)
    held = Trace.load(path)
    for name in ("positions", "context", "kth_score"):
        np.testing.assert_array_equal(getattr(held, name), getattr(trace, name))
    np.testing.assert_array_equal(np.sort(held.ranked, axis=2), np.sort(trace.ranked, axis=2))
    with np.load(path) as arrays:
        spacing = np.exp2(arrays["grid"].astype(np.float64))[..., None]
    with np.errstate(invalid="ignore"):
        finite = np.isfinite(trace.scores) & np.isfinite(held.scores)
        near = trace.scores < trace.kth_score[..., None] + 100 * spacing
        error = np.abs(held.scores - trace.scores)
    assert (error <= 0.51 * spacing)[finite & near].all()
    missing = (trace.ranked >= 0) & np.isnan(trace.scores)
    assert missing.any() == (ranks > 8) and np.isnan(held.scores).sum() == np.isnan(trace.scores).sum()
    held.save(path)
    assert same(Trace.load(path), held)


@pytest.mark.parametrize(
    "values",
    [
        [5.0, 5.0, 5.0, 5.0],
        [1e30, 1e30, 1.0, -1e30],
        [2e-31, 1e-31, 0.0, -0.0],
        [1.5, 0.9165021, 0.8, -2.9],  # the last is brought to level 31, which float32 has a little farther away
    ],
)
def test_scores_of_any_size_have_a_grid(tmp_path, values):
    ranked = np.array([[[2, 0, 1, 3]]], np.int32)
    scores = np.array([[values]], np.float32)
    trace = Trace(np.array([[[0, 2]]], np.int32), np.array([4], np.int32), scores[..., 1].copy(), ranked, scores)
    trace.save(tmp_path / "trace.npz")
    held = Trace.load(tmp_path / "trace.npz")
    assert held.ranked[0, 0, 2:].tolist() == [1, 3] and sorted(held.ranked[0, 0, :2]) == [0, 2]
    np.testing.assert_allclose(held.scores, scores, rtol=1e-6, atol=np.ptp(np.float64(values)) / 30)
    held.save(tmp_path / "trace.npz")
    assert same(Trace.load(tmp_path / "trace.npz"), held)


@pytest.fixture(scope="module")
def ranked_glm() -> Trace:
    return synthetic.generate("glm", steps=256, top_k=256, layers=5, ranks=1024)


def test_files_are_small(ranked_glm, tmp_path):
    """A ranked token takes about a byte, and a selected one without scores less than half of one of int32."""
    path = tmp_path / "trace.npz"
    ranked_glm.save(path)
    assert path.stat().st_size < 1.4e6
    plain = Trace(ranked_glm.positions, ranked_glm.context, ranked_glm.kth_score)
    plain.save(path)
    np.savez_compressed(tmp_path / "plain.npz", plain.positions, plain.context, plain.kth_score)
    assert path.stat().st_size < 0.6 * (tmp_path / "plain.npz").stat().st_size


def test_the_grid_is_fine_enough(ranked_glm, tmp_path):
    ranked_glm.save(tmp_path / "trace.npz")
    held = Trace.load(tmp_path / "trace.npz")
    exact, coarse = (compare(trace, (512, 1024), ("score", "echo"), [0, 1]) for trace in (ranked_glm, held))
    for policy in ("score", "echo"):
        assert coarse.mean(policy) == pytest.approx(exact.mean(policy), abs=0.001)


def test_files_that_are_no_traces_are_refused_by_path(tmp_path):
    path = tmp_path / "trace.npz"
    growing(steps=5, top_k=8, first=20, ranks=12).save(path)
    whole = path.read_bytes()
    with np.load(path) as held:
        arrays = dict(held)

    def refused() -> None:
        with pytest.raises(echo.InvalidArgument, match=f"^path: .*{re.escape(path.name)}"):
            Trace.load(path)

    for content in (b"", b"not a trace", whole[:50], whole[:-30], whole[:200] + b"\xff" * 40 + whole[240:]):
        path.write_bytes(content)
        refused()
    with path.open("wb") as file:
        np.save(file, arrays["left"])
    refused()
    directory = whole.index(b"PK\1\2")
    for place, value in ((8, 1), (10, 12), (10, 14), (10, 99)):  # encrypted, and other ways to compress
        path.write_bytes(whole[: directory + place] + bytes([value]) + whole[directory + place + 1 :])
        refused()
    meta = '{"model": "", "text": "", "notes": "", "seed": 0, "top_k": %d, "ranks": %d}'
    for name, value in (
        ("version", np.int64(3)),
        ("version", np.int64(1)),
        ("meta", np.frombuffer(b"[]", np.uint8)),
        ("meta", np.frombuffer(b'{"model": "", "text": "", "seed": 0, "top_k": 8, "ranks": 12}', np.uint8)),
        ("meta", np.frombuffer(b'{"model": "", "text": "", "notes": "", "seed": 0, "top_k": 8}', np.uint8)),
        ("meta", np.frombuffer(b"[" * 100_000, np.uint8)),
        ("meta", np.frombuffer(meta.replace("%d", "Infinity").encode(), np.uint8)),
        ("meta", np.frombuffer((meta % (3, 12)).encode(), np.uint8)),
        ("meta", np.frombuffer((meta % (9, 12)).encode(), np.uint8)),
        ("meta", np.frombuffer((meta % (0, 12)).encode(), np.uint8)),
        ("meta", np.frombuffer((meta % (13, 12)).encode(), np.uint8)),
        ("meta", np.frombuffer((meta % (8, 11)).encode(), np.uint8)),
        ("meta", np.frombuffer((meta % (8, 0)).encode(), np.uint8)),
        ("grid", arrays["grid"][1:]),
        ("grid", arrays["grid"].astype(np.int16)),
        ("level", arrays["level"][1:]),
        ("level", arrays["level"] * 0),
        ("level", arrays["level"].astype(np.int16)),
        ("entered", arrays["entered"][0]),
        ("entered", arrays["entered"][0].astype(np.uint16)),
        ("entered", arrays["entered"][:, 1:]),
        ("entered", np.repeat(arrays["entered"], 5, axis=0)),
        ("entered", arrays["entered"].astype(np.int16)),
        ("entered", arrays["entered"] * 0),
        ("entered", arrays["entered"] | 64),
        ("entered", np.repeat(arrays["entered"], 4, axis=0)),
        ("left", arrays["left"] | 64),
        ("left_count", arrays["left_count"][:, :0]),
        ("entered_count", -arrays["entered_count"]),
        ("context", arrays["context"][::-1]),
        ("kth_score", arrays["kth_score"].astype(np.float64)),
        ("kth_score", np.array([None])),
    ):
        np.savez(path, **{**arrays, name: value})
        refused()
    for lost in arrays:
        np.savez(path, **{name: value for name, value in arrays.items() if name != lost})
        refused()
    path.unlink()
    refused()
    path.mkdir()
    refused()


def test_arrays_that_are_no_trace_are_refused_by_name():
    good = growing(steps=5, top_k=8, first=20, ranks=12)
    swapped = good.ranked[..., [7, 8, *range(7), *range(9, 12)]]
    for name, value in (
        ("positions", good.positions.astype(np.int64)),
        ("positions", good.positions[..., ::-1].copy()),
        ("positions", good.positions - np.int32(30)),
        ("positions", good.positions + np.int32(30)),
        ("context", good.context[1:]),
        ("context", -good.context),
        ("kth_score", good.kth_score[1:]),
        ("ranked", None),
        ("ranked", good.ranked.astype(np.int64)),
        ("ranked", good.ranked[..., :7]),
        ("ranked", good.ranked[1:]),
        ("ranked", good.ranked[..., 0]),
        ("ranked", np.where(good.ranked == good.ranked[..., :1], -1, good.ranked).astype(np.int32)),
        ("ranked", np.where(good.ranked == good.ranked[..., -1:], -2, good.ranked).astype(np.int32)),
        ("ranked", np.where(good.ranked == good.ranked[..., -1:], good.ranked[..., -2:-1], good.ranked)),
        ("ranked", np.where(good.ranked == good.ranked[..., -1:], 100, good.ranked).astype(np.int32)),
        ("ranked", swapped),
        ("scores", good.scores[..., :9]),
        ("scores", good.scores.astype(np.float64)),
        ("scores", good.scores[..., ::-1].copy()),
        ("scores", good.scores - np.float32(1)),
        ("scores", np.where(good.scores == good.scores[..., -2:-1], np.float32(np.nan), good.scores)),
    ):
        fields = {field: getattr(good, field) for field in ARRAYS}
        with pytest.raises(echo.InvalidArgument, match=f"^{name}: "):
            Trace(**{**fields, name: value})
    unknown = np.full_like(good.kth_score, np.nan)
    with pytest.raises(echo.InvalidArgument, match="^ranked: .* no k-th score"):
        Trace(good.positions, good.context, unknown, good.ranked, good.scores)
