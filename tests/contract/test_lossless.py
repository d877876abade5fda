"""The promise: selections and outputs have the same bits with any pool, eager or captured, in any company."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from support.rig import Pair, Results, Rig, assert_same_bits, check_cache, full_width_shape, small_shape

SHAPES = {
    "fp32": small_shape(),
    "fp8_656": full_width_shape("fp8_656"),
    "bf16_1152": full_width_shape("bf16_1152"),
    "fp8_656, keys of 128": full_width_shape("fp8_656", index_dim=128),
}


@dataclass
class Script:
    """A fixed course of events that any rig can play: sessions open, read, decode, close."""

    seed: int
    events: list[tuple] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        lengths: dict[int, int] = {}
        opened = 0
        for _ in range(44):
            choice = rng.random()
            if (choice < 0.2 and len(lengths) < 6) or not lengths:
                self.events.append(("open", opened))
                lengths[opened] = 0
                opened += 1
            elif choice < 0.3 and len(lengths) > 2:
                gone = int(rng.choice(list(lengths)))
                self.events.append(("close", gone))
                del lengths[gone]
            elif choice < 0.5:
                who = int(rng.choice(list(lengths)))
                count = int(min(rng.integers(1, 80), 180 - lengths[who]))
                if count > 0:
                    self.events.append(("prefill", who, rng.integers(61, size=count).tolist()))
                    lengths[who] += count
            else:
                ready = [who for who, length in lengths.items() if length < 180]
                who = rng.permutation(ready)[: rng.integers(1, 5)].tolist()
                self.events.append(("step", [(w, int(rng.integers(61))) for w in who]))
                for w in who:
                    lengths[w] += 1

    def play(self, rig: Rig, captured: bool = False, verify: bool = False) -> list[Results]:
        """All results in order."""
        if captured:
            rig.runtime.capture(rig.model, [2, 4])
        pairs: dict[int, Pair] = {}
        results = []
        for event, *arguments in self.events:
            if event == "open":
                pairs[arguments[0]] = rig.open(200)
            elif event == "close":
                rig.close(pairs.pop(arguments[0]))
            elif event == "prefill":
                results.append(rig.prefill(pairs[arguments[0]], arguments[1], verify))
            else:
                entries = [(pairs[who], token) for who, token in arguments[0]]
                results.append(rig.step(entries, captured=captured, verify=verify))
        return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", SHAPES)
def test_offloaded_is_resident_bit_for_bit(make_rig, name, dtype):
    """Everything resident, against the least pool and twice that, eager and captured with padding."""
    shape = SHAPES[name]
    script = Script(seed=len(name))
    resident = make_rig(shape, model={"dtype": dtype}, gpu_slots=2048)
    expected = script.play(resident, verify=True)
    assert sum(layer.evictions for layer in resident.stats().layers) == 0
    resident.check()
    least = resident.runtime.plan.minimum_slots
    for slots, captured in ((0, False), (0, True), (2 * least, False), (2048, True)):
        rig = make_rig(shape, model=resident.model, gpu_slots=slots)
        for given, wanted in zip(script.play(rig, captured), expected, strict=True):
            assert_same_bits(given, wanted)
        rig.check()
        if slots == 0:
            assert rig.stats().hit_rate < resident.stats().hit_rate
            assert all(layer.evictions > 100 for layer in rig.stats().layers)


def test_host_mirrors_thresholds_and_books_are_right_after_every_event(make_rig):
    rig = make_rig(small_shape(), model={"integers": True})
    script = Script(seed=9)
    events = script.events
    rig.runtime.capture(rig.model, [4])
    pairs: dict[int, Pair] = {}
    for event, *arguments in events:
        if event == "open":
            pairs[arguments[0]] = rig.open(200)
        elif event == "close":
            rig.close(pairs.pop(arguments[0]))
        elif event == "prefill":
            rig.prefill(pairs[arguments[0]], arguments[1])
        else:
            rig.step([(pairs[who], token) for who, token in arguments[0]], captured=True)
        rig.check()
    assert rig.inexact == 0


PARTITIONS = {
    "one chunk": [64],
    "one by one": [1] * 64,
    "around blocks": [63, 1],
    "uneven": [1, 2, 3, 5, 8, 13, 21, 11],
    "halves": [32, 32],
}


@pytest.mark.parametrize("name", SHAPES)
def test_prefill_in_any_chunks_is_decoding_token_by_token(make_rig, name):
    """Selections, outputs and thresholds: 192 tokens in any partition, and through steps."""
    rig = make_rig(SHAPES[name], model={"integers": name == "fp32"}, prefill_chunk=64)
    tokens = np.random.default_rng(10).integers(61, size=192).tolist()
    decoded = rig.open(192)
    steps = [rig.step([(decoded, token)]) for token in tokens]
    expected = torch.cat([s[0] for s in steps]), torch.cat([s[1] for s in steps])
    for partition in PARTITIONS.values():
        pair = rig.open(192)
        parts = []
        for start in range(0, 192, 64):
            first = start
            for count in partition:
                parts.append(rig.prefill(pair, tokens[first : first + count], verify=False))
                first += count
        results = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
        assert_same_bits(results, expected)
        np.testing.assert_array_equal(rig.runtime.thresholds(pair.session), rig.runtime.thresholds(decoded.session))
        rig.check(thresholds=name == "fp32")
        rig.close(pair)


def test_results_do_not_depend_on_the_size_of_row_blocks(make_rig):
    """A prefill is worked through in blocks as large as the pool allows: 1 row, 7, or 64."""
    rigs = []
    for slots in (17, 7 * 17 + 5, 64 * 17):
        rig = make_rig(small_shape(), model=rigs[0].model if rigs else {}, max_batch=1, gpu_slots=slots)
        rigs.append(rig)
    assert [rig.runtime.plan.block_rows for rig in rigs] == [1, 7, 64]
    tokens = np.random.default_rng(11).integers(61, size=150).tolist()
    results = [rig.prefill(rig.open(200), tokens) for rig in rigs]
    for given in results[1:]:
        assert_same_bits(given, results[0])
    for rig in rigs:
        rig.check()


def test_several_query_rows_are_steps_of_one_token(make_rig):
    """Speculative decoding: three new tokens at once give what three steps give."""
    rig = make_rig(small_shape(), query_rows=3, max_batch=2)
    rng = np.random.default_rng(12)
    together, apart = rig.open(128), rig.open(128)
    for _ in range(20):
        tokens = rng.integers(61, size=3).tolist()
        given = rig.step([(together, tokens)])
        steps = [rig.step([(apart, token)]) for token in tokens]
        assert_same_bits(given, (torch.cat([s[0] for s in steps]), torch.cat([s[1] for s in steps])))
    rig.check()


def test_verbs_and_attention_are_the_same(make_rig):
    shape = small_shape()
    verbs = make_rig(shape)
    fused = make_rig(shape, fused=True)
    script = Script(seed=13)
    for given, wanted in zip(script.play(fused), script.play(verbs), strict=True):
        assert_same_bits(given, wanted)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_no_bit(make_rig, device, threads):
    if device != "cpu":
        pytest.skip("only the CPU backend has threads")
    one = make_rig(small_shape(), threads=1)
    many = make_rig(small_shape(), model=one.model, threads=threads)
    script = Script(seed=14)
    for given, wanted in zip(script.play(many), script.play(one), strict=True):
        assert_same_bits(given, wanted)


def test_two_workers_with_the_same_inputs_do_the_same(make_rig):
    """Pitfall 24: results are equal in every bit; on the CPU, which slots are taken is, too."""
    script = Script(seed=15)
    rigs = [make_rig(small_shape(), model={"seed": 2}) for _ in range(2)]
    first, second = (script.play(rig) for rig in rigs)
    for given, wanted in zip(first, second, strict=True):
        assert_same_bits(given, wanted)
    for a, b in zip(*(rig.stats().layers for rig in rigs), strict=True):
        assert a.appended == b.appended
        if rigs[0].kind == "cpu":  # a GPU's threads race for victims
            assert (a.hits, a.misses, a.evictions, a.used_slots) == (b.hits, b.misses, b.evictions, b.used_slots)
    for rig in rigs:
        check_cache(rig.runtime, [pair.session for pair in rig.pairs])
