"""What the demonstration prints: what the sessions wrote, and the figures as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from echo import settings
from echo.demo.decode import Decoded

_LINES = 12  # of a session's text that are shown


def print_texts(console: Any, openings: Sequence[str], texts: Sequence[str]) -> None:
    """A panel for each session with the beginning of what it wrote."""
    from rich.panel import Panel
    from rich.syntax import Syntax
    from rich.text import Text

    for number, (opening, text) in enumerate(zip(openings, texts, strict=True)):
        lines = _printable(opening + text).strip("\n").splitlines()
        more = f"{len(lines)} lines in all" if len(lines) > _LINES else None
        code = Syntax("\n".join(lines[:_LINES]), "python", theme="ansi_dark", background_color="default")
        given = opening.strip("\n").splitlines()[-1]
        title = Text.assemble(f"session {number}: ", (given, "bold"))  # brackets in it are no markup
        console.print(Panel(code, title=title, subtitle=more, title_align="left"))


def print_tables(console: Any, resident: Decoded, offloaded: Decoded, figures: dict[str, Any]) -> None:
    """Both runs side by side, then the small pool layer by layer."""
    from rich.table import Table

    def verdict(equal: bool) -> str:
        return "[green]equal[/]" if equal else "[red]DIFFERENT[/]"

    def row(what: str, *cells: Any) -> None:
        both.add_row(what, *(f"{cell:,}" if isinstance(cell, int) else cell for cell in cells))

    size = settings.readable
    row_bytes = offloaded.plan.shape.row_bytes
    runs = (resident, offloaded)
    both = Table(title="the same decoding with two GPU pools")
    both.add_column("")
    both.add_column("pool for everything", justify="right")
    both.add_column(f"pool for {offloaded.pool / resident.pool:.0%}", justify="right")
    row("slots per layer", resident.pool, offloaded.pool)
    row("GPU pool, all layers", *(size(figures["gpu_pool_bytes"][name]) for name in ("resident", "offloaded")))
    row("host pool", *[size(figures["host_pool_bytes"])] * 2)
    row("hit rate", f"{resident.hit_rate.mean():.1%}", f"{offloaded.hit_rate.mean():.1%}")
    row("rows missed", *(int(one.misses.sum()) for one in runs))
    row("rows prefetched", *(int(one.prefetched.sum()) for one in runs))
    row("of them used", *(int(one.prefetched_used.sum()) for one in runs))
    if any(one.forecast.any() for one in runs):
        row("rows forecast", *(int(one.forecast.sum()) for one in runs))
    row("missed or prefetched again", 0, sum(figures["fetched_again"]))
    row("bytes of all these", *(size(int(one.fetched.sum()) * row_bytes) for one in runs))
    row("time per step, median", *(f"{figures['step_ms'][name]:.1f} ms" for name in ("resident", "offloaded")))
    row("generated tokens", "", verdict(figures["tokens_equal"]))
    row("selections", "", verdict(figures["selections_equal"]))
    both.caption = (
        "Both start with an empty pool: what is used for the first time comes from the host in any case. "
        "Only what comes again, after it was evicted, is the price of the small pool."
    )
    console.print(both)

    layers = Table(title=f"pool for {offloaded.pool / resident.pool:.0%}, by layer")
    names = ("layer", "hit\nrate", "missed", "prefetched", "used", "again", "all per\nstep", "selections")
    for name in names:  # in two lines, so that they fit into 80 columns
        layers.add_column(name, justify="right")
    steps = len(offloaded.tokens)
    for layer, rate in enumerate(figures["hit_rate"]):
        counts = (offloaded.misses[layer], offloaded.prefetched[layer], offloaded.prefetched_used[layer])
        cells = [f"{int(count):,}" for count in (*counts, figures["fetched_again"][layer])]
        same = np.array_equal(resident.selections[:, layer], offloaded.selections[:, layer])
        layers.add_row(str(layer), f"{rate:.1%}", *cells, f"{offloaded.fetched[layer] / steps:.1f}", verdict(same))
    console.print(layers)
    if figures["device"] == "cpu":
        console.print("(times on the CPU, where host memory is as near as the pool, say nothing about a GPU)")
    console.print(f"reading {figures['prefill_seconds']:.1f} s, everything {figures['seconds']:.1f} s")


def _printable(text: str) -> str:
    """Without what a terminal would obey."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
