"""Writes the tables and pictures of docs/evidence.md from the traces that ship, generated ones, and bench/results.

Tables stand between `<!-- NAME -->` and `<!-- end NAME -->`; the text around them is written by hand and has no figures
of its own. Deterministic, half a minute on one core.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import evidence_measure as measure
import evidence_plots as plots
import evidence_prefetch as prefetch
import evidence_tables as tables

from echo.traces import shipped, synthetic

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "evidence.md"
RESULTS = ROOT / "bench" / "results"


def quick_blocks(results: Path = RESULTS) -> dict[str, str]:
    """Tables that need no replay, by name."""
    load = functools.cache(measure.load)
    return {
        "model": tables.model(results),
        "lossless": tables.lossless(results),
        "runtime": tables.runtime(results),
        "traces": tables.traces(load),
        "overlap": tables.overlaps(load),
    }


def measured_blocks(real: Sequence[measure.Measured], made: Sequence[measure.Measured]) -> dict[str, str]:
    """The others."""
    return {
        "clusters": tables.clusters(real, made),
        "policies": tables.policies(real),
        "layers": tables.layers(real),
        "kth_score": tables.kth_scores(real, made),
        "prefetch": prefetch.prefetches(real, made),
        "predictor": prefetch.predictors(real, made),
        "regimes": tables.regimes(real, made),
    }


def filled(page: str, blocks: Mapping[str, str]) -> str:
    """The page with blocks replaced; ValueError if it does not have one of them exactly once."""
    for name, block in blocks.items():
        pattern = re.compile(f"(?<=<!-- {name} -->\n).*?(?=\n<!-- end {name} -->)", re.DOTALL)
        page, count = pattern.subn(lambda _, block=block: block, page)
        if count != 1:
            raise ValueError(f"{name}: {count} places in the page, expected one")
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, draws, writes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="pictures go into a folder beside it")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="of the benchmarks")
    options = parser.parse_args(arguments)
    real = [measure.measure(name, measure.load(name)) for name in shipped.NAMES]
    made = [measure.measure(name, measure.generate(name)) for name in synthetic.REGIMES]
    plots.draw(options.page.parent / options.page.stem, real, made)
    blocks = {**quick_blocks(options.results), **measured_blocks(real, made)}
    options.page.write_text(filled(options.page.read_text(encoding="utf-8"), blocks), encoding="utf-8")
    print(f"{options.page}: {', '.join(blocks)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
