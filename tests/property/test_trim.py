"""Laws of packing and stripping over trees of steps."""

import contextlib
import copy

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrender.errors import TrajectoryError
from mmrender.spans import MultiModalData
from mmrender.trajectory import (
    pack_group,
    pack_sidecars,
    step_multi_modal_data,
    strip_intermediate_mm_data,
    unpack_group,
    unpack_sidecars,
)
from trajectory_cases import PAD, as_mapping, conversations, equal, rendered, step, trajectories


@given(trajectories())
@settings(max_examples=120)
def test_unpacking_undoes_packing(trajectory):
    before = copy.deepcopy(trajectory)
    packed = pack_sidecars(trajectory)
    assert equal(as_mapping(trajectory), as_mapping(before)), "the input was changed"
    assert equal(as_mapping(unpack_sidecars(packed)), as_mapping(trajectory))


@given(st.lists(trajectories(), max_size=4))
@settings(max_examples=40)
def test_unpacking_undoes_packing_of_groups(rollouts):
    assert equal(as_mapping(unpack_group(pack_group(rollouts))), as_mapping(rollouts))


@given(conversations())
@settings(max_examples=80)
def test_each_distinct_item_stands_once_and_no_more_tokens_than_are_new(tree):
    steps = []
    for segments, completion, parent in tree:
        prompt, mm = rendered(segments)
        steps.append(step(prompt, completion, mm, parent=parent))
    packed = pack_sidecars(steps)
    names = {name for segments, _, _ in tree for name, *_ in (s for s in segments if isinstance(s, tuple))}
    assert sorted(row["hash"] for row in packed["items"]) == sorted(names)
    # A step never costs more than its own tokens less the prefix that it shares with its parent's.
    bound = 0
    for segments, completion, parent in tree:
        prompt, _ = rendered(segments)
        known = [] if parent is None else rendered(tree[parent][0])[0] + tree[parent][1]
        shared = next(
            (i for i, (a, b) in enumerate(zip(prompt, known, strict=False)) if a != b),
            min(len(prompt), len(known)),
        )
        bound += len(prompt) - shared + len(completion)
    assert len(packed["tokens"]) <= bound


@given(trajectories())
@settings(max_examples=80)
def test_stripping_changes_nothing_but_sidecars_and_not_its_input(trajectory):
    before = copy.deepcopy(trajectory)
    stripped = strip_intermediate_mm_data(trajectory)
    assert equal(as_mapping(trajectory), as_mapping(before))
    assert [type(entry) for entry in stripped] == [type(entry) for entry in trajectory]
    for old, new in zip(as_mapping(trajectory), as_mapping(stripped), strict=True):
        assert equal(_without_sidecars(old), _without_sidecars(new))


@given(conversations())
@settings(max_examples=120)
def test_stripping_loses_no_step_its_images(tree):
    steps = []
    for segments, completion, parent in tree:
        prompt, mm = rendered(segments)
        steps.append(step(prompt, completion, mm, parent=parent, original=mm))
    stripped = strip_intermediate_mm_data(steps)
    for index, (segments, _, _) in enumerate(tree):
        prompt, mm = rendered(segments)
        assert _recovered(stripped, index, mm), "a step lost its sidecar, and no continuation holds it"
        assert prompt.count(PAD) == sum(r.length for ranges in mm.mm_placeholders.values() for r in ranges)


def _recovered(steps: list, index: int, mm: MultiModalData) -> bool:
    """Whether the step, or one that extends it, holds the sidecar, as a consumer of plain steps expects."""
    own = step_multi_modal_data(steps[index])
    sequence = steps[index]["tokens"]["prompt_ids"] + steps[index]["tokens"]["completion_ids"]
    if own is not None:
        return equal(own, mm)
    for later in range(index + 1, len(steps)):
        extends = (
            steps[later]["parent"] == index
            and steps[later]["tokens"]["prompt_ids"][: len(sequence)] == sequence
        )
        longer = steps[later]["original"]
        if extends and _starts_with(longer, mm) and _recovered(steps, later, longer):
            return True
    return False


def _starts_with(longer: MultiModalData, mm: MultiModalData) -> bool:
    return all(
        list(longer.mm_placeholders.get(key, ()))[: len(ranges)] == list(ranges)
        and list(longer.mm_hashes.get(key, ()))[: len(ranges)] == list(mm.mm_hashes[key])
        for key, ranges in mm.mm_placeholders.items()
    )


def _without_sidecars(node):
    if isinstance(node, dict):
        return {key: _without_sidecars(value) for key, value in node.items() if key != "multi_modal_data"}
    return node


@given(trajectories(), st.data())
@settings(max_examples=80)
def test_a_damaged_packed_form_is_one_clear_error_or_another_trajectory(trajectory, data):
    packed = pack_sidecars(trajectory)
    node, key = data.draw(st.sampled_from(list(_places(packed))))
    odd = [None, -1, 10**6, 2**70, "x", [], {}, [[]], np.zeros(3), True, 1.5]
    node[key] = data.draw(st.sampled_from(odd))
    with contextlib.suppress(TrajectoryError):
        unpack_group(packed)


def _places(node):
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        yield node, key
        if isinstance(value, list | dict) and value and key not in ("rest", "item"):
            yield from _places(value)
