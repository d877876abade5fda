"""A trace drives a real runtime: its counters against numpy's, its predictor, and what `echo-kv replay` says."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support.commands import lines_of
from support.traces import growing, misses

import echo
from echo import cli, trace_options
from echo.traces import Trace, shipped, synthetic
from echo.traces import drive as driving
from echo.traces.comparison import compare
from echo.traces.drive import drive
from echo.traces.layer_steps import LayerSteps
from echo.traces.policies import make_pool
from echo.traces.statistics import forecasts, moving_average


def partly_scored() -> Trace:
    """Layer 1 of 3 has no scores, all others those of all tokens."""
    trace = growing(steps=150, top_k=16, first=60, layers=3, ranks=210)
    trace.ranked[:, 1], trace.scores[:, 1], trace.kth_score[:, 1] = -1, np.nan, np.nan
    return trace


def selected(trace: Trace) -> np.ndarray:
    return (trace.positions >= 0).sum(axis=2)


@pytest.mark.parametrize("slots", [17, 18, 24, 40, 100])
def test_a_runtime_misses_what_numpys_rule_misses(slots):
    """In each step and layer."""
    trace = partly_scored()
    driven = drive(trace, slots, device="cpu")
    for layer in range(3):
        pool = make_pool(LayerSteps(trace, layer), slots, "echo")
        expected = [len(pool.step()) for _ in range(trace.steps)]
        np.testing.assert_array_equal(driven.misses[:, layer], expected)
    assert driven.misses[75:].sum() > 0 and driven.evictions[75:].sum() > 0
    np.testing.assert_array_equal(driven.hits + driven.misses, selected(trace))
    assert (driven.evictions.sum(axis=0) == driven.misses.sum(axis=0) + trace.steps - slots).all()


def test_a_pool_for_everything_on_each_device(device):
    """Nothing is evicted, so every device misses the same; layers can be left out."""
    trace = partly_scored()
    driven = drive(trace, 300, [2, 1], device=device, alpha=0.7, row_format="bf16_1152")
    expected = np.stack([misses(LayerSteps(trace, layer), 300, "echo") for layer in (2, 1)], axis=1)
    np.testing.assert_array_equal(driven.misses, expected)
    assert driven.device.startswith(device) and driven.row_bytes == 1152 and driven.evictions.sum() == 0
    np.testing.assert_allclose(driven.foretold[:, 0], moving_average(trace.kth_score[:, 2], 0.7), rtol=1e-5)
    assert np.isnan(driven.foretold[:, 1]).all()


def test_small_pools_on_each_device(device):
    """Which rows stay may depend on timing on a GPU, that all are there when they are used does not."""
    trace = partly_scored()
    driven = drive(trace, 24, device=device)
    np.testing.assert_array_equal(driven.hits + driven.misses, selected(trace))
    close = drive(trace, 24, device="cpu")
    assert driven.misses.sum() == pytest.approx(close.misses.sum(), rel=0.1)


def test_torchs_arrays_do_as_numpys(monkeypatch):
    """As on a GPU, but on the CPU."""
    trace = partly_scored()
    expected = drive(trace, 24, device="cpu")
    monkeypatch.setattr(driving, "_Host", lambda: driving._Gpu("cpu"))
    got = drive(trace, 24, device="cpu")
    np.testing.assert_array_equal(got.misses, expected.misses)
    np.testing.assert_array_equal(got.foretold, expected.foretold)


def test_contexts_that_stand_still_or_jump():
    """A jump is a prefill but for its last token; prompts may be longer than a chunk of prefill."""
    context = np.array([3, 3, 2000, 2000, 2001, 5000], np.int32)
    positions = np.array([[0, 1, 2], [0, 1, 2], [0, 1000, 1999], [1, 2, 1999], [0, 1999, 2000], [7, 4000, 4999]])
    trace = Trace(positions.astype(np.int32)[:, None], context, np.full((6, 1), np.nan, np.float32))
    driven = drive(trace, 100, device="cpu")
    assert driven.misses[:, 0].tolist() == [2, 0, 1, 0, 0, 2]
    assert driven.misses[:, 0].tolist() == misses(LayerSteps(trace, 0), 100, "lru").tolist()


def test_tokens_beyond_the_ranks_go_by_age():
    """Close to numpy's rule, with as few scores as there can be, too."""
    for ranks in (64, 128, 256):
        trace = synthetic.generate("glm", steps=120, top_k=64, ranks=ranks)
        for slots in (96, 256):
            got = drive(trace, slots, device="cpu").misses[60:].mean() / 64
            assert got == pytest.approx(compare(trace, [slots], ["echo"]).mean("echo")[0], abs=0.02)


