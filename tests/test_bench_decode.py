"""`echo-kv bench decode` with real steps, scaled down."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from support.programs import importable

import echo
from echo import cli
from echo.bench import offered, systems
from echo.bench.drift import Queries
from echo.bench.regimes import REGIMES
from echo.bench.schedule import Load, sample, schedule
from echo.bench.serve import Server
from echo.bench.systems import make_system

with importable("bench"):
    import decode
    import record

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SHAPE = echo.ModelShape(layers=2, index_heads=8, query_heads=8, top_k=16)
LOAD = Load((640, 704, 768, 640), (6, 9, 6, 4, 8, 6, 5))
SMALL = (
    "bench", "decode", "--quick", "--requests", "9", "--output", "4", "--lengths", "320-640", "--pools", "1.3K,0.7K",
    "--host-memory", "4M",
)  # fmt: skip


class Ticks:
    """A clock that is a second later whenever it is looked at."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def served(device, slots, most, resident=False, tokens=None, load=LOAD, most_steps=0, **more):
    stretches = schedule(load, most, tokens)
    with Server(SHAPE, load, most, REGIMES["glm"], device=device, gpu_slots=slots, **more) as server:
        ends = []
        close, run = server._close, server._run
        ran = []

        def noted(stretch):
            if not ran:  # it only warms up
                return close(stretch)
            for row in stretch.closed:
                one = stretch.running[row]
                ends.append((one.request, server._running[row].length - load.lengths[one.context]))
            close(stretch)

        server._close = noted
        server._run = lambda steps: ran.append(steps) or run(steps)
        timed = server.serve(stretches, sample(stretches, 0), resident, most_steps)
        server.runtime.synchronize()
        stats = server.runtime.stats()
        assert stats.sessions == len(load.lengths) and not server._running
        assert ran == [stretch.steps for stretch in stretches] and stats.steps > sum(ran)
        assert all(layer.used_slots == 0 for layer in stats.layers)
    assert sorted(ends) == list(enumerate(load.outputs))
    return stretches, timed


def test_every_request_gets_its_tokens_from_real_steps(device):
    stretches, timed = served(device, 120, 3)
    assert sorted(timed) == list(range(len(stretches)))
    for number, one in timed.items():
        rows = stretches[number].steps * len(stretches[number].running) * SHAPE.layers
        # A selected row that an entry shares with another counts once.
        assert one.counts.hits + one.counts.misses == rows * SHAPE.top_k
        assert 0 < one.counts.misses < rows * SHAPE.top_k and one.late.misses <= one.counts.misses
        assert one.seconds > 0


def test_resident_rows_never_miss(device):
    _, timed = served(device, 3000, 4, resident=True, tokens=2300)
    assert all(one.counts.misses == 0 and one.counts.hits > 0 for one in timed.values())


def test_the_same_again_gives_the_same():
    counts = [[t.counts for t in served("cpu", 120, 3)[1].values()] for _ in range(2)]
    assert counts[0] == counts[1]


def test_only_steps_are_timed():
    _, timed = served("cpu", 120, 3, clock=Ticks())
    # Two halves, each from one look to the next.
    assert {(one.seconds, one.late_seconds) for one in timed.values()} == {(2.0, 1.0)}


def test_the_first_steps_stand_for_all_of_a_batch():
    """A batch that nobody goes on from is ended after a few; its sessions make room as if it had been served."""
    load = Load((640,) * 3, (9,) * 6)
    stretches = schedule(load, 3)
    with Server(SHAPE, load, 3, REGIMES["glm"], device="cpu", gpu_slots=120, clock=Ticks()) as server:
        timed = server.serve(stretches, [0, 1], resident=False, most_steps=5)
        assert all(layer.used_slots == 0 for layer in server.runtime.stats().layers)
    assert [(one.steps, one.late_steps) for one in timed.values()] == [(5, 2)] * 2
    for one in timed.values():
        assert one.counts.hits + one.counts.misses == 5 * 3 * SHAPE.layers * SHAPE.top_k
        assert one.late.hits + one.late.misses == 2 * 3 * SHAPE.layers * SHAPE.top_k
        assert one.lasting(9) == 2.0 + 4 / 2 * 1.0
    # Requests go on from one batch to the next: nothing is left out.
    mixed = served("cpu", 120, 3, most_steps=2)
    assert [one.steps for one in mixed[1].values()] == [stretch.steps for stretch in mixed[0]]


