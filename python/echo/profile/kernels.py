"""Which verb a kernel belongs to, by its name, and which layer, by its place in the step.

A captured step tells nobody which verb a kernel was launched for. But kernels are called after their verbs, and a
layer calls its verbs in order: append, score, select, recall, attend. So what goes back in that order begins a layer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

VERBS = ("append", "score", "select", "recall", "attend")
"""Of a layer, in the order of the calls."""

UPLOAD, BEGIN, COMMIT, OTHER, GAPS = "upload", "begin", "commit", "other", "gaps"
FORECAST = "forecast"
"""Runs beside the others, on streams of its own."""

# Kernels that are called after something else than their verb.
_NAMED = {"index_queries": "score", "fold": COMMIT, "forget": COMMIT}
_WORDS = (BEGIN, *VERBS, "prefetch", FORECAST, COMMIT, "release")
_OWN = re.compile(r"(?:void )?echo::(?:\(anonymous namespace\)::|\w+::)*(\w+)")


def part_of(name: str) -> str:
    """The verb of a kernel of the library; of one that does the work of several "select+recall"; else OTHER.

    Args:
        name: demangled, with or without arguments.
    """
    found = _OWN.match(name)
    if found is None:
        return OTHER
    kernel = found[1]
    if kernel in _NAMED:
        return _NAMED[kernel]
    words = kernel.split("_")
    return "+".join(word for word in _WORDS if word in words) or OTHER


def layers_of(parts: Sequence[str], layers: int) -> list[int | None]:
    """The layer of each kernel of a step, None for what belongs to none.

    Args:
        parts: of the step's kernels, in order.
        layers: of the model. Where the order shows another number, every layer is taken to have launched as many
            kernels as any other; if that cannot be, nothing gets a layer.
    """
    ranks = [[VERBS.index(verb) for verb in part.split("+") if verb in VERBS] for part in parts]
    found = _by_order(ranks)
    ranked = [i for i, own in enumerate(ranks) if own]
    if found and max((layer for layer in found if layer is not None), default=-1) + 1 != layers:
        each, rest = divmod(len(ranked), layers)
        places = {} if rest else {i: place // max(each, 1) for place, i in enumerate(ranked)}
        found = [places.get(i) for i in range(len(parts))]
    return found


def _by_order(ranks: Sequence[Sequence[int]]) -> list[int | None]:
    layer, last = -1, len(VERBS)
    found: list[int | None] = []
    for own in ranks:
        if not own:
            found.append(None)
            continue
        if min(own) < last:
            layer += 1
        last = max(own)
        found.append(layer)
    return found
