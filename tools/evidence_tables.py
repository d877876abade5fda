"""The tables of docs/evidence.md, and the sentences that say what they come to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from evidence_measure import ALPHAS, DISTANCES, POOL, POOLS, RANKS, Measured, few_ranks, turns

from echo.traces import Trace, shipped
from echo.traces.comparison import Comparison, compare
from echo.traces.policies import POLICIES
from echo.traces.statistics import overlap

SHOWN = (0.0, 0.3, 0.5, 0.7, 0.9)  # of ALPHAS
Rows = list[list[str]]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def percents(shares: Any, digits: int = 1) -> list[str]:
    """Shares as numbers of percent."""
    return [f"{100 * share:.{digits}f}" for share in shares]


def results(folder: Path, name: str) -> list[dict[str, Any]] | None:
    """The cases of a benchmark, None if it was not run."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text())["cases"] if path.is_file() else None


def model(folder: Path) -> str:
    """Held-out loss, retrieval, and what the selections keep."""
    cases = results(folder, "tiny_dsa") or []
    found = next((case for case in cases if "held_out" in case), None)
    if found is None:
        return "Not recorded: `bench/results/tiny_dsa.json` has no evaluation."
    losses = [
        [
            name.replace("=", " = "),
            f"{loss['nats_per_token']:.4f}",
            f"{loss['bits_per_byte']:.4f}",
            f"{loss['tokens']:,}",
        ]
        for name, loss in found["held_out"].items()
    ]
    depths = list(next(iter(found["needle"]["k=256"].values())))
    needles = [
        [f"{int(length):,}", kind.replace("=", " = "), *(f"{hits} / {tries}" for hits, tries in answers.values())]
        for kind, lengths in found["needle"].items()
        for length, answers in lengths.items()
    ]
    kept = [
        [str(i), *percents(layer[k] for k in ("kept", "best", "recent"))] for i, layer in enumerate(found["indexer"])
    ]
    return "\n\n".join(
        [
            table(["attends to", "nats per token", "bits per byte", "held-out tokens"], losses),
            table(["context", "attends to", *(f"depth {depth}" for depth in depths)], needles),
            table(["layer", "attention kept by the selection, %", "most possible, %", "by the latest 256, %"], kept),
        ]
    )


def lossless(folder: Path) -> str:
    """Equal bits with any pool; equal tokens with transformers; retrieval through a small pool."""
    parts = [
        _pools(results(folder, "lossless")),
        _greedy(results(folder, "hf_greedy")),
        _needle(results(folder, "needle")),
    ]
    return "\n\n".join(parts)


def _not_run(name: str, what: str) -> str:
    return f"*{what}: not recorded yet; `python bench/{name}.py` writes `bench/results/{name}.json`.*"


def _pools(cases: list[dict[str, Any]] | None) -> str:
    if cases is None:
        return _not_run("lossless", "Small pools against one for everything")
    devices = dict.fromkeys(run["case"]["device"] for run in cases)
    return "\n\n".join(_pools_on([run for run in cases if run["case"]["device"] == device]) for device in devices)


def _pools_on(cases: list[dict[str, Any]]) -> str:
    """One device's: what was set up, then a case per pool and way of decoding."""
    setup, *measured = cases
    runs = [run for run in measured if "pool_slots" in run["case"]]
    kinds = ("tokens", "selections", "logits")
    rows = []
    for run in runs:
        counts = [
            f"{run[kind]['equal']:,} / {run[kind]['compared']:,}" if kind in run else "reference" for kind in kinds
        ]
        case, shares = run["case"], percents([run["pool_share"], run["hit_rate"]])
        rows.append(
            [f"{case['pool_slots']:,}", shares[0], case["sampling"], *counts, f"{run['rows_fetched']:,}", shares[1]]
        )
    compared = [run for run in runs if "tokens" in run]
    equal = all(run[kind]["equal"] == run[kind]["compared"] for run in compared for kind in kinds)
    verdict = "Nothing differs" if equal else "**There are differences**"
    lengths = setup["prompt_tokens"]
    head = (
        f"{verdict}: {runs[0]['prompts']} prompts of {lengths['shortest']:,} to {lengths['longest']:,} tokens, "
        f"{runs[0]['new_tokens']} new tokens each, batches of {setup['batch']}, {setup['row_format']} rows, "
        f"{setup['build']}, {setup['case']['device']}."
    )
    columns = ["slots", "of all rows, %", "decoding", *(f"equal {kind}" for kind in kinds), "rows missed", "hits, %"]
    random = [_scenarios(run) for run in measured if "scenarios" in run]
    return "\n\n".join([head, table(columns, rows), *random])


def _scenarios(run: dict[str, Any]) -> str:
    """Of whole steps."""
    rows = run["rows"]
    return (
        f"{run['scenarios']} random scenarios of whole steps of a synthetic model, {run['case']['device']}: "
        f"{rows['compared']:,} rows compared with plain histories, {rows['differences']} differences."
    )


