"""The Python package and the life of a runtime, as users meet them."""

from __future__ import annotations

import pathlib
import resource
import subprocess
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.rig import small_shape

import echo


def test_errors_are_also_what_python_programmers_expect():
    for error, base in (
        (echo.InvalidArgument, ValueError),
        (echo.CapacityError, MemoryError),
        (echo.StateError, RuntimeError),
        (echo.CudaError, RuntimeError),
        (echo.NotSupported, NotImplementedError),
    ):
        assert issubclass(error, base) and issubclass(error, echo.Error)


def test_version_and_build_are_told():
    assert echo.build_info().startswith(f"echo {echo.__version__}, ")
    assert (pathlib.Path(echo.cmake_dir()) / "lib" / "cmake" / "echo" / "echo-config.cmake").exists()


def test_importing_takes_neither_torch_nor_cuda():
    code = "import sys, echo; assert 'torch' not in sys.modules; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_counters_count(make_rig):
    rig = make_rig(small_shape(), max_batch=1)
    pair = rig.open(128)
    rig.prefill(pair, list(range(60)) + [3] * 10)
    for token in range(5):
        rig.step([(pair, token)])
    stats = rig.stats()
    assert (stats.steps, stats.prefill_tokens, stats.sessions) == (5, 70, 1)
    fetched = sum(layer.misses for layer in stats.layers)
    selected = 3 * (sum(range(1, 16)) + 16 * 60)
    assert sum(layer.hits + layer.misses for layer in stats.layers) == selected
    assert repr(stats).endswith(f"rows missed {fetched}, prefetched 0, of them used 0, forecast 0, of them used 0>")
    assert stats.recalled_bytes == fetched * 320
    assert stats.hit_rate == pytest.approx(1 - fetched / selected)
    assert all(layer.appended == 5 for layer in stats.layers)  # prefill fills no slots


def test_sessions_close_with_their_block(make_runtime):
    runtime = make_runtime(small_shape())
    with runtime.open_session(100) as session:
        assert (session.id, session.length, session.capacity, session.closed) == (0, 0, 100, False)
        assert len(session.blocks) == 2
        assert repr(session) == "<Session 0, 0 of 100 tokens>"
    assert session.closed and "closed" in repr(session)
    with pytest.raises(ZeroDivisionError), runtime.open_session(100) as session:
        raise ZeroDivisionError
    assert session.closed and session.id == 1
    session.close()
    assert runtime.stats().sessions == 0


def test_everything_after_close_is_refused_and_close_is_idempotent(make_rig):
    rig = make_rig(small_shape())
    pair = rig.open(64)
    rig.prefill(pair, [1, 2, 3])
    rig.runtime.capture(rig.model, [1])
    kv = rig.runtime.export_kv(pair.session)
    runtime, session = rig.runtime, pair.session
    runtime.close()
    runtime.close()
    assert runtime.closed and session.closed
    for call in (
        lambda: runtime.open_session(1),
        lambda: runtime.prefill(session, [1], rig.model),
        lambda: runtime.prefill(session, [1]),
        lambda: runtime.step(echo.Batch([session], [1]), rig.model),
        lambda: runtime.step(echo.Batch()),
        lambda: runtime.capture(rig.model, [1]),
        lambda: runtime.export_kv(session),
        lambda: runtime.import_kv(session, kv),
        lambda: runtime.begin_import(session, 1),
        lambda: runtime.finish_import(session, kv),
        lambda: runtime.thresholds(session),
        lambda: runtime.stats(),
        lambda: runtime.cache_state(0),
        lambda: runtime.synchronize(),
    ):
        with pytest.raises(echo.StateError, match="^runtime: it is closed"):
            call()
    for call in (
        lambda: session.fork(),
        lambda: session.truncate(0),
        lambda: session.pause(),
        lambda: session.resume(),
    ):
        with pytest.raises(echo.StateError, match="^session: session 0 is closed"):
            call()
    session.close()
    assert (session.length, session.capacity) == (3, 64)
    assert runtime.plan.host_blocks == 32 and runtime.device.startswith(rig.kind)  # what it was stays known


def test_closing_does_not_wait_to_be_asked(make_rig):
    """Pitfall 22: sessions and the runtime are closed right behind steps that may still be running."""
    rig = make_rig(small_shape())
    rig.runtime.capture(rig.model, [2])
    sessions = [rig.runtime.open_session(64) for _ in range(2)]
    for token in range(20):
        outputs, _ = rig.runtime.step(echo.Batch(sessions, [token, token]))
    sessions[0].close()
    outputs, _ = rig.runtime.step(echo.Batch(sessions[1:], [1]))
    rig.runtime.close()
    assert outputs.isfinite().all()


