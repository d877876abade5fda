"""generate: batching, sampling, stopping, sessions that are closed whatever happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.hf_reference import hf, random_bytes, torch

import echo

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PROMPTS = [random_bytes(length, seed=length).tolist() for length in (5, 64, 65, 130, 33, 71)]


@pytest.fixture
def dsa(device: str) -> Any:
    return hf.DsaModel(hf.tiny_model(0, device=device))


@pytest.fixture
def rt(make_runtime: Callable[..., echo.Runtime], dsa: Any) -> echo.Runtime:
    return make_runtime(dsa.shape("fp32", "fp32"), max_batch=2)


def test_prompts_queue_for_a_place_in_the_batch(rt: echo.Runtime, dsa: Any) -> None:
    together = hf.generate(rt, dsa, PROMPTS, max_new_tokens=20)
    assert together == [hf.generate(rt, dsa, [prompt], max_new_tokens=20)[0] for prompt in PROMPTS]
    assert [len(text) for text in together] == [20] * len(PROMPTS)
    assert rt.stats().sessions == 0


def test_prompts_queue_for_room_in_the_host_pool(make_runtime: Callable[..., echo.Runtime], dsa: Any) -> None:
    small = make_runtime(dsa.shape("fp32", "fp32"), max_batch=4, host_tokens=256, max_context=256)
    large = make_runtime(dsa.shape("fp32", "fp32"), max_batch=4)
    assert hf.generate(small, dsa, PROMPTS, 20) == hf.generate(large, dsa, PROMPTS, 20)
    with pytest.raises(echo.CapacityError), small.open_session(128):
        hf.generate(small, dsa, [PROMPTS[3]], 20)
    assert small.stats().sessions == 0


def test_captured_steps_write_the_same(rt: echo.Runtime, dsa: Any) -> None:
    eager = hf.generate(rt, dsa, PROMPTS, max_new_tokens=20)
    rt.capture(dsa.forward, batch_sizes=[1, 2])
    assert hf.generate(rt, dsa, PROMPTS, max_new_tokens=20, captured=True) == eager


def test_draws_are_seeded_per_prompt(rt: echo.Runtime, dsa: Any) -> None:
    def draw(prompts: list[list[int]], seed: int) -> list[list[int]]:
        return hf.generate(rt, dsa, prompts, max_new_tokens=12, temperature=2.0, seed=seed)

    state = torch.get_rng_state()
    texts = draw(PROMPTS[:3], seed=1)
    assert texts == draw(PROMPTS[:3], seed=1)
    assert texts != draw(PROMPTS[:3], seed=100)
    assert texts[0] == draw(PROMPTS[:1], seed=1)[0]
    assert torch.equal(state, torch.get_rng_state())


def test_a_stop_token_ends_a_text(rt: echo.Runtime, dsa: Any) -> None:
    (text,) = hf.generate(rt, dsa, PROMPTS[:1], max_new_tokens=20)
    stop = text[7]
    stopped = hf.generate(rt, dsa, PROMPTS[:2], max_new_tokens=20, stop_tokens=[stop])
    assert stopped[0] == text[: text.index(stop) + 1]
    dsa.model.generation_config.eos_token_id = stop
    assert hf.generate(rt, dsa, PROMPTS[:2], max_new_tokens=20) == stopped
    assert hf.generate(rt, dsa, PROMPTS[:1], max_new_tokens=20, stop_tokens=[]) == [text]


def test_nothing_to_do(rt: echo.Runtime, dsa: Any) -> None:
    assert hf.generate(rt, dsa, [], max_new_tokens=5) == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"prompts": [[1], []]}, "prompts: entry 1"),
        ({"prompts": [[1, 256]]}, "prompts: entry 0"),
        ({"prompts": [[-1]]}, "prompts: entry 0"),
        ({"prompts": ["text"]}, "prompts: entry 0"),
        ({"prompts": [7]}, "prompts: entry 0"),
        ({"prompts": [[1], [2] * 1021]}, "prompts: entry 1"),
        ({"prompts": None}, "prompts"),
        ({"prompts": 7}, "prompts"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"max_new_tokens": "4"}, "max_new_tokens"),
        ({"stop_tokens": 5}, "stop_tokens"),
        ({"stop_tokens": ["5"]}, "stop_tokens"),
        ({"temperature": None}, "temperature"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"seed": None}, "seed"),
        ({"max_new_tokens": 1 << 20}, "max_new_tokens"),
    ],
)
def test_malformed_arguments_are_named(rt: echo.Runtime, dsa: Any, change: dict[str, Any], name: str) -> None:
    arguments = {"prompts": PROMPTS, "max_new_tokens": 4, **change}
    with pytest.raises(echo.InvalidArgument, match=f"^{name}"):
        hf.generate(rt, dsa, **arguments)
    assert rt.stats().sessions == 0


def test_integers_of_numpy_are_seeds(rt: echo.Runtime, dsa: Any) -> None:
    first, second = (
        hf.generate(rt, dsa, PROMPTS, max_new_tokens=4, temperature=1.0, seed=seed) for seed in (3, np.int64(3))
    )
    assert first == second


def test_prompts_and_numbers_may_come_from_anywhere(rt: echo.Runtime, dsa: Any) -> None:
    expected = hf.generate(rt, dsa, PROMPTS[:2], max_new_tokens=4)
    given: Any = (torch.tensor(prompt) for prompt in PROMPTS[:2])
    assert hf.generate(rt, dsa, given, max_new_tokens=np.int64(4), temperature=np.float32(0)) == expected


def test_sessions_are_closed_when_the_model_fails(rt: echo.Runtime, dsa: Any) -> None:
    def fail(p: echo.ForwardPass, tensors: Any) -> None:
        if not p.is_prefill:
            raise RuntimeError("out of luck")

    dsa.observer = fail
    with pytest.raises(RuntimeError, match="out of luck"):
        hf.generate(rt, dsa, PROMPTS, max_new_tokens=4)
    assert rt.stats().sessions == 0
