"""The runtime as Python schedulers use it: sessions, steps, captured forwards, and the streams they run on."""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from echo import _core
from echo._core import (
    ForwardPass,
    InvalidArgument,
    KvRuns,
    ModelShape,
    Plan,
    RuntimeConfig,
    RuntimeStats,
    Session,
    StateError,
)
from echo.batch import Batch, integers
from echo.extras import TORCH, lacking

Forward = Callable[[ForwardPass], Any]
"""A model: gets a ForwardPass, calls its verbs layer by layer, returns outputs with one row per query row."""


class Runtime:
    """Keeps the KV of many sessions in host memory and serves sparse attention from a small pool on the GPU.

    All memory is taken at construction; `plan` shows where it goes. Calls must not overlap. Whoever calls `step`
    samples: the runtime knows tokens only as numbers that the forward reads.

    Args:
        shape: sizes of the model.
        **settings: see `echo.config_fields()`; a setting that is not given comes from ECHO_<NAME>, else it has its
            default. The important ones: `host_tokens`, `gpu_slots`, `max_batch`, `max_context`, `device`.

    Raises:
        InvalidArgument: `shape` is none; a setting is unknown or out of range; the message names it.
        CapacityError: it does not fit this machine; the message is a table of what was asked and what there is.
    """

    def __init__(self, shape: ModelShape, **settings: Any) -> None:
        """See the class."""
        if not isinstance(shape, ModelShape):
            raise InvalidArgument(f"shape: {shape!r} given, expected an echo.ModelShape")
        self._core = _core.Runtime(shape, RuntimeConfig(**settings))
        self._running = threading.Lock()
        self._output: Any = None  # of the pass that runs
        self._forwards: dict[int, Forward] = {}  # captured, by query rows
        self._stream: int | None = None

    @property
    def plan(self) -> Plan:
        """All sizes, as computed before memory was touched."""
        return self._core.plan

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model."""
        return self.plan.shape

    @property
    def device(self) -> str:
        """'cpu' or 'cuda:N'."""
        return self._core.device

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._core.closed

    def open_session(self, max_tokens: int) -> Session:
        """Opens a session for `max_tokens` tokens, prompt and output together.

        Its host rows are set aside now, in one contiguous run where possible, so a session that was opened can
        always be decoded to its end.

        Raises:
            InvalidArgument: `max_tokens` is not 1 to `max_context`: it will never fit.
            CapacityError: they do not fit now; running sessions go on.
        """
        return self._core.open_session(max_tokens)

    def prefill(self, session: Session, tokens: Any, forward: Forward | None = None) -> Any:
        """Appends a chunk of at most `prefill_chunk` tokens, with one query per token.

        Args:
            session: an open session with room for them.
            tokens: integers, or an array of them.
            forward: the model; default the captured one. It runs eagerly, on rows of one session.

        Returns:
            What the forward returned. If the forward raises, the session is as before.

        Raises:
            InvalidArgument: `tokens` are not 1 to `prefill_chunk` integers. Whether the model knows them is between
                the caller and the forward.
            CapacityError: the session has no room for them.
            StateError: the session is closed or paused, or no forward is given or captured.
        """
        ids = integers(tokens)
        with self._pass():
            self._core.prefill(session, ids, self._eager(forward))
            return self._output

    def capture(self, forward: Forward, batch_sizes: Sequence[int], query_rows: int = 1) -> None:
        """Makes `forward` the model of this runtime.

        On a GPU it is captured through torch as one CUDA graph per batch size; `step` replays the smallest one that
        holds the batch, its other rows being padding. On the CPU a replay runs the forward again. The forward is run
        once per size on padding rows to warm it up; that changes no session. What was captured before for the same
        `query_rows` is replaced; prefill takes the latest forward.

        Args:
            forward: the model. It must not synchronise or allocate outside of torch while it is captured, and what
                it reads besides the pass (weights, static inputs) must stay where it is.
            batch_sizes: numbers of sessions to capture for, each at most `max_batch`.
            query_rows: new tokens per session.
        """
        if not callable(forward):
            raise InvalidArgument(f"forward: {forward!r} given, expected a callable")
        try:
            sizes = list(batch_sizes)
        except TypeError as error:
            raise InvalidArgument(f"batch_sizes: {batch_sizes!r} given, expected a list of them") from error
        with self._pass():
            before = self._forwards.get(query_rows)
            self._forwards[query_rows] = forward
            try:
                if self.device == "cpu":
                    self._core.capture(self._captured(query_rows), sizes, query_rows, None)
                else:
                    self._capture_with_torch(sizes, query_rows)
            except BaseException:
                if before is None:
                    del self._forwards[query_rows]
                else:
                    self._forwards[query_rows] = before
                raise

    def step(self, batch: Batch, forward: Forward | None = None) -> Any:
        """One decode step: appends each session's tokens and runs the model on them.

        Args:
            batch: sessions and their new tokens. May be empty if a forward was captured (padding rows only).
            forward: run this model eagerly, on exactly the batch's rows; default: replay the captured one.

        Returns:
            What the forward returned. Of a replay with padding rows, arrays are cut to the batch's rows (their first
            dimension; also in tuples, lists and dicts). Session i's rows are i * query_rows onwards. Outputs of a
            replay last until the next step of the same captured size: a GPU then writes to them again. If the forward
            raises, every session is as before. On a GPU the step may still be running; what its kernels find wrong (a
            selection of the caller's that names no token) is raised by the next pass or `synchronize`.

        Raises:
            InvalidArgument: naming the part of the batch that is malformed; nothing has changed.
            StateError: a session is closed, or nothing was captured that holds the batch.
            CapacityError: a session is full.
        """
        if not isinstance(batch, Batch):
            raise InvalidArgument(f"batch: {batch!r} given, expected an echo.Batch")
        tokens, query_rows = batch.flat()
        if not batch.sessions and query_rows not in self._forwards:  # padding has as many rows as what was captured
            query_rows = min(self._forwards, default=query_rows)
        with self._pass():
            self._core.step(batch.sessions, tokens, query_rows, self._eager(forward))
            return self._output if forward is not None else _cut(self._output, len(tokens))

    def export_kv(self, session: Session) -> KvRuns:
        """The session's KV, all layers: rows as read-only views of host memory, index keys as a copy.

        Waits for steps that are still running. As long as the result or one of its arrays lives, its rows are given
        to nobody else, also when the session is closed; so drop it to get the memory back. (A session that is
        truncated and appended to writes to its own rows, and the views show it: copy or import first.)
        """
        return self._core.export_kv(session)

    def import_kv(self, session: Session, source: KvRuns) -> None:
        """Copies KV into an empty session; `source` may come from another runtime of the same shape."""
        self._core.import_kv(session, source)

    def begin_import(self, session: Session, tokens: int) -> KvRuns:
        """Writable views of an empty session's rows, for a transfer without a copy; see `finish_import`."""
        return self._core.begin_import(session, tokens)

    def finish_import(self, session: Session, filled: KvRuns) -> None:
        """Uploads the index keys of `filled` and makes its tokens part of the session.

        Raises:
            InvalidArgument: `filled` is not of the last `begin_import`, or a pass or an import has written to
                the session since.
        """
        self._core.finish_import(session, filled)

    def thresholds(self, session: Session) -> Any:
        """float32 [layers]: moving average of the k-th score, NaN where there is none yet."""
        return self._core.thresholds(session)

    @property
    def free_host_tokens(self) -> int:
        """Tokens that sessions could be opened for now, in blocks of 64. Does not wait for the device."""
        return self._core.free_host_tokens

    def stats(self) -> RuntimeStats:
        """Counters since construction.

        On a GPU, steps that are still running are not waited for: their part may be missing, or be counted in part.
        After `synchronize` the counters are exact.
        """
        return self._core.stats()

    def cache_state(self, layer: int) -> dict[str, Any]:
        """Copies of a layer's residency state, for tests and tools.

        Returns:
            `slot_of` int32 [host rows], `host_of` and `stamp` int32 [slots] (-1: none, free), `slots` uint8
            [slots, row_bytes].
        """
        return self._core.cache_state(layer)

    def synchronize(self) -> None:
        """Waits until everything called so far has happened; raises what went wrong in it."""
        self._core.synchronize()

    def close(self) -> None:
        """Closes all sessions and frees all memory. Idempotent."""
        self._core.close()

    def __enter__(self) -> Runtime:
        """The runtime itself; it is closed on exit."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the runtime."""
        self.close()

    def use_stream(self, stream: int | None) -> None:
        """Sets the CUDA stream that later calls work on.

        Args:
            stream: cudaStream_t as an integer; it must live until calls work on another stream, or until `close`. It
                is torch's current stream while a forward runs. None, the default, means torch's current stream at
                each call if torch with CUDA is loaded, else the one that is used already, at first one of the
                runtime's own.

        Raises:
            InvalidArgument: naming `stream`, if it is no integer.
        """
        now = stream
        if stream is None:  # not only at the next pass: the stream that was set may be gone by then
            torch = None if self.device == "cpu" else _torch_with_cuda()
            now = None if torch is None else torch.cuda.current_stream(self.device).cuda_stream
        if now is not None:
            self._core.use_stream(now)
        self._stream = stream

    @contextmanager
    def _pass(self) -> Iterator[None]:
        """One pass at a time, on the right stream; its output is in `_output` while the context lasts."""
        if not self._running.acquire(blocking=False):
            raise StateError("runtime: another call is still running; calls must not overlap")
        try:
            self._output = None
            torch = None if self.device == "cpu" else _torch_with_cuda()
            if torch is None:
                yield
            else:
                stream = self._torch_stream(torch)
                self._core.use_stream(stream.cuda_stream)
                with torch.cuda.stream(stream):  # the forward's own kernels and replays go there, too
                    yield
        finally:
            self._output = None
            self._running.release()

    def _torch_stream(self, torch: Any) -> Any:
        """The stream that calls work on: that of `use_stream`, else torch's current one."""
        if self._stream is None:
            return torch.cuda.current_stream(self.device)
        if self._stream == 0:
            return torch.cuda.default_stream(self.device)
        return torch.cuda.ExternalStream(self._stream, device=self.device)

    def _eager(self, forward: Forward | None) -> Callable[[ForwardPass], None] | None:
        """The forward, with what it returns put aside for the caller of the pass."""
        if forward is None:
            return None
        if not callable(forward):
            raise InvalidArgument(f"forward: {forward!r} given, expected a callable")

        def run(forward_pass: ForwardPass) -> None:
            self._output = forward(forward_pass)

        return run

    def _captured(self, query_rows: int) -> Callable[[ForwardPass], None]:
        """What the core keeps of a captured forward: no reference that Python's garbage collector cannot see."""
        runtime = weakref.ref(self)

        def run(forward_pass: ForwardPass) -> None:
            if (owner := runtime()) is not None:  # whoever runs a pass holds it
                owner._output = owner._forwards[query_rows](forward_pass)

        return run

    def _capture_with_torch(self, batch_sizes: list[int], query_rows: int) -> None:
        try:
            import torch
        except ImportError as error:
            raise lacking(error, TORCH, "capture") from error
        stream = torch.cuda.Stream(self.device)
        own = self._torch_stream(torch)
        stream.wait_stream(own)
        runtime = weakref.ref(self)

        def capturer(body: Callable[[], None]) -> Callable[[], None]:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                body()
            output = self._output

            def replay() -> None:
                graph.replay()
                if (owner := runtime()) is not None:
                    owner._output = output

            return replay

        def back() -> None:
            own.wait_stream(stream)
            self._core.use_stream(own.cuda_stream)

        self._core.use_stream(stream.cuda_stream)
        try:
            with torch.cuda.stream(stream):
                self._core.capture(self._captured(query_rows), batch_sizes, query_rows, capturer)
        except BaseException:
            with suppress(RuntimeError):  # who asks wants to know what came first
                back()
            raise
        back()


def _torch_with_cuda() -> Any:
    """torch, if it is loaded already and can use a GPU."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None


def _cut(output: Any, rows: int) -> Any:
    """Without the padding rows at the end of its first dimension."""
    if isinstance(output, (tuple, list)):
        entries = [_cut(part, rows) for part in output]
        return type(output)(*entries) if hasattr(output, "_fields") else type(output)(entries)
    if isinstance(output, dict):  # also what derives from it, such as the outputs of transformers' models
        parts = copy.copy(output)
        for name, part in output.items():
            parts[name] = _cut(part, rows)
        return parts
    shape = getattr(output, "shape", None)
    return output[:rows] if shape is not None and len(shape) > 0 and shape[0] > rows else output