def test_what_a_runtime_handed_out_outlives_it(make_rig):
    rig = make_rig(small_shape())
    pair = rig.open(64)
    kept: dict[str, np.ndarray] = {}

    def look(stage: str, layer: int, p: echo.ForwardPass) -> None:
        if stage == "end" and p.device == "cpu":
            kept.update(tokens=p.tokens, positions=p.positions, selection=p.selection)

    rig.model.on_stage = look
    outputs, selections = rig.prefill(pair, [4, 5, 6])
    plan, state, thresholds = rig.runtime.plan, rig.runtime.cache_state(0), rig.runtime.thresholds(pair.session)
    copies = {name: array.copy() for name, array in kept.items()}
    rig.runtime.close()
    assert plan.config.host_tokens == 2048 and len(state["slot_of"]) == 2048 and len(thresholds) == 3
    assert outputs.isfinite().all() and (selections[2, :, :3].cpu() == torch.tensor([0, 1, 2])).all()
    for name, array in kept.items():
        np.testing.assert_array_equal(array, copies[name])
    del rig
    assert plan.table()


def test_sessions_outlive_a_runtime_that_was_dropped(device):
    runtime = echo.Runtime(small_shape(), device=device, host_tokens=64, max_batch=1)
    session = runtime.open_session(10)
    del runtime
    assert session.length == 0
    with pytest.raises(echo.StateError, match="^session: "):
        session.truncate(0)
    session.close()


def test_a_runtime_is_a_context_manager(device):
    with echo.Runtime(small_shape(), device=device, host_tokens=64, max_batch=1) as runtime:
        session = runtime.open_session(10)
        assert not runtime.closed
    assert runtime.closed and session.closed
    with pytest.raises(ZeroDivisionError), echo.Runtime(small_shape(), device=device, host_tokens=64) as runtime:
        raise ZeroDivisionError
    assert runtime.closed


def test_sessions_may_be_closed_from_any_thread(make_rig):
    rig = make_rig(small_shape())
    pairs = [rig.open(64) for _ in range(4)]
    for pair in list(pairs):
        worker = threading.Thread(target=pair.session.close)
        worker.start()
        worker.join()
    rig.pairs.clear()
    rig.check()


def test_a_session_is_equal_to_itself_alone(make_runtime):
    """A scheduler's table of places, some of them empty, can be searched for it."""
    runtime = make_runtime(small_shape())
    first, second = runtime.open_session(10), runtime.open_session(10)
    places = [None, "free", second, first]
    assert places.index(first) == 3 and second in places and first not in [None, 0]
    assert first != None  # noqa: E711


DROPS = """
import threading, time
import numpy as np
import echo

shape = echo.ModelShape(layers=64, index_heads=8, query_heads=1, top_k=16, row_format="fp32", index_key_format="fp32")

def append(p):
    for layer in range(64):
        p.append(layer, np.zeros((p.rows, shape.row_dim), np.float32), np.zeros((p.rows, shape.index_dim), np.float32))

def work(session, started):
    started.set()
    try:
        session.fork()
    except echo.StateError:  # it was dropped before
        pass

for round in range(40):
    runtime = echo.Runtime(shape, device="cpu", host_tokens=1024, max_context=512, max_batch=1, threads=1)
    session = runtime.open_session(128)
    runtime.prefill(session, [0] * 127, append)
    started = threading.Event()
    worker = threading.Thread(target=work, args=(session, started))
    worker.start()
    started.wait()
    time.sleep(1e-4 * round)
    del runtime
    worker.join()
    assert session.closed
print("done")
"""


