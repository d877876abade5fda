"""What programs that measure the trained model share: the model, prompts from text that ships, reading, decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

import echo
from echo import hf

ROOT = Path(__file__).parents[1]
DATA = Path(str(resources.files("echo"))) / "data"
KINDS = ("prose", "code", "mixed")
_SOURCES = ("cpp/**/*.hpp", "cpp/**/*.cpp", "cpp/**/*.cu", "python/echo/**/*.py")
_PIECE = (150, 500)  # fewest and most tokens before the topic of a mixed prompt changes

Tokens = list[int]
Pick = Callable[[Tensor], Tokens]
"""Takes logits [sessions, vocab], returns the next token of each session."""


def device_named(name: str) -> str:
    """'cpu' or 'cuda:N', what a runtime takes for `name`; on the CPU, torch gets one thread."""
    with echo.Runtime(echo.ModelShape.tiny(), device=name, host_tokens=64, max_batch=1) as rt:
        device = rt.device
    if device == "cpu":  # the products of a step are so small that threads of torch's wait for each other
        torch.set_num_threads(1)
    return device


def load_model(device: str, dtype: torch.dtype | str = "auto", observer: hf.Observer | None = None) -> hf.DsaModel:
    """The trained model that ships with echo."""
    return hf.DsaModel.from_pretrained(hf.tiny_dsa_path(), dtype=dtype, device=device, observer=observer)


def load_tokenizer() -> Tokenizer:
    """Its tokenizer."""
    return Tokenizer.from_file(str(hf.tiny_dsa_path() / "tokenizer.json"))


def texts(tokenizer: Tokenizer) -> tuple[Tokens, Tokens]:
    """The essay that ships with echo, and the sources of this repository."""
    prose = (DATA / "memory.txt").read_text(encoding="utf-8")
    files = [path for pattern in _SOURCES for path in sorted(ROOT.glob(pattern))]
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return tokenizer.encode(prose).ids, tokenizer.encode(code).ids


def draw_prompts(prose: Tokens, code: Tokens, count: int, shortest: int, longest: int, seed: int = 0) -> list[Tokens]:
    """Prompts of the KINDS in turn, the shortest first, each longer than the one before by the same factor."""

    def cut(rng: random.Random, text: Tokens, length: int) -> Tokens:
        start = int(rng.random() * (len(text) - length + 1))
        return text[start : start + length]

    def mixed(rng: random.Random, length: int) -> Tokens:
        prompt: Tokens = []
        while len(prompt) < length:
            prompt += cut(rng, prose, rng.randint(*_PIECE)) + cut(rng, code, rng.randint(*_PIECE))
        return prompt[:length]

    prompts = []
    for i in range(count):
        length = round(shortest * (longest / shortest) ** (i / max(1, count - 1)))
        kind = KINDS[i % len(KINDS)]
        rng = random.Random(f"{seed}, {i}")  # its own: as the sources change, prose stays what it is
        prompts.append(mixed(rng, length) if kind == "mixed" else cut(rng, prose if kind == "prose" else code, length))
    return prompts


def blocks(tokens: int) -> int:
    """Host rows that a session of so many tokens takes: whole blocks of 64."""
    return -(-tokens // 64) * 64


def read(rt: echo.Runtime, session: echo.Session, tokens: Tokens) -> None:
    """Prefills tokens, chunk by chunk, with the captured forward."""
    chunk = rt.plan.config.prefill_chunk
    for start in range(0, len(tokens), chunk):
        rt.prefill(session, tokens[start : start + chunk])


def decode(
    rt: echo.Runtime, sessions: Sequence[echo.Session], tokens: Tokens, pick: Pick
) -> Iterator[tuple[Tokens, Tensor]]:
    """Decodes with the captured forward for as long as steps are asked for.

    Args:
        rt: the runtime.
        sessions: one batch.
        tokens: the first step's.
        pick: chooses the tokens of all later steps.

    Yields:
        What each step chose, and its logits [sessions, vocab], which the next step overwrites.
    """
    while True:
        logits = rt.step(echo.Batch(list(sessions), tokens))
        tokens = pick(logits)
        yield tokens, logits


def likeliest(logits: Tensor) -> Tokens:
    """Greedy decoding; of equal logits the first."""
    tokens: Tokens = logits.argmax(dim=-1).tolist()
    return tokens


class Sampler:
    """Draws on the host, for each session from a generator of its own.

    Args:
        seeds: one for each session.
        temperature: divides the logits.
    """

    def __init__(self, seeds: Sequence[int], temperature: float) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._temperature = temperature

    def __call__(self, logits: Tensor) -> Tokens:
        """The next token of each row of [sessions, vocab]."""
        rows = torch.softmax(logits.cpu().float() / self._temperature, dim=-1)
        return [int(torch.multinomial(p, 1, generator=g)) for p, g in zip(rows, self._generators, strict=True)]
