"""What `echo-kv bench decode` prints."""

from __future__ import annotations

from collections.abc import Sequence

from echo.bench.figures import PAPER, Case, base_of


def print_table(cases: Sequence[Case], added: Sequence[float]) -> None:
    """A line for each system and pool; the ratio is to `resident` at the same pool."""
    print(
        f"\n{'pool':>8}  {'system':<15}{'GPU memory, GB':>20}{'batch':>7}{'misses, %':>14}{'ms/step':>9}{'spread':>8}"
        + "".join(f"{f'+{extra:g} ms':>16}" for extra in added)
    )
    print(
        f"{'':>8}  {'':<15}{'rows + keys + maps':>20}{'':>7}{'all / late':>14}{'':>9}{'':>8}"
        + f"{'tokens/s':>16}" * len(added)
    )
    for pool in dict.fromkeys(case.system.pool for case in cases):
        group = [case for case in cases if case.system.pool == pool]
        for case in group:
            print(_line(case, base_of(cases, case), added))
        if pool in PAPER:
            print(f"{'':>8}  the paper's ECHO over SGLang (8 x H20, whole model): {PAPER[pool]:.2f}x")


def _line(case: Case, base: Case | None, added: Sequence[float]) -> str:
    served, gpu = case.served, case.gpu
    memory = " + ".join(f"{gpu[part] / 1e9:.3g}" for part in ("rows", "index_keys", "maps"))
    misses = f"{100 * served.miss_rate:.1f} / {100 * served.late_miss_rate:.1f}"
    cells = []
    for extra in added:
        rate = served.tokens_per_second(extra)
        ratio = f" {rate / base.served.tokens_per_second(extra):5.2f}x" if base is not None else ""
        cells.append(f"{f'{rate:,.0f}{ratio}':>16}")
    return (
        f"{case.system.pool:>8,}  {case.system.name:<15}{memory:>20}{served.batch:>7.1f}{misses:>14}"
        f"{served.step_ms:>9.2f}{f'{100 * served.spread:.1f} %':>8}" + "".join(cells)
    )
