"""Traces: what is recorded, generated, kept in files, and what policies make of it."""

from __future__ import annotations

import functools
import itertools
import re

import numpy as np
import pytest

import echo
from echo import cli
from echo.replay import miss_rate
from echo.traces import SelectionRecorder, Trace, policies, synthetic

REAL = ("lru", "fifo", "random", "echo")


def growing(steps: int, top_k: int, first: int, layers: int = 1, seed: int = 0) -> Trace:
    """A trace whose context grows by a token in each step; the newest tokens are often selected, then go cold."""
    draws = np.random.default_rng(seed)
    worth = draws.standard_normal((layers, first + steps)).astype(np.float32)
    positions = np.full((steps, layers, top_k), -1, np.int32)
    for t, layer in itertools.product(range(steps), range(layers)):
        length = first + t
        fresh = 2 * np.exp(-np.arange(length)[::-1] / 20) + (0.4 + layer) * draws.standard_normal(length)
        scores = (worth[layer, :length] + fresh).astype(np.float32)
        some = min(length, top_k - int(draws.integers(3)))
        positions[t, layer, :some], _ = synthetic.select(scores, some)
    context = np.arange(first, first + steps, dtype=np.int32)
    return Trace(positions, context, draws.standard_normal((steps, layers)).astype(np.float32), "a", "ü", seed)


def same(a: Trace, b: Trace) -> bool:
    arrays = all(
        np.array_equal(getattr(a, name), getattr(b, name), equal_nan=name == "kth_score")
        and getattr(a, name).dtype == getattr(b, name).dtype
        for name in ("positions", "context", "kth_score")
    )
    return arrays and (a.model, a.text, a.seed) == (b.model, b.text, b.seed)


def runtime_misses(trace: Trace, pool: int) -> np.ndarray:
    """int64 [steps, layers] misses of a real runtime on the CPU that recalls the trace."""
    shape = echo.ModelShape(layers=trace.layers, top_k=trace.top_k, row_format="raw", raw_row_bytes=16)
    step = 0

    def forward(p: echo.ForwardPass) -> None:
        for layer in range(trace.layers):
            p.append(layer, np.zeros((p.rows, 16), np.uint8))
            if not p.is_prefill:
                p.recall(layer, selection=trace.positions[step, layer][None])

    before = int(trace.context[0]) - 1
    capacity = before + trace.steps
    misses = np.zeros((trace.steps + 1, trace.layers), np.int64)
    with echo.Runtime(
        shape, device="cpu", host_tokens=capacity, max_context=capacity, max_batch=1, gpu_slots=pool, threads=1
    ) as runtime:
        session = runtime.open_session(capacity)
        runtime.prefill(session, [0] * before, forward)
        for step in range(trace.steps):
            runtime.step(echo.Batch([session], [0]), forward)
            misses[step + 1] = [layer.misses for layer in runtime.stats().layers]
    return np.diff(misses, axis=0)


@pytest.mark.parametrize("pool", [17, 24, 40, 100, 400, 560])
def test_echo_is_the_rule_of_the_runtime(pool):
    """The same misses in each of 600 steps. In the large pools slots are older than the histogram's window."""
    trace = growing(steps=600, top_k=16, first=120, layers=2)
    expected = runtime_misses(trace, pool)
    for layer in range(2):
        got = policies.misses(trace.positions[:, layer], pool, "echo", trace.context)
        np.testing.assert_array_equal(got, expected[:, layer])
    assert expected[20:].sum() > 0


def fewest_misses(trace: Trace, pool: int) -> int:
    """By trying all victims in all steps."""

    @functools.cache
    def best(t: int, held: frozenset[int]) -> int:
        if t == trace.steps:
            return 0
        grew = t == 0 or trace.context[t] > trace.context[t - 1]
        newest = {int(trace.context[t]) - 1} if grew else set()
        wanted = set(trace.positions[t, 0].tolist())
        return min(
            len(wanted - appended) + best(t + 1, left)
            for appended in choices(held, newest)
            for left in choices(appended, wanted | newest)
        )

    def choices(held: frozenset[int], kept: set[int]) -> list[frozenset[int]]:
        """What may be held once all of `kept` are."""
        others = held - kept
        room = min(len(others), pool - len(kept))
        return [frozenset(kept) | frozenset(stay) for stay in itertools.combinations(others, room)]

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(6))
def test_belady_is_the_optimum(seed):
    draws = np.random.default_rng(seed)
    rows = np.stack([np.sort(draws.permutation(8)[:2]) for _ in range(12)]).astype(np.int32)
    lengths = np.repeat(np.arange(8, 11, dtype=np.int32), 4)
    trace = Trace(rows[:, None], lengths, np.zeros((12, 1), np.float32))
    for pool in (4, 5):
        counts = {p: int(policies.misses(trace.positions[:, 0], pool, p, trace.context).sum()) for p in REAL}
        least = int(policies.misses(trace.positions[:, 0], pool, "belady", trace.context).sum())
        assert least == fewest_misses(trace, pool) <= min(counts.values())