def _greedy(cases: list[dict[str, Any]] | None) -> str:
    if cases is None:
        return _not_run("hf_greedy", "Greedy decoding against transformers")
    sentences = []
    for run in cases:
        case, tokens = run["case"], run["tokens"]
        sentences.append(
            f"Greedy decoding by echo and by transformers in float32, {case['device']}: {tokens['equal']:,} of "
            f"{tokens['all']:,} tokens are equal up to a first difference, which {len(run['differences'])} of "
            f"{case['prompts']} prompts have; logits differ by {run['largest_logit_difference']:.2g} at most, the two "
            f"likeliest tokens by {run['smallest_margin']:.2g} at least."
        )
    return "\n\n".join(sentences)


def _needle(cases: list[dict[str, Any]] | None) -> str:
    if cases is None:
        return _not_run("needle", "Retrieval through a small pool")
    depths = list(dict.fromkeys(run["case"]["depth"] for run in cases))
    rows = []
    for length in dict.fromkeys(run["case"]["length"] for run in cases):
        runs = [run for run in cases if run["case"]["length"] == length]
        shares = percents([runs[0]["pool_share"], runs[0]["hit_rate"]])
        rows.append([f"{length:,}", *shares, *(f"{run['hits']} / {run['tries']}" for run in runs)])
    columns = ["context", "pool, % of all rows", "hits, %", *(f"depth {depth:g}" for depth in depths)]
    return f"Answers found through echo with a pool of {cases[0]['pool_slots']:,} slots:\n\n{table(columns, rows)}"


def traces(load: Callable[[str], Trace]) -> str:
    """What ships."""
    rows = []
    for name in shipped.NAMES:
        trace, content = load(name), shipped.path_of(name).read_bytes()
        context = f"{trace.context[0]:,} to {trace.context[-1]:,}"
        digest = hashlib.sha256(content).hexdigest()[:12]
        sizes = [context, str(trace.steps), f"{trace.ranks // trace.top_k} k", f"{len(content):,}"]
        rows.append([f"`{name}`", trace.text, trace.notes, *sizes, f"`{digest}`"])
    return table(["trace", "text", "steps", "context", "number", "ranks", "bytes", "sha256"], rows)


def overlaps(load: Callable[[str], Trace]) -> str:
    """By layer."""
    rows = []
    for name in shipped.NAMES:
        shares = overlap(load(name))
        low = np.percentile(shares, 5, axis=0)
        cells = [f"{mean} ({least})" for mean, least in zip(percents(shares.mean(0)), percents(low), strict=True)]
        rows.append([f"`{name}`", *cells, *percents([shares.mean()])])
    layers = len(rows[0]) - 2
    head = table(["mean (5th percentile), %", *(f"layer {i}" for i in range(layers)), "all"], rows)
    return f"{head}\n\n{_at_turns(load)}"


def _at_turns(load: Callable[[str], Trace]) -> str:
    name, trace = next((name, load(name)) for name in shipped.NAMES if turns(load(name)))
    shares = overlap(trace)
    at = np.isin(np.arange(1, trace.steps), turns(trace))
    here, others = percents([shares[at].mean(), shares[~at].mean()])
    return (
        f"In the {at.sum()} steps of `{name}` that begin another text the mean is {here} %, in all others {others} %."
    )


def policy_rows(name: str, misses: Comparison) -> Rows:
    """Misses in %, means over layers; * where a layer's pool was not full when counting began."""
    marks = ["" if full.all() else "\\*" for full in misses.full]
    cells = {policy: percents(misses.mean(policy), 2) for policy in POLICIES}
    return [
        [f"`{name}`", policy, *(cell + mark for cell, mark in zip(cells[policy], marks, strict=True))]
        for policy in POLICIES
    ]


def policies(real: Sequence[Measured]) -> str:
    """All policies and pools."""
    lru, echo, belady = (np.mean([one.misses.mean(name) for one in real], axis=0) for name in ("lru", "echo", "belady"))
    gains = ", ".join(f"{100 * (lru[i] - echo[i]) / lru[i]:.1f} % at {POOLS[i]:g} k" for i in range(1, len(POOLS)))
    closed = ", ".join(
        f"{100 * (lru[i] - echo[i]) / (lru[i] - belady[i]):.0f} % at {POOLS[i]:g} k" for i in range(1, len(POOLS))
    )
    worst, best = (pick(_differences(real)) for pick in (max, min))
    head = (
        f"Means over the four traces: the product's rule, `echo`, misses less than exact LRU by {gains}. Of what "
        f"separates LRU from Belady's optimum that is {closed}. In single layers and pools the difference goes from "
        f"{100 * best[0]:+.2f} points ({best[1]}) to {100 * worst[0]:+.2f} ({worst[1]})."
    )
    known = max(real, key=lambda one: one.trace.ranks)
    few = compare(few_ranks(known.trace), known.misses.slots, ("echo",)).mean("echo")
    shown = ", ".join(f"{100 * few[i]:.2f} % at {POOLS[i]:g} k" for i in range(1, len(POOLS)))
    ranks = (
        f"`echo` needs scores down to the rows that it evicts. With those of {RANKS} k tokens, which is what the other "
        f"traces have, `{known.name}` would seem to miss {shown}."
    )
    rows = [row for one in real for row in policy_rows(one.name, one.misses)]
    return f"{head} {ranks}\n\n{table(['missed, %', 'policy', *(f'{pool:g} k' for pool in POOLS)], rows)}"


