"""Laws of trajectory trees: what is derived is what was appended, and what is shipped is what was there."""

from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import mmcodecs
from item_cases import same_tensors
from mmrender import Trajectory
from mmrender.errors import TrajectoryError
from mmrender.media.encoded import ReferenceItem
from mmrender.trajectory import AllowedTokens, RoutedExperts, WeightVersionSpan
from mmrender.trajectory.aligned import Aligned, joined_spans
from mmrender.trajectory.step import step_sample
from mmrender.trajectory.tree import trajectories_from_wire, trajectories_to_wire
from mmrender.trajectory.wire import StepRow, Table
from tree_cases import Call, assert_same, calls, grown, item, wire_bound

EDITED_EARLY = [
    Call([10, 11], [20], 0),
    Call([10, 11, 20, 12], [21], 1),
    Call([10, 13, 20, 12, 21, 12], [22], 2),
]
"""A prompt that ends as the last step does, and differs before it."""


@given(calls())
@example(EDITED_EARLY)
@settings(max_examples=60)
def test_what_is_derived_is_what_was_appended(rollout):
    trajectory = grown(rollout)
    check_steps(trajectory, rollout)
    check_prefixes(trajectory, rollout)
    check_samples(trajectory, rollout)
    check_branches(trajectory, rollout)
    check_experts(trajectory, rollout)


def check_steps(trajectory, rollout):
    for step, call in zip(trajectory.steps, rollout, strict=True):
        assert step.prompt_ids.tolist() == call.prompt
        assert step.completion_ids.tolist() == call.completion
        assert step.token_ids.tolist() == call.prompt + call.completion
        assert step.multi_modal_data == call.sidecar
        assert step.messages == call.messages
        assert len(step) == len(call.prompt) + len(call.completion)
        if step.parent is not None:
            assert step.token_ids[: step.keep].tolist() == step.parent.token_ids[: step.keep].tolist()
            assert not any(entry.start < step.keep < entry.stop for entry in step.media)


FORMS = {
    "list": list,
    "fresh list": lambda ids: np.array(ids, np.int64).tolist(),
    "array": lambda ids: np.array(ids, np.int64),
    "tuple": tuple,
}


@given(calls(), st.data())
@settings(max_examples=50)
def test_the_form_of_a_prompt_what_is_refused_and_what_is_read_between_change_no_tree(rollout, data):
    """A list is compared by address with the prompt before it: no form, and nothing between, may matter."""
    trajectory = Trajectory("t", extra={"env": "grid"})
    for call in rollout:
        form = FORMS[data.draw(st.sampled_from(sorted(FORMS)))]
        between = data.draw(st.sampled_from(["nothing", "refused", "read", "shipped"]))
        if between == "refused":
            with pytest.raises(TrajectoryError):
                call.append_to(trajectory, prompt_ids=[*call.prompt, 7, -1])
            with pytest.raises(TrajectoryError):
                call.append_to(trajectory, logprobs=[0.0, *call.logprobs])
        elif between == "read":
            trajectory.samples()
        elif between == "shipped":
            trajectory.to_frames()
        call.append_to(trajectory, prompt_ids=form(call.prompt), completion_ids=form(call.completion))
    assert_same(trajectory, grown(rollout))


def check_prefixes(trajectory, rollout):
    """A step starts where its longest common prefix ends: its prompt is compared with every earlier step's.

    A prompt that begins with all of the newest step may start there, though an older one shares more.
    """
    for index, call in enumerate(rollout):
        best = 0
        for earlier in rollout[:index]:
            sequence = earlier.prompt + earlier.completion
            pairs = zip(marked(call), [*marked(earlier), *earlier.completion], strict=False)
            agree = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            best = max(best, min(len(sequence), len(call.prompt)) if agree is None else agree)
        step = trajectory.steps[index]
        newest = trajectory.steps[index - 1] if index else None
        extends_newest = step.parent is not None and step.parent is newest and step.keep == len(newest)
        assert step.keep == uncut(call, best) or (extends_newest and step.keep < best)


def marked(call):
    """The prompt with each placeholder token replaced by its media, its place in them and its length."""
    out = list(call.prompt)
    for span in call.sidecar.spans():
        for index in range(span.start, span.stop):
            known = out[index] if isinstance(out[index], tuple) else ()
            out[index] = (*known, span.item.identity, index - span.start, span.range)
    return out


