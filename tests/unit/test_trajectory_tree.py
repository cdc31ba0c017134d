"""Trees of steps: where steps start, what they share, what is refused, and what consumers read."""

import copy
import pickle
import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from item_cases import patch_item
from kit import assistant, error_of, user
from mmrender import Trajectory
from mmrender.errors import MMRenderError, TrajectoryError
from mmrender.messages import ImagePart, Message, TextPart
from mmrender.sidecar import MultiModalData, PlaceholderRange
from mmrender.trajectory import AllowedTokens, RoutedExperts, WeightVersionSpan
from mmrender.trajectory.step import step_sample
from tree_cases import A, B, assert_same, sidecar

PAD = [9] * 6
PROMPT = [1, 2, *PAD, 3]
SHOWS_A = sidecar((2, A))


def rollout():
    """Two turns, the second of which shows a second image."""
    trajectory = Trajectory("t")
    trajectory.append(PROMPT, [20, 21], logprobs=[-1, -2], multi_modal_data=SHOWS_A)
    shows_both = sidecar((2, A), (12, B))
    trajectory.append([*PROMPT, 20, 21, 4, *PAD], [22], logprobs=[-3], multi_modal_data=shows_both)
    return trajectory


def test_a_thousand_turns_cost_what_they_add():
    """Growth from 250 to 1,000 turns: what is stored and looked at again must not grow with the square."""

    def seconds(turns):
        trajectory, prompt, entries, messages = Trajectory(), [1, 2], [], []
        started = time.process_time()
        for turn in range(turns):
            if turn % 4 == 0:
                entries.append((PlaceholderRange(len(prompt), 6), (A, B)[turn % 8 == 0]))
                prompt = [*prompt, *PAD]
            messages = [*messages, {"role": "user", "content": str(turn)}, assistant("!")]
            step = trajectory.append(
                prompt,
                [20] * 30,
                logprobs=[-1.0] * 30,
                multi_modal_data=MultiModalData.of(entries),
                messages=messages,
                routed_experts=RoutedExperts(
                    np.zeros((1 if turn else len(prompt) + 29, 1, 2), np.uint8),
                    len(prompt) + 28 if turn else 0,
                ),
            )
            prompt = [*prompt, *step.completion_ids.tolist(), *range(100, 130)]
        assert len(trajectory.branches()) == 1
        assert sum(len(step.own_ids) for step in trajectory.steps) == len(step)
        assert sum(len(step.new_messages) for step in trajectory.steps) == len(messages)
        return time.process_time() - started

    assert seconds(1000) < 8 * seconds(250) + 0.5


def test_a_rollout_that_was_read_out_keeps_its_distinct_bytes():
    """Besides 2 KiB a step: 4 bytes a token and its log probability, and the growing sequence, 8 at most."""
    turns, sampled = 40, 2_000
    tracemalloc.start()
    trajectory, prompt = Trajectory(), list(range(1_000, 1_500))
    for turn in range(turns):
        completion = list(range(turn * sampled + 1_000, (turn + 1) * sampled + 1_000))
        trajectory.append(prompt, completion, logprobs=[-0.5] * sampled)
        prompt = [*prompt, *completion]
    del prompt, completion
    trajectory.samples()
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept < 16 * len(trajectory.steps[-1]) + 2_048 * turns


def test_a_prompt_may_be_a_list_an_array_or_a_tuple():
    for form in (list, tuple, lambda ids: np.array(ids, np.int64), lambda ids: np.array(ids, np.int32)):
        trajectory = rollout()
        third = trajectory.append(
            form([*trajectory.steps[1].token_ids.tolist(), 5]),
            form([6]),
            multi_modal_data=trajectory.steps[1].multi_modal_data,
        )
        assert (third.parent.index, third.keep, third.own_ids.tolist()) == (1, 19, [5, 6])


