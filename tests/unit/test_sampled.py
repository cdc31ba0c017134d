"""Sampled spans where a template prints an assistant's values outside its turn, and items that compare."""

import numpy as np
import pytest

from kit import assistant, shown
from mmrender import Renderer
from mmrender.template.known import TemplateSet

LOOKS_UP_THE_TOOL = """\
{%- set ns = namespace(calls=[]) -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{%- set ns.calls = m.tool_calls -%}{%- endif -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'tool' -%}{{- '[' + ns.calls[0].function.name + '] ' -}}{%- endif -%}
{{- m.content -}}
{%- for c in m.tool_calls or [] -%}{{- '<tool_call>' + c.function.name + '</tool_call>' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


# As Gemma 4 does: results are written inside the assistant's turn, and the message's own content after them.
RESULTS_WITHIN_THE_TURN = """\
{%- for m in messages if m.role != 'tool' -%}
{%- set outer = loop -%}
{%- if not (m.role == 'assistant' and outer.previtem and outer.previtem.role == 'assistant') -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- endif -%}
{%- for c in m.tool_calls or [] -%}{{- '<tool_call>' + c.function.name + '</tool_call>' -}}{%- endfor -%}
{%- set results = messages | selectattr('tool_call_id', 'defined') | list if m.tool_calls else [] -%}
{%- for k in range(messages | length) if messages[k].role == 'tool' and results -%}
{%- for c in m.tool_calls if c.id == messages[k].tool_call_id -%}
{{- '<tool_response>' + c.function.name + ':' + messages[k].content + '</tool_response>' -}}
{%- endfor -%}
{%- endfor -%}
{{- m.content or '' -}}
{%- if m.tool_calls and not results -%}{{- '<tool_response>' -}}
{%- elif not m.tool_calls -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'tool' -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
CALL = {"id": "a", "type": "function", "function": {"name": "zoom", "arguments": {}}}


def with_results_within_the_turn(tiny_model):
    base = Renderer.from_pretrained(tiny_model, image_backend="pil")
    stops = [base.tokenizer.token_id(token) for token in ("<|im_end|>", "<tool_response>")]
    templates = TemplateSet({"default": RESULTS_WITHIN_THE_TURN}, base.tokenizer, model_stop_ids=stops)
    return Renderer(templates, base.tokenizer)


def test_a_sampled_span_ends_with_its_stop_token(tiny_model):
    renderer = with_results_within_the_turn(tiny_model)
    rendered = renderer.render(
        [
            {"role": "user", "content": "hi"},
            assistant(None, tool_calls=[CALL]),
            {"role": "tool", "content": "42", "tool_call_id": "a"},
            assistant("done"),
            {"role": "user", "content": "more"},
            assistant("one<|im_end|>two"),
        ]
    )
    assert _sampled(renderer, rendered) == [
        "<tool_call>zoom</tool_call><tool_response>",
        "done<|im_end|>",
        "one<|im_end|>",
    ]


def test_bridges_of_a_template_that_writes_results_within_the_turn(tiny_model):
    renderer = with_results_within_the_turn(tiny_model)
    encode, user = renderer.tokenizer.encode, [{"role": "user", "content": "hi"}]
    prompt = renderer.render_ids(user, add_generation_prompt=True)
    answered = renderer.bridge_to_next_turn(prompt, encode("fine<|im_end|>"), user)
    assert answered is not None, renderer.why_not_bridged
    assert answered.text == "\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    result = [{"role": "tool", "content": "42", "name": "zoom", "tool_call_id": "call00001"}]
    called = encode("<tool_call>zoom</tool_call><tool_response>")
    bridge = renderer.bridge_to_next_turn(prompt, called, result)
    assert bridge is not None, renderer.why_not_bridged
    assert bridge.text == "zoom:42</tool_response>"
    cut_off = renderer.bridge_to_next_turn(prompt, encode("fine"), user)
    assert cut_off.text == "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    # Cut off after a call, the turn would have ended in another stop token.
    assert renderer.bridge_to_next_turn(prompt, called[:-1], user) is None
    assert renderer.why_not_bridged == (
        "the template's text for this extension depends on tool calls that nothing answers"
    )


def test_a_call_named_in_the_tool_turn_is_not_sampled_there(tiny_model):
    renderer = Renderer.from_pretrained(tiny_model, image_backend="pil", chat_template=LOOKS_UP_THE_TOOL)
    rendered = renderer.render(
        [
            {"role": "user", "content": "hi"},
            assistant("look", tool_calls=[CALL]),
            {"role": "tool", "content": "42", "tool_call_id": "a"},
            assistant("done"),
        ]
    )
    expected = ["look<tool_call>zoom</tool_call><|im_end|>", "done<|im_end|>"]
    assert _sampled(renderer, rendered) == expected


def _sampled(renderer, rendered):
    """Text of each stretch of sampled tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], rendered.sampled_mask, [False]]).astype(np.int8)))
    return [renderer.decode(rendered.token_ids[start:stop]) for start, stop in edges.reshape(-1, 2)]


def test_renderings_with_images_compare(tiny_model):
    pixels = np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3)
    messages = [{"role": "user", "content": [shown(pixels)]}]
    first, second = (
        Renderer.from_pretrained(tiny_model, image_backend="pil").render(messages) for _ in range(2)
    )
    items = [rendering.multi_modal_data.mm_items["image"][0] for rendering in (first, second)]
    assert items[0] is not items[1]
    assert first == second
    assert len(set(items)) == 1


WHOLE, PART, NAMED = "<|im_end|>", "<|endoftext|>", "<|vision_end|>"
ENDINGS = [  # what closes the last turn, what closes others, what the model's files name, what stops
    (WHOLE, WHOLE, [], [WHOLE]),
    (WHOLE, WHOLE, [PART], [WHOLE, PART]),
    (WHOLE + PART, WHOLE, [PART], [WHOLE, PART]),
    (NAMED, PART, [NAMED], [NAMED]),
]


@pytest.mark.parametrize(("last", "others", "named", "stops"), ENDINGS)
def test_a_close_stops_only_where_the_files_name_none_that_closes_the_last_turn(
    tiny_model, last, others, named, stops
):
    tokenizer = Renderer.from_pretrained(tiny_model, image_backend="pil").tokenizer
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ L if loop.last else O }}{% endfor %}"
    source = source.replace("L", repr(last)).replace("O", repr(others))
    ids = [tokenizer.token_id(token) for token in named]
    renderer = Renderer(TemplateSet({"default": source}, tokenizer, model_stop_ids=ids), tokenizer)
    assert {renderer.decode([index]) for index in renderer.get_stop_token_ids()} == set(stops)
