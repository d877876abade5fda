"""Captured steps on a GPU: they do what eager ones do, and ask of CUDA one copy and one launch."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from support.gpu import (
    ON_A_GPU,
    assert_same_mirrors,
    batch_of,
    finished,
    host_work,
    marked,
    matching,
    opened,
    recorded,
    steady,
)
from support.rig import assert_same_bits, full_width_shape, tokens_of

import echo

pytestmark = ON_A_GPU


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


@pytest.mark.alone
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