def uncut(call, length):
    return next((span.start for span in call.sidecar.spans() if span.start < length < span.stop), length)


def check_samples(trajectory, rollout):
    """Every sampled token is trained on once."""
    sampled = sum(len(call.completion) for call in rollout)
    once, steps = trajectory.samples(), [step_sample(step) for step in trajectory.steps]
    for samples in (once, steps):
        assert sum(int(sample.loss_mask.sum()) for sample in samples) == sampled
    for sample in [*once, *steps, *trajectory.samples(once=False)]:
        assert (sample.logprobs[sample.loss_mask] < 0).all()
        assert not sample.logprobs[~sample.loss_mask].any()
        media = np.zeros(len(sample), np.bool_)
        for span in sample.media_spans:
            media[span.start : span.stop] = True
        assert not (media & sample.loss_mask).any()


def check_branches(trajectory, rollout):
    """Branches cover every step, and none extends another."""
    branches = trajectory.branches()
    assert {step.index for branch in branches for step in branch.steps} == set(range(len(rollout)))
    paths = [[step.index for step in branch.steps] for branch in branches]
    assert not any(one is not other and other[: len(one)] == one for one in paths for other in paths)
    sequences = [branch.token_ids.tolist() for branch in branches]
    for branch, sequence in zip(branches, sequences, strict=True):
        for step in branch.steps:
            assert sequence[: len(step)] == step.token_ids.tolist()
            assert sequence[step.prompt_length : len(step)] == step.completion_ids.tolist()


def check_experts(trajectory, rollout):
    """Router choices of a step are those of the earliest call that had them."""
    for step, call in zip(trajectory.steps, rollout, strict=True):
        if call.experts is None or not len(call.experts.data):
            continue
        found = step.routed_experts
        assert found.start <= call.experts.start
        assert found.stop >= call.experts.stop
        for position in range(found.start, found.stop):
            row = next(
                experts.data[position - experts.start]
                for part in step.parts()
                if (experts := rollout[part.step.index].experts) is not None
                and experts.start <= position < min(experts.stop, part.stop)
            )
            assert np.array_equal(found.data[position - found.start], row)


@given(st.lists(calls(), max_size=3), st.booleans())
@settings(max_examples=30)
def test_groups_survive_pack_ship_and_unpack(rollouts, keep):
    group = [grown(rollout, f"t{number}") for number, rollout in enumerate(rollouts)]
    for number, trajectory in enumerate(group):
        trajectory.reward = 0.5 * number
        trajectory.error = "timed out" if number == 1 else None
    wire = trajectories_to_wire(group, media_sources="keep" if keep else "drop")
    for read in (
        trajectories_from_wire(wire),
        trajectories_from_wire(mmcodecs.decode(mmcodecs.encode(wire))),
    ):
        assert len(read) == len(group)
        for old, new in zip(group, read, strict=True):
            assert_same(old, new)
            for first, second in zip(old.items, new.items, strict=True):
                assert type(first) is type(second)
                assert isinstance(first, ReferenceItem) or same_tensors(first, second)


@given(st.lists(calls(), max_size=3), st.integers(1, 6))
@settings(max_examples=25)
def test_bytes_are_linear_in_distinct_content(rollouts, copies):
    """However often its rollouts are repeated, a group ships each distinct item and root prompt once."""
    group = [grown(rollout, f"{c}-{n}") for c in range(copies) for n, rollout in enumerate(rollouts)]
    wire = trajectories_to_wire(group)
    assert len(wire["items"]["items"]) == len({(i.identity, type(i)) for t in group for i in t.items})
    table = msgspec.msgpack.decode(wire["table"].data, type=Table)
    assert len(table.messages) == len({str(m) for t in group for s in t.steps for m in s.new_messages})
    assert sum(len(memoryview(frame)) for frame in mmcodecs.encode_frames(wire)) <= wire_bound(group)
    stored = sum(len(step.own_ids) for trajectory in group for step in trajectory.steps)
    assert sum(len(step.tokens) for row in table.trajectories for step in row.steps) <= 4 * stored
    # A step stores no token that its parent has.
    for trajectory in group:
        for step in trajectory.steps:
            if step.parent is not None and step.prompt_length > step.keep < len(step.parent):
                new, old = step.prompt_delta[0], step.parent.token_ids[step.keep]
                assert new != old or any(entry.start == step.keep for entry in step.media)


