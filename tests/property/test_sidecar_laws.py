"""Laws of stripping sidecars, over trees of steps."""

import copy

from hypothesis import given, settings

from mmrender.sidecar import MultiModalData
from mmrender.trajectory import strip_intermediate_mm_data
from mmrender.trajectory.conversation import same_value
from mmrender.trajectory.sidecars import sidecar_of
from trajectory_cases import as_mapping, step, trajectories
from tree_cases import calls


@given(trajectories())
@settings(max_examples=50)
def test_stripping_changes_nothing_but_sidecars_and_not_its_input(trajectory):
    before = copy.deepcopy(trajectory)
    stripped = strip_intermediate_mm_data(trajectory)
    assert same_value(as_mapping(trajectory), as_mapping(before))
    assert [type(entry) for entry in stripped] == [type(entry) for entry in trajectory]
    for old, new in zip(as_mapping(trajectory), as_mapping(stripped), strict=True):
        assert same_value(_without_sidecars(old), _without_sidecars(new))


def steps_of(rollout):
    return [
        step(call.prompt, call.completion, call.sidecar or None, parent=call.parent, original=call.sidecar)
        for call in rollout
    ]


@given(calls())
@settings(max_examples=60)
def test_stripping_loses_no_step_its_images(rollout):
    stripped = strip_intermediate_mm_data(steps_of(rollout))
    for index, call in enumerate(rollout):
        assert not call.sidecar or _recovered(stripped, index, call.sidecar), "a step lost its images"


def _recovered(steps: list, index: int, mm: MultiModalData) -> bool:
    """Whether the step, or one that extends it, holds the sidecar, as a consumer of plain steps expects."""
    own = sidecar_of(steps[index])
    sequence = steps[index]["tokens"]["prompt_ids"] + steps[index]["tokens"]["completion_ids"]
    if own is not None:
        return same_value(own, mm)
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
