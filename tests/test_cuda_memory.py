"""Memory of a GPU and of its host: copies over the link, pinned memory, and what a process leaves behind."""

from __future__ import annotations

import os
import pathlib
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.gpu import LONG, ON_A_GPU, free_memory, nothing_lost, use_a_runtime
from support.rig import host_row_of, small_shape, tokens_of

import echo

pytestmark = [*ON_A_GPU, pytest.mark.alone]

GIB = 1 << 30


@pytest.fixture
def intact(device: str, one_torch_thread: None) -> Iterator[None]:
    """Device memory is as free afterwards as it was before, and a new runtime works."""
    with nothing_lost():
        yield


def need_host_memory(gib: int) -> None:
    """Skips where there is not as much."""
    if 0 < echo.machine_limits("cuda").host_bytes < gib * GIB:
        pytest.skip(f"needs {gib} GiB of host memory")


# --- copies ---------------------------------------------------------------------------------------------------------


def test_recall_of_scattered_rows_uses_the_link(make_runtime, device, capsys):
    """Pitfall 17: one row of a batch that misses everything gets most of what the link gives such rows."""
    need_host_memory(4)
    sets, calls, context = 128, 32, 1 << 18
    shape = small_shape(layers=1, top_k=2048, row_format="raw", raw_row_bytes=656, index_key_format="fp8")
    runtime = make_runtime(
        shape,
        host_tokens=26_600 * 64,  # more than 1 GiB
        gpu_slots=(calls + 2) * 2048,
        max_batch=1,
        max_context=context + 64,
        prefill_chunk=1,
    )
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, size=(context, 656), dtype=np.uint8)
    keys = np.zeros((context // 64, shape.index_block_bytes), np.uint8)
    session = runtime.open_session(context + 64)
    runtime.import_kv(session, echo.KvRuns.from_arrays([rows], [keys]))
    order = np.sort(rng.permutation(context).astype(np.int32).reshape(sets, 1, 2048), axis=2)
    wants = [torch.from_numpy(part).to(device) for part in order]
    new_row, new_key = torch.zeros(1, 656, dtype=torch.uint8, device=device), torch.zeros(1, 16, device=device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    last: list[torch.Tensor] = []

    def measure(first: int) -> float:
        """GB/s of recalls of fresh selections, all of them within one step."""

        def forward(p: echo.ForwardPass) -> None:
            p.append(0, new_row, new_key)
            torch.cuda._sleep(LONG // 10)  # wakes the clocks, and lets the calls be issued meanwhile
            begin.record()
            slots = [p.recall(0, want) for want in wants[first : first + calls]]
            end.record()
            last[:] = [torch.from_dlpack(slots[-1]).clone()]

        before = runtime.stats().layers[0]
        runtime.step(echo.Batch([session], [1]), forward)
        runtime.synchronize()
        after = runtime.stats().layers[0]
        assert (after.misses - before.misses, after.hits - before.hits) == (calls * 2048, 0)
        held = runtime.cache_state(0)["slots"][last[0][0].cpu().numpy()]
        np.testing.assert_array_equal(held, rows[order[first + calls - 1, 0]])
        return calls * 2048 * 656 / (begin.elapsed_time(end) * 1e-3) / 1e9

    rates = [measure(first) for first in range(0, sets, calls)]
    rate = statistics.median(rates[1:])  # the first loads the kernels
    with capsys.disabled():
        print(f"\nrecall of 2048 rows of 656 B, all missing: {rate:.1f} GB/s (each of {[round(r, 1) for r in rates]})")
    assert rate >= 8.0


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_rows_around_the_border_of_two_pinned_chunks(make_rig, captured):
    """Pitfall 19: kernels write and read host rows by the device's address, also a row that lies in two chunks."""
    need_host_memory(4)
    border = GIB // 656  # this row lies in both
    first_block = border // 64 - 4
    shape = small_shape(layers=1, top_k=8, row_format="raw", raw_row_bytes=656, index_key_format="fp8")
    rig = make_rig(shape, host_tokens=(first_block + 20) * 64, max_context=first_block * 64, max_batch=1)
    if captured:
        rig.runtime.capture(rig.model, [1])
    filler = rig.runtime.open_session(first_block * 64)
    pair = rig.open(640)
    filler.close()
    crossing = border - host_row_of(pair.session, 0)  # position of that row
    assert 200 < crossing < 400 and host_row_of(pair.session, crossing) == border
    rig.prefill(pair, tokens_of(1, crossing - 30), verify=False)
    for cut in (crossing, crossing - 3, crossing + 1):
        for token in tokens_of(cut, 70):
            rig.step([(pair, token)], captured=captured)
        rig.check(thresholds=False)
        rig.truncate(pair, cut)
    rig.prefill(pair, tokens_of(2, 60), verify=False)
    rig.step([(pair, 1)], captured=captured)
    rig.check(thresholds=False)
    assert rig.runtime.stats().layers[0].misses > 200


# --- allocation -----------------------------------------------------------------------------------------------------


def test_more_than_the_machine_has_is_refused_with_a_table(intact):
    """Pitfall 18: before any memory is touched."""
    limit = echo.machine_limits("cuda").host_bytes
    if limit == 0:
        pytest.skip("nothing says how much host memory there is")
    shape = small_shape(layers=1, row_format="raw", raw_row_bytes=4096, index_key_format="fp8")
    started = time.monotonic()
    with pytest.raises(echo.CapacityError, match="^host_tokens, gpu_slots: the runtime does not fit") as caught:
        echo.Runtime(shape, device="cuda", host_tokens=limit // 4096 + (1 << 20))
    assert time.monotonic() - started < 10
    table = str(caught.value)
    assert "host_pool" in table and "slots" in table and "DOES NOT FIT" in table


def test_host_memory_that_the_system_refuses_leaves_nothing(intact):
    """Pitfall 18: the plan fits, but memory cannot be had; nothing stays pinned or allocated, no error sticks."""
    need_host_memory(5)
    shape = small_shape(layers=1, row_format="raw", raw_row_bytes=4096, index_key_format="fp8")
    settings = {"device": "cuda", "host_tokens": 3 * GIB // 4096, "max_batch": 64, "max_sessions": 64}
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    for _ in range(5):
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + GIB, hard))
        try:
            with pytest.raises(echo.CapacityError, match="^host_pool: .* bytes of pinned host memory asked"):
                echo.Runtime(shape, **settings)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    with echo.Runtime(shape, **settings) as runtime:
        assert runtime.stats().host_bytes == 3 * GIB


def test_host_memory_is_kept_for_the_next_runtime_that_needs_as_much(intact):
    """Not for another; it counts as free meanwhile, and in the end it is."""
    need_host_memory(5)
    shape = small_shape(layers=1, row_format="raw", raw_row_bytes=4096, index_key_format="fp8")

    def resident() -> int:
        """Bytes of this process."""
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def use(gib: int) -> None:
        with echo.Runtime(shape, device="cuda", host_tokens=gib * GIB // 4096, max_batch=64) as runtime:
            assert runtime.stats().host_bytes == gib * GIB
            session = runtime.open_session(256)
            runtime.prefill(session, [1] * 200, lambda p: p.append(0, rows, keys))
            assert (runtime.export_kv(session).rows(0)[0] == 7).all()

    rows, keys = torch.full((200, 4096), 7, dtype=torch.uint8, device="cuda"), torch.zeros(200, 16, device="cuda")
    use(3)
    before, limit = resident(), echo.machine_limits("cuda").host_bytes
    echo.keep_host_memory(True)
    try:
        for _ in range(3):  # always the same 3 GiB
            use(3)
            assert 2 * GIB < resident() - before < 4 * GIB
            assert abs(echo.machine_limits("cuda").host_bytes - limit) < GIB
        use(1)
        assert resident() - before > 3.5 * GIB
    finally:
        echo.keep_host_memory(False)
    assert resident() - before < GIB / 2


def test_runtimes_that_close_give_everything_back(intact):
    """Device memory does not creep."""
    before = free_memory()
    for _ in range(6):
        use_a_runtime()
    assert abs(free_memory() - before) < 32 << 20


# --- the end of a process -------------------------------------------------------------------------------------------

CHILD = """
import sys
import torch
from support.rig import small_shape
from support.synthetic import SyntheticModel
import echo

shape = small_shape()
model = SyntheticModel(shape, device="cuda")
runtime = echo.Runtime(shape, device="cuda", host_tokens=2048, max_batch=4, max_context=512)
runtime.capture(model, [4])
sessions = [runtime.open_session(512) for _ in range(4)]
step = 0
while True:
    runtime.step(echo.Batch(sessions, [step % 61] * 4), model if step % 3 == 0 else None)
    step += 1
    if sessions[0].length == 512:
        for session in sessions:
            session.truncate(0)
    if step == 30:
        print("stepping", flush=True)
        if sys.argv[1] == "exit":
            torch.cuda._sleep(400_000_000)
            runtime.step(echo.Batch(sessions, [1] * 4))
            sys.exit(7)
"""


@pytest.mark.parametrize("how", ["SIGTERM", "exit"])
def test_a_process_that_ends_while_it_steps_leaves_nothing(intact, how):
    """Pitfall 22: by signal or of its own, with steps in flight: no process stays, the GPU is free and works."""
    paths = [str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, how],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "stepping\n", child.communicate(timeout=60)[1]
        if how == "SIGTERM":
            time.sleep(0.3)
            child.send_signal(signal.SIGTERM)
        _, errors = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == (-signal.SIGTERM if how == "SIGTERM" else 7), errors
    assert "Traceback" not in errors and "echo:" not in errors, errors
    with pytest.raises(ProcessLookupError):  # it was the only one of its group
        os.killpg(child.pid, 0)