def test_a_new_request_starts_without_slots():
    """Its context was another request's, which has ended."""
    load = Load((640,), (5, 5))
    _, timed = served("cpu", 700, 1, load=load)
    assert timed[0].counts.misses >= SHAPE.top_k and timed[1].counts.misses >= SHAPE.top_k


def test_systems_get_the_memory_they_are_said_to():
    load = Load((6400,) * 10, (64,) * 20)
    shape = echo.ModelShape(layers=4, top_k=64)
    pool = 16_000
    made = {name: make_system(name, pool, load, shape) for name in systems.SYSTEMS}
    sizes = {name: systems.gpu_bytes(system, load, shape) for name, system in made.items()}
    most = {name: max(len(stretch.running) for stretch in system.stretches(load)) for name, system in made.items()}
    rows = shape.row_bytes * shape.layers
    rest = {"per-request": 10, "echo": 10, "echo-prefetch": 10, "echo-forecast": 10}
    assert most == {"resident": 2, "resident-total": 3, **rest}
    assert sizes["resident"]["rows"] == 2 * 6464 * rows and made["per-request"].slots == 10 * 128
    assert sizes["echo"]["rows"] == pool * rows
    assert sizes["echo"]["index_keys"] == 10 * 6464 * 132 * shape.layers
    assert sizes["echo"]["maps"] == (10 * 6464 * 4 + pool * 12) * shape.layers
    total = sum(sizes["echo"].values())
    assert total - 6464 * (rows + 528) < sum(sizes["resident-total"].values()) <= total
    few = make_system("per-request", 300, load, shape)
    assert few.most == 2 and few.slots == 256
    for name, least in (("per-request", 128), ("echo", 65), ("resident", 6464)):
        with pytest.raises(echo.InvalidArgument, match="^pools: "):
            make_system(name, least - 1, load, shape)
        assert make_system(name, least, load, shape).stretches(load)


def test_the_regimes_miss_what_is_said():
    """Exact LRU at a third of the size, 44 times top-k."""
    expected = {"glm": (29.8, 13.2, 7.2), "v32_68k": (61.0, 40.5, 23.9)}
    for name, published in expected.items():
        found = lru_misses(name, tokens=4224, top_k=96, pools=(1, 2, 4))
        np.testing.assert_allclose(found, published, rtol=0.12)


def lru_misses(regime: str, tokens: int, top_k: int, pools: tuple[int, ...]) -> list[float]:
    shape = echo.ModelShape(layers=1)
    queries = Queries(shape, 1, REGIMES[regime], "cpu", seed=0)
    queries.start(0)
    keys = torch.randn(tokens, shape.index_dim, generator=torch.Generator().manual_seed(1))
    used = torch.full((tokens,), -1)
    misses = []
    for step in range(260):
        queries.advance(1)
        best = torch.relu(keys @ queries.layers[0, 0].float().T).sum(1).topk(top_k).indices
        if step >= 130:
            # The pool holds those used latest; of equal ones, some.
            order = torch.argsort(used, descending=True, stable=True)
            place = torch.empty_like(order)
            place[order] = torch.arange(tokens)
            misses.append([float((place[best] >= pool * top_k).float().mean()) for pool in pools])
        used[best] = step
    return (100 * np.mean(misses, axis=0)).tolist()


