"""Trees of steps: where steps start, what they share, what is refused, and what consumers read."""

import copy
import pickle

import numpy as np
import pytest
from PIL import Image

from item_cases import patch_item
from mmrender.audit import inspect_sample
from mmrender.errors import TrajectoryError
from mmrender.messages import ImagePart, Message, TextPart
from mmrender.spans import MultiModalData, PlaceholderRange
from mmrender.trajectory import (
    RoutedExperts,
    Trajectory,
    WeightVersionSpan,
    pack_sidecars,
    response_tokens,
    step_multi_modal_data,
    step_sample,
    trajectory_step_tokens,
    unpack_sidecars,
)

A, B = patch_item(seed=1), patch_item(seed=2)
PAD = [9] * 6
PROMPT = [1, 2, *PAD, 3]


def sidecar(*entries, length=6):
    return MultiModalData.of((PlaceholderRange(offset, length), item) for offset, item in entries)


SHOWS_A = sidecar((2, A))


def rollout():
    """Two turns, the second of which shows a second image."""
    trajectory = Trajectory("t")
    trajectory.append(PROMPT, [20, 21], logprobs=[-1, -2], multi_modal_data=SHOWS_A)
    shows_both = sidecar((2, A), (12, B))
    trajectory.append([*PROMPT, 20, 21, 4, *PAD], [22], logprobs=[-3], multi_modal_data=shows_both)
    return trajectory


def parents(trajectory):
    return [(step.parent.index if step.parent else None, step.keep) for step in trajectory.steps]


def test_a_next_turn_stores_what_it_adds():
    first, second = rollout().steps
    assert (second.parent, second.previous, second.keep) == (first, first, 11)
    assert second.prompt_delta.tolist() == [4, *PAD]
    assert second.completion_ids.tolist() == [22]
    assert second.new_items == (B,)
    assert second.prompt_ids.tolist() == [*PROMPT, 20, 21, 4, *PAD]
    assert second.multi_modal_data.mm_items["image"] == [A, B]
    assert not second.token_ids.flags.writeable


def test_siblings_start_at_the_end_of_their_prompt():
    trajectory = rollout()
    for token in (30, 31):
        trajectory.append(PROMPT, [token], logprobs=[-1], multi_modal_data=SHOWS_A)
    assert parents(trajectory) == [(None, 0), (0, 11), (0, 9), (0, 9)]
    assert trajectory.steps[3].previous is None
    assert [[step.index for step in branch.steps] for branch in trajectory.branches()] == [[0, 1], [2], [3]]
    assert trajectory.children(trajectory.steps[0]) == list(trajectory.steps[1:])


def test_a_compacted_conversation_starts_where_the_tokens_part():
    trajectory = rollout()
    step = trajectory.append([1, 2, *PAD, 7, 7], [23], logprobs=[-1], multi_modal_data=SHOWS_A)
    assert (step.parent.index, step.keep, step.new_items) == (0, 8, ())
    dropped = trajectory.append([1, 7], [24], logprobs=[-1])
    assert (dropped.parent.index, dropped.keep, dropped.multi_modal_data) == (0, 1, MultiModalData())


def test_another_image_of_the_same_size_starts_a_branch_at_the_image():
    trajectory = rollout()
    step = trajectory.append(PROMPT, [24], logprobs=[-1], multi_modal_data=sidecar((2, B)))
    assert (step.parent.index, step.keep, step.new_items) == (0, 2, ())
    assert step.multi_modal_data.mm_items["image"] == [B]


def test_a_larger_image_starts_a_branch_at_the_image():
    trajectory = rollout()
    larger = MultiModalData.of([(PlaceholderRange(2, 8), patch_item(64, 128, seed=3))])
    step = trajectory.append([1, 2, *PAD, 9, 9, 3], [24], logprobs=[-1], multi_modal_data=larger)
    assert (step.parent.index, step.keep) == (0, 2)


