"""What a profile decodes: the sessions of one runtime, and the tokens of each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from echo import Batch, Forward, ModelShape, Runtime, Session
from echo.settings import counted

WARM_UP = 16
"""Steps before those that are measured: the pools fill, and what is used often settles in them."""


@dataclass(frozen=True)
class Workload:
    """Sessions that decode in one batch.

    Attributes:
        name: in words, without sizes.
        shape: of the model.
        device: 'cpu' or 'cuda:N'.
        batch: sessions.
        length: tokens of the longest when decoding begins.
        pool: slots of a layer per session, in multiples of top-k.
        forward: the model.
        fill: takes an empty session, its number and the runtime, and gives it its context.
        token: of a session's number and the step.
        settings: others of the runtime.
    """

    name: str
    shape: ModelShape
    device: str
    batch: int
    length: int
    pool: float
    forward: Forward
    fill: Callable[[Runtime, Session, int], None]
    token: Callable[[int, int], int]
    settings: dict[str, Any]

    @property
    def slots(self) -> int:
        """Slots of each layer."""
        return self.batch * max(self.shape.top_k + 1, int(self.pool * self.shape.top_k))

    def runtime(self, steps: int) -> Runtime:
        """One with room for so many steps."""
        capacity = -(-(self.length + steps) // 64) * 64  # of whole blocks, as select for Hopper wants it
        return Runtime(
            self.shape,
            device=self.device,
            host_tokens=self.batch * capacity,
            max_context=capacity,
            max_sessions=self.batch,
            max_batch=self.batch,
            query_rows=1,
            gpu_slots=self.slots,
            **self.settings,
        )

    def open(self, runtime: Runtime, steps: int) -> list[Session]:
        """Opens and fills the sessions."""
        sessions = []
        for number in range(self.batch):
            session = runtime.open_session(self.length + steps)
            self.fill(runtime, session, number)
            sessions.append(session)
        return sessions

    def batch_of(self, sessions: list[Session], step: int) -> Batch:
        """What a step works on."""
        return Batch(list(sessions), [self.token(number, step) for number in range(self.batch)])

    def describe(self) -> str:
        """In words, with its sizes."""
        return (
            f"{self.name}, {counted(self.shape.layers, 'layer')}, top-{self.shape.top_k}; "
            f"{counted(self.batch, 'session')} of {counted(self.length, 'token')}, "
            f"{self.slots // self.batch:,} slots each per layer"
        )
