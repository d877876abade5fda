"""Pitfall 23: bad batches, overlapping calls and passes kept too long are refused by name, and change nothing."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from support.rig import Rig, small_shape
from support.verbs import ARGUMENTS, call, tensors

import echo


def test_bad_batches_are_refused_by_name(make_rig):
    rig = make_rig(small_shape(), query_rows=2)
    foreign = make_rig(small_shape()).open(64).session
    a, b = rig.open(64), rig.open(64)
    closed = rig.runtime.open_session(64)
    closed.close()
    first, second = a.session, b.session
    cases = [
        (echo.InvalidArgument, "^sessions: ", [first, "b"], [1, 2]),
        (echo.InvalidArgument, "^sessions: ", [first, None], [1, 2]),
        (echo.InvalidArgument, "^sessions: session 0 is in the batch twice", [first, second, first], [1, 2, 3]),
        (echo.InvalidArgument, "^session: it was not opened by this runtime", [first, foreign], [1, 2]),
        (echo.StateError, "^session: session 2 is closed", [first, closed], [1, 2]),
        (echo.InvalidArgument, "^tokens: ", [first, second], [1]),
        (echo.InvalidArgument, "^tokens: ", [first, second], [1, 2, 3]),
        (echo.InvalidArgument, "^tokens: ", [first, second], [[1, 2], [3]]),
        (echo.InvalidArgument, "^query_rows: 0 given", [first, second], [[], []]),
        (echo.InvalidArgument, "^tokens: ", [first], [1.5]),
        (echo.InvalidArgument, "^tokens: ", [first], ["1"]),
        (echo.InvalidArgument, "^tokens: ", [first], [None]),
        (echo.InvalidArgument, "^tokens: ", [first], [[1.0, 2.0]]),
        (echo.InvalidArgument, "^tokens: ", [first], [1 << 31]),
        (echo.InvalidArgument, "^tokens: ", [first], [-(1 << 40)]),
        (echo.InvalidArgument, "^query_rows: 3 given, expected 1 to query_rows = 2", [first], [[1, 2, 3]]),
    ]
    for error, message, sessions, tokens in cases:
        with pytest.raises(error, match=message):
            rig.runtime.step(echo.Batch(sessions, tokens), rig.model)
        assert (first.length, second.length) == (0, 0)
    for not_callable in (3, "forward", [rig.model]):
        with pytest.raises(echo.InvalidArgument, match="^forward: "):
            rig.runtime.step(echo.Batch([first], [1]), not_callable)
        with pytest.raises(echo.InvalidArgument, match="^forward: "):
            rig.runtime.prefill(first, [1], not_callable)
        with pytest.raises(echo.InvalidArgument, match="^forward: "):
            rig.runtime.capture(not_callable, [1])
    with pytest.raises(echo.InvalidArgument, match="^forward: "):
        rig.runtime.capture(None, [1])
    for rows in (0, 3, -1):
        with pytest.raises(echo.InvalidArgument, match=f"^query_rows: {rows} given, expected 1 to query_rows = 2"):
            rig.runtime.capture(rig.model, [1], rows)
    rig.step([(b, 1), (a, 1)])
    rig.check()


def test_bad_prefills_are_refused_by_name(make_rig):
    rig = make_rig(small_shape())
    foreign = make_rig(small_shape()).open(64).session
    pair = rig.open(64)
    cases = [
        [],
        [1] * 65,
        [1.5],
        ["7"],
        "7",
        [None],
        None,
        [[1, 2]],
        [1 << 31],
        np.array([1.5, 2.5]),
        np.array([1.0, 2.0], np.float32),
        np.array([[1, 2]], np.int32),
        torch.tensor([1.5, 2.5]),
    ]
    for tokens in cases:
        with pytest.raises(echo.InvalidArgument, match="^tokens: "):
            rig.runtime.prefill(pair.session, tokens, rig.model)
        assert pair.session.length == 0
    with pytest.raises(echo.InvalidArgument, match="^session: it was not opened by this runtime"):
        rig.runtime.prefill(foreign, [1], rig.model)
    with pytest.raises(echo.StateError, match="^forward: none given"):
        rig.runtime.prefill(pair.session, [1])
    for tokens in ([1, 2], (3, 4), range(5, 7), np.array([7, 8], np.int32), np.array([9, 10]), torch.tensor([11, 12])):
        rig.prefill(pair, tokens)  # all of these are integers
    assert pair.oracle.tokens == list(range(1, 13))
    rig.check()


def test_a_pass_is_refused_after_its_forward(make_rig, device):
    rig = make_rig(small_shape())
    pair = rig.open(64)
    kept: list[echo.ForwardPass] = []
    rig.model.on_stage = lambda stage, layer, p: kept.append(p)
    rig.step([(pair, 1)])
    rig.prefill(pair, [2, 3])
    rig.model.on_stage = None
    good = tensors(device)
    for p in (kept[0], kept[-1]):
        for name in ("rows", "query_rows", "is_prefill", "tokens", "positions", "selection", "blocks"):
            with pytest.raises(echo.StateError, match="^pass: "):
                getattr(p, name)
        for verb in ARGUMENTS:
            with pytest.raises(echo.StateError, match="^pass: "):
                call(p, verb, 0, good)
        with pytest.raises(echo.StateError, match="^pass: "):
            p.select(0)
        with pytest.raises(echo.StateError, match="^pass: "):
            p.scores()
    rig.check()


def everything(rig: Rig, session: echo.Session) -> dict[str, object]:
    """Every call of a runtime that has to have it for itself."""
    runtime = rig.runtime
    return {
        "open_session": lambda: runtime.open_session(1),
        "prefill": lambda: runtime.prefill(session, [1], rig.model),
        "step": lambda: runtime.step(echo.Batch([session], [1]), rig.model),
        "capture": lambda: runtime.capture(rig.model, [1]),
        "export_kv": lambda: runtime.export_kv(session),
        "import_kv": lambda: runtime.import_kv(session, runtime.export_kv(session)),
        "begin_import": lambda: runtime.begin_import(session, 1),
        "thresholds": lambda: runtime.thresholds(session),
        "stats": lambda: runtime.stats(),
        "cache_state": lambda: runtime.cache_state(0),
        "synchronize": lambda: runtime.synchronize(),
        "close": lambda: runtime.close(),
        "session.close": lambda: session.close(),
    }


def test_calls_from_within_a_forward_are_refused(make_rig):
    rig = make_rig(small_shape())
    pair = rig.open(64)
    rig.prefill(pair, [1, 2, 3])
    tried = []

    def on_stage(stage: str, layer: int, p: echo.ForwardPass) -> None:
        if (stage, layer) == ("select", 1):
            for name, overlapping in everything(rig, pair.session).items():
                with pytest.raises(echo.StateError, match="^runtime: another call is still running"):
                    overlapping()
                tried.append(name)
            assert pair.session.length == 3 and not pair.session.closed and not rig.runtime.closed

    rig.model.on_stage = on_stage
    rig.step([(pair, 4)])
    assert len(tried) == 13
    rig.model.on_stage = None
    rig.step([(pair, 5)])
    rig.check()


def test_overlapping_calls_from_another_thread_are_refused(make_rig):
    rig = make_rig(small_shape())
    pair = rig.open(64)
    inside, go_on = threading.Event(), threading.Event()

    def on_stage(stage: str, layer: int, p: echo.ForwardPass) -> None:
        if (stage, layer) == ("recall", 0):
            inside.set()
            assert go_on.wait(60)

    rig.model.on_stage = on_stage
    results = []
    worker = threading.Thread(target=lambda: results.append(rig.step([(pair, 4)])))
    worker.start()
    try:
        assert inside.wait(60)
        for overlapping in everything(rig, pair.session).values():
            with pytest.raises(echo.StateError, match="^runtime: another call is still running"):
                overlapping()
    finally:
        go_on.set()
        worker.join()
    assert len(results) == 1
    rig.model.on_stage = None
    rig.step([(pair, 5)])
    rig.check()
