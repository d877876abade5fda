"""What `echo-kv policies` prints, writes and refuses."""

from __future__ import annotations

import json

import pytest
from support.commands import lines_of
from support.traces import growing

from echo import cli
from echo.traces import Trace, synthetic
from echo.traces.comparison import compare
from echo.traces.policies import POLICIES

REAL = tuple(policy for policy in POLICIES if policy != "belady")


def test_a_table_for_each_trace(capsys, tmp_path):
    path = tmp_path / "trace.npz"
    trace = growing(steps=60, top_k=8, first=80, layers=3, ranks=60)
    trace.save(path)
    files = {"--json": tmp_path / "figures.json", "--plot": tmp_path / "figures.png"}
    lines = lines_of(
        capsys, "policies", str(path), "glm", "--pools", "1,2.5", "--steps", "40", "--top-k", "16", "--layers", "0",
        *(str(part) for pair in files.items() for part in pair),
    )  # fmt: skip
    assert lines[0] == "a: 60 steps, 3 layers, top-8 of 80 to 139 tokens"
    assert lines[1].startswith("scores of 60 tokens: ")  # fewer than four times the largest pool
    assert lines[2].split() == ["pool", "/", "top-k", "1", "2.5"]
    table = {name: [float(rate.rstrip("*")) for rate in rates] for name, *rates in map(str.split, lines[3:9])}
    assert list(table) == list(POLICIES)
    assert all(table["belady"][i] <= min(table[policy][i] for policy in REAL) for i in range(2))
    rate = compare(Trace.load(path), [20], ("echo",), [0]).mean("echo")[0]
    assert table["echo"][1] == round(100 * rate, 2)
    assert lines[9].split()[:4] == ["echo", "to", "lru,", "%"]
    assert "synthetic:glm: 40 steps, 1 layer, top-16 of 256 tokens" in lines
    figures = json.loads(files["--json"].read_text())
    assert [one["model"] for one in figures["traces"]] == ["a", "synthetic:glm"]
    assert figures["traces"][0]["misses"]["echo"][1] == [rate] and figures["traces"][0]["notes"] == "turn at 7"
    assert figures["traces"][1]["slots"] == [17, 40]
    assert files["--plot"].read_bytes().startswith(b"\x89PNG")


def test_forecasts_beside_the_policies(capsys, tmp_path):
    growing(steps=40, top_k=8, first=80).save(tmp_path / "no_scores.npz")
    files = {"--json": tmp_path / "figures.json", "--plot": tmp_path / "figures.png"}
    lines = lines_of(
        capsys, "policies", str(tmp_path / "no_scores.npz"), "glm", "--steps", "60", "--top-k", "32", "--pools", "2,4",
        "--policies", "echo", "--forecast", "0.125,1", "--reach", "1.5",
        *(str(part) for pair in files.items() for part in pair),
    )  # fmt: skip
    assert sum(line.startswith("echo with forecasts: ") for line in lines) == 1
    first, second = (line.split() for line in lines if line.startswith("1.5 "))
    assert first[:2] == ["1.5", "0.125"] and second[:2] == ["1.5", "1"]
    without, with_ = json.loads(files["--json"].read_text())["traces"]
    assert without["forecasts"] == []
    of_2k, of_4k = with_["forecasts"]
    shares = [(one["misses"], one["fetched"], one["fetched"] - one["used"]) for one in (of_2k[0], of_4k[0])]
    assert [float(cell) for cell in first[2:] if cell != "/"] == [
        round(100 * share, 2) for one in shares for share in one
    ]
    assert 0 < of_4k[0]["fetched"] <= 0.125 and of_4k[0]["misses"] < with_["misses"]["echo"][1][0]
    assert files["--plot"].read_bytes().startswith(b"\x89PNG")


def test_ranks_for_four_times_the_pool_are_enough(capsys, tmp_path):
    growing(steps=20, top_k=8, first=80, ranks=60).save(tmp_path / "trace.npz")
    for pool, warned in (("1.875", False), ("2", True)):
        lines = lines_of(capsys, "policies", str(tmp_path / "trace.npz"), "--pools", pool, "--policies", "echo")
        assert any(line.startswith("scores of 60 tokens: ") for line in lines) == warned


def test_all_regimes_and_a_trace_without_scores(capsys, tmp_path):
    growing(steps=20, top_k=8, first=80).save(tmp_path / "trace.npz")
    lines = lines_of(capsys, "policies", str(tmp_path / "trace.npz"), "--pools", "2", "--policies", "echo,lru")
    assert "without scores: score and echo go by age" in lines
    lines = lines_of(capsys, "policies", "--steps", "8", "--top-k", "4", "--pools", "300", "--policies", "fifo")
    assert [line.split(":")[1] for line in lines if line.startswith("synthetic")] == list(synthetic.REGIMES)
    assert all(line.endswith("*") for line in lines if line.startswith("fifo"))
    assert not any(line.startswith("echo to lru") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("glm", "--pools", "0.5"), "pools"),
        (("glm", "--pools", "one"), "pools"),
        (("glm", "--policies", "lru,mru"), "policies"),
        (("glm", "--policies", ""), "policies"),
        (("glm", "--layers", "first"), "layers"),
        (("glm", "--forecast", "few"), "forecast"),
        (("glm", "--forecast", "0"), "forecast"),
        (("glm", "--forecast", "--reach", "1"), "reach"),
        (("glm", "--reach", "2"), "reach"),
        (("glm", "--layers", "1"), "layers"),
        (("glm", "--steps", "0"), "steps"),
        (("glm", "--top-k", "0"), "top_k"),
        (("glm", "--sinks", "-1"), "sinks"),
        (("glm", "--json", "no/where/f.json"), "json"),
        (("glm", "--plot", "."), "plot"),
        (("glm", "--plot", "picture.foo"), "plot"),
        (("glm", "--plot", "picture"), "plot"),
        (("glm", "--seed", "-1"), "seed"),
        (("glm", "--top-k", "99999999"), "top_k"),
        (("glm", "--steps", "2000000000"), "top_k"),
        (("code", "--steps", "10"), "steps"),
        (("code", "prose", "--recency", "0"), "recency"),
        ((".",), "path"),
        (("nowhere.npz",), "path"),
    ],
)
def test_the_command_refuses_by_name(capsys, tmp_path, monkeypatch, arguments, named):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["policies", *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"echo-kv policies: {named}: ")


def test_the_mark_is_explained_where_it_stands(capsys):
    few = ("policies", "glm", "--steps", "40", "--top-k", "16", "--policies", "lru", "--pools")
    full, growing_still = lines_of(capsys, *few, "1"), lines_of(capsys, *few, "1,16")
    assert not any("*" in line for line in full) and full[-1].startswith("misses, % of selected rows")
    assert sum("*" in line for line in growing_still) == 2 and "* first uses" in growing_still[-1]
