"""Which requests run together: continuous batching, worked out ahead.

A request is served on a *context*, a prompt that is kept on the host. It starts when a context is free and the batch
has room, in the order of arrival, and ends when its output is complete; then the next one starts. All requests are
there from the beginning and every step gives each running one a token, so nothing in the schedule depends on how long
steps take. It is a list of *stretches*, steps between two changes of the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import echo


@dataclass(frozen=True)
class Load:
    """What is to be served.

    Attributes:
        lengths: tokens of each context.
        outputs: tokens that each request wants.
    """

    lengths: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Running:
    """A request in the batch, and the context it runs on."""

    request: int
    context: int


@dataclass(frozen=True)
class Stretch:
    """Steps with the same batch.

    Attributes:
        steps: how many.
        running: row by row. Who ran before comes first, in the same order.
        opened: how many of them, from the end, start with this stretch.
        closed: rows that are complete after it.
    """

    steps: int
    running: tuple[Running, ...]
    opened: int
    closed: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens that it gives."""
        return self.steps * len(self.running)

    @property
    def whole(self) -> bool:
        """Whether all of its requests start and end with it: it can be left out without others noticing."""
        return self.opened == len(self.closed) == len(self.running)


def draw_load(
    lengths: tuple[int, int], requests: int, output: tuple[int, int], host_tokens: int, room: int, seed: int
) -> Load:
    """As many contexts as the host has room for, at most one for each request; lengths are whole blocks of 64 tokens.

    Args:
        lengths: of contexts, least and most.
        requests: how many.
        output: tokens of each, least and most.
        host_tokens: tokens that the host holds.
        room: tokens that a context needs beside its own, for what its requests write.
        seed: of lengths and outputs.

    Raises:
        InvalidArgument: naming `host_memory`, if not even one context fits.
    """
    draw = np.random.default_rng(seed)
    contexts: list[int] = []
    taken = 0
    while len(contexts) < requests:
        length = max(64, int(draw.integers(lengths[0], lengths[1] + 1)) // 64 * 64)
        taken += blocks(length) + blocks(room)
        if taken > host_tokens:
            break
        contexts.append(length)
    if not contexts:
        raise echo.InvalidArgument(
            f"host_memory: it holds {host_tokens:,} tokens, expected room for one context of {lengths[1]:,}"
        )
    outputs = draw.integers(output[0], output[1] + 1, size=requests)
    return Load(tuple(contexts), tuple(int(count) for count in outputs))


def room_for(output: int, length: int, top_k: int) -> int:
    """Tokens that a context of `length` needs beside its own: for output, and for the pass that makes it resident."""
    return max(output, -(-length // top_k))


def blocks(tokens: int) -> int:
    """Tokens in whole blocks of 64."""
    return -(-tokens // 64) * 64


def schedule(load: Load, most: int, tokens: int | None = None) -> list[Stretch]:
    """All stretches until every request is complete.

    Args:
        load: contexts and requests.
        most: requests at once.
        tokens: of all running requests together, context and output; None for any number.

    Raises:
        InvalidArgument: naming `pools`, if one request alone is too much.
    """
    waiting = deque(range(len(load.outputs)))
    free = deque(range(len(load.lengths)))
    running: list[Running] = []
    left: list[int] = []  # tokens that each still has to write
    held = 0
    stretches = []

    def need(one: Running) -> int:
        return load.lengths[one.context] + load.outputs[one.request]

    while waiting or running:
        opened = 0
        while waiting and free and len(running) < most:
            candidate = Running(waiting[0], free[0])
            if tokens is not None and held + need(candidate) > tokens:
                break
            waiting.popleft()
            free.popleft()
            running.append(candidate)
            left.append(load.outputs[candidate.request])
            held += need(candidate)
            opened += 1
        if not running:
            raise echo.InvalidArgument("pools: one has no room for a single request of this length")
        steps = min(left)
        closed = tuple(row for row, count in enumerate(left) if count == steps)
        stretches.append(Stretch(steps, tuple(running), opened, closed))
        for row in closed:
            held -= need(running[row])
            free.append(running[row].context)
        rest = [row for row in range(len(running)) if row not in closed]
        running = [running[row] for row in rest]
        left = [left[row] - steps for row in rest]
    return stretches


def sample(stretches: Sequence[Stretch], repeat: int) -> list[int]:
    """Numbers of the stretches that are to be run; others last as long as those of their size do on average.

    Left out is only what is whole, after `repeat` whole stretches with as many requests and steps; 0: nothing.
    """
    seen: dict[tuple[int, int], int] = {}
    chosen = []
    for number, stretch in enumerate(stretches):
        if repeat and stretch.whole:
            size = len(stretch.running), stretch.steps
            seen[size] = seen.get(size, 0) + 1
            if seen[size] > repeat:
                continue
        chosen.append(number)
    return chosen
