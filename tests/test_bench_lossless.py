"""bench/lossless.py: it runs, nothing differs, and what is made to differ is counted and located."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.programs import importable

pytest.importorskip("transformers", minversion="5.17")
with importable("bench"):
    import generation
    import lossless
    import record

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SIZES = [
    "--prompts", "2", "--shortest", "300", "--longest", "600", "--new-tokens", "4", "--pools", "2", "--scenarios", "6",
]  # fmt: skip


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    return tmp_path / "lossless.json"


def test_nothing_differs(results: Path, device: str) -> None:
    assert lossless.main([*SIZES, "--device", device]) == 0
    setup, *cases, scenarios = json.loads(results.read_text())["cases"]
    assert scenarios["scenarios"] == scenarios["worlds"] == 6
    assert scenarios["rows"]["compared"] > 600 and scenarios["rows"]["differences"] == 0
    assert setup["prompt_tokens"] == {"shortest": 300, "longest": 600, "all": 900}
    resident, least = 320 + 640, 2 * 257
    keys = [(case["case"]["pool_slots"], case["case"]["sampling"]) for case in cases]
    kinds = ["greedy", "sampled", "greedy, reversed"]
    # Half of the tokens are fewer than the least that a runtime takes, so that is the only other pool.
    assert keys == [(resident, "greedy"), (resident, "sampled"), *((least, kind) for kind in kinds)]
    assert all("tokens" not in case for case in cases[:2])
    first_uses = sum(case["rows_fetched"] for case in cases[:2])  # of rows that no query of the prefill selected
    for case in cases[2:]:
        assert case["first_difference"] is None
        assert case["tokens"] == case["logits"] == {"compared": 8, "equal": 8}
        assert case["selections"] == {"compared": 40, "equal": 40}
        assert case["rows_fetched"] > first_uses and 0 < case["hit_rate"] < 1


def test_an_uneven_last_batch(results: Path) -> None:
    assert lossless.main([*SIZES, "--prompts", "3", "--batch", "2", "--device", "cpu"]) == 0
    _, *cases, _ = json.loads(results.read_text())["cases"]
    assert cases[-1]["tokens"] == {"compared": 12, "equal": 12}


def test_a_model_that_changes_is_found_out(monkeypatch: pytest.MonkeyPatch, results: Path) -> None:
    """As if small pools returned other rows: behind the second layer, everything is another."""
    run = lossless.Experiment.run

    def tampered(self: Any, slots: int, order_too: bool = False) -> Any:
        if slots < self.host_tokens:
            with torch.no_grad():
                self.model.model.model.layers[1].mlp.down_proj.weight.mul_(1.5)
        return run(self, slots, order_too)

    monkeypatch.setattr(lossless.Experiment, "run", tampered)
    assert lossless.main([*SIZES, "--device", "cpu"]) == 1
    _, *cases, _ = json.loads(results.read_text())["cases"]
    greedy = cases[2]
    # Layers 0 and 1 select what they did for the first token, and all prompts are longer than a selection.
    assert greedy["first_difference"]["selections"] == {"step": 0, "layer": 2, "prompt": 0}
    assert greedy["first_difference"]["logits"] == {"step": 0, "prompt": 0}
    assert greedy["logits"] == {"compared": 8, "equal": 0}
    assert greedy["selections"]["equal"] < greedy["selections"]["compared"]


def decoded() -> lossless.Decoded:
    generator = torch.Generator().manual_seed(0)
    return lossless.Decoded(
        torch.randint(99, (4, 3), generator=generator),
        torch.randint(99, (4, 2, 3, 5), generator=generator, dtype=torch.int32),
        torch.zeros(4, 3, 7, dtype=torch.bfloat16),
    )


def test_differences_are_counted_and_located() -> None:
    wanted, got = decoded(), decoded()
    got.selections[3, 0, 0, 1] += 1
    got.selections[2, 1, 2, 4] += 1
    got.selections[2, 1, 2, 0] += 1  # of the same selection
    got.logits[1, 1, 6] = -0.0  # equal as a number, another bit
    tally = lossless.Tally()
    tally.add(decoded(), wanted, prompts=[10, 11, 12])
    assert tally.lossless
    tally.add(got, wanted, prompts=[13, 14, 15])
    assert not tally.lossless
    assert tally.figures() == {
        "tokens": {"compared": 24, "equal": 24},
        "selections": {"compared": 48, "equal": 46},
        "logits": {"compared": 24, "equal": 23},
        "first_difference": {
            "selections": {"step": 2, "layer": 1, "prompt": 15},
            "logits": {"step": 1, "prompt": 14},
        },
    }


def test_the_first_difference_of_all_batches_is_reported() -> None:
    tally = lossless.Tally()
    for step, prompts in ((2, [0, 1, 2]), (1, [3, 4, 5]), (3, [6, 7, 8])):
        got = decoded()
        got.tokens[step, 2] += 1
        tally.add(got, decoded(), prompts)
    assert tally.first == {"tokens": {"step": 1, "prompt": 5}}
    assert tally.equal["tokens"] == tally.compared["tokens"] - 3


def test_prompts() -> None:
    prose, code = generation.texts(generation.load_tokenizer())
    prompts = generation.draw_prompts(prose, code, 50, 300, 6000)
    lengths = [len(prompt) for prompt in prompts]
    assert lengths == sorted(lengths) and lengths[0] == 300 and lengths[-1] == 6000
    assert len({tuple(prompt[:64]) for prompt in prompts}) == 50
    assert prompts == generation.draw_prompts(prose, code, 50, 300, 6000)


def test_draws_are_each_sessions_own() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    together = generation.Sampler([1, 2, 3], 1.0)
    alone = generation.Sampler([2], 1.0)
    assert [together(logits)[1] for _ in range(20)] == [alone(logits[1:2])[0] for _ in range(20)]


def test_scenarios_that_differ_are_found_out(monkeypatch: pytest.MonkeyPatch, results: Path) -> None:
    case = {"case": {"setup": "random"}, "rows": {"compared": 9, "differences": 1}}
    monkeypatch.setattr(lossless.scenarios, "run", lambda device, count: (case, ["scenario 3: outputs"]))
    assert lossless.main([*SIZES, "--device", "cpu"]) == 1
    assert json.loads(results.read_text())["cases"][-1] == case


@pytest.mark.parametrize("wrong", [["--longest", "16384"], ["--pools", "0"], ["--scenarios", "0"], ["--shortest", "1"]])
def test_what_cannot_be_is_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        lossless.main([*SIZES, "--device", "cpu", *wrong])