def test_a_runtime_may_be_dropped_while_a_session_of_it_is_busy():
    """The call that is under way holds it; a process that dies would take the other tests along."""
    found = subprocess.run([sys.executable, "-c", DROPS], capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (0, "done\n", "")


def test_a_stream_is_let_go_of_at_once(make_runtime, monkeypatch):
    """Where torch has a stream to go to; else it stays in use, and has to live."""
    used = []
    core = SimpleNamespace(device="cuda:0", use_stream=used.append)
    torchs = SimpleNamespace(cuda=SimpleNamespace(current_stream=lambda device: SimpleNamespace(cuda_stream=7)))
    runtime = make_runtime(small_shape())
    real, runtime._core = runtime._core, core
    for with_cuda in (torchs, None):
        monkeypatch.setattr("echo.runtime._torch_with_cuda", lambda found=with_cuda: found)
        runtime.use_stream(5)
        runtime.use_stream(None)
    assert used == [5, 7, 5]
    runtime._core = real
    runtime.use_stream(0)  # a stream on every device
    for bad in ("5", 5.0, -1, 1 << 64):
        with pytest.raises(echo.InvalidArgument, match="^stream: .* given, expected an integer"):
            runtime.use_stream(bad)
    assert runtime._stream == 0
    runtime.close()
    with pytest.raises(echo.StateError, match="^runtime: it is closed"):
        runtime.use_stream(6)
    assert runtime._stream == 0


@pytest.mark.parametrize("broken", [False, True])
def test_a_capture_that_fails_leaves_the_stream_that_was_set(make_runtime, monkeypatch, broken):
    used = []

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    def use_stream(stream: int) -> None:
        used.append(stream)
        if broken and len(used) > 1:
            raise echo.CudaError("nothing works any more")

    def wait(_: object) -> None:
        """Of a stream that is on no GPU."""

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: SimpleNamespace(cuda_stream=7, wait_stream=wait))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    runtime = make_runtime(small_shape())
    real, runtime._core = runtime._core, SimpleNamespace(device="cuda:0", use_stream=use_stream, capture=fail)
    monkeypatch.setattr(runtime, "_torch_stream", lambda _: SimpleNamespace(cuda_stream=5, wait_stream=wait))
    with pytest.raises(ZeroDivisionError):
        runtime._capture_with_torch([1], 1)
    assert used == [7, 5]
    runtime._core = real


def resident_bytes() -> int:
    """Of this process."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_exports_that_are_dropped_leave_nothing():
    """Also where nothing else is ever asked of the runtime."""
    shape = small_shape(layers=1, index_key_format="fp8")
    with echo.Runtime(shape, device="cpu", host_tokens=12800, max_context=12800, max_batch=1, threads=1) as runtime:
        session = runtime.open_session(12800)
        zeros = np.zeros((12800, 320), np.uint8), np.zeros((200, shape.index_block_bytes), np.uint8)
        runtime.import_kv(session, echo.KvRuns.from_arrays([zeros[0]], [zeros[1]]))
        for count in (500, 20000):
            before = resident_bytes()
            for _ in range(count):
                runtime.export_kv(session)
        assert resident_bytes() - before < 4 << 20


def test_layers_of_the_cache_state_are_checked(make_runtime):
    runtime = make_runtime(small_shape())
    for layer in (-1, 3):
        with pytest.raises(echo.InvalidArgument, match=f"^layer: {layer} given, expected 0 to 2"):
            runtime.cache_state(layer)
    state = runtime.cache_state(2)
    assert {name: array.dtype for name, array in state.items()} == {
        "slot_of": np.int32,
        "host_of": np.int32,
        "stamp": np.int32,
        "slots": np.uint8,
    }
    assert (state["slot_of"] == -1).all() and (state["host_of"] == -1).all() and (state["stamp"] == -1).all()


class Named(OrderedDict):
    """Entries are attributes, too, as in the outputs of transformers' models."""

    def __setitem__(self, name: str, part: Any) -> None:
        super().__setitem__(name, part)
        super().__setattr__(name, part)


def test_outputs_may_be_anything(make_rig):
    """Tensors and tuples of them are cut to the batch's rows; what has no rows is left alone."""
    rig = make_rig(small_shape())
    pair = rig.open(64)
    scalar, name = torch.ones(()), "a name"

    def forward(p: echo.ForwardPass):
        outputs, selections = rig.model(p)
        return outputs, (selections, scalar), name, None

    rig.runtime.capture(forward, [4])
    outputs, (selections, same), label, nothing = rig.runtime.step(echo.Batch([pair.session], [1]))
    assert len(outputs) == len(selections) == 1
    assert same is scalar and label == name and nothing is None
    for make in (dict, Named, lambda **parts: defaultdict(list, parts)):
        rig.runtime.capture(lambda p, make=make: make(logits=rig.model(p)[0]), [4])
        given = rig.runtime.step(echo.Batch([pair.session], [1]))
        assert type(given) is type(make(logits=None)) and len(given["logits"]) == 1
        assert not isinstance(given, Named) or given.logits is given["logits"]
    rig.runtime.capture(rig.model, [4])