def test_a_prompt_that_cuts_into_a_completion_keeps_its_beginning():
    """Sampling that was aborted and taken up again from its first token."""
    trajectory = rollout()
    step = trajectory.append([*PROMPT, 20], [25], logprobs=[-5], multi_modal_data=SHOWS_A)
    assert (step.parent.index, step.keep, step.previous) == (0, 10, None)
    sample = trajectory.branches()[1].sample()
    assert sample.token_ids.tolist() == [*PROMPT, 20, 25]
    assert sample.loss_mask.tolist() == [False] * 9 + [True, True]
    assert sample.logprobs[9:].tolist() == [-1, -5]
    assert trajectory.samples()[1].loss_mask.tolist() == [False] * 10 + [True]


def test_what_is_trained_on_elsewhere_carries_no_logprobs():
    trajectory = rollout()
    trajectory.append([*PROMPT, 20, 21, 5], [25, 26], logprobs=[-5, -6], multi_modal_data=SHOWS_A)
    first, second = trajectory.samples()
    assert first.logprobs[first.loss_mask].tolist() == [-1, -2, -3]
    assert second.loss_mask.nonzero()[0].tolist() == [12, 13]
    assert second.logprobs.tolist() == [0.0] * 12 + [-5, -6]
    alone = step_sample(trajectory.steps[2])
    assert alone.logprobs.tolist() == second.logprobs.tolist()
    whole = trajectory.samples(once=False)[1]
    assert whole.logprobs.tolist() == [0.0] * 9 + [-1, -2, 0, -5, -6]
    for sample in (first, second, alone, whole):
        assert inspect_sample(sample) == []


def test_the_parent_may_be_named():
    trajectory = rollout()
    last = trajectory.steps[1]
    step = trajectory.append([1, 5], [24], parent=last, logprobs=[-1])
    assert (step.parent, step.keep, step.previous) == (last, 1, None)


def test_nothing_in_common_is_a_root():
    trajectory = rollout()
    step = trajectory.append([5, 6], [7], logprobs=[-1])
    assert (step.parent, step.keep) == (None, 0)


def test_find_says_where_a_prompt_would_start():
    trajectory = rollout()
    assert trajectory.find([*PROMPT, 20, 21, 5], SHOWS_A) == (trajectory.steps[0], 11)
    assert trajectory.find([*PROMPT, 20, 5], SHOWS_A) == (trajectory.steps[0], 10)
    assert trajectory.find([4]) == (None, 0)
    assert len(trajectory) == 2


def test_equal_items_are_kept_once():
    trajectory = Trajectory()
    trajectory.append(PROMPT, [1], multi_modal_data=SHOWS_A)
    again = patch_item(seed=1)
    step = trajectory.append([*PROMPT, 1, *PAD], [2], multi_modal_data=sidecar((2, again), (10, again)))
    assert all(item is A for item in step.multi_modal_data.mm_items["image"])
    assert trajectory.items == (A,)
    assert trajectory.nbytes == A.nbytes + 4 * (10 + 7)


def test_messages_are_stored_once_and_compared_with_what_they_hold():
    pixels = np.zeros((2, 2, 3), np.uint8)
    question = Message(role="user", content=(ImagePart(pixels), TextPart("?")))
    same = Message(role="user", content=(ImagePart(pixels.copy()), TextPart("?")))
    other = Message(role="user", content=(ImagePart(pixels + 1), TextPart("?")))
    answer = {"role": "assistant", "content": "!"}
    trajectory = Trajectory()
    trajectory.append([1], [2], messages=[question, answer])
    step = trajectory.append([1, 2, 3], [4], messages=[same, answer, {"role": "user", "content": "more"}])
    assert (step.messages_keep, len(step.new_messages)) == (2, 1)
    assert step.messages == [question, answer, {"role": "user", "content": "more"}]
    changed = trajectory.append([1, 2, 5], [4], messages=[other])
    assert (changed.messages_keep, changed.messages) == (0, [other])
    image = Image.new("RGB", (2, 2))
    assert trajectory.append([8], [9], messages=[{"image": image}]).messages[0]["image"] is image


