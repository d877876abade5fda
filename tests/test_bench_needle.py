"""bench/needle.py: it runs, right answers are hits and others are not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.programs import importable

import echo

pytest.importorskip("transformers", minversion="5.17")
with importable("bench"):
    import generation
    import needle
    import record

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def test_all_depths_are_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert needle.main(["--lengths", "128", "320", "--tries", "1", "--device", device]) == 0
    cases = json.loads((tmp_path / "needle.json").read_text())["cases"]
    keys = [(case["case"]["length"], case["case"]["depth"]) for case in cases]
    assert keys == [(length, depth) for length in (128, 320) for depth in needle.DEPTHS]
    assert all(case["tries"] == 1 and case["hits"] in (0, 1) for case in cases)


def test_only_the_right_answer_is_a_hit(device: str) -> None:
    device = generation.device_named(device)
    model = generation.load_model(device)
    tokenizer = generation.load_tokenizer()
    essay, _ = generation.texts(tokenizer)  # the sources change
    source = needle.RetrievalText(tokenizer, np.asarray(essay, np.int16), seed=0)
    questions = needle.draw(source, 320)
    for one in questions:
        asked, answer = tokenizer.decode(one.text), tokenizer.decode(one.answer)
        assert len(one.text) + len(one.answer) == 320
        key = asked.rsplit("assert ", 1)[1].removesuffix(' == "')
        assert f'{key} = "{answer}' in asked
    shape = model.shape()
    with echo.Runtime(
        shape, device=device, host_tokens=5 * 384, max_context=384, max_batch=5, gpu_slots=5 * (shape.top_k + 1)
    ) as rt:
        rt.capture(model.forward, [5])
        assert all(needle.ask(rt, questions))  # what the model was trained for
        for one in questions[::2]:
            one.answer[-2] = (one.answer[-2] + 1) % 2048
        assert needle.ask(rt, questions) == [False, True, False, True, False]
        assert rt.stats().sessions == 0
