"""What `echo-kv bench decode` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from echo.bench.figures import PAPER, Case, base_of

_COLUMNS = (  # name, what is under it, width
    ("pool", "", 8),
    ("system", "", 15),
    ("GPU memory", "rows + keys + maps", 21),
    ("batch", "", 6),
    ("misses, %", "all / late", 12),
    ("early, %", "", 9),
    ("ms/step", "", 8),
    ("spread", "", 8),
)
_RATE = 16


def print_table(cases: Sequence[Case], added: Sequence[float]) -> None:
    """A line for each system and pool; the ratio is to `resident` at the same pool.

    Misses and rows that were fetched early, before they were known to be selected, are shares of what was selected.
    """
    print()
    _print_row([name for name, _, _ in _COLUMNS], [f"+{extra:g} ms" for extra in added])
    _print_row([below for _, below, _ in _COLUMNS], ["tokens/s"] * len(added))
    for pool in dict.fromkeys(case.system.pool for case in cases):
        for case in cases:
            if case.system.pool == pool:
                _print_row(_cells(case), _rates(case, base_of(cases, case), added))
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
        f"{100 * served.counts.share(served.counts.prefetched):.1f}",
        f"{served.step_ms:.2f}",
        f"{100 * served.spread:.1f} %",
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


def _print_row(cells: Iterable[str], rates: Iterable[str]) -> None:
    parts = [
        f"  {cell:<{width}}" if name == "system" else f"{cell:>{width}}"
        for cell, (name, _, width) in zip(cells, _COLUMNS, strict=True)
    ]
    print("".join([*parts, *(f"{rate:>{_RATE}}" for rate in rates)]).rstrip())