def test_samples_hold_rewards_and_versions():
    trajectory = rollout()
    first, second = trajectory.steps
    first.reward, second.reward = [0.5, 0.25], 2
    third = trajectory.append(
        second.token_ids.tolist() + [5],
        [6, 7],
        logprobs=[-1, -1],
        multi_modal_data=second.multi_modal_data,
        weight_versions=[WeightVersionSpan("a", 0, 1), WeightVersionSpan("b", 1, 2)],
    )
    (sample,) = trajectory.samples()
    assert sample.rewards.nonzero()[0].tolist() == [9, 10, 18]
    assert sample.rewards[[9, 10, 18]].tolist() == [0.5, 0.25, 2.0]
    assert sample.weight_versions == (("a", 20, 21), ("b", 21, 22))
    assert sample.sample_id == "t/0"
    assert sample.extra == {"steps": (0, 1, 2)}
    alone = step_sample(third, "t")
    assert (alone.loss_mask.nonzero()[0].tolist(), alone.sample_id) == ([20, 21], "t/step-2")


def test_the_reward_of_a_step_that_sampled_nothing_stands_on_what_was_sampled_before():
    trajectory = rollout()
    second = trajectory.steps[1]
    third = trajectory.append(
        [*second.token_ids.tolist(), 5], [], logprobs=[], multi_modal_data=second.multi_modal_data, reward=2
    )
    second.reward = 0.5
    (sample,) = trajectory.samples()
    assert sample.rewards.nonzero()[0].tolist() == [18]
    assert sample.rewards[18] == 2.5
    assert step_sample(third).rewards.tolist() == sample.rewards.tolist()


def test_where_nothing_was_sampled_a_reward_stands_at_the_end_of_the_prompt():
    trajectory = Trajectory()
    trajectory.append([1, 2], [], logprobs=[], reward=-1)
    trajectory.append([1, 2, 3], [4], logprobs=[-1], reward=1)
    (sample,) = trajectory.samples()
    assert sample.rewards.tolist() == [0, -1, 0, 1]


def test_a_step_cut_in_its_completion_keeps_the_rewards_of_the_tokens_it_keeps():
    trajectory = rollout()
    trajectory.append([*PROMPT, 20], [25], logprobs=[-5], multi_modal_data=SHOWS_A, reward=1)
    first = trajectory.steps[0]
    for reward, kept in ((7, 0), ([0.5, 0.25], 0.5)):
        first.reward = reward
        assert trajectory.branches()[1].sample().rewards[9:].tolist() == [kept, 1]
        assert trajectory.branches()[0].sample().rewards.sum() == np.sum(reward)


def test_logprobs_are_required_unless_waived():
    trajectory = Trajectory("t")
    trajectory.append([1], [2, 3])
    with pytest.raises(TrajectoryError) as error:
        trajectory.samples()
    assert str(error.value) == (
        "steps[0].logprobs: sampled tokens have no log probabilities - expected 2 numbers, got None. "
        "Ask the engine for them, or pass require_logprobs=False for 0.0 in their place"
    )
    assert trajectory.samples(require_logprobs=False)[0].logprobs.tolist() == [0, 0, 0]


def test_routed_experts_are_stored_once_and_put_together():
    trajectory = Trajectory()
    rows = np.arange(12 * 2, dtype=np.uint16).reshape(12, 1, 2)
    trajectory.append([1, 2, 3], [4, 5], routed_experts=RoutedExperts(rows[:4]))
    step = trajectory.append([1, 2, 3, 4, 5, 6, 7], [8], routed_experts=RoutedExperts(rows[:7]))
    assert (step.own_experts.start, step.own_experts.stop) == (4, 7)
    assert step.routed_experts == RoutedExperts(rows[:7])
    late = trajectory.append([1, 2, 3, 4, 5, 6, 7, 8], [9], routed_experts=RoutedExperts(rows[7:8], 7))
    assert late.routed_experts == RoutedExperts(rows[:8])
    gap = trajectory.append(
        [*late.token_ids.tolist(), 1, 1], [9], routed_experts=RoutedExperts(rows[10:11], 10)
    )
    assert gap.routed_experts == RoutedExperts(rows[10:11], 10)


