"""Sampled spans where a template prints an assistant's values outside its turn, and items that compare."""

import numpy as np

from mmrender import Renderer

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


def test_a_call_named_in_the_tool_turn_is_not_sampled_there(tiny_model):
    renderer = Renderer.from_pretrained(tiny_model, image_backend="pil", chat_template=LOOKS_UP_THE_TOOL)
    call = {"id": "a", "type": "function", "function": {"name": "zoom", "arguments": {}}}
    rendered = renderer.render(
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "look", "tool_calls": [call]},
            {"role": "tool", "content": "42", "tool_call_id": "a"},
            {"role": "assistant", "content": "done"},
        ]
    )
    sampled = [
        renderer.decode(rendered.token_ids[start:stop]) for start, stop in _runs(rendered.sampled_mask)
    ]
    assert sampled == ["look<tool_call>zoom</tool_call><|im_end|>", "done<|im_end|>"]


def _runs(mask):
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return edges.reshape(-1, 2).tolist()


def test_renderings_with_images_compare(tiny_model):
    pixels = np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3)
    messages = [{"role": "user", "content": [{"type": "image", "image": pixels}]}]
    first, second = (
        Renderer.from_pretrained(tiny_model, image_backend="pil").render(messages) for _ in range(2)
    )
    items = [rendering.multi_modal_data.mm_items["image"][0] for rendering in (first, second)]
    assert items[0] is not items[1]
    assert first == second
    assert len(set(items)) == 1