def test_a_selection_that_is_not_the_traces_is_reported():
    trace = partly_scored()
    trace.positions[3, 2] = trace.positions[5, 2]
    with pytest.raises(echo.StateError, match="^selection: step 3, layer 2: "):
        drive(trace, 24, device="cpu")


@pytest.mark.parametrize(
    ("named", "arguments"),
    [
        ("slots", {"slots": 16}),
        ("layers", {"slots": 24, "layers": [3]}),
        ("layers", {"slots": 24, "layers": []}),
        ("alpha", {"slots": 24, "alpha": 1.5}),
        ("prefetch_cap", {"slots": 24, "prefetch_cap": -2.0}),
        ("forecast_cap", {"slots": 24, "forecast_cap": -2}),
        ("alpha", {"slots": 24, "alpha": float("nan")}),
        ("device", {"slots": 24, "device": "gpu"}),
        ("row_format", {"slots": 24, "row_format": "fp4"}),
    ],
)
def test_bad_arguments_are_refused_by_name(named, arguments):
    with pytest.raises(echo.InvalidArgument, match=f"^{named}: "):
        drive(partly_scored(), **arguments)


def test_traces_with_scores_of_too_many_steps_are_refused(monkeypatch):
    monkeypatch.setattr(driving, "_MOST_DIMS", 144)
    with pytest.raises(echo.InvalidArgument, match="^trace: 150 steps with scores given, expected at most 144"):
        drive(partly_scored(), 24, device="cpu")
    assert drive(growing(steps=150, top_k=16, first=60), 24, device="cpu").misses.sum() > 0


def test_the_runtime_prefetches_what_it_will_miss():
    """All scores are known, so the runtime sifts as it would with a model: most misses are fetched ahead."""
    trace = synthetic.generate("glm", steps=100, top_k=64, ranks=synthetic.ALL)
    without, with_ = (drive(trace, 256, device="cpu", prefetch_cap=cap) for cap in (0, 1000))
    assert without.prefetched.sum() == without.prefetches_capped.sum() == 0
    assert without.candidates.sum() == with_.candidates.sum() > 0
    np.testing.assert_array_equal(with_.hits + with_.misses, without.hits + without.misses)
    later = slice(50, None)
    assert with_.misses[later].sum() < 0.3 * without.misses[later].sum()
    assert with_.prefetched_used[later].sum() > 0.5 * without.misses[later].sum()
    assert with_.full_selects[later].sum() < 20  # of 50; the sample is two blocks
    few = drive(trace, 256, device="cpu", prefetch_cap=2.5)  # of 1,024 tokens
    assert few.prefetched.max() == 2 and few.prefetches_capped.sum() > 0


def test_the_runtime_forecasts_what_it_would_miss():
    trace = synthetic.generate("glm", steps=100, top_k=64, ranks=synthetic.ALL)
    without, with_ = (drive(trace, 256, device="cpu", forecast_cap=cap) for cap in (0, 6))
    assert without.forecast.sum() == without.forecast_used.sum() == 0
    assert 0 < with_.forecast.max() <= 6
    np.testing.assert_array_equal(with_.hits + with_.misses, without.hits + without.misses)
    later = slice(50, None)
    assert with_.misses[later].sum() < 0.7 * without.misses[later].sum()
    assert with_.forecast_used[later].sum() > 0.4 * without.misses[later].sum()