def test_long_trajectories_can_be_pickled_copied_and_printed():
    trajectory = rollout()
    step = trajectory.steps[1]
    for _ in range(600):
        ids = step.token_ids.tolist()[:20]
        step = trajectory.append(ids, [5], parent=step, multi_modal_data=sidecar((2, A), (12, B)))
    for same in (pickle.loads(pickle.dumps(trajectory)), copy.deepcopy(trajectory)):
        assert_same_tree(trajectory, same)
        assert same.append(PROMPT, [7], multi_modal_data=SHOWS_A).parent is same.steps[0]
    assert repr(step) == "Step(601: 20 tokens of step 600; 0 of the prompt, 1 sampled, 0 media)"
    assert repr(trajectory.steps[0]) == "Step(0: a root; 9 of the prompt, 2 sampled, 1 media)"
    assert repr(trajectory) == "Trajectory('t', 602 steps, 2 media items)"


def assert_same_tree(first, second):
    assert parents(first) == parents(second)
    for old, new in zip(first.steps, second.steps, strict=True):
        assert old.own_ids.tolist() == new.own_ids.tolist()
        assert old.new_items == new.new_items
    assert first.items == second.items
    assert [item.frames.tobytes() for item in first.items] == [item.frames.tobytes() for item in second.items]


def call(trajectory, prompt=(1,), completion=(2,), **fields):
    return trajectory.append(prompt, completion, **fields)


def experts(*shape, start=0, dtype=np.uint8):
    return RoutedExperts(np.zeros(shape, dtype), start)


