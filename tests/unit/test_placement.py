"""Every placeholder gets the item of the part that the template wrote it for, in whatever order it writes them."""

import random
from itertools import count

import pytest

from kit import shown, text
from mmrender.errors import PlaceholderError
from mmrender.testing.conversations import sample_images
from small_models import MODELS

IMAGES = sample_images(random.Random(5), 6, largest=64)
PARTS = "{%- macro parts(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content%s %}{{ part.text }}{{ '<image>' if part.type == 'image' }}{% endfor %}{% endif %}{% endmacro -%}"
WRAPPED = "{% for m in messages%s %}<|im_start|>{{ m.role }}{{ parts(m.content) }}<|im_end|>{% endfor %}"
# Results stand in the turn of the call, before its content, as in Gemma 4.
RESULTS_IN_CALL = """{%- for m in messages if m.role != 'tool' -%}
<|im_start|>{{ m.role }}
{%- if m.tool_calls -%}
{%- for k in range(messages | length) if messages[k].role == 'tool' %}{% set follow = messages[k] -%}
<tool_response>{% for part in follow.content %}{{ part.text }}{{ '<image>' if part.type == 'image' }}{% endfor %}</tool_response>
{%- endfor -%}
{%- endif -%}
{{ parts(m.content) }}<|im_end|>
{%- endfor -%}"""
# Images are counted, and written before the text: provenance knows the message alone.
COUNTED = """{%- for m in messages -%}
<|im_start|>{{ m.role }}{{ '<image>' * (m.content | selectattr('type', 'equalto', 'image') | list | length) }}<|im_end|>
{%- endfor -%}"""


def template(source, parts="", messages=""):
    return PARTS.replace("%s", parts) + source.replace("%s", messages)


# The images of the conversation below, in the order in which each template writes them.
ORDERS = {
    "as they come": (template(WRAPPED), [0, 1, 2, 3, 4, 5]),
    "parts reversed": (template(WRAPPED, " | reverse"), [1, 0, 2, 4, 3, 5]),
    "messages reversed": (template(WRAPPED, messages=" | reverse"), [5, 3, 4, 2, 0, 1]),
    "results in the call": (template(RESULTS_IN_CALL), [0, 1, 3, 4, 5, 2]),
    "counted": (template(COUNTED), [0, 1, 2, 3, 4, 5]),
    "all in one loop": (
        "{% for m in messages %}{% for part in m.content if part.type == 'image' %}<image>{% endfor %}{% endfor %}",
        [0, 1, 2, 3, 4, 5],
    ),
}  # fmt: skip


def conversation():
    number = count()

    def content(images):
        pictures = [shown(IMAGES[next(number)]) for _ in range(images)]
        return [text("see"), *pictures, text("so")]

    calls = [{"name": "f", "arguments": {}, "id": f"call0000{k}"} for k in range(2)]
    return [
        {"role": "user", "content": content(2)},
        {"role": "assistant", "content": content(1), "tool_calls": calls},
        {"role": "tool", "content": content(2), "tool_call_id": "call00000"},
        {"role": "tool", "content": content(1), "tool_call_id": "call00001"},
    ]


@pytest.mark.parametrize("name", ORDERS)
def test_items_follow_the_placeholders(name):
    renderer = MODELS["everything"].renderer()
    source, order = ORDERS[name]
    hashes = [
        renderer.render([{"role": "user", "content": [shown(image)]}]).multi_modal_data for image in IMAGES
    ]
    rendered = MODELS["everything"].renderer(source=source).render(conversation())
    data = rendered.multi_modal_data
    assert data.mm_hashes["image"] == [hashes[index].mm_hashes["image"][0] for index in order]
    items = data.mm_items["image"]
    assert [found.length for found in data.mm_placeholders["image"]] == [
        sum(piece.count for piece in item.expansion) for item in items
    ]
    # Each image's tokens belong to the message that it came in.
    owners = [0, 0, 1, 2, 2, 3]
    starts = [found.offset for found in data.mm_placeholders["image"]]
    assert [rendered.message_indices[start] for start in starts] == [owners[index] for index in order]


MISFITS = {
    "dropped": template(WRAPPED, "[:2]"),
    "repeated": template(WRAPPED * 2),
    "exchanged": template(WRAPPED, messages="[:3]") + WRAPPED.replace("%s", "[1:2]"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_is_dropped_or_repeated_is_named(case, sentence):
    with pytest.raises(PlaceholderError) as caught:
        MODELS["everything"].renderer(source=MISFITS[case]).render(conversation())
    assert str(caught.value) == sentence