def test_the_command_on_a_trace_that_ships(capsys, tmp_path):
    files = {"--json": tmp_path / "figures.json", "--plot": tmp_path / "figures.png"}
    lines = lines_of(
        capsys, "replay", "sampled", "--pools", "2,4", "--layers", "1,4", "--alpha", "0.5,0", "--device", "cpu",
        *(str(part) for pair in files.items() for part in pair),
    )  # fmt: skip
    assert lines[0].startswith("tiny_dsa:sampled: 144 steps") and lines[0].endswith("rows of 656 B on cpu")
    assert lines[1].split()[:7] == ["pool", "/", "top-k", "layer", "hits", "misses", "evictions"]
    assert [line.split()[:2] for line in lines[2:8]] == [
        [pool, layer] for pool in ("2", "4") for layer in ("1", "4", "all")
    ]
    report = json.loads(files["--json"].read_text())
    assert report["device"] == "cpu" and report["alphas"] == [0.5, 0] and report["row_bytes"] == 656
    assert report["runtime_alpha"] == 0.5
    assert report["trace"]["model"] == "tiny_dsa:sampled" and report["counted_steps"] == [72, 144]
    assert report["runtime_average_off_by"] < 1e-5
    trace = Trace.load(shipped.path_of("sampled"))
    rates = compare(trace, [512, 1024], ["lru", "echo", "belady"], [1, 4])
    for i, pool in enumerate(report["pools"]):
        assert pool["slots"] == (512, 1024)[i] and pool["pool"] == (2, 4)[i]
        for j, counts in enumerate(pool["layers"]):
            assert counts["layer"] == (1, 4)[j] and counts["hits"] + counts["misses"] == 72 * 256
            assert counts["recalled_bytes"] == 656 * counts["misses"]
            assert counts["hit_rate"] == pytest.approx(1 - rates.rates["echo"][i, j], abs=0.01)
            assert counts["lru"] == 1 - rates.rates["lru"][i, j] and counts["full"] == rates.full[i, j]
            assert counts["belady"] == 1 - rates.rates["belady"][i, j] >= counts["hit_rate"] - 0.001
            pool_again = make_pool(LayerSteps(trace, counts["layer"]), pool["slots"], "echo")
            assert counts["forecasts"] == [vars(one) for one in forecasts(pool_again, [0.5, 0])]
    counts = report["pools"][0]["layers"][1]
    assert f"{counts['misses']:,}" in lines[3].split() and f"{100 * counts['hit_rate']:.2f}" in lines[3].split()
    assert files["--plot"].read_bytes().startswith(b"\x89PNG")
    assert lines[-1].startswith("at alpha 0.5 the runtime's own average of k-th scores differs from the trace's by ")
    assert lines[-11].startswith("the runtime with prefetches, mean over layers")
    assert [line.split()[0] for line in lines[-9:-7]] == ["2", "4"]
    assert lines[-6].startswith("the runtime with forecasts of up to 25 rows per step, mean over layers")
    assert [line.split()[0] for line in lines[-4:-2]] == ["2", "4"]
    for pool in report["pools"]:
        assert pool["next_step"]["forecast_cap"] == 25
        for counts in pool["next_step"]["layers"]:
            assert 0 < counts["forecast"] <= 25 * 72 and counts["forecast_wasted"] >= 0
            assert counts["forecast_wasted"] == counts["forecast"] - counts["forecast_used"]
            assert counts["forecast_bytes"] == 656 * counts["forecast"]
    for pool in report["pools"]:
        for counts in pool["prefetches"]:
            assert counts["prefetched_wasted"] == counts["prefetched"] - counts["prefetched_used"] >= 0
            assert counts["prefetched_bytes"] == 656 * counts["prefetched"]
            assert 256 * 72 < counts["candidates"] < 1024 * 72
        without, with_ = (sum(one["misses"] for one in pool[kind]) for kind in ("layers", "prefetches"))
        assert with_ < without and sum(one["prefetched"] for one in pool["prefetches"]) > 0


