"""What `echo-kv record` reads, decodes and keeps."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import echo
from echo import cli
from echo.traces import Trace

hf = pytest.importorskip("echo.hf")
pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Records with the random model unless told otherwise."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, model: str = "random") -> Trace:
        options = ["--out", "trace.npz", "--device", "cpu", "--model", model]
        assert cli.main(["record", *options, *arguments]) == 0
        return Trace.load("trace.npz")

    return run


@pytest.fixture
def fed(monkeypatch):
    """Tokens that are given to runtimes: prompts in one list, those of the steps in another."""
    prompt: list[int] = []
    decoded: list[int] = []
    prefill, batch = echo.Runtime.prefill, echo.Batch

    def seen_prefill(self, session, tokens, forward=None):
        prompt.extend(tokens)
        return prefill(self, session, tokens, forward)

    def seen_batch(sessions, tokens):
        decoded.extend(tokens)
        return batch(sessions, tokens)

    monkeypatch.setattr(echo.Runtime, "prefill", seen_prefill)
    monkeypatch.setattr(echo, "Batch", seen_batch)
    return prompt, decoded


def test_the_trained_model_reads_the_essay_that_ships(capsys, record, fed):
    trace = record("--tokens", "500", "--new-tokens", "20", model="trained")
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(echo.build_info()) and first.endswith(": 500 tokens, then 20 steps")
    assert "20 steps, 5 layers, top-256 of 501 to 520 tokens" in last
    assert (trace.model, trace.text, trace.ranks) == ("tiny_dsa", "memory.txt; 500 tokens prefilled", 520)
    assert trace.positions.min() >= 0 and np.isfinite(trace.kth_score).all()
    start, _, nats = trace.notes.partition(", ")
    assert start == "steps decode the text"
    # Better than guessing among 2,048 tokens, by much: it read the right ones in their order.
    assert 1 < float(nats.removesuffix(" nats per token")) < 5
    prompt, decoded = fed
    essay = (Path(echo.__file__).parent / "data" / "memory.txt").read_text()
    tokenizer = hf.tiny_dsa_tokenizer()
    assert prompt + decoded == [tokenizer.eos_token_id, *tokenizer(essay)["input_ids"]][:520] and len(decoded) == 20


@pytest.mark.parametrize("ranks", [None, 0])
def test_the_random_model_reads_bytes(capsys, record, ranks, fed):
    more = () if ranks is None else ("--ranks", str(ranks))
    trace = record("--tokens", "600", "--new-tokens", "24", *more)
    assert "24 steps, 3 layers, top-64 of 601 to 624 tokens" in capsys.readouterr().out
    assert trace.positions.min() >= 0 and np.isfinite(trace.kth_score).all()
    assert trace.ranks == (512 if ranks is None else 0) and trace.model == "tiny_model"
    assert bytes(fed[0] + fed[1]) == (Path(echo.__file__).parent / "data" / "memory.txt").read_bytes()[:624]


def test_texts_are_joined(record, fed, tmp_path):
    (tmp_path / "a.txt").write_text("a" * 90)
    (tmp_path / "ü.txt").write_text("ü" * 40)
    (tmp_path / "c.txt").write_text("c" * 40)
    trace = record("--text", "a.txt", "ü.txt", "c.txt", "--tokens", "150", "--new-tokens", "20")
    assert bytes(fed[0]).decode() == "a" * 90 + "ü" * 30 and bytes(fed[1]).decode() == "ü" * 10
    assert trace.text == "a.txt, ü.txt; 150 tokens prefilled"  # the third is not reached


def test_texts_go_on_in_turn(record, fed, tmp_path):
    for letter in "abc":
        (tmp_path / f"{letter}.txt").write_text("".join(f"{letter}{number:02}" for number in range(40)))
    texts = ["--text", "a.txt", "b.txt", "c.txt"]
    trace = record(*texts, "--tokens", "200", "--new-tokens", "30", "--turn-every", "7")
    parts = {letter: (tmp_path / f"{letter}.txt").read_text() for letter in "abc"}
    assert bytes(fed[0]).decode() == parts["a"][:66] + parts["b"][:67] + parts["c"][:67]
    expected = [parts["a"][66:73], parts["b"][67:74], parts["c"][67:74], parts["a"][73:80], parts["b"][74:76]]
    assert bytes(fed[1]).decode() == "".join(expected)
    assert trace.notes.endswith("; the next text every 7 steps")
    assert trace.text == "a.txt, b.txt, c.txt; 200 tokens prefilled"


def test_the_model_writes_what_its_seed_says(record, fed):
    _, decoded = fed
    texts = {}
    for name, arguments in {
        "once": ("--seed", "3"),
        "again": ("--seed", "3"),
        "other": ("--seed", "4"),
        "likeliest": ("--seed", "3", "--temperature", "0"),
        "likeliest, other": ("--seed", "4", "--temperature", "0"),
    }.items():
        decoded.clear()
        trace = record("--tokens", "100", "--new-tokens", "12", "--continue", "model", "--ranks", "0", *arguments)
        texts[name] = list(decoded)
        assert trace.seed == int(arguments[1]) and "the model writes at temperature" in trace.notes
    assert texts["once"] == texts["again"] and texts["likeliest"] == texts["likeliest, other"]
    assert len({tuple(texts[name]) for name in ("once", "other", "likeliest")}) == 3


def test_layers_can_be_left_out(record):
    arguments = ("--tokens", "100", "--new-tokens", "6")
    every = record(*arguments)
    for ranks in (), ("--ranks", "0"):
        some = record(*arguments, *ranks, "--layers", "2,0")
        assert some.layers == 2 and some.notes.endswith("; layers 0, 2")
        np.testing.assert_array_equal(some.positions, every.positions[:, [0, 2]])
        np.testing.assert_array_equal(some.kth_score, every.kth_score[:, [0, 2]])
    assert some.ranks == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "0"), "tokens: 0 given, expected at least 1"),
        (("--new-tokens", "0"), "new_tokens: 0 given, expected at least 1"),
        (("--seed", "-1"), "seed: -1 given, expected an integer from 0 to"),
        (("--continue", "model", "--temperature", "nan"), "temperature: nan given, expected at least 0"),
        (("--continue", "model", "--temperature", "-1"), "temperature: -1.0 given"),
        (("--temperature", "0.5"), "temperature: given for steps that decode the text; see --continue"),
        (("--seed", str(1 << 64)), "seed: 18446744073709551616 given"),
        (("--ranks", "63"), r"ranks: 63 given, expected 0 or at least 64 \(top-k\)"),
        (("--layers", "0,3"), "layers: '0,3' given, expected numbers from 0 to 2"),
        (("--layers", "-1"), "layers: '-1' given"),
        (("--layers", ""), "layers: '' given"),
        (("--out", "no/where/t.npz"), "out: 'no/where/t.npz' given, expected a file in a folder that exists"),
        (("--out", "."), "out: '.' given"),
        (("--text", "nowhere.txt"), "text: expected files of UTF-8 text: .*nowhere.txt"),
        (("--text", "latin1.txt"), "text: expected files of UTF-8 text: .*utf-8"),
        (("--text", "short.txt", "--tokens", "30"), "tokens: 158 are needed with the new ones, the text has 40"),
        (
            ("--tokens", "37988", "--new-tokens", "1"),
            "tokens: 37,989 are needed with the new ones, the text has 37,988",
        ),
        (("--turn-every", "-1"), "turn_every: -1 given"),
        (("--turn-every", "4"), "turn_every: expected several texts, and steps that follow them"),
        (
            ("--text", "short.txt", "short.txt", "--turn-every", "4", "--continue", "model"),
            "turn_every: expected several",
        ),
        (
            ("--text", "short.txt", "short.txt", "--turn-every", "4", "--tokens", "60", "--new-tokens", "40"),
            "tokens: 42 are needed with the new ones, short.txt has 40",
        ),
        (("--text", "short.txt", "short.txt", "--turn-every", "4", "--tokens", "90"), "tokens: 45 are needed"),
        (
            ("--model", "trained", "--tokens", "16384", "--new-tokens", "1"),
            "tokens: 16384 and 1 new ones given, .*16,384",
        ),
        (("--device", "tpu"), "device: "),
    ],
)
def test_it_refuses_by_name(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    for load in ("tiny_model", "tiny_dsa_model"):
        monkeypatch.setattr(f"echo.hf.{load}", lambda *_, **__: pytest.fail("a model was loaded"))
    (tmp_path / "short.txt").write_text("x" * 40)
    (tmp_path / "latin1.txt").write_bytes(b"\xfc")
    assert cli.main(["record", "--out", "t.npz", "--model", "random", "--device", "cpu", *arguments]) == 1
    assert not (tmp_path / "t.npz").exists()
    assert re.match(f"echo-kv record: {message}", capsys.readouterr().err)
