"""Whole steps have the same bits under all settings that may change none: see support/whole_steps.py.

ECHO_WHOLE_STEPS is the number of scenarios; by default a few on the CPU, and more than 300 on a GPU.
"""

from __future__ import annotations

import os

import pytest
from support.whole_steps import SETTINGS, WORLDS, Reference, Scenario, Tally, play

import echo

COUNTS = {"cpu": 24, "cuda": 312}


@pytest.mark.parametrize("world", range(len(WORLDS)))
def test_results_have_the_same_bits_under_all_settings(device, one_torch_thread, capsys, world):
    count = int(os.environ.get("ECHO_WHOLE_STEPS", COUNTS[device])) // len(WORLDS)
    tally = play(device, count, [world])
    with capsys.disabled():
        print(f"\n{device}, world {world}: {tally}")
    assert tally.scenarios == count and not tally.differences, "\n".join(tally.differences[:20])
    for event in ("evictions", "replayed steps", "eager steps", "pauses", "rewinds", "forks"):
        assert tally.done[event] > tally.scenarios / 4, f"hardly any {event}"
    assert tally.rows > 100 * tally.scenarios


def test_a_byte_that_differs_is_found(monkeypatch, one_torch_thread):
    """Of an output, a selection or a host row, whatever the scenario."""
    reference = Reference.of(4, "cpu")
    assert Scenario(reference, 4).run() == []
    for name in ("outputs", "selections"):
        wanted = [getattr(history, name) for history in reference.histories]
        kept = [tensor.clone() for tensor in wanted]
        for tensor in wanted:
            tensor[150, 1].view(-1)[3] += 1
        found = Scenario(reference, 4).run()
        assert found and all(f"{name} of position 150, layer 1" in one for one in found)
        for tensor, before in zip(wanted, kept, strict=True):
            tensor.copy_(before)
    for history in reference.histories:
        history.rows[2][7, 5] ^= 1
    found = Scenario(reference, 4).run()
    assert found and all("host rows of layer 2" in one for one in found)


def test_what_a_runtime_does_wrong_is_found(monkeypatch, one_torch_thread):
    """As if a setting decided what is attended to."""
    step = echo.Runtime.step

    def wrong(self, batch, forward=None):
        outputs, selections = step(self, batch, forward)
        return (outputs * 1.0009765625 if self.plan.config.prefetch == "on" else outputs), selections

    tally = Tally()
    reference = Reference.of(4, "cpu")
    monkeypatch.setattr(echo.Runtime, "step", wrong)
    for seed in range(8):
        tally.add(Scenario(reference, seed))
    assert tally.scenarios == 8 and tally.differences
    assert all("'prefetch': 'on'" in one and "outputs of position" in one for one in tally.differences)


def test_every_value_of_a_setting_is_drawn():
    drawn = [Scenario(Reference(WORLDS[4], None, []), seed).settings for seed in range(40)]
    for name, choices in SETTINGS.items():
        assert {settings[name] for settings in drawn} == {*choices}