def test_lru_and_fifo_on_a_sequence_by_hand():
    selected = np.array([[0, 1], [0, 2], [0, 3], [1, -1], [0, 2]], np.int32)
    # Pool of 3. LRU: 3 evicts 1, 1 evicts 2, 2 evicts 3. FIFO: 3 evicts 1 (0, as old, is in use), 1 evicts 0.
    assert policies.misses(selected, 3, "lru").tolist() == [2, 1, 1, 1, 1]
    assert policies.misses(selected, 3, "fifo").tolist() == [2, 1, 1, 1, 1]
    assert policies.misses(selected, 4, "lru").tolist() == [2, 1, 1, 0, 0]
    again = np.array([[0, 1], [0, 2], [0, 3], [3, 4], [0, 4]], np.int32)
    assert policies.misses(again, 3, "lru").tolist() == [2, 1, 1, 1, 0]
    assert policies.misses(again, 3, "fifo").tolist() == [2, 1, 1, 1, 1]


@pytest.mark.parametrize("policy", policies.POLICIES)
def test_a_pool_for_everything_misses_each_row_once(policy):
    trace = growing(steps=60, top_k=8, first=50)
    rows = trace.positions[:, 0]
    fetched = policies.misses(rows, 200, policy, trace.context)
    old = np.unique(rows[(rows >= 0) & (rows < trace.context[0] - 1)])
    assert fetched.sum() == len(old)  # those appended meanwhile were never missing
    smallest = policies.misses(rows, 9, policy, trace.context, seed=3)
    np.testing.assert_array_equal(smallest, policies.misses(rows, 9, policy, trace.context, seed=3))
    assert (smallest <= (rows >= 0).sum(axis=1)).all() and smallest.sum() > fetched.sum()


def test_what_a_step_needs_is_the_least_pool():
    rows = growing(steps=4, top_k=8, first=50).positions[:, 0]
    for policy in policies.POLICIES:
        with pytest.raises(echo.InvalidArgument, match="^pool: 8 slots given, expected at least 9"):
            policies.misses(rows, 8, policy)
    with pytest.raises(echo.InvalidArgument, match="^policy: 'mru' given"):
        policies.misses(rows, 9, "mru")
    with pytest.raises(echo.InvalidArgument, match="^positions: "):
        policies.misses(rows[0], 9, "lru")
    with pytest.raises(echo.InvalidArgument, match="^context: "):
        policies.misses(rows, 9, "lru", np.arange(3, dtype=np.int32))


@pytest.fixture(scope="module")
def glm() -> Trace:
    return synthetic.generate("glm", steps=400, top_k=512)


def test_glm_misses_what_was_published(glm):
    """LRU 30.5 / 13.0 / 7.0 % at pools of 1, 2, 4 k; at 2 k FIFO 17.0, random 16.5, Belady 7.9: within a point."""
    for multiple, percent in ((1, 30.5), (2, 13.0), (4, 7.0)):
        assert 100 * miss_rate(glm, max(513, 512 * multiple), "lru") == pytest.approx(percent, abs=1.0)
    for policy, percent in (("fifo", 17.0), ("random", 16.5), ("belady", 7.9)):
        assert 100 * miss_rate(glm, 1024, policy) == pytest.approx(percent, abs=1.0)


def test_the_products_rule_is_lru_up_to_half_a_point(glm):
    for multiple in (2, 4):
        rates = [100 * miss_rate(glm, 512 * multiple, policy) for policy in ("echo", "lru")]
        assert rates[0] == pytest.approx(rates[1], abs=0.5)


