"""The stages of a run and how its time is divided among them."""

from __future__ import annotations

from dataclasses import dataclass

from model import Mode

MIN_STEPS = 20


@dataclass(frozen=True)
class Stage:
    """A part of the training.

    Attributes:
        length: tokens of a sequence.
        share: of the training time, relative to the other stages'.
        rates: learning rate at its beginning and its end, relative to `--lr`.
    """

    name: str
    length: int
    mode: Mode
    share: float
    rates: tuple[float, float]


@dataclass(frozen=True)
class Plan:
    """Sizes of a whole run.

    Attributes:
        vocab: tokens of the tokenizer, at most.
        retrieval: length -> synthetic retrieval sequences to make.
        contexts: lengths of the needle test.
    """

    vocab: int
    batch_tokens: int
    stages: tuple[Stage, ...]
    retrieval: dict[int, int]
    contexts: tuple[int, ...]
    evaluation_length: int


def stages(lengths: tuple[int, int, int], top_k: int, queries: tuple[int, int]) -> tuple[Stage, ...]:
    """The stages for short, usual and long sequences; `queries` of the indexer's loss, alone and in sparse training."""
    short, usual, long = lengths
    sparse = Mode(top_k, index_queries=queries[1])
    return (
        Stage("dense_short", short, Mode(), 0.32, (1.0, 1.0)),
        Stage("dense", usual, Mode(), 0.26, (0.6, 0.3)),
        Stage("indexer", usual, Mode(index_queries=queries[0], index_only=True), 0.10, (1.0, 0.4)),
        Stage("sparse", usual, sparse, 0.24, (0.3, 0.1)),
        Stage("sparse_long", long, sparse, 0.08, (0.1, 0.0)),
    )


PLANS = {
    "tiny": Plan(
        2048, 65536, stages((2048, 8192, 16384), 256, (512, 256)),
        {2048: 1500, 8192: 700, 16384: 100}, (2048, 4096, 8192, 16384), 8192,
    ),
    "micro": Plan(300, 512, stages((64, 128, 256), 16, (32, 16)), {64: 20, 128: 20, 256: 10}, (128, 256), 128),
}  # fmt: skip


def divide(planned: list[Stage], step_seconds: dict[str, float], available: float) -> list[tuple[Stage, float]]:
    """Seconds for each stage: its share, but time for some steps at least."""
    usable = [stage for stage in planned if stage.name in step_seconds]
    total = sum(stage.share for stage in usable)
    wanted = [max(available * s.share / total, min(MIN_STEPS * step_seconds[s.name], 0.2 * available)) for s in usable]
    scale = available / sum(wanted)
    return [(stage, seconds * scale) for stage, seconds in zip(usable, wanted, strict=True)]