def test_the_command_on_other_traces(capsys, tmp_path):
    growing(steps=40, top_k=8, first=80).save(tmp_path / "trace.npz")
    lines = lines_of(
        capsys, "replay", str(tmp_path / "trace.npz"), "--pools", "1,30", "--device", "cpu",
        "--plot", str(tmp_path / "f.png"), "--json", str(tmp_path / "f.json"),
    )  # fmt: skip
    assert lines[-1] == "no scores: nothing to predict" and lines[3].endswith("*") and not lines[2].endswith("*")
    assert any("* some pool was not full yet" in line for line in lines)
    lines = lines_of(capsys, "replay", str(tmp_path / "trace.npz"), "--pools", "1", "--device", "cpu")
    assert "counted in the second half of the steps" in lines
    report = json.loads((tmp_path / "f.json").read_text())
    assert report["pools"][0]["layers"][0]["forecasts"] == [] and report["runtime_average_off_by"] is None
    flat = synthetic.generate("glm", steps=20, top_k=8, ranks=24)
    flat.scores[:], flat.kth_score[:] = 1, 1  # nothing to measure an error by
    flat.save(tmp_path / "trace.npz")
    lines_of(
        capsys, "replay", str(tmp_path / "trace.npz"), "--pools", "2", "--device", "cpu",
        "--json", str(tmp_path / "f.json"),
    )  # fmt: skip
    report = json.loads((tmp_path / "f.json").read_text())
    assert {one["error"] for one in report["pools"][0]["layers"][0]["forecasts"]} == {None}
    lines = lines_of(
        capsys, "replay", "glm", "--steps", "60", "--top-k", "32", "--pools", "2", "--recency", "16", "--device", "cpu"
    )
    assert lines[0].startswith("synthetic:glm: 60 steps, 1 layer, top-32 of 512 to 571 tokens")
    assert len(lines) == 22


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("glm", "--pools", "0.5"), "pools"),
        (("glm", "--pools", "one"), "pools"),
        (("glm", "--layers", "first"), "layers"),
        (("glm", "--layers", "1"), "layers"),
        (("glm", "--alpha", "2"), "alpha"),
        (("glm", "--alpha", "a"), "alpha"),
        (("glm", "--prefetch-cap", "1001"), "prefetch_cap"),
        (("glm", "--forecast-cap", "-2"), "forecast_cap"),
        (("glm", "--plot", "picture.foo"), "plot"),
        (("glm", "--seed", "-1"), "seed"),
        (("glm", "--top-k", "99999999"), "top_k"),
        (("code", "--turn-every", "10"), "turn_every"),
        ((".",), "path"),
        (("glm", "--steps", "0"), "steps"),
        (("glm", "--device", "gpu"), "device"),
        (("glm", "--json", "no/where/f.json"), "json"),
        (("glm", "--plot", "."), "plot"),
        (("nowhere.npz",), "path"),
    ],
)
def test_the_command_refuses_by_name(capsys, tmp_path, monkeypatch, arguments, named):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["replay", *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"echo-kv replay: {named}: ")


def test_settings_come_from_variables_and_are_checked_before_anything_is_done(capsys, monkeypatch):
    monkeypatch.setattr(trace_options, "load", lambda *_: pytest.fail("it has begun"))
    monkeypatch.setenv("ECHO_PREFETCH_CAP", "5000")
    assert cli.main(["replay", "glm"]) == 1
    assert capsys.readouterr().err.startswith("echo-kv replay: prefetch_cap: 5000")
    assert cli.main(["replay", "glm", "--prefetch-cap", "-3"]) == 1
    monkeypatch.undo()
    monkeypatch.setenv("ECHO_PREFETCH_CAP", "0")
    arguments = ("glm", "--steps", "60", "--top-k", "32", "--pools", "2", "--device", "cpu")
    lines = lines_of(capsys, "replay", *arguments, "--forecast-cap", "0")
    assert lines[-3].split()[2] == "0.0"  # prefetched
    assert lines[-1].startswith("at alpha 0.5 ")
    monkeypatch.setenv("ECHO_THRESHOLD_ALPHA", "0.25")
    arguments = ("glm", "--steps", "60", "--top-k", "32", "--pools", "2", "--device", "cpu")
    assert lines_of(capsys, "replay", *arguments)[-1].startswith("at alpha 0.25 ")
    assert lines_of(capsys, "replay", *arguments, "--alpha", "0.7,0")[-1].startswith("at alpha 0.7 ")
    monkeypatch.setenv("ECHO_THRESHOLD_ALPHA", "2")
    assert cli.main(["replay", *arguments]) == 1
    assert capsys.readouterr().err.startswith("echo-kv replay: threshold_alpha: 2")
