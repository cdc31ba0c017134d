"""Texts that a template wrote, against the messages that it wrote them for."""

import pytest
from PIL import Image

from kit import shown, text
from mmrender.errors import PlaceholderError


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_text_encodes_as_the_messages_that_it_was_written_for(renderer, count):
    images = [Image.new("RGB", (64 + 40 * index, 96), (9 * index, 9, 200)) for index in range(count)]
    parts = [shown(image) for image in images]
    messages = [{"role": "user", "content": [*parts, text("Which?")]}]
    rendered = renderer.render(messages, add_generation_prompt=True)
    encoded = renderer.encode_text(rendered.text, images=images)
    assert encoded.token_ids == rendered.token_ids
    assert encoded.multi_modal_data == rendered.multi_modal_data
    assert encoded.collapsed_ids == rendered.collapsed_ids
    assert not encoded.sampled_mask.any()
    for wrong in (images[1:], [*images, Image.new("RGB", (32, 32))]):
        if len(wrong) != count:
            with pytest.raises(PlaceholderError):
                renderer.encode_text(rendered.text, images=wrong)
