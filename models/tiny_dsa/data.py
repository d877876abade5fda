"""Text to tokens: a byte-level BPE, packed token arrays, and synthetic retrieval text.

Run as a program of its own, it needs no torch and works while the trainer compiles:

    python data.py --out FOLDER --vocab 2048 --lengths 2048:1500,8192:700 [--roots FOLDER] [--tokenizer FILE]

and writes train.npy, heldout.npy, retrieval_<length>.npy (int16), tokenizer.json, data.json and DATA.md. Files that lie
next to each other on disk stay next to each other in the token stream, so that long contexts have something to look up.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from corpus import Document, describe, folder_package, installed_packages, read_documents
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"  # token 0: before each file, and the model's beginning and end of text
TOKENIZER_SAMPLE_BYTES = 40_000_000
NEWLINE = "Ċ"  # how the byte-level alphabet writes "\n"

Tokens = NDArray[np.int16]
T = TypeVar("T")
R = TypeVar("R")


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """A byte-level BPE that takes digits one at a time: numbers and hashes are then copied token by token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_bytes(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Bytes of text that each token stands for."""
    lengths = np.zeros(tokenizer.get_vocab_size(), np.int64)
    for token, number in tokenizer.get_vocab().items():
        lengths[number] = 0 if token == END else len(token)  # the byte-level alphabet has a character per byte
    return lengths


@dataclass(frozen=True)
class Needle:
    """A key with its value: the line that states it, and the line that asks for it split before the value."""

    key: str
    value: str

    @property
    def statement(self) -> str:
        return f'\nKEY_{self.key} = "{self.value}"'

    @property
    def question(self) -> str:
        return f'\nassert KEY_{self.key} == "'

    @property
    def answer(self) -> str:
        return f'{self.value}"'


def draw_needles(count: int, rng: random.Random) -> list[Needle]:
    """Needles with different keys."""
    return [Needle(f"{key:04x}", f"{rng.getrandbits(32):08x}") for key in rng.sample(range(16**4), count)]


class RetrievalText:
    """Corpus text with needles in it.

    Args:
        tokenizer: of the corpus.
        tokens: the corpus.
        seed: of the draws.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: Tokens, seed: int) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._rng = random.Random(seed)
        vocab = tokenizer.get_vocab()
        starts = np.zeros(tokenizer.get_vocab_size(), bool)
        starts[[number for token, number in vocab.items() if token.startswith(NEWLINE)]] = True
        self._starts_line = starts

    def training_sequence(self, length: int) -> Tokens:
        """`length` tokens with 1 to length / 64 needles, each asked for at a random place after its statement."""
        rng = self._rng
        needles = draw_needles(max(1, round((length / 64) ** rng.random())), rng)
        lines = []
        for needle in needles:
            stated, asked = sorted((rng.random(), rng.random()))
            lines += [(stated, needle.statement), (asked, needle.question + needle.answer)]
        lines.sort()
        return self._with_lines(length, lines)

    def test_sequence(self, length: int, depth: float) -> tuple[Tokens, int]:
        """`length` tokens that end in the answer to a question; also how many tokens the answer has.

        Args:
            length: tokens in all.
            depth: where in the text the statement stands, 0 at the beginning and 1 right before the question.
        """
        needle = draw_needles(1, self._rng)[0]
        question, whole = self._ids(needle.question), self._ids(needle.question + needle.answer)
        answer = len(whole) - len(question)
        context = self._with_lines(length - len(whole), [(depth, needle.statement)])
        return np.concatenate([context, whole]), answer

    def _ids(self, text: str) -> Tokens:
        return np.asarray(self._tokenizer.encode(text).ids, np.int16)

    def _with_lines(self, length: int, lines: list[tuple[float, str]]) -> Tokens:
        inserted = [encoding.ids for encoding in self._tokenizer.encode_batch([text for _, text in lines])]
        background = length - sum(map(len, inserted))
        if not 0 < background <= len(self._tokens):
            raise ValueError(f"length: {length} given, expected room for text and no more than the corpus has")
        first = self._rng.randrange(len(self._tokens) - background + 1)
        text = self._tokens[first : first + background]
        ends = np.flatnonzero(self._starts_line[text])
        ends = np.concatenate([[0], ends]) if len(ends) == 0 or ends[0] else ends
        parts: list[Any] = []
        done = 0
        for (place, _), ids in zip(lines, inserted, strict=True):
            target = place * background
            # The line boundary at or before the place; at depth 1 the very end.
            cut = background if place >= 1 else int(ends[max(0, np.searchsorted(ends, target, "right") - 1)])
            cut = max(cut, done)
            parts += [text[done:cut], np.asarray(ids, np.int16)]
            done = cut
        return np.concatenate([*parts, text[done:]])


