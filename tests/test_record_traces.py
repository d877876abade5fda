"""The traces that ship: what their README says of them, and what the product's rule misses on them."""

from __future__ import annotations

import re

import numpy as np
import pytest

import echo
from echo import cli
from echo.traces import Trace, shipped
from echo.traces.comparison import compare, slots_of

POOLS = (1, 1.5, 2, 3, 4, 8)


@pytest.fixture(scope="module", params=shipped.NAMES)
def trace(request) -> Trace:
    return Trace.load(shipped.path_of(request.param))


def readme() -> dict[str, list[str]]:
    """Cells by trace."""
    lines = (shipped.path_of("code").parent / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    return {row[0].strip("`").removesuffix(".npz"): row[1:] for row in rows}


def test_there_are_those_that_the_readme_lists():
    folder = shipped.path_of("code").parent
    assert tuple(readme()) == shipped.NAMES == tuple(name for name in readme() if (folder / f"{name}.npz").is_file())
    assert {path.stem for path in folder.glob("*.npz")} == {*shipped.NAMES}
    assert sum(path.stat().st_size for path in folder.glob("*.npz")) <= 4_000_000


@pytest.mark.parametrize("name", shipped.NAMES)
def test_sizes_are_as_the_readme_says(name):
    size, text, steps, ranks = readme()[name]
    trace, path = Trace.load(shipped.path_of(name)), shipped.path_of(name)
    prefilled = int(re.findall(r"[\d,]*\d{3}", text)[-1].replace(",", ""))
    assert path.stat().st_size == int(size.replace(",", ""))
    assert trace.text.endswith(f"; {prefilled:,} tokens prefilled")
    assert trace.steps == int(steps.split(",")[0]) and trace.ranks == 256 * int(ranks.split()[0])
    assert trace.context.tolist() == list(range(prefilled + 1, prefilled + 1 + trace.steps))
    assert (trace.model, trace.layers, trace.top_k) == ("tiny_dsa", 5, 256)
    assert trace.positions.min() >= 0 and np.isfinite(trace.kth_score).all() and (trace.ranked >= 0).all()


def test_the_products_rule_does_not_lose_to_lru(trace):
    """Never more than 0.2 points behind in a layer; over layers not behind, and a twentieth better where it matters.

    In a pool of one selection the new token takes a slot before it is known which rows the step selects: often enough
    one of them, and there is nothing else to choose.
    """
    rates = compare(trace, [slots_of(trace, pool) for pool in POOLS], ("lru", "echo"))
    assert (rates.rates["echo"] <= rates.rates["lru"] + 0.002).all()
    lru, rule = rates.mean("lru"), rates.mean("echo")
    assert rule[0] <= lru[0] + 0.0015
    assert (rule[1:] <= lru[1:]).all()
    assert (rule[1:3] <= 0.95 * lru[1:3]).all()


def test_the_command_takes_them_by_name(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["sampled", "topics", "--pools", "2", "--policies", "lru,echo", "--layers", "1", "--plot", "p.png"]
    assert cli.main(["policies", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if line.startswith("tiny_dsa:")]
    assert heads[0] == "tiny_dsa:sampled: 144 steps, 5 layers, top-256 of 4,097 to 4,240 tokens"
    assert heads[1].startswith("tiny_dsa:topics: ") and len(heads) == 2
    assert (tmp_path / "p.png").is_file()


def test_one_that_is_missing_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "_FOLDER", tmp_path)
    with pytest.raises(echo.NotSupported, match="^traces: code.npz is missing in "):
        shipped.path_of("code")
    assert cli.main(["policies", "code"]) == 1
    assert capsys.readouterr().err.startswith("echo-kv policies: traces: ")