AFTER = [*PROMPT, 20, 21]
NEXT = "steps[2]"
BAD = {
    "float id": (lambda t: call(t, [1.5]), f"{NEXT}.prompt_ids: token ids must be a flat list, tuple or numpy array of integers of 32 bits - got a list with 1.5"),
    "negative id": (lambda t: call(t, [1, -2]), f"{NEXT}.prompt_ids[1]: a token id is negative - got -2"),
    "completion": (lambda t: call(t, [1], [[2]]), f"{NEXT}.completion_ids: token ids must be a flat list, tuple or numpy array of integers of 32 bits - got a list with [2]"),
    "few logprobs": (lambda t: call(t, [1], [2, 3], logprobs=[-1.0]), f"{NEXT}.logprobs: there is not one log probability for each sampled token - expected numbers [2], got [1]"),
    "text logprobs": (lambda t: call(t, [1], [2], logprobs="x"), f"{NEXT}.logprobs: there is not one log probability for each sampled token - expected numbers [1], got str"),
    "nan": (lambda t: call(t, [1], [2, 3], logprobs=[-1.0, float("nan")]), f"{NEXT}.logprobs[1]: a log probability is not finite - got nan"),
    "none logprob": (lambda t: call(t, [1], [2, 3], logprobs=[None, -1.0]), f"{NEXT}.logprobs[0]: a log probability is not finite - got nan"),
    "mapping": (lambda t: call(t, multi_modal_data={}), f"{NEXT}.multi_modal_data: this is no sidecar - expected MultiModalData, got dict"),
    "lists": (lambda t: call(t, PROMPT, multi_modal_data=MultiModalData({"image": [A.identity]}, {}, {})), f"{NEXT}.multi_modal_data.image: hashes, placeholders and items of a sidecar must be equally many - got 1 hashes, 0 placeholders, 0 items"),
    "hash": (lambda t: call(t, PROMPT, multi_modal_data=MultiModalData({"image": ["x"]}, SHOWS_A.mm_placeholders, SHOWS_A.mm_items)), f"{NEXT}.multi_modal_data.image[0]: a hash does not belong to its item - expected '{A.identity}', got 'x'"),
    "outside": (lambda t: call(t, PROMPT[:-3], multi_modal_data=SHOWS_A), f"{NEXT}.multi_modal_data.image at token 2: a media range does not lie inside the prompt - expected tokens within [0, 6), got [2, 8). Trim the sidecar together with the tokens"),
    "overlap": (lambda t: call(t, [1, *PAD, *PAD], multi_modal_data=sidecar((1, A), (6, B))), f"{NEXT}.multi_modal_data.image at token 6: two media ranges overlap - expected 7 or more, got 6"),
    "lost image": (lambda t: call(t, [*AFTER, 5]), f"{NEXT}.multi_modal_data: the sidecar lacks a medium that steps[0] shows at the same tokens - expected image {A.identity[:12]} at tokens [2, 8), got no range there. Carry the sidecar of earlier turns along with their tokens"),
    "shifted": (lambda t: call(t, [*AFTER, 5, 6, 7], multi_modal_data=sidecar((2, A), (8, B))), f"{NEXT}.multi_modal_data: a media range covers sampled tokens - expected no range within tokens [9, 11), which steps[0] sampled, got image at tokens [8, 14). Shift the ranges of new media by the length of prompt and completion"),
    "no step": (lambda t: call(t, parent=3), f"{NEXT}.parent: the parent is no step of this trajectory - expected one of 2 steps, got 3"),
    "experts": (lambda t: call(t, routed_experts=[1]), f"{NEXT}.routed_experts: these are no routed experts - expected RoutedExperts, got list"),
    "rows": (lambda t: call(t, [1, 2], [3, 4], routed_experts=experts(2, 1, 1)), f"{NEXT}.routed_experts: the rows of routed experts do not fit the tokens - expected rows to position 3 or 4, got positions [0, 2)"),
    "version": (lambda t: call(t, weight_versions=[("a", 0, 2)]), f"{NEXT}.weight_versions[0]: a span of a weight version is malformed - expected version, start and stop within sampled tokens [0, 1), got ('a', 0, 2)"),
    "version order": (lambda t: call(t, [1], [2, 3], weight_versions=[("a", 0, 2), ("b", 1, 2)]), f"{NEXT}.weight_versions[1]: a span of a weight version is malformed - expected version, start and stop within sampled tokens [2, 2), got ('b', 1, 2)"),
    "reward": (lambda t: call(t, reward=[1.0, 2.0]), f"{NEXT}.reward: a reward is malformed - expected a finite number, or 1 of them, one for each sampled token, got [1.0, 2.0]"),
    "infinite reward": (lambda t: call(t, reward=float("inf")), f"{NEXT}.reward: a reward is malformed - expected a finite number, or 1 of them, one for each sampled token, got inf"),
    "extra": (lambda t: call(t, extra={1: 2}), f"{NEXT}.extra: extra is no mapping with text keys - got {{1: 2}}"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_and_changes_nothing(case):
    trajectory = rollout()
    action, message = BAD[case]
    with pytest.raises(TrajectoryError) as error:
        action(trajectory)
    assert str(error.value) == message
    assert len(trajectory) == 2
    assert trajectory.items == (A, B)


def test_an_image_that_only_the_later_prompt_has_is_refused():
    trajectory = Trajectory()
    trajectory.append(PROMPT, [4])
    with pytest.raises(TrajectoryError) as error:
        trajectory.append([*PROMPT, 4, 5], [6], multi_modal_data=SHOWS_A)
    assert str(error.value) == (
        "steps[1].multi_modal_data: the sidecar has a medium that steps[0] lacks at the same tokens - expected "
        f"no range there, got image {A.identity[:12]} at tokens [2, 8). "
        "Append every step with the sidecar of its whole prompt"
    )


def test_routed_experts_keep_their_form():
    trajectory = Trajectory()
    trajectory.append([1, 2], [3], routed_experts=experts(2, 4, 8))
    with pytest.raises(TrajectoryError) as error:
        trajectory.append([1, 2, 3], [4], routed_experts=experts(3, 4, 8, dtype=np.uint16))
    assert str(error.value) == (
        "steps[1].routed_experts: routed experts have another form than in earlier steps - expected uint8 "
        "[rows, 4, 8], got uint16 [rows, 4, 8]"
    )


def test_a_step_of_another_trajectory_is_no_parent():
    trajectory = rollout()
    with pytest.raises(TrajectoryError, match="the parent is no step of this trajectory"):
        trajectory.append([1], [2], parent=rollout().steps[0])


def test_tokens_as_verifiers_reads_them():
    trajectory = rollout()
    second = trajectory.steps[1]
    second.finish_reason = "length"
    tokens = trajectory_step_tokens(second)
    assert tokens == {
        "prompt_ids": [*AFTER, 4, *PAD],
        "prompt_mask": [0] * 18,
        "completion_ids": [22],
        "completion_mask": [1],
        "completion_logprobs": [-3.0],
        "overlong_prompt": False,
        "is_truncated": True,
        "routed_experts": None,
        "multi_modal_data": second.multi_modal_data,
    }
    assert set(tokens) - set(response_tokens(second)) == {"overlong_prompt", "is_truncated"}
    step = {"tokens": None, "response": {"message": {"tokens": response_tokens(second)}}}
    assert step_multi_modal_data(step) == second.multi_modal_data


def test_items_may_be_given_as_tensors():
    """Libraries of the verifiers kind hold a dict of tensors for each image."""
    made = []

    def tensors(item):
        made.append(item)
        return item.tensors("bfloat16")

    trajectory = rollout()
    twice = trajectory.append(
        [*AFTER, 4, *PAD, 22, *PAD],
        [5],
        logprobs=[-1],
        multi_modal_data=sidecar((2, A), (12, B), (19, A)),
    )
    tokens = response_tokens(twice, as_item=tensors)
    items = tokens["multi_modal_data"].mm_items["image"]
    assert [sorted(item) for item in items] == [["image_grid_thw", "pixel_values"]] * 3
    assert items[0] is items[2]
    assert made == [A, B]
    assert tokens["multi_modal_data"].mm_hashes["image"] == [A.identity, B.identity, A.identity]
    cut = trajectory_step_tokens(twice, 15, as_item=tensors)
    assert [item["pixel_values"].dtype for item in cut["multi_modal_data"].mm_items["image"]] == [np.uint16]
    assert made == [A, B, A]  # what was cut off is not expanded
    plain = trajectory_step_tokens(Trajectory().append([1], [2]), as_item=tensors)
    assert plain["multi_modal_data"] is None


def test_tokens_are_cut_at_whole_images_with_their_sidecar():
    second = rollout().steps[1]
    tokens = trajectory_step_tokens(second, 15)
    assert tokens["prompt_ids"] == [*AFTER, 4]
    assert tokens["multi_modal_data"] == SHOWS_A
    assert (tokens["overlong_prompt"], tokens["is_truncated"]) == (True, True)
    assert tokens["completion_ids"] == tokens["completion_mask"] == tokens["completion_logprobs"] == []
    exact = trajectory_step_tokens(second, 18)
    assert (exact["overlong_prompt"], exact["is_truncated"], exact["completion_ids"]) == (False, True, [])


def test_routed_experts_are_cut_with_the_tokens():
    trajectory = Trajectory()
    step = trajectory.append([1, 2, 3], [4, 5], logprobs=[-1, -1], routed_experts=experts(4, 1, 2))
    assert trajectory_step_tokens(step, 4)["routed_experts"] == experts(4, 1, 2)
    assert trajectory_step_tokens(step, 2)["routed_experts"] == experts(2, 1, 2)


def test_token_views_can_be_packed_as_steps():
    steps = [
        {"tokens": trajectory_step_tokens(step), "parent": None if step.parent is None else step.parent.index}
        for step in rollout().steps
    ]
    packed = pack_sidecars(steps)
    assert [row["hash"] for row in packed["items"]] == [A.identity, B.identity]
    assert unpack_sidecars(packed) == steps
