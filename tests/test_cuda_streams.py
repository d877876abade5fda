"""Steps on a GPU's streams: they come after what is there before them, and host calls come in between at any time."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
import torch
from support.gpu import LONG, ON_A_GPU, assert_same_mirrors, batch_of, marked, nothing_lost, opened
from support.rig import Pair, assert_same_bits, host_rows, small_shape, tokens_of
from support.synthetic import LayerInputs, SyntheticModel

import echo

pytestmark = ON_A_GPU


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


@pytest.mark.alone
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


@pytest.mark.alone
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
