"""Whether the trained model finds a line far back in its text when it runs through echo with a small pool.

A text of a given length has one line like `KEY_7f3a = "3fa90c17"` at a given depth (0: its beginning, 1: right before
the question) and ends in the question for it; a hit is an answer that is right in all its tokens. Prefill and decode
have a pool in which a selection per session just fits, unless `--pool-slots` says otherwise.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import record
from generation import ROOT, Tokens, blocks, decode, device_named, likeliest, load_model, load_tokenizer, read, texts

import echo

# What the question looks like is defined where the model is trained.
sys.path.insert(0, str(ROOT / "models" / "tiny_dsa"))
from data import RetrievalText

sys.path.remove(str(ROOT / "models" / "tiny_dsa"))  # its modules have names that others may want

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass
class Question:
    """A text that ends in a question, and the tokens that answer it."""

    text: Tokens
    answer: Tokens


def draw(source: RetrievalText, length: int) -> list[Question]:
    """One question for each depth, of `length` tokens with its answer."""
    questions = []
    for depth in DEPTHS:
        tokens, size = source.test_sequence(length, depth)
        questions.append(Question(tokens[:-size].tolist(), tokens[-size:].tolist()))
    return questions


def ask(rt: echo.Runtime, questions: Sequence[Question]) -> list[bool]:
    """Reads all texts and decodes the answers in one batch; says which are right."""
    steps = max(len(one.answer) for one in questions)
    sessions = [rt.open_session(len(one.text) + steps) for one in questions]
    for session, one in zip(sessions, questions, strict=True):
        read(rt, session, one.text[:-1])
    following = decode(rt, sessions, [one.text[-1] for one in questions], likeliest)
    written = [tokens for _, (tokens, _) in zip(range(steps), following, strict=False)]
    for session in sessions:
        session.close()
    answers = zip(*written, strict=True)
    return [list(a[: len(one.answer)]) == one.answer for a, one in zip(answers, questions, strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Asks at all lengths and depths and records a case for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384], metavar="N")
    parser.add_argument("--tries", type=int, metavar="N", help="for each length and depth (default 2, on a GPU 20)")
    parser.add_argument("--pool-slots", type=int, metavar="N", help="default: 5 x (top-k + 1)")
    parser.add_argument("--row-format", choices=("fp8_656", "bf16_1152", "fp32"), default="fp8_656")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--result", default="needle", metavar="NAME", help="results go to NAME.json")
    options = parser.parse_args(arguments)
    device = device_named(options.device)
    model = load_model(device)
    if max(options.lengths) > model.config.max_position_embeddings:
        parser.error(f"lengths: the model reads {model.config.max_position_embeddings} tokens")
    tokenizer = load_tokenizer()
    prose, code = texts(tokenizer)
    shape = model.shape(options.row_format, "fp32" if options.row_format == "fp32" else "fp8")
    slots = options.pool_slots or len(DEPTHS) * (shape.top_k + 1)
    tries = options.tries or (2 if device == "cpu" else 20)
    cases: list[dict[str, Any]] = []
    for length in options.lengths:
        source = RetrievalText(tokenizer, np.asarray(prose + code, np.int16), options.seed)
        capacity = blocks(length) + 64  # shorter answers than the batch's longest are decoded on, in vain
        started = time.perf_counter()
        hits = [0] * len(DEPTHS)
        with echo.Runtime(
            shape, device=device, host_tokens=len(DEPTHS) * capacity, max_context=capacity,
            max_batch=len(DEPTHS), gpu_slots=slots,
        ) as rt:  # fmt: skip
            rt.capture(model.forward, [len(DEPTHS)])
            for _ in range(tries):
                hits = [before + hit for before, hit in zip(hits, ask(rt, draw(source, length)), strict=True)]
            hit_rate = rt.stats().hit_rate
        seconds = time.perf_counter() - started
        shares = {"pool_slots": slots, "pool_share": slots / (len(DEPTHS) * length), "hit_rate": hit_rate}
        cases += [
            {"case": {"device": device, "length": length, "depth": depth}, "hits": found, "tries": tries, **shares}
            for depth, found in zip(DEPTHS, hits, strict=True)
        ]
        print(f"{length} tokens: {hits} of {tries} at depths {DEPTHS}; {seconds:.1f} s", flush=True)
        cases[-1]["seconds_of_length"] = seconds
    print(record.write(options.result, cases))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
