"""Laws of training samples, over the language of generated conversations and real templates.

The reference is the slow path: a turn's prompt is rendered by itself, and what the whole has beyond it,
through the first stop token after what the message says, is what a model samples.
"""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import small_models
from mmrender import Renderer
from mmrender.errors import InputError, PlaceholderError, TemplateError
from mmrender.spans import common_prefix
from mmrender.testing.conversations import ConversationMaker, sample_images
from mmrender.training import ModelFamily, build_training_sample, collate
from mmrender.trajectory.sample import TrainingSample

MODELS = ("qwen3_vl", "qwen3_vl_thinking", "qwen3_5", "qwen2_5_vl", "glm4_5v")
PICTURES = sample_images(random.Random(7), 3, largest=120)


@cache
def renderer_of(path: Path) -> Renderer:
    return Renderer.from_pretrained(path, image_backend="pil")


@pytest.fixture(scope="module", params=MODELS)
def renderer(request: pytest.FixtureRequest, shared_models: Path) -> Renderer:
    return renderer_of(shared_models / request.param)


def drawn(renderer: Renderer, seed: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A conversation that the template takes, without a generation prompt."""
    maker = ConversationMaker(renderer.profile, PICTURES, ("<|im_end|>", "</think>"), max_turns=3)
    messages, options = maker.make(random.Random(seed))
    options.pop("add_generation_prompt")
    try:
        renderer.render(messages, **options)
    except (TemplateError, PlaceholderError):
        assume(False)
    return messages, options


def owners(sample: TrainingSample) -> np.ndarray[Any, Any]:
    return sample.rendered.message_indices


@settings(max_examples=14)
@given(seed=st.integers(0, 1 << 32))
def test_the_mask_is_the_whole_less_the_prompt(renderer: Renderer, seed: int) -> None:
    messages, options = drawn(renderer, seed)
    sample = build_training_sample(renderer, messages, on_rewritten="skip", **options)
    stop_ids = set(renderer.get_stop_token_ids())
    expected = np.zeros(len(sample), np.bool_)
    judged = np.ones(len(sample), np.bool_)
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index in sample.rewritten:
            continue
        prompt = renderer.render_ids(messages[:index], add_generation_prompt=True, **options)
        if sample.token_ids[: len(prompt)].tolist() != prompt:
            # The template changes what came before this turn, so its place is not known by this way.
            judged[owners(sample) == index] = False
            continue
        stop = len(prompt)
        while stop < len(sample) and sample.token_ids[stop] not in stop_ids:
            stop += 1
        expected[len(prompt) : stop + 1] = True
    expected &= sample.mm_token_type_ids == 0
    np.testing.assert_array_equal(sample.loss_mask[judged], expected[judged])


@settings(max_examples=9)
@given(seed=st.integers(0, 1 << 32), data=st.data())
def test_selection_narrows_by_owner(renderer: Renderer, seed: int, data: st.DataObject) -> None:
    messages, options = drawn(renderer, seed)
    options |= {"on_rewritten": "content", "train_on": ("tool", "user", "assistant")}
    whole = build_training_sample(renderer, messages, **options)
    chosen = data.draw(st.sets(st.integers(0, len(messages) - 1)))
    part = build_training_sample(renderer, messages, select=chosen, **options)
    np.testing.assert_array_equal(part.token_ids, whole.token_ids)
    rest = build_training_sample(renderer, messages, select=set(range(len(messages))) - chosen, **options)
    np.testing.assert_array_equal(part.loss_mask | rest.loss_mask, whole.loss_mask)
    assert not (part.loss_mask & rest.loss_mask).any()
    assert not whole.loss_mask[whole.mm_token_type_ids != 0].any()


@settings(max_examples=9)
@given(seed=st.integers(0, 1 << 32))
def test_bodies_hold_what_was_said_and_nothing_else(renderer: Renderer, seed: int) -> None:
    messages, options = drawn(renderer, seed)
    options |= {"train_on": ("tool", "user"), "on_rewritten": "skip"}
    sample = build_training_sample(renderer, messages, final_stop=False, **options)
    roles = {messages[index]["role"] for index in owners(sample)[sample.loss_mask].tolist()}
    assert roles <= {"tool", "user"}
    assert not sample.loss_mask[~sample.rendered.is_content].any()


@settings(max_examples=9)
@given(seed=st.integers(0, 1 << 32))
def test_a_step_joins_to_the_sample(renderer: Renderer, seed: int) -> None:
    messages, options = drawn(renderer, seed)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    for first in turns[-2:]:
        prompt = renderer.render_ids(messages[:first], add_generation_prompt=True, **options)
        step = build_training_sample(
            renderer, messages, completion_start=first, on_rewritten="skip", **options
        )
        assert step.prompt_length == common_prefix(prompt, step.token_ids)
        sample = build_training_sample(
            renderer, messages, select=range(first, len(messages)), on_rewritten="skip", **options
        )
        np.testing.assert_array_equal(step.token_ids, sample.token_ids)
        np.testing.assert_array_equal(step.loss_mask, sample.loss_mask)
        assert step.rewritten == sample.rewritten
        assert not step.loss_mask[: step.prompt_length].any()


SMALL = sorted(small_models.MODELS)
NAMED: dict[Any, Callable[[list[str]], list[int]]] = {
    "all_assistant_messages": lambda roles: [i for i, role in enumerate(roles) if role == "assistant"],
    "last_assistant_message": lambda roles: [len(roles) - 1 - roles[::-1].index("assistant")],
    "last_turn": lambda roles: [
        i for i, role in enumerate(roles) if role == "assistant" and "user" not in roles[i:]
    ],
    "all_messages": lambda roles: list(range(len(roles))),
    ("assistant", "tool"): lambda roles: [i for i, role in enumerate(roles) if role in ("assistant", "tool")],
    ("user",): lambda roles: [i for i, role in enumerate(roles) if role == "user"],
}


@settings(max_examples=60)
@given(name=st.sampled_from(SMALL), seed=st.integers(0, 1 << 32), train_on=st.sampled_from(list(NAMED)))
def test_each_choice_is_the_sum_of_its_messages(name: str, seed: int, train_on: Any) -> None:
    """A message gives the same tokens whichever way it is chosen, and is told of where it gives none."""
    messages, sampled = small_sample(name, seed)
    roles = [message["role"] for message in messages]
    expected = NAMED[train_on](roles)
    if not expected:
        with pytest.raises(InputError, match="no message of this conversation is one to train on"):
            sampled(train_on=train_on)
        return
    whole = sampled(train_on=train_on)
    parts = []
    for index in expected:
        is_first = iter([i == index for i in range(len(messages))])
        part = sampled(train_on=lambda _, is_first=is_first: next(is_first))
        np.testing.assert_array_equal(part.token_ids, whole.token_ids)
        parts.append(part.loss_mask)
        assert part.loss_mask.any() or index in whole.rewritten or roles[index] != "assistant"
    np.testing.assert_array_equal(np.sum(parts, axis=0), whole.loss_mask)


WEIGHTS = st.sampled_from([0, 0.25, 1, 3.5])


@settings(max_examples=40)
@given(name=st.sampled_from(SMALL), seed=st.integers(0, 1 << 32), data=st.data())
def test_weights_reach_the_batch_and_change_no_token(name: str, seed: int, data: st.DataObject) -> None:
    messages, sampled = small_sample(name, seed)
    plain = sampled(train_on="all_messages")
    members = data.draw(st.dictionaries(st.integers(0, len(messages) - 1), WEIGHTS))
    given = data.draw(st.dictionaries(st.integers(-len(messages), -1), WEIGHTS))
    for index, weight in members.items():
        messages[index]["weight"] = weight
    sample = sampled(train_on="all_messages", weights=given)
    after = {index % len(messages): weight for index, weight in given.items()}
    each = np.array([(members | after).get(index, 1.0) for index in range(len(messages))], np.float32)
    expected = np.where(plain.loss_mask, each[owners(plain)], np.float32(0))
    np.testing.assert_array_equal(sample.token_ids, plain.token_ids)
    np.testing.assert_array_equal(sample.loss_weights, expected)
    np.testing.assert_array_equal(sample.loss_mask, expected > 0)
    assume(not (plain.loss_mask[0] or sample.multi_modal_data))
    batch = collate([sample, plain], ModelFamily("small"), pad_token_id=0)
    np.testing.assert_array_equal(batch.loss_weights[0].numpy(), expected)
    np.testing.assert_array_equal(batch.loss_weights[1].numpy(), plain.loss_mask)


def small_sample(name: str, seed: int) -> tuple[list[dict[str, Any]], Callable[..., TrainingSample]]:
    """A conversation that a small template takes, with an assistant's turn, and how to make a sample of it."""
    renderer = small_models.MODELS[name].renderer()
    maker = ConversationMaker(
        renderer.profile, (), max_turns=3, tools=not small_models.MODELS[name].spec.alternating
    )
    messages, options = maker.make(random.Random(seed))
    options.pop("add_generation_prompt")
    options |= {"on_rewritten": "skip", "final_stop": False}

    def sampled(**more: Any) -> TrainingSample:
        return build_training_sample(renderer, messages, **options, **more)

    try:
        sampled()
    except (TemplateError, PlaceholderError):
        assume(False)
    return messages, sampled