def test_batches_are_lists_that_grow(make_rig):
    rig = make_rig(small_shape(), query_rows=2)
    a, b = rig.open(64), rig.open(64)
    batch = echo.Batch()
    batch.add(a.session, 5)
    batch.add(b.session, np.int64(6))
    assert batch.flat() == ([5, 6], 1)
    assert echo.Batch([a.session], [(7, 8)]).flat() == ([7, 8], 2)
    assert echo.Batch([a.session, b.session], np.array([[1, 2], [3, 4]])).flat() == ([1, 2, 3, 4], 2)
    assert echo.Batch([a.session, b.session], torch.tensor([1, 2])).flat() == ([1, 2], 1)
    assert echo.Batch().flat() == ([], 1)
    for sessions, tokens in (((a.session,), (5,)), ([a.session], np.array([5])), ([a.session], torch.tensor([5]))):
        grown = echo.Batch(sessions, tokens)
        grown.add(b.session, 6)
        assert grown.flat() == ([5, 6], 1) and len(grown.sessions) == 2
    sessions, tokens = [a.session], [5]
    assert echo.Batch(sessions, tokens).tokens is tokens
    batch.tokens.append(7)
    with pytest.raises(echo.InvalidArgument, match="^tokens: 3 entries given"):
        batch.flat()
    assert echo.Batch().sessions is not echo.Batch().sessions


def test_batches_that_no_step_would_take_are_not_made(make_runtime):
    session = make_runtime(small_shape()).open_session(64)
    for sessions, tokens, message in (
        (session, 1, "^sessions: <Session .* given, expected a list of echo.Session objects"),
        ([1], [1], "^sessions: 1 given, expected echo.Session objects"),
        ([session], 1, "^tokens: 1 given, expected a list"),
        ([session], [1, 2], "^tokens: 2 entries given, expected one for each of 1 sessions"),
    ):
        with pytest.raises(echo.InvalidArgument, match=message):
            echo.Batch(sessions, tokens)


@pytest.mark.parametrize("bad", [1.0, "1", True, 1 << 80, -(1 << 80), [1], np.float64(1)])
def test_what_is_no_integer_is_refused_by_name(make_rig, bad):
    """Also what is one, but too large for any; numbers of numpy and torch are integers."""
    rig = make_rig(small_shape())
    runtime, pair = rig.runtime, rig.open(64)
    rig.prefill(pair, [1, 2, 3])
    empty = runtime.open_session(64)
    calls: dict[str, list[Callable[[Any], object]]] = {
        "max_tokens": [runtime.open_session, pair.session.fork],
        "length": [pair.session.truncate],
        "tokens": [lambda count: runtime.begin_import(empty, count)],
        "layer": [runtime.cache_state],
        "batch_sizes": [lambda size: runtime.capture(rig.model, [1, size])],
        "layers": [lambda layers: echo.ModelShape(layers=layers)],
    }
    if not isinstance(bad, list):
        calls["query_rows"] = [lambda rows: runtime.capture(rig.model, [1], rows)]
    for name, named in calls.items():
        for call in named:
            with pytest.raises(echo.InvalidArgument, match=f"^{name}: .* given, expected an integer of (32|64) bits"):
                call(bad)
    assert rig.stats().sessions == 2 and pair.session.length == 3
    for good in (np.int64(3), np.uint8(3), torch.tensor(3)):
        pair.session.truncate(good)
        pair.session.fork(good).close()
        runtime.open_session(good).close()
    empty.close()
    rig.check()


def test_sizes_that_are_no_list_are_refused_by_name(make_rig):
    rig = make_rig(small_shape())
    for sizes in (1, None):
        with pytest.raises(echo.InvalidArgument, match=f"^batch_sizes: {sizes} given, expected a list"):
            rig.runtime.capture(rig.model, sizes)
    rig.runtime.capture(rig.model, (size for size in (1, 2)))


def test_padding_has_as_many_rows_as_what_was_captured(make_rig):
    """A worker without requests steps with those that have some, whatever it captured."""
    rig = make_rig(small_shape(), query_rows=3)
    with pytest.raises(echo.StateError, match="^forward: none given, and none was captured"):
        rig.runtime.step(echo.Batch())
    rig.runtime.capture(rig.model, [2], query_rows=3)
    outputs, selections = rig.runtime.step(echo.Batch())
    assert len(outputs) == len(selections) == 0 and rig.stats().steps == 1
    rig.runtime.capture(rig.model, [2], query_rows=2)
    rig.runtime.step(echo.Batch())
    assert rig.stats().steps == 2


@pytest.mark.parametrize("shape", ["deepseek_v32", None, {"layers": 2}])
def test_a_shape_that_is_none_is_refused_by_name(shape):
    with pytest.raises(echo.InvalidArgument, match="^shape: .* given, expected an echo.ModelShape"):
        echo.Runtime(shape, host_tokens=64)
