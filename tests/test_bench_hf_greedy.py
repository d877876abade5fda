"""bench/hf_greedy.py: it runs, and a token that differs is reported with its logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.programs import importable

pytest.importorskip("transformers", minversion="5.17")
with importable("bench"):
    import generation
    import hf_greedy
    import record

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def test_the_same_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    essay, _ = generation.texts(generation.load_tokenizer())
    monkeypatch.setattr(hf_greedy, "texts", lambda _: (essay, essay))  # the sources change
    assert hf_greedy.main(["--prompts", "2", "--longest", "400", "--new-tokens", "4"]) == 0
    (case,) = json.loads((tmp_path / "hf_greedy.json").read_text())["cases"]
    assert case["tokens"] == {"all": 8, "equal": 8}
    assert case["largest_logit_difference"] < case["smallest_margin"]
    assert case["differences"] == []


def test_a_difference_is_located() -> None:
    theirs = torch.tensor([[9.0, 1.0, 2.0], [0.0, 5.0, 4.5], [9.0, 0.0, 0.0]])
    ours = torch.tensor([[9.0, 1.0, 2.25], [0.0, 4.5, 5.0], [0.0, 0.0, 9.0]])
    found = hf_greedy.compare([0, 2, 2], ours, [0, 1, 0], theirs)
    assert found == hf_greedy.Comparison(
        equal=1,
        logit_difference=0.5,  # not 9: behind the difference, both continue different texts
        margin=0.5,
        difference={"step": 1, "ours": 2, "theirs": 1, "logit_gap": 0.5, "logit_difference": 0.5},
    )


def test_all_equal() -> None:
    logits = torch.tensor([[3.0, 1.0], [0.0, 0.5]])
    assert hf_greedy.compare([0, 1], logits, [0, 1], logits) == hf_greedy.Comparison(2, 0.0, 0.5, None)
