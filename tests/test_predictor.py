"""How the k-th score is foretold: the product's rule in numpy against the product, simple cases, and the command."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from support.commands import lines_of
from support.traces import growing

import echo
from echo import cli
from echo.predictor import averages
from echo.traces import Trace, shipped, synthetic
from echo.traces.drive import drive
from echo.traces.layer_steps import LayerSteps
from echo.traces.policies import make_pool
from echo.traces.predictor import Guess, guesses, rescored_bounds
from echo.traces.ranking import rank
from echo.traces.sample import ordered_keys
from echo.traces.sifting import capacity_of, predicted_bounds


def trace_of(scores: np.ndarray, top_k: int) -> Trace:
    """One layer that ranks all tokens, float32 [steps, tokens]."""
    ranked = np.stack([rank(row, len(row)) for row in scores])[:, None]
    kept = np.take_along_axis(scores, ranked[:, 0], axis=1)[:, None]
    return Trace(
        positions=np.sort(ranked[..., :top_k], axis=2),
        context=np.full(len(scores), scores.shape[1], np.int32),
        kth_score=kept[..., top_k - 1].copy(),
        ranked=ranked,
        scores=kept,
    )


def shifted(steps: int, tokens: int, top_k: int, offset: float, sway: float, seed: int) -> Trace:
    """Scores around an offset, of either sign; the whole step goes up and down."""
    draws = np.random.default_rng(seed)
    worth = draws.standard_normal(tokens)
    rows = [worth + 0.3 * draws.standard_normal(tokens) + offset + sway * draws.standard_normal() for _ in range(steps)]
    return trace_of(np.array(rows, np.float32), top_k)


@pytest.mark.parametrize(
    "trace",
    [
        synthetic.generate("glm", steps=40, top_k=64, ranks=synthetic.ALL),
        synthetic.generate("long_context", steps=30, top_k=96, ranks=synthetic.ALL, recency=200, sinks=4),
        growing(steps=200, top_k=16, first=20, ranks=220),
        shifted(60, 2000, 64, offset=-2, sway=1, seed=1),
        shifted(60, 700, 300, offset=0, sway=0.5, seed=2),
        shifted(60, 5000, 20, offset=100, sway=30, seed=3),
    ],
    ids=["glm", "long_context", "growing", "negative", "around 0", "steady"],
)
def test_the_product_lists_and_fetches_what_numpys_rule_says(trace):
    """In each step: candidates, whether they do, and rows fetched into a pool that has room for everything."""
    tokens = int(trace.context[-1])
    driven = drive(trace, tokens + 1, device="cpu", prefetch_cap=1000)
    steps = LayerSteps(trace, 0)
    low, high = predicted_bounds(trace.kth_score[:, 0], 0.5)
    np.testing.assert_array_equal(driven.foretold[:, 0][np.isfinite(high)], high[np.isfinite(high)])
    resident = set()
    bounded = 0
    for t in range(trace.steps):
        scores, positions = steps.scores[t], trace.ranked[t, 0]
        listed = int((scores >= low[t]).sum())
        assert driven.candidates[t, 0] == min(listed, capacity_of(trace.top_k))
        full = trace.context[t] > trace.top_k and not trace.top_k <= listed <= capacity_of(trace.top_k)
        assert driven.full_selects[t, 0] == full
        fetched = set(positions[scores >= high[t]].tolist()) - resident - {int(trace.context[t]) - 1}
        assert driven.prefetched[t, 0] == len(fetched)
        selected = set(trace.positions[t, 0].tolist()) - {-1}
        assert driven.prefetched_used[t, 0] == len(fetched & selected)
        resident |= fetched | selected | {int(trace.context[t]) - 1}
        bounded += listed > 0
    assert bounded > 5


def test_keys_are_in_the_order_of_scores():
    values = np.array([np.nan, -np.inf, -3e38, -1, -1e-42, -0.0, 0.0, 1e-42, 1, 3e38, np.inf], np.float32)
    keys = ordered_keys(values)
    assert keys[0] == 0 and keys[5] == keys[6] == 1 << 31
    assert (np.diff(np.delete(keys, 5).astype(np.int64)) > 0).all()


def test_the_last_selections_lowest_score_is_a_lower_bound():
    trace = synthetic.generate("low_overlap", steps=30, top_k=32, ranks=synthetic.ALL)
    steps = LayerSteps(trace, 0)
    bounds = rescored_bounds(steps)
    assert np.isnan(bounds[0]) and (bounds[1:] <= trace.kth_score[1:, 0]).all()
    for t in range(1, 30):
        scores = dict(zip(trace.ranked[t, 0].tolist(), trace.scores[t, 0].tolist(), strict=True))
        assert bounds[t] == min(scores[position] for position in trace.positions[t - 1, 0].tolist())


def test_a_perfect_prediction_fetches_what_is_missed():
    """Scores that stay as they are: the moving average is the k-th score, nothing is missed, nothing is in vain."""
    row = np.random.default_rng(0).standard_normal(400).astype(np.float32)
    trace = trace_of(np.repeat(row[None], 8, axis=0), 16)
    for guess in guesses(make_pool(LayerSteps(trace, 0), 17, "echo"), trace.context, [0, 0.5]):
        if guess.name != "sample":
            assert (guess.error, guess.candidates, guess.full) == (0, 1, 0)
            assert guess.wasted == guess.left == guess.misses == guess.prefetched == 0


def test_by_hand():
    """Top-2 of six tokens; the last two steps are counted."""
    rows = [[9, 8, 0, 0, 0, 0], [9, 8, 0, 0, 0, 0], [1, 9, 7, 6, 2, 5], [1, 9, 7, 6, 2, 5]]
    trace = trace_of(np.array(rows, np.float32), 2)
    found = guesses(make_pool(LayerSteps(trace, 0), 3, "lru"), trace.context, [0], [0, 334, math.inf])
    by_name = {(guess.name, guess.cap): guess for guess in found}
    # Steps 2 and 3; foretold are 8 and 7, the k-th score is 7 in both.
    average = by_name["alpha 0", math.inf]
    spread = np.std(np.array(rows[2], np.float64))
    assert average.error == pytest.approx(math.sqrt(1 / 2) / spread)
    assert average.candidates == (1 + 2) / 2 / 2 and average.full == 0.5
    assert (average.misses, average.left, average.prefetched) == (1 / 4, 1 / 4, 0)  # token 2, which 8 is above
    # Rescored: tokens 0 and 1 of step 1 score 1 and 9 in step 2, tokens 1 and 2 then 9 and 7.
    rescore = by_name["rescore", math.inf]
    assert rescore.candidates == (6 + 2) / 2 / 2 and rescore.full == 0
    assert (rescore.left, rescore.wasted) == (0, 2 / 4)  # 2, and in vain 3 and 4; 0, 1 and the first new one are there
    assert by_name["rescore", 334].prefetched == 2 / 4  # of 6 tokens two, in order: 2 is one
    assert (by_name["rescore", 334].left, by_name["rescore", 334].wasted) == (0, 1 / 4)
    assert (by_name["rescore", 0].prefetched, by_name["rescore", 0].left) == (0, 1 / 4)
    sample = by_name["sample", math.inf]
    assert sample.full == 0 or math.isnan(sample.error) or sample.candidates >= 1


def test_on_real_traces_the_sample_does_better_than_any_average():
    """What docs/evidence.md says: less in vain for less that is missed, and lists that do in nearly all steps."""
    trace = Trace.load(shipped.path_of("prose"))
    found = averages(trace, 512, [0, 0.5, 0.9], [math.inf])
    *average, rescore, sample = found
    assert [guess.name for guess in found] == ["alpha 0", "alpha 0.5", "alpha 0.9", "rescore", "sample"]
    assert all(sample.left < guess.left and sample.wasted < guess.wasted for guess in average)
    assert all(sample.error < guess.error and sample.full < 0.01 < guess.full for guess in average)
    assert rescore.left == 0 and rescore.wasted > 3 * sample.wasted


def test_traces_without_a_step_that_can_be_foretold():
    trace = growing(steps=40, top_k=8, first=80)
    with pytest.raises(echo.InvalidArgument, match="^pool: no step"):
        guesses(make_pool(LayerSteps(trace, 0), 20, "echo"), trace.context, [0.5])
    with pytest.raises(echo.InvalidArgument, match="^trace: no layer"):
        averages(trace, 20, [0.5], [math.inf])


def test_the_command(capsys, tmp_path):
    growing(steps=40, top_k=8, first=80).save(tmp_path / "trace.npz")
    files = {"--json": tmp_path / "figures.json", "--plot": tmp_path / "figures.png"}
    lines = lines_of(
        capsys, "predictor", "sampled", str(tmp_path / "trace.npz"), "glm", "--top-k", "32", "--steps", "40",
        "--pools", "2,4", "--alpha", "0,0.5", "--caps", "1.2,inf",
        *(str(part) for pair in files.items() for part in pair),
    )  # fmt: skip
    assert lines[0].startswith("tiny_dsa:sampled: 144 steps, 5 layers")
    assert lines.pop(1).startswith("scores of 1,024 tokens: ")  # fewer than four times the larger pool
    assert lines[1].startswith("pool of 2 x top-k, ") and lines[8].startswith("pool of 4 x top-k, ")
    assert lines[2].split()[-4:] == ["cap", "1.2", "cap", "inf"]
    assert "without scores: nothing to foretell" in lines
    trace = Trace.load(shipped.path_of("sampled"))
    expected = averages(trace, 512, [0, 0.5], [1.2, math.inf])
    assert [line.split("  ")[0] for line in lines[3:7]] == ["alpha 0", "alpha 0.5", "rescore", "sample"]
    for i, line in enumerate(lines[3:7]):
        few, all_ = expected[2 * i : 2 * i + 2]
        assert isinstance(few, Guess) and (few.cap, all_.cap) == (1.2, math.inf)
        assert f"{few.error:.2f}" in line and f"{few.candidates:.2f}" in line
        assert line.endswith(f"{100 * all_.wasted:.1f} / {100 * all_.left:.1f}")
        assert few.prefetched <= all_.prefetched and few.left >= all_.left
    report = json.loads(files["--json"].read_text())
    assert [one["model"] for one in report["traces"]] == ["tiny_dsa:sampled", "synthetic:glm"]
    guess = report["traces"][0]["pools"][0]["guesses"][1]
    assert guess["cap"] is None and guess["left"] == expected[1].left
    assert files["--plot"].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("glm", "--caps", "-1"), "caps"),
        (("glm", "--caps", "nan"), "caps"),
        (("glm", "--caps", "few"), "caps"),
        (("glm", "--alpha", "1.1"), "alpha"),
        (("glm", "--pools", "0"), "pools"),
        (("glm", "--layers", "1"), "layer"),
        (("glm", "--json", "no/where/f.json"), "json"),
        (("glm", "--plot", "picture.foo"), "plot"),
        (("glm", "--seed", "-1"), "seed"),
        (("glm", "--top-k", "99999999"), "top_k"),
        (("code", "--top-k", "10"), "top_k"),
        ((".",), "path"),
        (("nowhere.npz",), "path"),
    ],
)
def test_the_command_refuses_by_name(capsys, tmp_path, monkeypatch, arguments, named):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["predictor", *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"echo-kv predictor: {named}: ")