def test_a_table_a_picture_and_figures(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    report, plot = tmp_path / "r.json", tmp_path / "p.png"
    assert cli.main([*SMALL, "--device", "cpu", "--json", str(report), "--plot", str(plot), "--added", "0,20"]) == 0
    out = capsys.readouterr().out
    assert all(f"{head}: " in out for head in ("missed", "ahead", "spread"))
    assert plot.stat().st_size > 5000 and "modelled" not in out.splitlines()[0]
    figures = json.loads(report.read_text())
    cases = figures["cases"]
    here = [name for name in systems.SYSTEMS if name not in figures["left_out"]]
    expected = [(pool, name) for pool in (1300, 700) for name in here]
    assert [(c["case"]["pool"], c["case"]["system"]) for c in cases] == expected
    assert all(f"{name} is left out: " in out for name in figures["left_out"])
    for case in cases:
        assert case["case"]["system"] in out
        step = np.array(case["added_ms"]) + case["attention_ms_per_step"]
        np.testing.assert_allclose(case["tokens_per_s"], 1e3 * case["batch"] / step)
        assert case["batch"] == pytest.approx(9 * 4 / case["steps"]) and case["batch"] <= case["batch_most"]
        if case["case"]["system"].startswith("resident"):
            assert case["miss_rate"] == 0
        if case["case"]["system"] == "resident":
            assert case["ratio_to_resident"] == [1.0, 1.0]
    by = {(c["case"]["pool"], c["case"]["system"]): c for c in cases}
    assert by[1300, "echo"]["batch"] > by[1300, "resident"]["batch"] > by[700, "resident"]["batch"] >= 1
    assert by[1300, "echo"]["miss_rate"] <= by[700, "echo"]["miss_rate"]


def test_each_system_turns_on_its_own_setting():
    load, shape = Load((640,) * 2, (4,) * 2), echo.ModelShape(layers=1, top_k=16)
    made = {name: dict(make_system(name, 700, load, shape).settings) for name in systems.SYSTEMS}
    off = {"prefetch": "off", "forecast_cap": 0}
    assert made.pop("echo-prefetch") == {**off, "prefetch": "on"}
    assert made.pop("echo-forecast") == {**off, "forecast_cap": 1}
    assert all(settings == off for settings in made.values())


def test_a_device_that_fetches_nothing_ahead_is_found_out(monkeypatch):
    shape = echo.ModelShape(layers=1, index_heads=8, query_heads=8, top_k=16)
    assert all(offered.why_not(name, shape, "cpu", {}) is None for name in systems.SYSTEMS)
    stats = type("Stats", (), {"layers": [type("Layer", (), {"candidates": 0, "full_selects": 0})]})
    monkeypatch.setattr(Server, "serve", lambda self, *_, **__: None)
    monkeypatch.setattr(echo.Runtime, "stats", lambda self: stats)
    assert "fetches nothing ahead" in offered.why_not("echo-prefetch", shape, "cpu", {})


def test_it_is_recorded(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert decode.main([*SMALL[2:], "--systems", "resident,echo", "--device", "cpu"]) == 0
    result = json.loads((tmp_path / "decode.json").read_text())
    setup, *cases = result["cases"]
    assert len(cases) == 4 and {"modelled", "measured", "put_together", "left_out"} <= set(setup)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decode.json", "decode.png"]


@pytest.mark.parametrize(
    ("flag", "value", "named"),
    [
        ("--pools", "1", "pools"),
        ("--pools", "many", "pools"),
        ("--pools", "inf", "pools"),
        ("--lengths", "9K-1K", "lengths"),
        ("--lengths", "1e400", "lengths"),
        ("--requests", "9223372036854775807", "requests"),
        ("--systems", "echo,else", "systems"),
        ("--requests", "0", "requests"),
        ("--repeat", "-1", "repeat"),
        ("--steps", "1", "steps"),
        ("--added", "-1", "added"),
        ("--host-memory", "1K", "host_memory"),
        ("--json", "/nowhere/at/all.json", "json"),
        ("--plot", "picture.foo", "plot"),
        ("--seed", "-1", "seed"),
        ("--device", "gpu", "device"),
        ("--threshold-alpha", "2", "threshold_alpha"),
    ],
)
def test_nonsense_is_refused_by_name(capsys, flag, value, named):
    assert cli.main([*SMALL, "--device", "cpu", f"{flag}={value}"]) == 1
    assert capsys.readouterr().err.startswith(f"echo-kv bench decode: {named}: ")


def test_rows_that_lie_apart_take_the_memory_that_they_take(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr("echo.bench.command.measure", lambda asked, _: seen.append(asked) or [])
    monkeypatch.setattr("echo.bench.tables.print_table", lambda *_: None)
    for flags in ((), ("--host-row-stride", "1312")):
        assert cli.main([*SMALL, "--requests", "100", "--systems", "echo", "--device", "cpu", *flags]) == 0
    packed, apart = (sum(seen[i].load.lengths) for i in (0, -1))
    assert 0.3 * packed < apart < 0.6 * packed


def test_on_the_cpu_everything_is_scaled_down_unless_asked_for(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr("echo.bench.command.measure", lambda asked, _: seen.append(asked) or [])
    monkeypatch.setattr("echo.bench.tables.print_table", lambda *_: None)
    for flags, quick in (((), True), (("--quick",), True), (("--no-quick",), False)):
        assert cli.main(["bench", "decode", "--systems", "resident", "--device", "cpu", *flags]) == 0
        assert seen[-1].quick == quick and seen[-1].shape.layers == (2 if quick else 61)
        assert ("--no-quick takes" in capsys.readouterr().out) == (not flags)
