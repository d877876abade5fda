"""Steps on a GPU: what only shows there. Graphs, streams, steps in flight, errors of kernels."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from support.gpu import (
    LONG,
    assert_same_mirrors,
    batch_of,
    finished,
    host_work,
    marked,
    matching,
    nothing_lost,
    opened,
    recorded,
    steady,
    tokens_of,
    watched,
)
from support.rig import Pair, Rig, assert_same_bits, full_width_shape, host_rows, small_shape
from support.synthetic import LayerInputs, SyntheticModel

import echo

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.parametrize("device", ["cuda"], indirect=True)]


@pytest.fixture(autouse=True)
def watchdog(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing hangs for ever."""
    with watched(request.config):
        yield


# --- graphs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_format", ["fp8_656", "bf16_1152"])
@pytest.mark.parametrize("query_rows", [1, 2])
def test_replays_do_what_eager_steps_do(make_rig, row_format, query_rows):
    """Pitfall 3: outputs, selections, host mirrors and moving averages, with prompts, forks and padding."""
    shape = full_width_shape(row_format, index_dim=128)
    eager = make_rig(shape, model={"dtype": torch.bfloat16}, query_rows=query_rows)
    replayed = make_rig(shape, model=eager.model, query_rows=query_rows)
    replayed.runtime.capture(replayed.model, [1, 2, 4], query_rows)
    for rig in (eager, replayed):
        for i in range(3):
            opened(rig, 200, tokens_of(i, 30 + 40 * i))
        rig.fork(rig.pairs[2])
    rng = np.random.default_rng(0)
    for turn in range(32):
        who = rng.permutation(4)[: turn % 4 + 1]
        tokens = rng.integers(61, size=(4, query_rows)).tolist()
        expected = eager.step([(eager.pairs[i], tokens[i]) for i in who], verify=False)
        given = replayed.step([(replayed.pairs[i], tokens[i]) for i in who], captured=True, verify=False)
        assert_same_bits(given, expected)
    assert_same_mirrors(replayed, eager)
    for rig in (eager, replayed):
        rig.check(thresholds=False)
        assert all(layer.evictions > 0 for layer in rig.runtime.stats().layers)


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
def test_steps_run_on_the_stream_that_was_set(make_rig, captured):
    """Where torch's current stream is another one, and the set one is busy when a step is called."""
    shape = full_width_shape("fp8_656", index_dim=128)
    usual = make_rig(shape, model={"dtype": torch.bfloat16})
    own = make_rig(shape, model=usual.model)
    stream = torch.cuda.Stream()
    own.runtime.use_stream(stream.cuda_stream)
    own.runtime.capture(own.model, [2])
    for rig in (usual, own):
        for i in range(2):
            opened(rig, 200, tokens_of(i, 60))
    for token in range(20):
        expected = usual.runtime.step(batch_of(usual.pairs, token), usual.model)
        usual.runtime.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)  # a millisecond
        given = own.runtime.step(batch_of(own.pairs, token), None if captured else own.model)
        own.runtime.synchronize()
        stream.synchronize()
        assert_same_bits(given, expected)
    assert_same_mirrors(own, usual)


def test_a_steady_captured_step_is_one_copy_and_one_launch(make_rig, device, tmp_path):
    """Pitfall 13: no synchronisation, no allocation, no pageable copy; by what CUPTI saw of 100 steps."""
    steps = 100
    rig = make_rig(full_width_shape("fp8_656"), host_tokens=4096, max_context=512)
    rig.runtime.capture(rig.model, [4])
    pairs = [opened(rig, 512, tokens_of(i, 200)) for i in range(4)]
    batches = [batch_of(pairs, token) for token in range(60)]

    def run(count: int) -> None:
        """Like a scheduler that reads the tokens of a step before it issues the one after the next."""
        events = [torch.cuda.Event(), torch.cuda.Event()]
        for number in range(count):
            rig.runtime.step(batches[number % 60])
            events[number % 2].record()
            while number > 0 and not events[(number - 1) % 2].query():
                pass
        while not events[(count - 1) % 2].query():
            pass

    run(10)
    before = rig.runtime.stats()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function("steady steps"):
            run(steps)
        time.sleep(0.1)
        # Calls that would have been wrong, to see that they would have been seen.
        rig.runtime.synchronize()
        marked().synchronize()
        torch.ones(4096).to(device)
        torch.cuda.synchronize()
    after = rig.runtime.stats()
    assert after.steps - before.steps == steps
    assert after.recalled_bytes > before.recalled_bytes  # there was something to fetch
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    calls, copies, later = recorded(tmp_path / "trace.json", "steady steps")
    print(f"calls in {steps} steps: {dict(calls)}\ncopies: {dict(copies)}\nlater: {dict(later)}")
    assert host_work(calls, copies) == steady(steps)
    assert {
        "synchronisations of echo": matching(later, r"cudaStreamSynchronize") > 0,
        "synchronisations of events": matching(later, r"cudaEventSynchronize") > 0,
        "pageable copies": any("Pageable" in name for name in later),
    } == dict.fromkeys(("synchronisations of echo", "synchronisations of events", "pageable copies"), True)