def test_long_context_and_first_layers():
    """LRU 27.9 / 8.1 / 2.8 %, within a point; first layers select more than three quarters anew."""
    trace = synthetic.generate("long_context", steps=400, top_k=256)
    for multiple, percent in ((1, 27.9), (2, 8.1), (4, 2.8)):
        assert 100 * miss_rate(trace, max(257, 256 * multiple), "lru") == pytest.approx(percent, abs=1.0)
    assert miss_rate(synthetic.generate("first_layers", steps=100, top_k=256), 257, "lru") > 0.75


def test_regimes_are_ordered_repeatable_and_checked():
    one = synthetic.generate("v32_68k", steps=20, top_k=32, seed=5, layers=2)
    assert same(one, synthetic.generate("v32_68k", steps=20, top_k=32, seed=5, layers=2))
    assert not np.array_equal(one.positions[:, 0], one.positions[:, 1]) and one.context.tolist() == [512] * 20
    assert one.kth_score.std() > 0.1  # the common shift moves it
    for arguments, named in (
        (("nothing", 1, 1), "regime"),
        (("glm", 0, 1), "steps"),
        (("glm", 1, 0), "top_k"),
        (("glm", 1, 4, 3), "tokens"),
        (("glm", 1, 4, 8, 0, 0), "layers"),
    ):
        with pytest.raises(echo.InvalidArgument, match=f"^{named}: "):
            synthetic.generate(*arguments)


def test_equal_scores_go_to_the_smaller_position():
    scores = np.array([1, 5, 3, 3, -0.0, 3, 0, 7], np.float32)
    assert synthetic.select(scores, 4)[0].tolist() == [1, 2, 3, 7]
    assert synthetic.select(scores, 7)[0].tolist() == [0, 1, 2, 3, 4, 5, 7]
    positions, kth = synthetic.select(scores, 8)
    assert positions.tolist() == list(range(8)) and kth == 0


@pytest.mark.parametrize("far", [0, 1 << 30])
def test_a_file_holds_a_trace(tmp_path, far):
    trace = growing(steps=30, top_k=8, first=6, layers=3)
    trace.kth_score[2, 1] = np.nan
    trace.positions[5, 1] = -1
    moved = Trace(
        np.where(trace.positions >= 0, trace.positions + far, -1).astype(np.int32),
        trace.context + np.int32(far), trace.kth_score, trace.model, trace.text, trace.seed,
    )  # fmt: skip
    moved.save(tmp_path / "trace.any")
    assert same(Trace.load(tmp_path / "trace.any"), moved)


def test_the_encoding_is_worth_it(glm, tmp_path):
    glm.save(tmp_path / "trace.npz")
    np.savez_compressed(tmp_path / "plain.npz", glm.positions, glm.context, glm.kth_score)
    assert (tmp_path / "trace.npz").stat().st_size < 0.7 * (tmp_path / "plain.npz").stat().st_size


def test_files_that_are_no_traces_are_refused_by_path(tmp_path):
    path = tmp_path / "trace.npz"
    growing(steps=5, top_k=8, first=20).save(path)
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
    for name, value in (
        ("version", np.int64(2)),
        ("meta", np.frombuffer(b"[]", np.uint8)),
        ("meta", np.frombuffer(b'{"model": "", "text": "", "seed": 0, "top_k": 3}', np.uint8)),
        ("entered", arrays["entered"][1:]),
        ("entered", arrays["entered"] * 0),
        ("entered", arrays["entered"] * 50),
        ("left", arrays["left"] * 100),
        ("left_count", arrays["left_count"][:, :0]),
        ("entered_count", -arrays["entered_count"]),
        ("context", arrays["context"][::-1]),
        ("kth_score", arrays["kth_score"].astype(np.float64)),
        ("kth_score", np.array([None])),
    ):
        np.savez(path, **{**arrays, name: value})
        refused()
    np.savez(path, **{name: value for name, value in arrays.items() if name != "left"})
    refused()
    path.unlink()
    refused()
    path.mkdir()
    refused()


def test_arrays_that_are_no_trace_are_refused_by_name():
    good = growing(steps=5, top_k=8, first=20)
    for name, value in (
        ("positions", good.positions.astype(np.int64)),
        ("positions", good.positions[..., ::-1].copy()),
        ("positions", good.positions - np.int32(1)),
        ("positions", good.positions + np.int32(30)),
        ("context", good.context[1:]),
        ("context", -good.context),
        ("kth_score", good.kth_score[1:]),
    ):
        fields = {"positions": good.positions, "context": good.context, "kth_score": good.kth_score, name: value}
        with pytest.raises(echo.InvalidArgument, match=f"^{name}: "):
            Trace(**fields)


