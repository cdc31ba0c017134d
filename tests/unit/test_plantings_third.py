"""The third and fourth tables of planted faults: their words agree, and their check can tell a fault from none."""

import re
from collections import Counter

import pytest

from planting import HEALTHY, SMALL, STAGES, departures, roll, world_of
from plantings_fourth import FOURTH
from plantings_third import THIRD


def test_plantings_are_new_and_spread():
    names = Counter(one.name for one in (*THIRD, *FOURTH))
    assert [name for name, count in names.items() if count > 1] == []
    assert {part for one in THIRD for part in one.stage.split("|")} == set(STAGES)
    single = Counter(one.stage.split("|")[0] for one in THIRD if not one.halves)
    assert single.total() == 60
    assert min(single.values()) >= 8
    assert len({one.family for one in THIRD}) >= 4


def test_the_fourth_table_is_spread_over_its_families():
    assert sorted(Counter(one.family for one in FOURTH).values()) == [15] * 4
    assert {part for one in FOURTH for part in one.stage.split("|")} == set(STAGES)


@pytest.mark.parametrize("one", [*THIRD, *FOURTH], ids=lambda one: one.name)
def test_the_words_of_a_planting_accept_its_own_cause(one):
    assert one.exotic == (one.cause == "unknown")
    if not one.exotic:
        assert one.named_by(one.cause)
        assert all(re.search(pattern, one.cause) for pattern in one.patterns)


def test_departures_tell_a_fault_from_none(tmp_path):
    world = world_of("glm4v", tmp_path, HEALTHY)
    negated = next(one for one in THIRD if one.name == "negated")
    samples = [roll(world, 0, HEALTHY), roll(world, 0, negated.fault)]
    none, fault = departures(world.model, world.tiny, samples)
    assert none.max() < SMALL / 10
    assert fault.min() > SMALL
    assert len(none) == samples[0].loss_mask.sum()