@given(calls())
@settings(max_examples=30)
def test_a_lost_image_is_an_error_and_changes_nothing(rollout):
    trajectory = grown(rollout)
    call = next((c for c in reversed(rollout) if c.sidecar), None)
    assume(call is not None)
    before = len(trajectory)
    try:
        trajectory.append(call.prompt + call.completion, [1], logprobs=[-1.0])
    except TrajectoryError:
        assert len(trajectory) == before
    else:
        raise AssertionError("an image was lost without a word")


@given(calls(), st.data())
@settings(max_examples=50)
def test_a_damaged_form_gives_one_kind_of_error_or_a_sound_tree(rollout, data):
    from mmrender.errors import InputError, PlaceholderError

    wire = mmcodecs.decode(mmcodecs.encode(trajectories_to_wire([grown(rollout)])), copy=True)
    name = data.draw(st.sampled_from(["table", "items", "experts", "extras", "row"]))
    table = msgspec.msgpack.decode(wire["table"].data)
    if name == "table":
        at = data.draw(st.integers(0, wire["table"].size - 1))
        wire["table"][at] = data.draw(st.integers(0, 255))
    elif name == "row" and rollout:
        row = data.draw(st.sampled_from(table["trajectories"][0]["steps"]))
        field = data.draw(st.sampled_from(StepRow.__struct_fields__))
        odd = st.sampled_from([None, b"", b"12345678", [], [1], [[0, 3, 2]], "x", 0.5])
        row[field] = data.draw(st.integers(-3, 40) | odd)
        wire["table"] = np.frombuffer(msgspec.msgpack.encode(table), np.uint8)
    else:
        wire[name] = data.draw(st.sampled_from([None, [], {}, [None], 3, "x", {"x": [0, None]}]))
    try:
        read = trajectories_from_wire(wire)[0]
    except (InputError, PlaceholderError):
        return
    for step in read.steps:
        assert len(step.token_ids) == len(step)
        assert all(entry.stop <= step.prompt_length for entry in step.media)
        assert len(step.messages) == step.messages_keep + len(step.new_messages)
    read.samples(require_logprobs=False)


def test_an_empty_trajectory():
    assert_same(Trajectory("x"), Trajectory.from_bytes(Trajectory("x").to_bytes()))
    assert Trajectory().trajectory_id != Trajectory().trajectory_id
    assert Trajectory("x").branches() == []
    assert item("A") is item("A")
    assert Call([], [], 0).prompt == []


def per_token(values: Aligned) -> dict[int, tuple[Any, ...]]:
    """All values of each position that has any."""
    found: dict[int, tuple[Any, ...]] = {}
    columns = [dict(enumerate(array, values.start)) for array in values.arrays.values()]
    if values.routed_experts is not None:
        columns.append(dict(enumerate(values.routed_experts.data[:, 0, 0], values.routed_experts.start)))
    columns.append({at: one.version for one in values.weight_versions for at in range(one.start, one.stop)})
    columns.append({at: one.forbids for one in values.allowed for at in range(one.start, one.stop)})
    for column in columns:
        for at, value in column.items():
            found[at] = (*found.get(at, ()), value)
    return found


@given(st.lists(st.integers(0, 4), min_size=8, max_size=8), *[st.integers(0, 12)] * 4)
def test_aligned_values_are_cut_and_moved_with_their_tokens(
    bounds: list[int], first: int, start: int, stop: int, by: int
) -> None:
    edges = list(accumulate(bounds))
    values = Aligned(
        {"logprobs": np.arange(12.0), "weights": list(range(12))},
        RoutedExperts(np.arange(9, dtype=np.uint8)[:, None, None], first),
        (WeightVersionSpan("a", *edges[:2]), WeightVersionSpan("b", *edges[2:4])),
        (AllowedTokens(*edges[4:6], (1,), True), AllowedTokens(*edges[6:], (1,))),
    )
    whole = per_token(values)
    part = values.cut(start, stop)
    assert per_token(part) == {at: found for at, found in whole.items() if start <= at < stop}
    assert per_token(part.shift(by)) == {at + by: found for at, found in per_token(part).items()}
    pieces = [values.cut(0, start), values.cut(start, 99)]
    assert per_token(joined_spans(pieces)) == per_token(joined_spans([values]))