def test_equal_items_and_messages_are_kept_once():
    trajectory = Trajectory()
    trajectory.append(PROMPT, [1], multi_modal_data=SHOWS_A)
    again = patch_item(seed=1)
    step = trajectory.append([*PROMPT, 1, *PAD], [2], multi_modal_data=sidecar((2, again), (10, again)))
    assert all(item is A for item in step.multi_modal_data.mm_items["image"])
    assert (trajectory.items, trajectory.nbytes) == ((A,), A.nbytes + 4 * (10 + 7))
    pixels = np.zeros((2, 2, 3), np.uint8)
    question = Message(role="user", content=(ImagePart(pixels), TextPart("?")))
    same = Message(role="user", content=(ImagePart(pixels.copy()), TextPart("?")))
    other = Message(role="user", content=(ImagePart(pixels + 1), TextPart("?")))
    answer = assistant("!")
    trajectory = Trajectory()
    trajectory.append([1], [2], messages=[question, answer])
    step = trajectory.append([1, 2, 3], [4], messages=[same, answer, user("more")])
    assert (step.messages_keep, len(step.new_messages)) == (2, 1)
    assert step.messages == [question, answer, user("more")]
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
    assert (sample.weight_versions, sample.sample_id) == ((("a", 20, 21), ("b", 21, 22)), "t/0")
    trajectory.extra["group"] = 3
    (sample,) = trajectory.samples()
    assert sample.extra == {"group": 3, "trajectory_id": "t", "steps": (0, 1, 2)}
    alone = step_sample(third, "t")
    assert (alone.loss_mask.nonzero()[0].tolist(), alone.sample_id) == ([20, 21], "t/step-2")


def test_rewards_of_steps_that_sampled_nothing_or_are_held_in_part():
    trajectory = rollout()
    first, second = trajectory.steps
    ids, shown = [*second.token_ids.tolist(), 5], second.multi_modal_data
    third = trajectory.append(ids, [], logprobs=[], multi_modal_data=shown, reward=2)
    second.reward = 0.5
    (sample,) = trajectory.samples()
    assert {place: sample.rewards[place] for place in sample.rewards.nonzero()[0]} == {18: 2.5}
    assert step_sample(third).rewards.tolist() == sample.rewards.tolist()
    trajectory.append([*PROMPT, 20], [25], logprobs=[-5], multi_modal_data=SHOWS_A, reward=1)
    for reward, kept in ((7, 0), ([0.5, 0.25], 0.5)):
        first.reward = reward
        assert trajectory.branches()[1].sample().rewards[9:].tolist() == [kept, 1]
        assert trajectory.branches()[0].sample().rewards.sum() == np.sum(reward) + 2.5
    unsampled = Trajectory()
    unsampled.append([1, 2], [], logprobs=[], reward=-1)
    unsampled.append([1, 2, 3], [4], logprobs=[-1], reward=1)
    assert unsampled.samples()[0].rewards.tolist() == [0, -1, 0, 1]


def test_logprobs_are_required_unless_waived(sentence):
    trajectory = Trajectory("t")
    trajectory.append([1], [2, 3])
    assert error_of(TrajectoryError, trajectory.samples) == sentence
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
    for _ in range(400):
        ids = step.token_ids.tolist()[:20]
        shown = sidecar((2, A), (12, B))
        step = trajectory.append(ids, [5], logprobs=[-1], parent=step, multi_modal_data=shown)
    for same in (pickle.loads(pickle.dumps(trajectory)), copy.deepcopy(trajectory)):
        assert_same(trajectory, same)
        assert same.append(PROMPT, [7], multi_modal_data=SHOWS_A).parent is same.steps[0]
    assert repr(step) == "Step(401: 20 tokens of step 400; 0 of the prompt, 1 sampled, 0 media)"
    assert repr(trajectory.steps[0]) == "Step(0: a root; 9 of the prompt, 2 sampled, 1 media)"
    assert repr(trajectory) == "Trajectory('t', 402 steps, 2 media items)"
    trajectory = rollout()
    buffers = []
    data = pickle.dumps(trajectory, protocol=5, buffer_callback=buffers.append)
    assert sum(len(buffer.raw()) for buffer in buffers) >= A.nbytes + B.nbytes
    assert len(data) < 6000
    assert_same(trajectory, pickle.loads(data, buffers=buffers))


def call(trajectory, prompt=(1,), completion=(2,), **fields):
    return trajectory.append(prompt, completion, **fields)


def experts(*shape, start=0, dtype=np.uint8):
    return RoutedExperts(np.zeros(shape, dtype), start)


