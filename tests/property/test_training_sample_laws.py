"""Laws of training samples, over the language of generated conversations and real templates.

The reference is the slow path: a turn's prompt is rendered by itself, and what the whole has beyond it,
through the first stop token after what the message says, is what a model samples.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import small_models
from mmrender import Renderer, build_training_sample
from mmrender.errors import InputError, PlaceholderError, RenderError, TemplateError
from mmrender.sidecar import common_prefix
from mmrender.testing.conversations import ConversationMaker, sample_images
from mmrender.training import ModelFamily, collate
from mmrender.trajectory.sample import TrainingSample

MODELS = ("qwen3_vl", "qwen3_vl_thinking", "qwen3_5", "qwen2_5_vl", "glm4_5v")
PICTURES = sample_images(random.Random(7), 3, largest=120)


@pytest.fixture(scope="module", params=MODELS)
def renderer(request: pytest.FixtureRequest, renderers: Any) -> Renderer:
    return renderers(request.param)


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


def sample_of(renderer: Renderer, messages: list[dict[str, Any]], **options: Any) -> TrainingSample | None:
    """The sample of a conversation; None where no token of it would be trained on, which is an error."""
    try:
        sample = build_training_sample(renderer, messages, **options)
    except RenderError as error:
        if error.problem != "no token of this conversation is trained on":
            raise
        return None
    assert sample.loss_mask.any()
    return sample


def block_ids(renderer: Renderer) -> list[int]:
    """Tokens that open or close reasoning."""
    block = renderer.profile.reasoning
    found = [renderer.tokenizer.token_id(text) for text in (block.begin, block.end)] if block else []
    return [token_id for token_id in found if token_id is not None]


def mask_of(sample: TrainingSample | None, whole: TrainingSample) -> np.ndarray[Any, Any]:
    """The mask of a sample with the tokens of `whole`; no token where there is no sample."""
    if sample is None:
        return np.zeros(len(whole), np.bool_)
    np.testing.assert_array_equal(sample.token_ids, whole.token_ids)
    return sample.loss_mask


def owners(sample: TrainingSample) -> np.ndarray[Any, Any]:
    return sample.rendered.message_indices


@settings(max_examples=9)
@given(seed=st.integers(0, 1 << 32))
def test_the_mask_is_the_whole_less_the_prompt(renderer: Renderer, seed: int) -> None:
    messages, options = drawn(renderer, seed)
    sample = sample_of(renderer, messages, on_rewritten="skip", **options)
    assume(sample is not None)
    stop_ids = set(renderer.get_stop_token_ids())
    expected = np.zeros(len(sample), np.bool_)
    judged = np.ones(len(sample), np.bool_)
    for index, message in enumerate(messages):
        if index in sample.rendered.answer_only:
            own = sample.loss_mask[owners(sample) == index]
            assert own.any()
            assert sample.token_ids[owners(sample) == index][own][-1] in stop_ids
            assert not np.isin(sample.token_ids[owners(sample) == index][own], block_ids(renderer)).any()
            judged[owners(sample) == index] = False
            continue
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


@settings(max_examples=6)
@given(seed=st.integers(0, 1 << 32), data=st.data())
def test_selection_narrows_by_owner(renderer: Renderer, seed: int, data: st.DataObject) -> None:
    messages, options = drawn(renderer, seed)
    options |= {"on_rewritten": "content", "train_on": ("tool", "user", "assistant")}
    whole = sample_of(renderer, messages, **options)
    assume(whole is not None)
    chosen = data.draw(st.sets(st.integers(0, len(messages) - 1)))
    part = mask_of(sample_of(renderer, messages, select=chosen, **options), whole)
    rest = set(range(len(messages))) - chosen
    left = mask_of(sample_of(renderer, messages, select=rest, **options), whole)
    np.testing.assert_array_equal(part | left, whole.loss_mask)
    assert not (part & left).any()
    assert not whole.loss_mask[whole.mm_token_type_ids != 0].any()


@settings(max_examples=6)
@given(seed=st.integers(0, 1 << 32))
def test_bodies_hold_what_was_said_and_nothing_else(renderer: Renderer, seed: int) -> None:
    messages, options = drawn(renderer, seed)
    options |= {"train_on": ("tool", "user"), "on_rewritten": "skip"}
    sample = sample_of(renderer, messages, final_stop=False, **options)
    assume(sample is not None)
    roles = {messages[index]["role"] for index in owners(sample)[sample.loss_mask].tolist()}
    assert roles <= {"tool", "user"}
    assert not sample.loss_mask[~sample.rendered.is_content].any()


@settings(max_examples=6)
@given(seed=st.integers(0, 1 << 32))
def test_a_step_joins_to_the_sample(renderer: Renderer, seed: int) -> None:
    messages, options = drawn(renderer, seed)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    for first in turns[-2:]:
        prompt = renderer.render_ids(messages[:first], add_generation_prompt=True, **options)
        step = sample_of(renderer, messages, completion_start=first, on_rewritten="skip", **options)
        sample = sample_of(
            renderer, messages, select=range(first, len(messages)), on_rewritten="skip", **options
        )
        if step is None or sample is None:
            assert step is sample
            continue
        if first in step.rendered.answer_only:
            assert step.prompt_length == step.loss_mask.argmax()
        else:
            assert step.prompt_length == common_prefix(prompt, step.token_ids)
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


@settings(max_examples=20)
@given(name=st.sampled_from(SMALL), seed=st.integers(0, 1 << 32), train_on=st.sampled_from(list(NAMED)))
def test_each_choice_is_the_sum_of_its_messages(name: str, seed: int, train_on: Any) -> None:
    """A message gives the same tokens whichever way it is chosen, and is told of where it gives none."""
    messages, sampled = small_sample(name, seed)
    roles = [message["role"] for message in messages]
    expected = NAMED[train_on](roles)
    if not expected:
        with pytest.raises(InputError, match="this conversation has no message to train on"):
            sampled(train_on=train_on)
        return
    whole = sampled(train_on=train_on)
    assume(whole is not None)
    parts = []
    for index in expected:
        is_first = iter([i == index for i in range(len(messages))])
        part = sampled(train_on=lambda _, is_first=is_first: next(is_first))
        parts.append(mask_of(part, whole))
        assert part is not None or index in whole.rewritten or roles[index] != "assistant"
    np.testing.assert_array_equal(np.sum(parts, axis=0), whole.loss_mask)


WEIGHTS = st.sampled_from([0, 0.25, 1, 3.5])


@settings(max_examples=20)
@given(name=st.sampled_from(SMALL), seed=st.integers(0, 1 << 32), data=st.data())
def test_weights_reach_the_batch_and_change_no_token(name: str, seed: int, data: st.DataObject) -> None:
    messages, sampled = small_sample(name, seed)
    plain = sampled(train_on="all_messages")
    assume(plain is not None)
    members = data.draw(st.dictionaries(st.integers(0, len(messages) - 1), WEIGHTS))
    given = data.draw(st.dictionaries(st.integers(-len(messages), -1), WEIGHTS))
    for index, weight in members.items():
        messages[index]["weight"] = weight
    sample = sampled(train_on="all_messages", weights=given)
    after = {index % len(messages): weight for index, weight in given.items()}
    each = np.array([(members | after).get(index, 1.0) for index in range(len(messages))], np.float32)
    expected = np.where(plain.loss_mask, each[owners(plain)], np.float32(0))
    np.testing.assert_array_equal(mask_of(sample, plain), expected > 0)
    assume(sample is not None)
    np.testing.assert_array_equal(sample.loss_weights, expected)
    assume(not (plain.loss_mask[0] or sample.multi_modal_data))
    batch = collate([sample, plain], ModelFamily("small"), pad_token_id=0)
    np.testing.assert_array_equal(batch.loss_weights[0].numpy(), expected)
    np.testing.assert_array_equal(batch.loss_weights[1].numpy(), plain.loss_mask)


def small_sample(name: str, seed: int) -> tuple[list[dict[str, Any]], Callable[..., TrainingSample | None]]:
    """A conversation that a small template takes, with an assistant's turn, and how to make a sample of it."""
    renderer = small_models.MODELS[name].renderer()
    maker = ConversationMaker(
        renderer.profile, (), max_turns=3, tools=not small_models.MODELS[name].spec.alternating
    )
    messages, options = maker.make(random.Random(seed))
    options.pop("add_generation_prompt")
    options |= {"on_rewritten": "skip", "final_stop": False}

    def sampled(**more: Any) -> TrainingSample | None:
        return sample_of(renderer, messages, **options, **more)

    try:
        sampled()
    except (TemplateError, PlaceholderError):
        assume(False)
    return messages, sampled