def test_padding_and_empty_sessions_finish(make_rig):
    """Pitfall 15: batches of padding alone, sessions of length 0, both at once; nothing waits for ever."""
    rig = make_rig(full_width_shape("fp8_656"), query_rows=2)
    rig.runtime.capture(rig.model, [1, 4])
    for _ in range(3):
        rig.runtime.step(echo.Batch())
    assert finished(marked())
    for captured in (True, False):
        pairs = [rig.open(64) for _ in range(3)]
        _, selections = rig.step([(pair, 7) for pair in pairs], captured=captured, verify=False)
        assert finished(marked())
        assert (selections[:, :, 0] == 0).all() and (selections[:, :, 1:] == -1).all()
        rig.step([(rig.open(64), 3), (pairs[0], 3)], captured=captured, verify=False)
        rig.step([(rig.open(64), [1, 2])], verify=False)
        assert finished(marked())
        rig.check(thresholds=False)
        for pair in list(rig.pairs):
            rig.close(pair)


# --- streams --------------------------------------------------------------------------------------------------------


class LateModel(SyntheticModel):
    """Rows are multiplied by a number that is written on the stream, shortly before the step."""

    gain: torch.Tensor

    def inputs(self, layer: int, tokens: torch.Tensor, positions: torch.Tensor) -> LayerInputs:
        """As always, but for the rows."""
        x = super().inputs(layer, tokens, positions)
        x.kv = x.kv * self.gain.to(x.kv.device)  # the oracle computes on the CPU
        return x


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_a_step_comes_after_what_is_on_its_stream_and_before_what_follows(make_rig, device, captured):
    """Inputs are produced and outputs consumed on a stream of torch's, without a synchronisation of any kind."""
    model = LateModel(small_shape(), device=device)
    model.gain = torch.ones(1, device=device)
    runs = []
    for flowing in (False, True):
        rig = make_rig(model.shape, model=model)
        replay = captured and flowing
        if replay:
            rig.runtime.capture(model, [2])
        model.gain.fill_(1.0)
        pairs = [opened(rig, 128, tokens_of(i, 40)) for i in range(2)]
        torch.cuda.synchronize()
        stream = torch.cuda.Stream() if flowing else torch.cuda.current_stream()
        results = []
        with torch.cuda.stream(stream):
            for turn in range(12):
                if flowing:
                    torch.cuda._sleep(LONG // 40)
                model.gain.fill_(2.0 ** (turn % 5 - 2))
                outputs, selections = rig.runtime.step(batch_of(pairs, turn), None if replay else model)
                results.append((outputs * 2.0, selections + 1))
                model.gain.fill_(float("nan"))  # would be seen if the step were not done with it
                if not flowing:
                    torch.cuda.synchronize()
        stream.synchronize()
        runs.append((rig, results))
    (waiting, expected), (flowing_rig, given) = runs
    for one, other in zip(given, expected, strict=True):
        assert one[0].isfinite().all()
        assert_same_bits(one, other)
    assert_same_mirrors(flowing_rig, waiting)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_steps_on_changing_streams_come_one_after_the_other(make_rig, captured):
    """Sessions and pools are shared by all steps, so a step waits for the last one, on whatever stream that was."""
    straight = make_rig(small_shape())
    winding = make_rig(small_shape(), model=straight.model)
    if captured:
        winding.runtime.capture(winding.model, [2])
    for rig in (straight, winding):
        for i in range(2):
            opened(rig, 128, tokens_of(i, 50))
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    rng = np.random.default_rng(1)
    given = []
    for turn in range(18):
        with torch.cuda.stream(streams[int(rng.integers(3))]):
            torch.cuda._sleep(LONG // int(rng.integers(40, 400)))
            model = None if captured else winding.model
            outputs, selections = winding.runtime.step(batch_of(winding.pairs, turn), model)
            given.append((outputs.clone(), selections.clone()))
    torch.cuda.synchronize()
    for turn, results in enumerate(given):
        assert_same_bits(results, straight.step([(pair, turn) for pair in straight.pairs], verify=False))
    assert_same_mirrors(winding, straight)


# --- in flight ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_runtime_ends_with_steps_in_flight(device, one_torch_thread, how):
    """Pitfall 22: it waits for them, bounded, and does so once; what was handed out stays readable."""

    def run() -> None:
        shape = small_shape()
        model = SyntheticModel(shape, device=device)
        runtime = echo.Runtime(shape, device=device, host_tokens=1024, max_batch=2, max_context=256)
        kept: list[torch.Tensor] = []  # device memory of the runtime, so that it cannot go at once
        model.on_stage = lambda stage, layer, p: kept.append(torch.from_dlpack(p.selection)) if stage == "end" else None
        runtime.capture(model, [2])
        model.on_stage = None
        sessions = [runtime.open_session(128) for _ in range(2)]
        for session in sessions:
            runtime.prefill(session, tokens_of(1, 60), model)
        kv = runtime.export_kv(sessions[0])
        runtime.synchronize()
        torch.cuda._sleep(LONG)
        for token in range(3):
            runtime.step(echo.Batch(sessions, [token, token]))
        last = marked()
        assert not last.query(), "the steps are done already"
        started = time.monotonic()
        if how == "closed":
            runtime.close()
            assert last.query(), "memory went while steps were in flight"
            runtime.close()
            assert runtime.closed and all(session.closed for session in sessions)
        else:
            del runtime
            gc.collect()
            assert last.query(), "memory went while steps were in flight"
        assert time.monotonic() - started < 30
        assert (kept[-1].cpu()[0] >= 0).all() and len(host_rows(kv, 0)) == 60
        with pytest.raises(echo.StateError, match="^session: "):
            sessions[0].fork()

    with nothing_lost():
        run()


def test_rows_of_a_closed_session_wait_for_its_steps(make_rig):
    """Pitfall 4: what the next session writes to its host rows is not overwritten by a step that was in flight."""
    rig = make_rig(small_shape(), host_tokens=256, max_context=128, max_batch=2)
    source = opened(rig, 128, tokens_of(1, 100))
    for imported in (True, False, True, False):
        leaving = opened(rig, 128, tokens_of(2, 70))
        blocks = leaving.session.blocks
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG)
        rig.runtime.step(batch_of([leaving]), rig.model)
        rig.close(leaving)
        assert not marked().query(), "the step is done already"
        follower = rig.open(128)
        assert follower.session.blocks == blocks
        if imported:
            rig.runtime.import_kv(follower.session, rig.runtime.export_kv(source.session))
            follower.oracle = source.oracle.copy()
        else:
            rig.prefill(follower, tokens_of(3, 90))
        rig.check()
        rig.step([(follower, 5), (source, 6)])
        rig.check()
        rig.close(follower)


def test_cuts_forks_and_pauses_with_steps_in_flight(make_rig):
    """They come after the steps that were issued before them, and before those that are issued next."""
    plain = make_rig(small_shape())
    rig = make_rig(small_shape(), model=plain.model)
    rig.runtime.capture(rig.model, [2])
    prompt = tokens_of(4, 100)
    parent = opened(rig, 256, prompt)
    torch.cuda.synchronize()
    given = []

    def issue(pairs: list[Pair], token: int) -> None:
        torch.cuda._sleep(LONG // 10)
        outputs, selections = rig.runtime.step(batch_of(pairs, token))
        for i, pair in enumerate(pairs):
            given.append((outputs[i : i + 1].clone(), selections[i : i + 1].clone()))
            pair.oracle.append([token])

    issue([parent], 1)
    child = rig.fork(parent)
    issue([parent, child], 2)
    rig.truncate(child, 70)
    issue([child, parent], 3)
    parent.session.pause()
    issue([child], 4)
    parent.session.resume()
    rig.truncate(parent, 20)
    issue([parent, child], 5)
    torch.cuda.synchronize()
    straight, cut, short = opened(plain, 256, prompt), opened(plain, 256, prompt[:70]), opened(plain, 256, prompt[:20])
    expected = []
    for twin, token in (
        (straight, 1),
        (straight, 2),
        (None, 2),
        (cut, 3),
        (straight, 3),
        (cut, 4),
        (short, 5),
        (cut, 5),
    ):
        # None: the child did what its parent did
        expected.append(plain.step([(twin, token)], verify=False) if twin else expected[-1])
    for one, other in zip(given, expected, strict=True):
        assert_same_bits(one, other)
    rig.check(thresholds=False)


# --- errors ---------------------------------------------------------------------------------------------------------


def select_wrongly(rig: Rig, pair: Pair, entry: int) -> None:
    """A step whose forward selects a position that its row does not have."""
    wanted = torch.arange(rig.model.shape.top_k, dtype=torch.int32)[None]
    wanted[0, 5] = entry
    selection = wanted.to(rig.model.device)

    def forward(p: echo.ForwardPass) -> None:
        for layer in range(rig.model.shape.layers):
            x = rig.model.inputs(layer, torch.from_dlpack(p.tokens), torch.from_dlpack(p.positions))
            p.append(layer, x.kv, x.index_key)
            p.recall(layer, selection)

    rig.runtime.step(batch_of([pair], 9), forward)
    pair.oracle.append([9])


@pytest.mark.parametrize("entry", [71, 1 << 20, -2, -(1 << 31)])
def test_what_kernels_find_wrong_is_raised_by_synchronize(make_rig, entry):
    """Once only; the entry was left out, nothing else happened, and the runtime goes on."""
    rig = make_rig(small_shape())
    pair = opened(rig, 128, tokens_of(5, 70))  # the new token has position 70
    select_wrongly(rig, pair, entry)
    with pytest.raises(echo.InvalidArgument, match="^selection: "):
        rig.runtime.synchronize()
    rig.runtime.synchronize()
    rig.step([(pair, 3)])
    rig.check(thresholds=False)


@pytest.mark.parametrize("how", ["step", "replay", "prefill"])
def test_what_kernels_find_wrong_is_raised_by_the_next_pass(make_rig, how):
    """That pass does not happen; made again, it does."""
    rig = make_rig(small_shape())
    rig.runtime.capture(rig.model, [2])
    pair = opened(rig, 128, tokens_of(5, 70))
    select_wrongly(rig, pair, 71)
    torch.cuda.synchronize()

    def again() -> None:
        if how == "prefill":
            rig.prefill(pair, [1])
        else:
            rig.step([(pair, 1)], captured=how == "replay")

    with pytest.raises(echo.InvalidArgument, match="^selection: "):
        again()
    assert pair.session.length == 71
    rig.check(thresholds=False)
    again()
    rig.check(thresholds=False)


OTHER_CALLS: dict[str, Callable[[Rig, Pair], object]] = {
    "open_session": lambda rig, pair: rig.open(64),
    "fork": lambda rig, pair: rig.fork(pair),
    "truncate": lambda rig, pair: rig.truncate(pair, 10),
    "pause": lambda rig, pair: pair.session.pause(),
    "close": lambda rig, pair: rig.close(pair),
}


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_what_kernels_find_wrong_stays_until_then(make_rig, name):
    """Calls that are no passes do what they should, and do not swallow it."""
    rig = make_rig(small_shape())
    pair = opened(rig, 128, tokens_of(5, 70))
    other = rig.fork(pair)  # so that a cut has to copy
    select_wrongly(rig, pair, 71)
    torch.cuda.synchronize()
    OTHER_CALLS[name](rig, pair)
    with pytest.raises(echo.InvalidArgument, match="^selection: "):
        rig.step([(other, 4)])
    rig.check(thresholds=False)  # counts free blocks and sessions too
    for each in rig.pairs:
        each.session.resume()
        rig.step([(each, 4)])
    rig.check(thresholds=False)
