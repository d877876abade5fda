"""How tokens are drawn and prompts read."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import echo
from echo import decoding


def generators(*seeds: int) -> list:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def test_rows_draw_apart_and_not_what_is_left_out():
    logits = torch.randn((3, 50), generator=torch.Generator().manual_seed(0))
    draws = generators(1, 2, 3)
    together = [decoding.draw(logits, 1.0, draws, without=[4, 7]) for _ in range(200)]
    (alone,) = generators(2)
    assert [tokens[1] for tokens in together] == [
        decoding.draw(logits[1:2], 1.0, [alone], without=[4, 7])[0] for _ in range(200)
    ]
    assert len({tokens[0] for tokens in together}) > 10 and not {4, 7} & {token for row in together for token in row}
    (free,) = generators(2)
    assert {4, 7} & {decoding.draw(logits[1:2], 1.0, [free])[0] for _ in range(500)}


def test_without_temperature_the_first_of_the_likeliest_is_taken():
    logits = torch.tensor([[0.0, 3.0, 5.0, 5.0], [7.0, 3.0, 5.0, 1.0]], dtype=torch.bfloat16)
    assert decoding.draw(logits, 0, generators(0, 0)) == [2, 0]
    assert decoding.draw(logits, 0, generators(0, 0), without=(0, 2)) == [3, 1]
    assert decoding.draw(100 * logits, 1e-42, generators(0, 0)) == [2, 0]  # next to none
    assert logits[1, 0] == 7


def test_a_prompt_is_read_chunk_by_chunk():
    calls = []
    runtime = SimpleNamespace(
        plan=SimpleNamespace(config=SimpleNamespace(prefill_chunk=4)),
        prefill=lambda *given: calls.append(given) or len(calls),
    )
    assert decoding.read(runtime, "session", list(range(10)), "forward") == 3
    assert calls == [("session", part, "forward") for part in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9])]


def test_a_device_is_named_as_a_runtime_would():
    assert decoding.device_of("cpu") == "cpu"
    with pytest.raises(echo.InvalidArgument, match="^device: "):
        decoding.device_of("tpu")


def test_a_model_goes_where_a_runtime_does(monkeypatch):
    with echo.Runtime(echo.ModelShape.tiny(), host_tokens=64, max_batch=1) as runtime:
        assert decoding.runtime_device() == runtime.device
    monkeypatch.setenv("ECHO_DEVICE", "cpu")
    monkeypatch.setenv("ECHO_HOST_ROW_STRIDE", "768")  # of another shape than the one that is tried
    assert decoding.runtime_device() == "cpu"
    monkeypatch.setenv("ECHO_DEVICE", "gpu")
    with pytest.raises(echo.InvalidArgument, match="^ECHO_DEVICE: "):
        decoding.runtime_device()