_worker_tokenizer: list[Tokenizer] = []


def _encode(job: tuple[str, list[str]]) -> list[Tokens]:
    file, texts = job
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    if not _worker_tokenizer:
        _worker_tokenizer.append(Tokenizer.from_file(file))
    end = np.asarray([0], np.int16)
    return [np.concatenate([end, np.asarray(e.ids, np.int16)]) for e in _worker_tokenizer[0].encode_batch(texts)]


def _chunks(items: list[T], size: int) -> Iterator[list[T]]:
    return (items[i : i + size] for i in range(0, len(items), size))


def _collect(
    roots: list[Path], map_: Callable[..., Iterable[Any]], max_bytes: int
) -> tuple[list[Document], str, dict[str, int]]:
    packages, refused = ([folder_package(root) for root in roots], []) if roots else installed_packages()
    files = [(number, path) for number, package in enumerate(packages) for path in package.files]
    documents, seen, size, duplicates = [], set(), 0, 0
    for found in map_(read_documents, list(_chunks(files, 64))):
        for document in found:
            if document.digest in seen or size > max_bytes:
                duplicates += document.digest in seen
                continue
            seen.add(document.digest)
            documents.append(document)
            count = len(document.text.encode())
            size += count
            packages[document.package].used_files += 1
            packages[document.package].used_bytes += count
    totals = {"files": len(documents), "bytes": size, "duplicate_files_left_out": duplicates}
    totals["held_out_files"] = sum(document.held_out for document in documents)
    return documents, describe(packages, refused, totals), totals


def _in_order(documents: list[Document], seed: int) -> list[Document]:
    """Folders in random order, the files of a folder together."""
    ranks: dict[str, float] = {}
    rng = random.Random(seed)
    for document in documents:
        ranks.setdefault(document.group, rng.random())
    return sorted(documents, key=lambda d: (ranks[d.group], d.path))


def prepare(
    out: Path, vocab: int, lengths: dict[int, int], seed: int, roots: list[Path], tokenizer_file: Path | None,
    max_bytes: int, workers: int,
) -> None:  # fmt: skip
    """Writes everything that the module's docstring lists; `lengths` maps a length to how many sequences to make."""
    started = time.time()
    out.mkdir(parents=True, exist_ok=True)
    # Forked before the tokenizer starts its threads.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        documents, description, totals = _collect(roots, pool.map, max_bytes)
        documents = _in_order(documents, seed)
        read = time.time()
        if tokenizer_file is None:
            seen = [document.text for document in documents if not document.held_out]
            random.Random(seed).shuffle(seen)
            tokenizer = train_tokenizer(_up_to(seen, TOKENIZER_SAMPLE_BYTES), vocab)
        else:
            tokenizer = Tokenizer.from_file(str(tokenizer_file))
        file = str(out / "tokenizer.json")
        tokenizer.save(file)
        trained = time.time()
        jobs = [(file, [d.text for d in chunk]) for chunk in _chunks(documents, 32)]
        encoded = [ids for part in pool.map(_encode, jobs) for ids in part]
    train = np.concatenate([ids for d, ids in zip(documents, encoded, strict=True) if not d.held_out])
    held = [ids for d, ids in zip(documents, encoded, strict=True) if d.held_out]
    np.save(out / "train.npy", train)
    np.save(out / "heldout.npy", np.concatenate(held) if held else train[:0])
    retrieval = RetrievalText(tokenizer, train, seed)
    for length, count in lengths.items():
        rows = np.stack([retrieval.training_sequence(length + 1) for _ in range(count)])
        np.save(out / f"retrieval_{length}.npy", rows)
    totals |= {"train_tokens": len(train), "held_out_tokens": sum(map(len, held)), "vocab": tokenizer.get_vocab_size()}
    times = {"read": read - started, "tokenizer": trained - read, "encode_and_rest": time.time() - trained}
    (out / "DATA.md").write_text(description)
    (out / "data.json").write_text(json.dumps(totals | {"seconds": times}, indent=1))


def _up_to(texts: list[str], size: int) -> Iterator[str]:
    for text in texts:
        yield text
        size -= len(text)
        if size <= 0:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--lengths", default="2048:1500,8192:700,16384:100", help="length:sequences of retrieval text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--roots", type=Path, nargs="*", default=[], help="folders to use instead of what is installed")
    parser.add_argument("--tokenizer", type=Path, help="use this tokenizer.json instead of training one")
    parser.add_argument("--max-bytes", type=int, default=400_000_000)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    lengths = {int(length): int(count) for length, count in (pair.split(":") for pair in args.lengths.split(","))}
    prepare(args.out, args.vocab, lengths, args.seed, args.roots, args.tokenizer, args.max_bytes, args.workers)


if __name__ == "__main__":
    main()
