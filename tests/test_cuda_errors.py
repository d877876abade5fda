"""What kernels find wrong while a GPU works on a step: raised by the next pass or `synchronize`, once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.gpu import ON_A_GPU, batch_of, opened
from support.rig import Pair, Rig, small_shape, tokens_of

import echo

pytestmark = ON_A_GPU


def select_wrongly(rig: Rig, pair: Pair, entry: int) -> None:
    """A step whose forward selects a position that its row does not have."""
    wanted = torch.arange(rig.model.shape.top_k, dtype=torch.int32)[None]
    wanted[0, 5] = entry
    selection = wanted.to(rig.model.device)

    def forward(p: echo.ForwardPass) -> None:
        for layer in range(rig.model.shape.layers):
            x = rig.model.inputs(layer, torch.from_dlpack(p.tokens), torch.from_dlpack(p.positions))
            p.append(layer, x.kv, x.index_key)
            p.recall(layer, selection)

    rig.runtime.step(batch_of([pair], 9), forward)
    pair.oracle.append([9])


@pytest.mark.parametrize("entry", [71, 1 << 20, -2, -(1 << 31)])
def test_what_kernels_find_wrong_is_raised_by_synchronize(make_rig, entry):
    """Once only; the entry was left out, nothing else happened, and the runtime goes on."""
    rig = make_rig(small_shape())
    pair = opened(rig, 128, tokens_of(5, 70))  # the new token has position 70
    select_wrongly(rig, pair, entry)
    with pytest.raises(echo.InvalidArgument, match="^selection: "):
        rig.runtime.synchronize()
    rig.runtime.synchronize()
    rig.step([(pair, 3)])
    rig.check(thresholds=False)


@pytest.mark.parametrize("how", ["step", "replay", "prefill"])
def test_what_kernels_find_wrong_is_raised_by_the_next_pass(make_rig, how):
    """That pass does not happen; made again, it does."""
    rig = make_rig(small_shape())
    rig.runtime.capture(rig.model, [2])
    pair = opened(rig, 128, tokens_of(5, 70))
    select_wrongly(rig, pair, 71)
    torch.cuda.synchronize()

    def again() -> None:
        if how == "prefill":
            rig.prefill(pair, [1])
        else:
            rig.step([(pair, 1)], captured=how == "replay")

    with pytest.raises(echo.InvalidArgument, match="^selection: "):
        again()
    assert pair.session.length == 71
    rig.check(thresholds=False)
    again()
    rig.check(thresholds=False)


OTHER_CALLS: dict[str, Callable[[Rig, Pair], object]] = {
    "open_session": lambda rig, pair: rig.open(64),
    "fork": lambda rig, pair: rig.fork(pair),
    "truncate": lambda rig, pair: rig.truncate(pair, 10),
    "pause": lambda rig, pair: pair.session.pause(),
    "close": lambda rig, pair: rig.close(pair),
}


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_what_kernels_find_wrong_stays_until_then(make_rig, name):
    """Calls that are no passes do what they should, and do not swallow it."""
    rig = make_rig(small_shape())
    pair = opened(rig, 128, tokens_of(5, 70))
    other = rig.fork(pair)  # so that a cut has to copy
    select_wrongly(rig, pair, 71)
    torch.cuda.synchronize()
    OTHER_CALLS[name](rig, pair)
    with pytest.raises(echo.InvalidArgument, match="^selection: "):
        rig.step([(other, 4)])
    rig.check(thresholds=False)  # counts free blocks and sessions too
    for each in rig.pairs:
        each.session.resume()
        rig.step([(each, 4)])
    rig.check(thresholds=False)