AFTER = [*PROMPT, 20, 21]
BAD = {
    "float id": lambda t: call(t, [1.5]),
    "negative id": lambda t: call(t, [1, -2]),
    "few logprobs": lambda t: call(t, [1], [2, 3], logprobs=[-1.0]),
    "nan": lambda t: call(t, [1], [2, 3], logprobs=[-1.0, float("nan")]),
    "mapping": lambda t: call(t, multi_modal_data={}),
    "outside": lambda t: call(t, PROMPT[:-3], multi_modal_data=SHOWS_A),
    "lost image": lambda t: call(t, [*AFTER, 5]),
    "shifted": lambda t: call(t, [*AFTER, 5, 6, 7], multi_modal_data=sidecar((2, A), (8, B))),
    "no step": lambda t: call(t, parent=3),
    "experts": lambda t: call(t, routed_experts=[1]),
    "rows": lambda t: call(t, [1, 2], [3, 4], routed_experts=experts(2, 1, 1)),
    "version": lambda t: call(t, weight_versions=[("a", 0, 2)]),
    "allowed span": lambda t: call(t, allowed=[(0, 2, (5,))]),
    "allowed twice": lambda t: call(t, [1], [7], allowed=[(0, 1, (7, 7))]),
    "allowed negative": lambda t: call(t, [1], [7], allowed=[(0, 1, (-1, 7))]),
    "not allowed": lambda t: call(t, [1], [7], allowed=[(0, 1, (5, 6))]),
    "forbidden": lambda t: call(t, [1], [7], allowed=[(0, 1, (5, 7), True)]),
    "tool": lambda t: call(t, tools=[{"name": ""}]),
    "tool data": lambda t: call(t, tools=[{"name": "f", "x": {1j: 2}}]),
    "reward": lambda t: call(t, reward=[1.0, 2.0]),
    "reward as text": lambda t: call(t, reward="1"),
    "extra": lambda t: call(t, extra={1: 2}),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_and_changes_nothing(case, sentence):
    trajectory = rollout()
    assert error_of(MMRenderError, BAD[case], trajectory) == sentence
    assert len(trajectory) == 2
    assert trajectory.items == (A, B)


def test_a_turn_is_appended_with_everything_that_its_engine_said():
    """The same step as all of its fields give by name, and the grammar that no tokens are known of."""
    fields = {
        "logprobs": [-1.0, -2.0],
        "multi_modal_data": SHOWS_A,
        "finish_reason": "length",
        "routed_experts": RoutedExperts(np.arange(20, dtype=np.uint8).reshape(10, 1, 2)),
        "weight_versions": (WeightVersionSpan("7", 0, 2),),
        "allowed": (AllowedTokens(0, 1, (20, 30)),),
    }
    turn = SimpleNamespace(prompt_ids=PROMPT, completion_ids=[20, 21], restricted=(), **fields)
    rest = {"messages": [user("Which?")], "reward": 1.0}
    whole, named = Trajectory("t"), Trajectory("t")
    whole.append_turn(turn, extra={"note": 1}, **rest)
    named.append(PROMPT, [20, 21], extra={"note": 1}, **fields, **rest)
    assert_same(whole, named)
    assert error_of(TrajectoryError, whole.append, turn) == (
        "steps[1].prompt_ids: a sampled turn is appended whole, with everything that its engine returned - "
        "expected token ids, got SimpleNamespace. Call append_turn(turn)"
    )
    turn.restricted, turn.allowed, turn.sampler = ("json",), (), {"dtype": "bfloat16"}
    step = whole.append_turn(turn, extra={"note": 2})
    assert step.extra == {"restricted": ["json"], "sampler": {"dtype": "bfloat16"}, "note": 2}
    assert step_sample(step).extra["restricted"] == ((9, 11, "json"),)
    assert step_sample(step).extra["sampler"] == {"dtype": "bfloat16"}


def test_samples_that_train_on_some_steps():
    """The tokens of the other steps stay in the sequence, and train nothing, also where branches share them."""
    trajectory = Trajectory()
    first = trajectory.append([1, 2], [3, 4], logprobs=[-1, -1])
    trajectory.append([1, 2, 3, 4, 5], [6], logprobs=[-1], parent=first)
    trajectory.append([1, 2, 3, 4, 7], [8], logprobs=[-1], parent=first)
    samples = trajectory.samples(trains=lambda step: step.index != 1)
    masks = [sample.loss_mask.tolist() for sample in samples]
    assert masks == [
        [False, False, True, True, False, False],
        [False, False, False, False, False, True],
    ]
    assert [sample.loss_mask.sum() for sample in trajectory.samples(trains=lambda step: step.index == 2)] == [
        1
    ]
