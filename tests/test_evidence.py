"""docs/evidence.md is what tools/evidence.py makes of the traces that ship and of bench/results; throughput.md, too."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support.programs import ROOT, importable

pytest.importorskip("matplotlib")
with importable("tools"):
    import evidence
    import evidence_measure as measure
    import evidence_prefetch as prefetch
    import evidence_tables as tables
    import throughput

PAGE = evidence.PAGE.read_text(encoding="utf-8")


def block(name: str, page: str = PAGE) -> str:
    return re.search(f"<!-- {name} -->\n(.*?)\n<!-- end {name} -->", page, re.DOTALL)[1]


@pytest.mark.parametrize("name", evidence.quick_blocks())
def test_tables_that_need_no_replay_are_up_to_date(name):
    assert block(name) == evidence.quick_blocks()[name], "run `make evidence`"


def test_the_page_on_throughput_is_up_to_date():
    result = json.loads((evidence.RESULTS / "decode.json").read_text())
    page = evidence.PAGE.with_name("throughput.md").read_text(encoding="utf-8")
    assert block("measured", page) == throughput.measured(result), "run `make evidence`"


def test_throughput_says_what_systems_come_to():
    result = json.loads((evidence.RESULTS / "decode.json").read_text())
    case = next(case for case in result["cases"][1:] if case["case"]["system"] == "echo")
    slower = {**case, "case": {**case["case"], "system": "echo-prefetch"}, "late_miss_rate": case["late_miss_rate"] / 2,
              "attention_ms_per_step": 12 * case["attention_ms_per_step"]}  # fmt: skip
    text = throughput.measured({**result, "cases": [result["cases"][0], case, slower]})
    assert "With prefetches a step takes 12.00 times as long as without, and 0.50 times as much is missed." in text
    assert "Not run: `resident`, `resident-total`, `per-request`, `echo-forecast`." in text


def test_misses_of_one_trace_are_up_to_date():
    """The others need the same code, and longer."""
    rows = tables.policy_rows("sampled", measure.misses(measure.load("sampled")))
    for row in rows:
        assert f"| {' | '.join(row)} |" in block("policies"), "run `make evidence`"


def test_the_products_rule_on_one_trace_is_up_to_date():
    trace = measure.load("sampled")
    row = prefetch.predictor_row("sampled", measure.guess(trace), measure.driven(trace))
    assert f"| {' | '.join(row)} |" in block("predictor"), "run `make evidence`"


def test_the_page_shows_all_pictures():
    shown = re.findall(r"!\[[^]]+\]\((evidence/[^)]+)\)", PAGE)
    folder = evidence.PAGE.parent / "evidence"
    assert sorted(shown) == sorted(f"evidence/{path.name}" for path in folder.iterdir())
    assert all((evidence.PAGE.parent / path).read_bytes().startswith(b"\x89PNG") for path in shown)
    links = re.findall(r"\]\((\.\./[^)]+)\)", PAGE)
    assert links and all((evidence.PAGE.parent / link).exists() for link in links)


def test_the_page_has_no_figures_by_hand():
    """Outside of tables there are sizes of the model and multiples of k, no shares and no points."""
    text = re.sub(r"<!-- (\w+) -->.*?<!-- end \1 -->", "", PAGE, flags=re.DOTALL)
    assert not re.findall(r"\d+\.\d+|\d ?%", text)


def test_the_script_fills_a_page(tmp_path, monkeypatch):
    """With a few steps of each trace."""
    whole = measure.load

    def few_steps(name):
        trace = whole(name)
        arrays = {part: getattr(trace, part)[:40] for part in ("positions", "context", "kth_score", "ranked", "scores")}
        return replace(trace, **arrays)

    monkeypatch.setattr(measure, "load", few_steps)
    monkeypatch.setattr(measure, "GENERATED", {"steps": 40, "top_k": 32, "ranks": 256})
    page = tmp_path / "page.md"
    page.write_text(re.sub(r"(<!-- (\w+) -->\n).*?(\n<!-- end \2 -->)", r"\1\3", PAGE, flags=re.DOTALL))
    assert evidence.main(["--page", str(page)]) == 0
    filled = page.read_text()
    assert all(block(name, filled) for name in re.findall(r"<!-- end (\w+) -->", PAGE))
    assert {path.name for path in (tmp_path / "page").iterdir()} == {p.name for p in (ROOT / "docs/evidence").iterdir()}
    assert "| 40 | 8 k |" in block("traces", filled)


def test_a_page_without_a_place_for_a_table_is_refused():
    assert (
        evidence.filled("<!-- a -->\nold\n<!-- end a -->\n", {"a": r"new \1"})
        == "<!-- a -->\nnew \\1\n<!-- end a -->\n"
    )
    with pytest.raises(ValueError, match="^b: 0 places"):
        evidence.filled("<!-- a -->\nold\n<!-- end a -->\n", {"b": "new"})


def write(folder: Path, name: str, cases: list) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"cases": cases}))


def pool_case(slots: int, sampling: str, equal: int | None) -> dict:
    case = {"case": {"device": "cuda:0", "sampling": sampling, "pool_slots": slots}, "pool_share": slots / 4000,
            "prompts": 3, "new_tokens": 8, "rows_fetched": 1234, "hit_rate": 0.875}  # fmt: skip
    if equal is not None:
        case |= {kind: {"compared": 24, "equal": equal} for kind in ("tokens", "selections", "logits")}
    return case


def test_what_was_not_run_says_so(tmp_path):
    assert tables.lossless(tmp_path).count("not recorded yet; `python bench/") == 3
    assert "not recorded yet; `python bench/trace_pools.py` writes `bench/results/trace_pools.json`" in tables.runtime(
        tmp_path
    )
    assert "no evaluation" in tables.model(tmp_path)


@pytest.mark.parametrize("equal", [24, 23])
def test_results_as_they_are(tmp_path, equal):
    setup = {"case": {"device": "cuda:0", "setup": "all cases"}, "build": "echo 1", "row_format": "fp8_656", "batch": 2,
             "prompt_tokens": {"shortest": 300, "longest": 6000, "all": 9000}}  # fmt: skip
    scenarios = {"case": {"device": "cuda:0", "setup": "random"}, "scenarios": 312,
                 "rows": {"compared": 4321, "differences": 0}}  # fmt: skip
    write(tmp_path, "lossless", [setup, pool_case(4000, "greedy", None), pool_case(1000, "sampled", equal), scenarios])
    greedy = {"case": {"device": "cpu", "prompts": 2, "new_tokens": 64}, "tokens": {"all": 128, "equal": 120},
              "largest_logit_difference": 1.2e-5, "smallest_margin": 0.0012, "differences": [{}]}  # fmt: skip
    write(tmp_path, "hf_greedy", [greedy])
    needle = {"pool_slots": 1285, "tries": 20, "pool_share": 0.25, "hit_rate": 0.9}
    write(tmp_path, "needle", [{"case": {"length": 1024, "depth": d}, "hits": 19, **needle} for d in (0.0, 0.5)])
    text = tables.lossless(tmp_path)
    verdict = "Nothing differs" if equal == 24 else "**There are differences**"
    assert text.startswith(
        f"{verdict}: 3 prompts of 300 to 6,000 tokens, 8 new tokens each, batches of 2, fp8_656 rows"
    )
    assert "| 4,000 | 100.0 | greedy | reference | reference | reference | 1,234 | 87.5 |" in text
    counts = " | ".join([f"{equal} / 24"] * 3)
    assert f"| 1,000 | 25.0 | sampled | {counts} | 1,234 | 87.5 |" in text
    assert "312 random scenarios of whole steps of a synthetic model, cuda:0: 4,321 rows compared" in text
    assert "120 of 128 tokens are equal" in text and "which 1 of 2 prompts have" in text and "1.2e-05" in text
    assert "| 1,024 | 25.0 | 90.0 | 19 / 20 | 19 / 20 |" in text


def test_a_small_trace_is_replayed_as_the_runtime_runs(monkeypatch, tmp_path, one_torch_thread):
    """bench/trace_pools.py on a trace that knows all scores; and it sees that a text is another."""
    hf = pytest.importorskip("echo.hf")
    from echo import cli
    from echo.traces import Trace

    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import record
    import trace_pools

    path = tmp_path / "trace.npz"
    assert cli.main(["record", "--out", str(path), "--tokens", "700", "--new-tokens", "40", "--device", "cpu"]) == 0
    trace, tokens = Trace.load(path), trace_pools.tokens_of(trace_pools.TEXTS["prose"])
    cases = trace_pools.cases_of("prose", trace, tokens, [1.5])
    assert cases[0]["runtime"] == pytest.approx(cases[0]["replayed"], abs=0.002)  # scores in the file are on a grid
    assert 0 < sum(cases[0]["runtime"]) < sum(cases[0]["lru"])
    with pytest.raises(ValueError, match="^prose: the selections are not those of the trace"):
        trace_pools.cases_of("prose", trace, tokens[1:], [1.5])
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(trace_pools, "cases_of", lambda name, *_: [{**cases[0], "case": {"trace": name, "pool": 1.5}}])
    assert trace_pools.main(["--pools", "1.5"]) == 0
    assert "| `prose` | 1.5 k | 2 k |" in tables.runtime(tmp_path)
    assert hf.tiny_dsa_tokenizer().eos_token_id == tokens[0]
