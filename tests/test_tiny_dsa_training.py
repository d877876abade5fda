"""models/tiny_dsa: its forward is transformers' model, its stages run, what it saves loads."""

from __future__ import annotations

import json
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import torch
from support.programs import importable

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

with importable("models/tiny_dsa"):
    import attention
    import corpus
    import evaluate
    import model
    import plan
    import train

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def random_model(config: Any, seed: int) -> model.TinyDsa:
    """All weights random, those of norms too, and larger than at the beginning of a training."""
    ours = model.TinyDsa(config)
    ours.initialise(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in ours.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.5 * parameter if parameter.dim() == 2 else parameter + 0.1 * noise)
    return ours


@pytest.mark.parametrize("top_k", [16, 40, 100, 1000])
@pytest.mark.parametrize("make_config", [model.micro_config, model.tiny_config])
def test_logits_are_those_of_transformers(make_config: Any, top_k: int) -> None:
    """In double: else the order in which a processor adds up decides which of two nearly equal tokens is selected."""
    config = make_config(128)
    config.index_topk = top_k
    ours = random_model(config, seed=top_k).double()
    theirs = transformers.DeepseekV32ForCausalLM._from_config(config, attn_implementation="eager").eval().double()
    keys = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert not keys.unexpected_keys and set(keys.missing_keys) <= {"lm_head.weight"}
    tokens = torch.randint(128, (2, 100), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = theirs(tokens).logits
        sparse = ours.logits(tokens, model.Mode(top_k), model.Kernels())
        dense = ours.logits(tokens, model.Mode(), model.Kernels())
    assert wanted.abs().max() > 0.5
    torch.testing.assert_close(sparse, wanted, rtol=0, atol=1e-5)
    if top_k >= 100:
        torch.testing.assert_close(dense, wanted, rtol=0, atol=1e-5)
    else:
        assert (dense - wanted).abs().max() > 1e-3


def test_a_selection_has_exactly_k_causal_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_CHUNK_ELEMENTS", 2 * 4 * 50 * 7)  # chunks of 7 queries
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 50, 4, 8, generator=generator), torch.randn(2, 50, 8, generator=generator)
    weights = torch.rand(2, 50, 4, generator=generator)
    indexing = attention.Indexing()
    mask = indexing.select(q, k, weights, 9)
    assert torch.equal(mask.sum(-1), (torch.arange(50) + 1).clamp(max=9).expand(2, -1))
    assert not mask.triu(1).any()
    scores = indexing.scores(q, k, weights)
    left_out = scores.masked_fill(mask, -torch.inf).tril().masked_fill(torch.ones(50, 50).triu(1).bool(), -torch.inf)
    assert (scores.masked_fill(~mask, torch.inf).amin(-1) >= left_out.amax(-1)).all()


def test_the_indexer_learns_from_its_own_loss_alone() -> None:
    ours = random_model(model.micro_config(128), seed=0)
    tokens = torch.randint(128, (2, 65), generator=torch.Generator().manual_seed(0))
    losses, index_loss = ours.token_losses(tokens, model.Mode(16, index_queries=8), model.Kernels())
    losses.mean().backward(retain_graph=True)
    assert all((p.grad is None) == ("indexer" in name) for name, p in ours.named_parameters())
    ours.zero_grad()
    index_loss.backward()
    assert all((p.grad is not None) == ("indexer" in name) for name, p in ours.named_parameters())
    assert float(index_loss.detach()) > 0


def test_the_indexer_loss_is_the_divergence_from_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 3, 20, 8, generator=generator)
    index = (torch.randn(1, 20, 2, 4), torch.randn(1, 20, 4), torch.randn(1, 20, 2))
    positions = torch.tensor([3, 10, 19])
    indexing = attention.Indexing()
    wanted = []
    for t in positions.tolist():
        probabilities = (q[0, :, t] @ k[0, :, : t + 1].transpose(1, 2) * 8**-0.5).diagonal(dim1=0, dim2=1)
        target = probabilities.softmax(0).sum(1) / 3
        guess = indexing.scores(*index)[0, t, : t + 1].softmax(0)
        wanted.append((target * (target / guess).log()).sum())
    torch.testing.assert_close(indexing.loss(index, q, k, None, positions), torch.stack(wanted).mean())
    everything = torch.ones(1, 20, 20).tril().bool()
    torch.testing.assert_close(indexing.loss(index, q, k, everything, positions), torch.stack(wanted).mean())


