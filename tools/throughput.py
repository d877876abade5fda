"""Writes the measured part of docs/throughput.md from bench/results/decode.json.

It stands between `<!-- measured -->` and `<!-- end measured -->`, with every figure of a run; the text around it is
written by hand.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evidence import PAGE, RESULTS, filled
from evidence_tables import table

from echo.bench.systems import SYSTEMS

HEAD = ["pool", "system", "GB of rows/keys", "batch", "missed, %", "fetched ahead (in vain), %", "ms per step"]
AHEAD = {"echo-prefetch": "prefetches", "echo-forecast": "forecasts"}


def measured(result: dict[str, Any]) -> str:
    """What was run, a table, and what it comes to."""
    setup, *cases = result["cases"]
    first, machine = cases[0], result["machine"]
    spreads = [100 * case["spread"] for case in cases]
    rows = first["context_tokens"] * first["layers"] * first["row_bytes"]
    what = (
        f"`{result['command']}` at {result['commit'][:7]}, {machine['gpu']}, driver {machine['driver']}: "
        f"{first['contexts']} contexts of {first['context_tokens'] / 1e6:.1f} million tokens ({rows / 1e9:.0f} GB of "
        f"rows); `{first['case']['overlap']}`; {setup['steps']} steps of {setup['repeat']} runs of each batch size, "
        f"which differ by {min(spreads):.1f} to {max(spreads):.1f} %. Misses are those of the second half of the "
        f"steps; tokens per second with {_listed(first['added_ms'])} ms added per step, which is modelled."
    )
    missing = [f"`{name}`" for name in SYSTEMS if all(case["case"]["system"] != name for case in cases)]
    if missing:
        what += f" Not run: {', '.join(missing)}."
    head = [*HEAD, *(f"+{extra:g} ms" for extra in first["added_ms"])]
    return "\n\n".join([what, table(head, [_row(case) for case in cases]), " ".join(_sentences(cases))]).strip()


def _row(case: dict[str, Any]) -> list[str]:
    gpu = case["gpu_bytes"]
    ratios = case["ratio_to_resident"] or [None] * len(case["tokens_per_s"])
    rates = [
        f"{rate:,.0f}" + (f" ({ratio:.1f}x)" if ratio is not None else "")
        for rate, ratio in zip(case["tokens_per_s"], ratios, strict=True)
    ]
    return [
        f"{case['case']['pool'] / 1000:g}K",
        f"`{case['case']['system']}`",
        f"{gpu['rows'] / 1e9:.1f}/{gpu['index_keys'] / 1e9:.1f}",
        f"{case['batch']:.1f}",
        f"{100 * case['late_miss_rate']:.1f}",
        f"{100 * case['fetched_ahead_per_selected']:.1f} ({100 * case['fetched_in_vain_per_selected']:.1f})",
        f"{case['attention_ms_per_step']:.1f}",
        *rates,
    ]


def _sentences(cases: Sequence[dict[str, Any]]) -> list[str]:
    """Ratios between systems at the same pool."""
    by = {(case["case"]["pool"], case["case"]["system"]): case for case in cases}

    def ratio(name: str, to: str, of: Callable[[dict[str, Any]], float]) -> str | None:
        """Least and most of all pools that have both."""
        pools = [pool for pool, system in by if system == name and (pool, to) in by]
        found = [of(by[pool, name]) / of(by[pool, to]) for pool in pools]
        return " to ".join(dict.fromkeys(f"{end:.2f}" for end in (min(found), max(found)))) if found else None

    said = []
    for i, extra in enumerate(cases[0]["added_ms"][:2]):
        if times := ratio("echo", "resident-total", lambda case, i=i: case["tokens_per_s"][i]):
            said.append(f"With {extra:g} ms added `echo` decodes {times} times as many tokens as `resident-total`.")
    for name, what in AHEAD.items():
        times = ratio(name, "echo", lambda case: case["attention_ms_per_step"])
        missed = ratio(name, "echo", lambda case: case["late_miss_rate"])
        if times and missed:
            said.append(
                f"With {what} a step takes {times} times as long as without, and {missed} times as much is missed."
            )
    return said


def _listed(numbers: Sequence[float]) -> str:
    words = [f"{number:g}" for number in numbers]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--page", type=Path, default=PAGE.with_name("throughput.md"), metavar="FILE")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="of the benchmarks")
    options = parser.parse_args(arguments)
    result = json.loads((options.results / "decode.json").read_text())
    page = options.page.read_text(encoding="utf-8")
    options.page.write_text(filled(page, {"measured": measured(result)}), encoding="utf-8")
    print(options.page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