@pytest.mark.parametrize("captured", [False, True])
def test_a_recorder_keeps_what_the_model_selects(captured):
    hf = pytest.importorskip("echo.hf")
    import torch

    network = hf.tiny_model(seed=1, layers=2, top_k=32)
    recorder = SelectionRecorder(layers=2)
    seen: list[np.ndarray] = []

    def observer(p: echo.ForwardPass, tensors: object) -> None:
        recorder(p, tensors)
        seen.append(torch.from_dlpack(p.selection)[0].numpy().copy())

    model = hf.DsaModel(network, observer=observer)
    with pytest.raises(echo.StateError, match="no step"):
        recorder.trace()
    with echo.Runtime(
        model.shape("fp32", "fp32"), device="cpu", host_tokens=256, max_context=128, max_batch=2, threshold_alpha=0.0
    ) as runtime:
        session = runtime.open_session(100)
        runtime.prefill(session, list(range(29)), model.forward)
        if captured:
            runtime.capture(model.forward, batch_sizes=[2])  # with a padding row
        seen.clear()
        thresholds = []
        for token in range(6):
            runtime.step(echo.Batch([session], [token]), None if captured else model.forward)
            thresholds.append(runtime.thresholds(session))
            recorder.kth_scores(thresholds[-1])
        trace = recorder.trace("tiny", "numbers", 1)
        both = echo.Batch([session, runtime.open_session(20)], [1, 2])
        with pytest.raises(echo.NotSupported, match="^sessions: a step of 2 rows"):
            runtime.step(both, None if captured else model.forward)
        with pytest.raises(echo.InvalidArgument, match="^layers: 1 given"):
            runtime.step(echo.Batch([session], [1]), hf.DsaModel(network, SelectionRecorder(layers=1)).forward)
    assert (trace.steps, trace.layers, trace.top_k) == (6, 2, 32)
    assert trace.context.tolist() == list(range(30, 36))  # 30 and 31 tokens: not all places are taken
    np.testing.assert_array_equal(trace.positions.reshape(12, 32), np.stack(seen))
    np.testing.assert_array_equal(trace.kth_score, np.stack(thresholds))


def test_a_recorded_file_is_replayed(capsys, tmp_path):
    pytest.importorskip("echo.hf")
    path = str(tmp_path / "trace.npz")
    assert cli.main(["record", "--out", path, "--tokens", "600", "--new-tokens", "24"]) == 0
    assert "24 steps, 3 layers, top-64 of 601 to 624 tokens" in capsys.readouterr().out
    trace = Trace.load(path)
    assert trace.positions.min() >= 0 and np.isfinite(trace.kth_score).all()
    assert cli.main(["replay", path, "--pools", "1,2.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-6].split() == ["pool", "/", "top-k", "1", "2.5"]
    table = {name: [float(rate) for rate in rates] for name, *rates in map(str.split, lines[-5:])}
    assert list(table) == list(policies.POLICIES)
    assert table["echo"][1] == round(100 * miss_rate(trace, 160, "echo"), 1)
    assert all(table["belady"][i] <= min(table[policy][i] for policy in REAL) for i in range(2))


def test_a_regime_is_replayed(capsys):
    assert cli.main(["replay", "glm", "--pools", "2"]) == 0
    assert "synthetic:glm: 400 steps, 1 layer, top-256 of 4,096 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("replay", "glm", "--pools", "0.5"), "pools"),
        (("replay", "glm", "--pools", "one"), "pools"),
        (("replay", "nowhere.npz"), "path"),
        (("record", "--out", "t.npz", "--tokens", "0"), "tokens"),
        (("record", "--out", "t.npz", "--new-tokens", "0"), "new_tokens"),
        (("record", "--out", "no/where/t.npz"), "out"),
        (("record", "--out", "."), "out"),
    ],
)
def test_commands_refuse_by_name(capsys, tmp_path, monkeypatch, arguments, named):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 1
    assert capsys.readouterr().err.startswith(f"echo-kv {arguments[0]}: {named}: ")
