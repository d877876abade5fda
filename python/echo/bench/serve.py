"""A runtime that serves a load: fills contexts once, then runs stretches of a schedule and times them.

Random arrays stand for the projections of a model, and nothing else of it runs. A request is a fork of its context's
session: a new session with rows, index keys and pools of slots as after a transfer from a prefill instance, but
without 3.6 GB of them being sent for each. When it is closed, its context gives up its slots (`pause`), so the next
request on it starts with none.

Timed are the steps, from the first control block to the end of the last kernel, with what draws the queries
(`drift.py`). Filling, opening and closing are not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import torch

import echo
from echo.bench.drift import Queries
from echo.bench.measured import Counts, Timed
from echo.bench.regimes import Regime
from echo.bench.schedule import Load, Stretch, blocks, room_for

_WARM_UP = 8  # steps of each size before any is timed
_CHUNK = 8192  # tokens that are filled in one pass
_SPREAD = 1 << 16  # rows of a table more than are read at once: where they are read from changes


class Server:
    """A runtime with one session for each context of a load, filled; requests run on them."""

    def __init__(
        self,
        shape: echo.ModelShape,
        load: Load,
        most: int,
        regime: Regime,
        *,
        device: str = "auto",
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        **settings: Any,
    ) -> None:
        """Takes all memory and fills all contexts.

        Args:
            shape: of the model.
            load: what will be served.
            most: requests at once.
            regime: how queries change.
            device: as of `echo.Runtime`.
            seed: of all that is random.
            clock: seconds.
            **settings: of the runtime; `gpu_slots` among them.
        """
        self._load = load
        self._clock = clock
        self._room = room_for(max(load.outputs), max(load.lengths), shape.top_k)
        self._chunk = min(_CHUNK, max(load.lengths))
        self.runtime = echo.Runtime(
            shape,
            device=device,
            host_tokens=sum(length + blocks(self._room) for length in load.lengths),
            max_context=max(load.lengths) + self._room,
            max_batch=most,
            query_rows=1,
            max_sessions=len(load.lengths) + most,
            prefill_chunk=self._chunk,
            **settings,
        )
        try:
            self._draw = torch.Generator("cpu").manual_seed(seed)
            self._queries = Queries(shape, most, regime, self.runtime.device, seed)
            self._make_arrays(shape, most)
            started = time.perf_counter()
            self._contexts = [self._filled(length) for length in load.lengths]
            self.runtime.synchronize()
            self.fill_seconds = time.perf_counter() - started
        except BaseException:
            self.runtime.close()
            raise
        self._running: list[echo.Session] = []

    def __enter__(self) -> Server:
        """The server itself; its runtime is closed on exit."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the runtime."""
        self.runtime.close()

    def serve(
        self, stretches: Sequence[Stretch], chosen: Iterable[int], resident: bool, most_steps: int = 0
    ) -> dict[int, Timed]:
        """Runs the chosen stretches; what is left out has to be whole.

        Args:
            stretches: of a schedule of this server's load.
            chosen: numbers of those that are to be run.
            resident: all rows of a request have slots before its first step. The pool must hold them.
            most_steps: that are run of a stretch which is whole; 0: all.
        """
        numbers = sorted(chosen)
        self.runtime.capture(self._forward, sorted({len(stretches[number].running) for number in numbers}))
        self._warm_up([stretches[number] for number in numbers])
        timed = {}
        for number in numbers:
            stretch = stretches[number]
            self._open(stretch, resident)
            steps = stretch.steps
            timed[number] = self._run(min(steps, most_steps) if most_steps and stretch.whole else steps)
            self._close(stretch)
        return timed

    def steady_step(self, stretch: Stretch) -> Callable[[], None]:
        """Opens the requests of a stretch; returns what replays one step of them, with the same queries each time."""
        self.runtime.capture(self._forward, [len(stretch.running)])
        self._open(stretch, resident=False)
        self._queries.advance(len(self._running))
        batch = echo.Batch(list(self._running), [0] * len(self._running))
        return lambda: self.runtime.step(batch)

    def _warm_up(self, stretches: Sequence[Stretch]) -> None:
        """A few steps of each size; their requests are gone then."""
        for running in {len(stretch.running): stretch.running for stretch in stretches}.values():
            alone = Stretch(_WARM_UP, running, len(running), tuple(range(len(running))))
            self._open(alone, resident=False)
            self._advance(min(_WARM_UP, self._room))
            self._close(alone)

    def _open(self, stretch: Stretch, resident: bool) -> None:
        """The new requests, behind those that are running."""
        for row in range(len(stretch.running) - stretch.opened, len(stretch.running)):
            context = self._contexts[stretch.running[row].context]
            session = context.fork(context.length + self._room)
            if resident:
                self._make_resident(session)
            self._running.append(session)
            self._queries.start(row)

    def _close(self, stretch: Stretch) -> None:
        for row in stretch.closed:
            self._running[row].close()
            context = self._contexts[stretch.running[row].context]
            context.pause()
            context.resume()
        kept = [row for row in range(len(self._running)) if row not in stretch.closed]
        self._queries.keep(kept)
        self._running = [self._running[row] for row in kept]

    def _run(self, steps: int) -> Timed:
        counts, seconds, late_steps = [self._counts()], [], steps // 2
        for part in (steps - late_steps, late_steps):
            started = self._clock()
            self._advance(part)
            self.runtime.synchronize()
            seconds.append(self._clock() - started)
            counts.append(self._counts())
        before, half, after = counts
        return Timed(steps, sum(seconds), after - before, late_steps, seconds[1], after - half)

    def _advance(self, steps: int) -> None:
        batch = echo.Batch(list(self._running), [0] * len(self._running))
        for _ in range(steps):
            self._queries.advance(len(self._running))
            self.runtime.step(batch)

    def _counts(self) -> Counts:
        self.runtime.synchronize()
        return Counts.of(self.runtime.stats().layers)

    def _make_arrays(self, shape: echo.ModelShape, most: int) -> None:
        device = self.runtime.device
        draw = torch.Generator(device).manual_seed(1)

        def table(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=draw, device=device).bfloat16()

        self._rows = table(self._chunk + _SPREAD, shape.row_dim)
        # No two tokens of a context have the same key.
        self._keys = table(max(self._load.lengths) + _SPREAD, shape.index_dim)
        self._q = table(most, shape.query_heads, shape.row_dim)
        self._out = torch.empty(most, shape.query_heads, shape.latent_dim, device=device, dtype=torch.bfloat16)
        self._weights = torch.ones(most, shape.index_heads, device=device)

    def _forward(self, p: echo.ForwardPass) -> None:
        rows, shape = p.rows, self.runtime.shape
        for layer in range(shape.layers):
            p.attention(
                layer,
                kv=self._rows[:rows],
                index_key=self._queries.key[:rows],
                index_q=self._queries.layers[layer, :rows],
                index_weights=self._weights[:rows],
                q=self._q[:rows],
                scale=shape.row_dim**-0.5,
                out=self._out[:rows],
            )

    def _filled(self, length: int) -> echo.Session:
        """A session of so many tokens, by passes that append and compute nothing."""
        layers = self.runtime.shape.layers
        session = self.runtime.open_session(length)
        starts = torch.randint(_SPREAD, (layers, 2), generator=self._draw).tolist()

        def append(p: echo.ForwardPass) -> None:
            for layer, (row, key) in enumerate(starts):
                key += session.length
                p.append(layer, self._rows[row : row + p.rows], self._keys[key : key + p.rows])

        while session.length < length:
            self.runtime.prefill(session, [0] * min(self._chunk, length - session.length), append)
        return session

    def _make_resident(self, session: echo.Session) -> None:
        """Recalls all rows in one pass, whose own tokens are forgotten."""
        shape, length = self.runtime.shape, session.length
        count = -(-length // shape.top_k)
        positions = torch.full((count * shape.top_k,), -1, dtype=torch.int32)
        positions[:length] = torch.arange(length, dtype=torch.int32)
        selection = positions.view(count, shape.top_k).to(self.runtime.device)

        def recall(p: echo.ForwardPass) -> None:
            for layer in range(shape.layers):
                p.append(layer, self._rows[: p.rows], self._keys[: p.rows])
                for first, rows in p.blocks:
                    p.recall(layer, selection[first : first + rows], (first, rows))

        self.runtime.prefill(session, [0] * count, recall)
        session.truncate(length)
