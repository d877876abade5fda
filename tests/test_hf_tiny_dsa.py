"""The trained model that comes with the package: complete, loaded as transformers loads it, the same through echo.

The weights ship, so nothing here may be skipped for want of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.hf_reference import hf, torch

import echo

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_torch_thread")

# Longer than the selection of 256 tokens, so that what is selected matters.
CODE = '''"""Reading and writing of settings."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Settings:
    """What a user has chosen.

    Attributes:
        path: the file they come from.
        values: the settings by name.
    """

    path: Path
    values: dict[str, str] = field(default_factory=dict)

    def get(self, name: str, default: str | None = None) -> str | None:
        """Returns a value; the environment comes first."""
        return os.environ.get(name.upper(), self.values.get(name, default))

    def set(self, name: str, value: str) -> None:
        if not name.isidentifier():
            raise ValueError(f"{name!r} is not a name")
        self.values[name] = value

    def save(self) -> None:
        with open(self.path, "w", encoding="utf-8") as file:
            json.dump(self.values, file, indent=2)'''
# After each, the likeliest token stands clear of the next one, step after step.
OPENINGS = ("\n\n\ndef load(path):", "\n\n    def load(self)", "\n\n\ndef test_settings(")


@pytest.fixture
def device() -> str:
    """A GPU rounds differently, and what is greedy may then be another token."""
    return "cpu"


@pytest.fixture(scope="module")
def model() -> Any:
    return hf.tiny_dsa_model(device="cpu")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = hf.tiny_dsa_tokenizer()
    return [[tokenizer.eos_token_id, *tokenizer(CODE + opening)["input_ids"]] for opening in OPENINGS]


def test_it_is_what_transformers_loads(model: Any, prompts: list[list[int]]) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf.tiny_dsa_path(), dtype=torch.float32)
    tokens = torch.tensor(prompts[:1])
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, theirs.eval()(tokens).logits)
    assert not model.training and model.dtype == torch.float32


def test_both_types_have_the_weights_as_they_are_stored(model: Any) -> None:
    stored = hf.tiny_dsa_model(dtype=torch.bfloat16, device="cpu").state_dict()
    assert all(torch.equal(weights, stored[name].float()) for name, weights in model.state_dict().items())


def test_the_tokenizer_gives_text_back() -> None:
    tokenizer = hf.tiny_dsa_tokenizer()
    ids = tokenizer(CODE)["input_ids"]
    assert tokenizer.decode(ids) == CODE
    assert 256 < len(ids) < 0.6 * len(CODE)
    assert max(ids) < tokenizer.vocab_size == hf.tiny_dsa_model(device="cpu").config.vocab_size


def test_its_texts_through_echo_are_those_of_transformers(
    make_runtime: Callable[..., echo.Runtime], model: Any, prompts: list[list[int]]
) -> None:
    dsa = hf.DsaModel(model)
    rt = make_runtime(dsa.shape("fp32", "fp32"), gpu_slots=3 * 257, max_batch=3)
    assert min(map(len, prompts)) > model.config.index_topk
    expected = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        written = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=32,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best, second = torch.cat(written.logits).topk(2).values.unbind(-1)
        assert (best - second).min() > 0.05, "a near tie: this prompt says nothing, choose another"
        expected.append(written.sequences[0, len(prompt) :].tolist())
    assert hf.generate(rt, dsa, prompts, max_new_tokens=32) == expected
    assert len({tuple(text) for text in expected}) == len(prompts)


def test_it_loads_from_its_folder(make_runtime: Callable[..., echo.Runtime], prompts: list[list[int]]) -> None:
    dsa = hf.DsaModel.from_pretrained(hf.tiny_dsa_path(), device="cpu")
    assert dsa.dtype == torch.bfloat16
    rt = make_runtime(dsa.shape(), gpu_slots=257, max_batch=1)
    assert len(hf.generate(rt, dsa, prompts[:1], max_new_tokens=4)[0]) <= 4


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_missing_files_are_named(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(hf.tiny_dsa_path(), tmp_path, dirs_exist_ok=True)
    (tmp_path / missing).unlink()
    monkeypatch.setattr("echo.hf.tiny_dsa._FOLDER", tmp_path)
    for load in (hf.tiny_dsa_path, hf.tiny_dsa_model, hf.tiny_dsa_tokenizer):
        with pytest.raises(echo.NotSupported, match=f"^tiny_dsa: {missing} missing in "):
            load()


def test_it_goes_where_a_runtime_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which on a machine without GPUs is the CPU in any case: so another device stands for the runtime's."""
    monkeypatch.setattr("echo.hf.tiny_dsa.runtime_device", lambda: "meta")
    monkeypatch.setattr("echo.hf.model.runtime_device", lambda: "meta")
    assert hf.tiny_dsa_model().device.type == "meta"
    assert hf.DsaModel.from_pretrained(hf.tiny_dsa_path()).device.type == "meta"
    assert hf.DsaModel.from_pretrained(hf.tiny_dsa_path(), device="cpu").device.type == "cpu"
