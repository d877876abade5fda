"""What `echo-kv bench decode` prints."""

from __future__ import annotations

from collections.abc import Sequence

from echo.bench.figures import PAPER, Case, base_of

_COLUMNS = (  # name, what is under it
    ("pool", ""),
    ("system", ""),
    ("GPU memory", "rows + keys + maps"),
    ("batch", ""),
    ("missed, %", "all / late"),
    ("ahead, %", "all / in vain"),
    ("ms/step", ""),
    ("spread", ""),
)


def print_table(cases: Sequence[Case], added: Sequence[float]) -> None:
    """A line for each system and pool; the ratio is to `resident` at the same pool.

    Rows that were missed, and those that were fetched ahead, are shares of what was selected.
    """
    heads = [
        [*(name for name, _ in _COLUMNS), *(f"+{extra:g} ms" for extra in added)],
        [*(below for _, below in _COLUMNS), *(["tokens/s"] * len(added))],
    ]
    rows = [[*_cells(case), *_rates(case, base_of(cases, case), added)] for case in cases]
    widths = [max(map(len, column)) for column in zip(*heads, *rows, strict=True)]
    print()
    for head in heads:
        _print_row(head, widths)
    for pool in dict.fromkeys(case.system.pool for case in cases):
        for case, row in zip(cases, rows, strict=True):
            if case.system.pool == pool:
                _print_row(row, widths)
        if pool in PAPER:
            print(f"{'':>10}the paper's ECHO over SGLang (8 x H20, whole model): {PAPER[pool]:.2f}x")


def _cells(case: Case) -> list[str]:
    served, gpu = case.served, case.gpu
    return [
        f"{case.system.pool:,}",
        case.system.name,
        _memory([gpu[part] for part in ("rows", "index_keys", "maps")]),
        f"{served.batch:.1f}",
        " / ".join(f"{100 * one.share(one.misses):.1f}" for one in (served.counts, served.late)),
        " / ".join(f"{100 * served.counts.share(rows):.1f}" for rows in (served.counts.ahead, served.counts.wasted)),
        f"{served.step_ms:.2f}",
        f"{100 * served.batches[0].spread:.1f} %",
    ]


def _memory(parts: Sequence[int]) -> str:
    unit, name = (1e9, "GB") if max(parts) >= 1e9 else (1e6, "MB")
    return " + ".join(f"{part / unit:.1f}" for part in parts) + f" {name}"


def _rates(case: Case, base: Case | None, added: Sequence[float]) -> list[str]:
    cells = []
    for extra in added:
        rate = case.served.tokens_per_second(extra)
        ratio = f" {rate / base.served.tokens_per_second(extra):5.2f}x" if base is not None else ""
        cells.append(f"{rate:,.0f}{ratio}")
    return cells


def _print_row(cells: Sequence[str], widths: Sequence[int]) -> None:
    left = [name for name, _ in _COLUMNS].index("system")
    parts = [
        f"{cell:<{width}}" if i == left else f"{cell:>{width}}"
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    print(f"  {'  '.join(parts)}".rstrip())
