"""The law of the library: text, ids, placeholder ranges and pixels equal the reference's, to the last bit.

`make parity` runs the same comparison with hundreds of conversations and both image back ends.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrender.renderer import Renderer
from mmrender.testing.conversations import ConversationMaker, conversations, sample_images
from mmrender.testing.parity import check_parity, first_difference
from mmrender.testing.reference import ReferenceRenderer, has_reference_backend

CASES = {
    "glm4_5v": 12,
    "idefics3": 3,
    "internvl3": 8,
    "qwen2_5_vl": 12,
    "qwen3_5": 12,
    "qwen3_vl": 12,
    "qwen3_vl_thinking": 12,
}
BACKENDS = [
    "pil",
    pytest.param(
        "torch",
        marks=pytest.mark.skipif(
            not has_reference_backend("torch"),
            reason="the reference's torch back end needs torchvision; `make parity` installs it",
        ),
    ),
]
IMAGES = sample_images(random.Random(1), 4, largest=160)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_generated_conversations_equal_the_reference(shared_models, name, backend):
    report = check_parity(shared_models / name, image_backend=backend, cases=CASES[name], seed=7)
    assert report.mismatch is None
    assert report.without_processor is None
    assert report.cases == CASES[name]
    assert report.images > 0
    assert report.pixel_values > 0
    assert report.refused < report.cases


class _Pair:
    """Our renderer and the reference for the tiny model, which needs no folder beside the checkout."""

    def __init__(self, directory):
        self.ours = Renderer.from_pretrained(directory, image_backend="pil", content_special_tokens="parse")
        self.reference = ReferenceRenderer(directory, "pil")
        assert self.reference.processor_missing is None

    def difference(self, messages, options):
        parts = [
            part
            for message in messages
            if isinstance(message["content"], list)
            for part in message["content"]
        ]
        pictures = [part["image"] for part in parts if part["type"] == "image"]
        expected = self.reference.render(messages, pictures, **options)
        return first_difference(self.ours, self.ours.render(messages, **options), expected)


@pytest.fixture(scope="module")
def pair(tiny_model):
    return _Pair(tiny_model)


@settings(max_examples=60)
@given(data=st.data())
def test_any_conversation_of_the_tiny_model_equals_the_reference(pair, data):
    literals = ["<|im_end|>", "<think>", "<tool_call>", "<|endoftext|>"]
    made = conversations(pair.ours.profile, images=IMAGES, literals=literals)
    messages, options = data.draw(made)
    assert pair.difference(messages, options) is None


@settings(max_examples=40)
@given(text=st.text(max_size=60), role=st.sampled_from(["system", "user", "assistant", "tool"]))
def test_any_text_in_any_role_equals_the_reference(pair, text, role):
    before = [{"role": "user", "content": "a"}] if role in ("assistant", "tool") else []
    after = [] if role == "user" else [{"role": "user", "content": "b"}]
    assert pair.difference([*before, {"role": role, "content": text}, *after], {}) is None


def _example(pair):
    maker = ConversationMaker(pair.ours.profile, IMAGES, (), max_turns=2, tools=False)
    source = random.Random(0)
    while True:
        messages, options = maker.make(source)
        if any(isinstance(message["content"], list) for message in messages):
            rendered = pair.ours.render(messages, **options)
            if rendered.multi_modal_data:
                parts = [
                    part for message in messages for part in message["content"] if isinstance(part, dict)
                ]
                pictures = [part["image"] for part in parts if part["type"] == "image"]
                return rendered, pair.reference.render(messages, pictures, **options)


def test_a_difference_is_found_wherever_it_is(pair):
    rendered, expected = _example(pair)
    assert first_difference(pair.ours, rendered, expected) is None

    text = replace(rendered, text=rendered.text.replace("user", "usex", 1))
    assert first_difference(pair.ours, text, expected)[0] == "text"

    ids = replace(rendered, token_ids=[*rendered.token_ids[:-1], 0])
    assert first_difference(pair.ours, ids, expected)[0] == "token ids"

    moved = replace(rendered, multi_modal_data=rendered.multi_modal_data.shifted(1))
    assert first_difference(pair.ours, moved, expected)[0] == "placeholder ranges"

    pixels = expected.tensors["pixel_values"].copy()
    pixels[0, 0] = np.nextafter(pixels[0, 0], np.float32(9))
    nudged = replace(expected, tensors={**expected.tensors, "pixel_values": pixels})
    assert first_difference(pair.ours, rendered, nudged)[0] == "pixel_values"

    absent = replace(
        expected, tensors={key: value for key, value in expected.tensors.items() if key != "image_grid_thw"}
    )
    assert first_difference(pair.ours, rendered, absent)[0] == "tensor image_grid_thw"