def _differences(real: Sequence[Measured]) -> list[tuple[float, str]]:
    """echo - LRU, and where."""
    found = []
    for one in real:
        less = one.misses.rates["echo"] - one.misses.rates["lru"]
        for pool, layer in np.ndindex(*less.shape):
            found.append((float(less[pool, layer]), f"`{one.name}`, layer {layer}, {POOLS[pool]:g} k"))
    return found


def runtime(folder: Path) -> str:
    """The runtime itself beside replays."""
    cases = results(folder, "trace_pools")
    if cases is None:
        return _not_run("trace_pools", "The runtime on the same texts")
    rows, gains = [], []
    for case in cases:
        lru, replayed, real = (float(np.mean(case[part])) for part in ("lru", "replayed", "runtime"))
        gains.append(1 - real / lru)
        cells = [f"{case['case']['pool']:g} k", f"{case['ranks']} k", *percents([lru, replayed, real], 2)]
        rows.append([f"`{case['case']['trace']}`", *cells, f"{100 * (real / lru - 1):+.1f}"])
    head = f"It misses less than exact LRU by {100 * min(gains):.1f} to {100 * max(gains):.1f} %."
    columns = ["", "pool", "ranks of the trace", "lru, %", "echo, replayed, %", "runtime, %", "runtime to lru, %"]
    return f"{head}\n\n{table(columns, rows)}"


def layers(real: Sequence[Measured]) -> str:
    """LRU, echo and Belady in each layer."""
    rows = []
    for one in real:
        rates = [one.misses.rates[policy][POOLS.index(POOL)] for policy in ("lru", "echo", "belady")]
        rows.append([f"`{one.name}`", *(" / ".join(percents(layer)) for layer in zip(*rates, strict=True))])
    return table([f"{POOL} k: LRU / echo / Belady, %", *(f"layer {i}" for i in range(len(rows[0]) - 1))], rows)


def clusters(real: Sequence[Measured], made: Sequence[Measured]) -> str:
    """Where misses lie."""
    rows = []
    for one in [*real, *made]:
        weights = np.array([cluster.misses for cluster in one.clusters])

        def mean(values: Sequence[float], weights: Any = weights) -> float:
            return float(np.average(values, weights=weights))

        cells = []
        for distance in DISTANCES:
            near = mean([cluster.near[distance] for cluster in one.clusters])
            cells.append(" / ".join(percents([near, mean([by[distance] for by in one.scattered])], 0)))
        per_step = weights.sum() / len(weights) / (one.trace.steps - one.trace.steps // 2)
        groups = mean([cluster.groups for cluster in one.clusters])
        rows.append([f"`{one.name}`", f"{per_step:.1f}", *cells, f"{groups:.2f}"])
    columns = ["", "misses per step and layer", *(f"within {distance}, %" for distance in DISTANCES)]
    return table([*columns, "groups of 100 per miss"], rows)


def kth_scores(real: Sequence[Measured], made: Sequence[Measured]) -> str:
    """Errors of moving averages."""
    rows = []
    for one in [*real, *made]:
        for layer, foretold in enumerate(one.forecasts):
            errors = [f"{foretold[ALPHAS.index(alpha)].error:.2f}" for alpha in SHOWN]
            low, median, high = (f"{part:.2f}" for part in one.prefetches[layer].reach)
            name = f"`{one.name}`" + (f", layer {layer}" if one.trace.layers > 1 else "")
            rows.append([name, *errors, f"{low} / {median} / {high}"])
    head = [f"alpha {alpha:g}" for alpha in SHOWN]
    return table(["root mean square error", *head, "alpha 0.5: tokens above it / k"], rows)


def regimes(real: Sequence[Measured], made: Sequence[Measured]) -> str:
    """Generated and real side by side."""
    rows = []
    for one in [*real, *made]:
        spans = [one.overlap.mean(0), *(one.misses.rates["lru"][POOLS.index(pool)] for pool in (1, 2, 4))]
        errors = [f[ALPHAS.index(0.5)].error for f in one.forecasts]
        lru, echo = (one.misses.mean(name)[POOLS.index(POOL)] for name in ("lru", "echo"))
        gain = f"{100 * (echo / lru - 1):+.1f}"
        rows.append([f"`{one.name}`", *(_span(100 * span) for span in spans), _span(np.array(errors), 2), gain])
    head = ["layers, least to most", "overlap, %", *(f"LRU misses at {pool} k, %" for pool in (1, 2, 4))]
    return table([*head, "error of the k-th score", f"echo to LRU at {POOL} k, %"], rows)


def _span(values: Any, digits: int = 0) -> str:
    low, high = (f"{value:.{digits}f}" for value in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"