def test_flex_attention_reads_the_mask() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 2, 4, 256, 24, generator=generator)
    v = torch.randn(2, 4, 256, 8, generator=generator)
    mask = ((torch.rand(2, 256, 256, generator=generator) < 0.2) | torch.eye(256).bool()).tril()
    for width in (0, 32):
        flex = attention.FlexSparse(compiled=False, width=width)
        torch.testing.assert_close(flex(q, k, v, mask), attention.sparse_attention(q, k, v, mask))


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        ({"License-Expression": "MIT"}, "MIT"),
        ({"License-Expression": "Apache-2.0 OR BSD-2-Clause"}, "Apache-2.0 / BSD"),
        ({"License-Expression": "MIT AND MPL-2.0"}, None),
        ({"License-Expression": "Apache-2.0 WITH LLVM-exception"}, None),
        ({"Classifier": "License :: OSI Approved :: BSD License"}, "BSD"),
        ({"Classifier": "License :: Other/Proprietary License", "License": "MIT"}, None),
        ({"License": "Apache License, Version 2.0"}, "Apache-2.0"),
        ({"License": "Apache 2.0"}, "Apache-2.0"),
        ({"License": "3-Clause BSD License"}, "BSD"),
        ({"License": "BSD-3-Clause"}, "BSD"),
        ({"License": "GPL-3.0"}, None),
        ({"License": "LGPL or MIT"}, None),
        ({}, None),
    ],
)
def test_licenses(fields: dict[str, str], accepted: str | None) -> None:
    message: Any = Message()
    for key, value in fields.items():
        message[key] = value
    assert corpus.permitted_license(message) == accepted


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """A folder with text, the folder of a trained model, and the metrics."""
    text = tmp_path_factory.mktemp("text")
    for number, source in enumerate(sorted(Path(json.__file__).parents[1].glob("[a-d]*.py"))):
        (text / f"{number}.py").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    out = tmp_path_factory.mktemp("model")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    metrics = train.main(arguments(out, text))
    torch.set_num_threads(threads)
    return text, out, metrics


def test_time_is_divided_by_share_but_each_stage_gets_some() -> None:
    planned = list(plan.PLANS["tiny"].stages)
    steps = {stage.name: 0.2 for stage in planned}
    seconds = {stage.name: part for stage, part in plan.divide(planned, steps, 400.0)}
    assert sum(seconds.values()) == pytest.approx(400.0)
    assert seconds["dense_short"] == pytest.approx(400 * 0.32)
    seconds = {stage.name: part for stage, part in plan.divide(planned, steps | {"sparse_long": 3.0}, 400.0)}
    assert sum(seconds.values()) == pytest.approx(400.0)
    assert seconds["sparse_long"] > 50
    del steps["sparse_long"]  # it did not work on this machine
    assert [stage.name for stage, _ in plan.divide(planned, steps, 9.0)] == [stage.name for stage in planned[:-1]]


def arguments(out: Path, text: Path, *more: str) -> list[str]:
    common = ["--config", "micro", "--roots", str(text), "--workers", "2", "--max-steps", "20"]
    return ["--out", str(out), *common, *more]


def test_all_stages_run_and_learn(trained: tuple[Path, Path, dict[str, Any]]) -> None:
    _, out, metrics = trained
    assert metrics["events"] == []
    stages = {stage["name"]: stage for stage in metrics["stages"]}
    assert list(stages) == ["dense_short", "dense", "indexer", "sparse", "sparse_long"]
    assert all(stage["steps"] == 20 for stage in stages.values())
    curve = stages["dense_short"]["curve"]
    assert curve[-1][4] < curve[0][4] < 7
    evaluation = metrics["evaluation"]
    assert not [part for part in evaluation.values() if "failed" in part]
    assert 0 < evaluation["held_out"]["k=16"]["bits_per_byte"] < 8
    assert evaluation["transformers"]["largest_difference"] < 1e-3
    assert all(layer["kept"] <= layer["best"] + 1e-4 for layer in evaluation["indexer"])
    assert evaluation["needle"]["k=all"][128][0.5][1] > 0
    assert json.loads((out / "metrics.json").read_text())["evaluation"].keys() == evaluation.keys()
    files = {file.name for file in out.iterdir()}
    assert len(files) <= 8 and {"DATA.md", "loss.png", "metrics.json", "model.safetensors", "config.json"} <= files
    assert "| text" in (out / "DATA.md").read_text()


def test_what_was_saved_loads_everywhere(trained: tuple[Path, Path, dict[str, Any]]) -> None:
    _, out, _ = trained
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype="auto")
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert theirs.dtype == torch.bfloat16
    assert theirs.lm_head.weight.data_ptr() == theirs.model.embed_tokens.weight.data_ptr()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    text = 'def f(x):\n    return {"κ": 0x7f3a, "b": [1, 22]}\n\n\n<|endoftext|>KEY_7f3a = "3fa90c17"'
    ids = tokenizer(text)["input_ids"]
    assert ids == evaluate.Tokenizer.from_file(str(out / "tokenizer.json")).encode(text).ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == theirs.config.eos_token_id == 0
    hf = pytest.importorskip("echo.hf")
    assert hf.DsaModel.from_pretrained(out).dtype == torch.bfloat16


def test_resuming(trained: tuple[Path, Path, dict[str, Any]], tmp_path: Path) -> None:
    text, out, _ = trained
    more = [
        "--resume",
        str(out / "model.safetensors"),
        "--minutes",
        "0.08",
        "--stages",
        "indexer,sparse",
        "--seed",
        "3",
    ]
    metrics = train.main(arguments(tmp_path, text, *more))
    assert [stage["name"] for stage in metrics["stages"]] == ["indexer", "sparse"]
    assert (tmp_path / "tokenizer.json").read_text() == (out / "tokenizer.json").read_text()
    assert metrics["evaluation"]["held_out"]["k=16"]["bits_per_byte"] < 8
