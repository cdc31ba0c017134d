"""Images in tool results that the template drops, moved into a user turn of their own where asked.

The reference is the same conversation with the turn written out by hand.
"""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bridge_cases import assert_tail_equals, bridged, extensions
from kit import sources
from mmrender.errors import MMRenderError, PlaceholderError, RenderError
from mmrender.renderer import Renderer
from mmrender.template.known import TemplateSet
from mmrender.testing.conversations import ConversationMaker, sample_images
from small_models import MODELS

PICTURES = sample_images(random.Random(3), 3, largest=64)
DROPPING = ("tilde", "glm4_5v")
WRITING = ("everything", "hoisted")


def moving(name: str, request: pytest.FixtureRequest) -> tuple[Renderer, Renderer]:
    """A renderer as it is by default, and one that moves."""
    if name in MODELS:
        return MODELS[name].renderer(), MODELS[name].renderer(tool_images="user")
    plain = request.getfixturevalue("renderers")(name)
    directory = request.getfixturevalue("shared_models") / name
    return plain, Renderer.from_pretrained(directory, image_backend="pil", tool_images="user")


@pytest.fixture(scope="module", params=DROPPING)
def pair(request: pytest.FixtureRequest) -> tuple[Renderer, Renderer]:
    return moving(request.param, request)


def written_out(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
    """The conversation with the user turns in it, and the message that each of its messages belongs to."""
    result: list[dict[str, Any]] = []
    indices: list[int] = []
    waiting: list[Any] = []
    holder = -1
    for index, message in [*enumerate(messages), (len(messages), {"role": "end"})]:
        if waiting and message["role"] != "tool":
            result.append({"role": "user", "content": waiting})
            indices.append(holder)
            waiting, holder = [], -1
        if message["role"] == "end":
            break
        content = message["content"]
        pictures = [part for part in content or () if isinstance(part, dict) and part["type"] != "text"]
        if message["role"] == "tool" and pictures:
            holder = holder if waiting else index
            waiting += pictures
            text = "".join([part["text"] for part in content if part["type"] == "text"])
            message = {**message, "content": text}
        result.append(message)
        indices.append(index)
    return result, indices


def conversation(renderer: Renderer, source: random.Random) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    messages, options = ConversationMaker(renderer.profile, PICTURES, [], 3).make(source)
    del options["add_generation_prompt"]
    assume(any(message["role"] == "tool" and isinstance(message["content"], list) for message in messages))
    for message in messages:
        if message["role"] == "assistant" and isinstance(message["content"], list):
            message["content"] = [part for part in message["content"] if part["type"] != "image"]
    return messages, options


@settings(max_examples=8)
@given(source=sources(), prompted=st.booleans())
def test_moved_images_render_as_a_user_turn_written_by_hand(
    pair: tuple[Renderer, Renderer], source: random.Random, prompted: bool
) -> None:
    plain, moves = pair
    messages, options = conversation(moves, source)
    options["add_generation_prompt"] = prompted
    by_hand, owners = written_out(messages)
    try:
        expected = plain.render(by_hand, **options)
    except MMRenderError:
        assume(False)
    found = moves.render(messages, **options)
    assert found.token_ids == expected.token_ids
    assert found.text == expected.text
    data, other = found.multi_modal_data, expected.multi_modal_data
    assert (data.mm_placeholders, data.mm_hashes) == (other.mm_placeholders, other.mm_hashes)
    np.testing.assert_array_equal(found.sampled_mask, expected.sampled_mask)
    np.testing.assert_array_equal(found.is_content, expected.is_content)
    # Each token is the caller's message's: what surrounds moved images, the first that held some.
    theirs = expected.message_indices
    indices = np.where(theirs < 0, theirs, np.asarray(owners)[theirs])
    same = indices == found.message_indices
    tools = np.asarray([message["role"] == "tool" for message in messages])
    assert (same | (tools[indices] & tools[found.message_indices])).all()
    assert found.roles == tuple(message["role"] for message in messages)
    assert found.rewritten == tuple([owners[index] for index in expected.rewritten])


@settings(max_examples=4)
@given(source=sources())
def test_bridge_over_moved_images_equals_rendering(
    pair: tuple[Renderer, Renderer], source: random.Random
) -> None:
    moves = pair[1]
    messages, options = conversation(moves, source)
    try:
        cases = list(extensions(moves, messages, options))
    except MMRenderError:
        assume(False)
    for case in cases:
        bridge = bridged(moves, messages, options, case, case.prompt)
        assert bridge is not None, moves.why_not_bridged
        assert_tail_equals(bridge, case.full, len(case.prompt) + len(case.completion), case.turn + 1)


CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Look."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"name": "look", "arguments": {}, "id": "call00001"}],
    },
]


def test_each_image_belongs_to_the_result_that_held_it(pair: tuple[Renderer, Renderer]) -> None:
    plain, moves = pair
    results = [
        {"role": "tool", "tool_call_id": "call00001", "content": [{"type": "image", "image": PICTURES[0]}]},
        {
            "role": "tool",
            "tool_call_id": "call00001",
            "content": [{"type": "text", "text": "two"}, {"type": "image", "image": PICTURES[1]}],
        },
    ]
    rendered = moves.render([*CALLED, *results], add_generation_prompt=True)
    places = rendered.multi_modal_data.mm_placeholders["image"]
    assert [rendered.message_indices[place.offset] for place in places] == [2, 3]
    with pytest.raises(RenderError) as caught:
        plain.render([*CALLED, *results])
    if isinstance(caught.value, PlaceholderError):
        assert 'tool_images="user"' in str(caught.value)


@pytest.mark.parametrize("name", [*WRITING, "string_only"])
def test_templates_that_write_them_or_take_none_are_left_alone(
    name: str, request: pytest.FixtureRequest
) -> None:
    plain, moves = moving(name, request)
    assert moves.profile == plain.profile
    assert moves.template_profile().image_roles == plain.template_profile().image_roles


def test_findings_are_kept_apart(tmp_path: Any) -> None:
    model = MODELS["tilde"]
    sets = [
        TemplateSet({"default": model.source}, model.tokenizer, folder=tmp_path, tool_images=where)
        for where in ("tool", "user", "tool")
    ]
    roles = [known.find({}, has_tools=False).profile.image_roles for known in sets]
    assert roles == [("user",), ("user", "tool"), ("user",)]
