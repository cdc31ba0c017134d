"""How a completion ended decides what closes it: any stop token, none, open reasoning, half a call, nothing."""

import logging
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kit import assistant, error_of, shown, user
from mmrender.errors import InputError, MessageError, PlaceholderError, SpecialTokenError
from mmrender.renderer import Renderer
from mmrender.sidecar import MultiModalData

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function.name }}({{ c.function.arguments | tojson }})\n"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinking %}<think>\n{% endif %}{% endif %}"
)
# The next turn's opener closes the assistant's: <|im_start|> opens a user's turn, <|im_end|> a tool's.
OPENERS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}"
    "{% elif m.role == 'user' %}<|im_start|>\n{{ m.content }}{% else %}<|im_end|>\n{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}A:\n{% endif %}"
)
# No special token anywhere, as in LLaVA-1.5; the model stops with its end-of-text token.
PLAIN_TEXT = (
    "{% for m in messages %}{{ m.role.upper() }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
STOPS_IN_USER_TURNS = (
    "{% for m in messages %} {{ m.role.upper() }}: {{ m.content }}"
    "{{ '<|endoftext|>' if m.role == 'user' }}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)

USER = [user("And now?")]
TOOL = [{"role": "tool", "content": "42", "name": "zoom", "tool_call_id": "call00001"}]


# Reasoning is in the history only as long as the template keeps it there.
DROPS_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' else m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
LISTS_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content if p.type == 'text' %}{{ p.text }}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_GENERATION_PROMPT = (
    "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}<|im_end|>"
    "{% else %}<|im_start|>{{ m.content }}|{% endif %}{% endfor %}"
)
CALL_OR_CONTENT = (
    "{% for m in messages %}{% if m.tool_calls and m.content %}{{ raise_exception('not both') }}{% endif %}"
    + CHATML.removeprefix("{% for m in messages %}").replace("{{ m.content }}", "{{ m.content or '' }}")
)


@cache
def load(directory: Path, source: str, **options: Any) -> Renderer:
    return Renderer.from_pretrained(directory, chat_template=source, image_backend="pil", **options)


@pytest.fixture
def chatml(tiny_model: Path) -> Renderer:
    return load(tiny_model, CHATML)


def first_prompt(renderer: Renderer, **options: Any) -> list[int]:
    return renderer.render_ids([user("Hi")], add_generation_prompt=True, **options)


NEXT = "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
THINK_NEXT = NEXT + "<think>\n"
RESULT = "\n<|im_start|>tool\n42<|im_end|>"
RESULTS = RESULT + RESULT.replace("42", "43")
ANSWER = "\n<|im_start|>assistant\n"
CLOSED = "because\n</think>\n\nFine"
CLOSES = {
    "ChatML": (CHATML, {}, USER, {
        "Fine.<|im_end|>": NEXT,
        "Fine.<|endoftext|>": NEXT,
        "Fine": "<|im_end|>" + NEXT,
        "": "<|im_end|>" + NEXT,
        "a <|im_end|> b": "<|im_end|>" + NEXT,
        '<tool_call>\nzoom({"box": [1, ': "<|im_end|>" + NEXT,
        "<think>\nbecause": "\n</think>\n\n<|im_end|>" + NEXT,
        f"<think>\n{CLOSED}": "<|im_end|>" + NEXT,
        "<think>\na\n</think>\n\nb <think> c": "\n</think>\n\n<|im_end|>" + NEXT,
        "<think>\nbecause\n": "\n</think>\n\n<|im_end|>" + NEXT,
        "<think>\nbecause\n</think>": "\n\n<|im_end|>" + NEXT,
        "<think>\nbecause\n</think>\n": "\n<|im_end|>" + NEXT,
        "<think>\nbecause\n</think>\n\n": "<|im_end|>" + NEXT,
        "<think>\nbecause\n</think> ": "<|im_end|>" + NEXT,
        "<think>\nbecause<|im_end|>": NEXT,
    }),
    "reasoning that the template trims": (CHATML.replace("m.reasoning_content }}", "m.reasoning_content.strip() }}"), {}, USER, {
        "<think>\nbecause": "\n</think>\n\n<|im_end|>" + NEXT,
        "<think>\nbecause\n": "</think>\n\n<|im_end|>" + NEXT,
        "<think>\nbecause \n": "\n</think>\n\n<|im_end|>" + NEXT,
    }),
    "reasoning that the prompt opened": (CHATML, {"thinking": True}, USER, {
        "because": "\n</think>\n\n<|im_end|>" + THINK_NEXT,
        "": "\n</think>\n\n<|im_end|>" + THINK_NEXT,
        CLOSED: "<|im_end|>" + THINK_NEXT,
        CLOSED + "<|im_end|>": THINK_NEXT,
    }),
    "reasoning that the template drops from history": (DROPS_REASONING, {}, USER, {
        "because": "\n</think>\n\n<|im_end|>" + THINK_NEXT,
        CLOSED: "<|im_end|>" + THINK_NEXT,
        CLOSED + "<|im_end|>": THINK_NEXT,
    }),
    "lists of parts only": (LISTS_ONLY, {}, USER, {"Fine.<|im_end|>": NEXT}),
    "no content beside calls": (CALL_OR_CONTENT, {}, TOOL, {
        "<tool_call>\nzoom({})\n</tool_call><|im_end|>": RESULT + ANSWER,
        "<tool_call>\nzo": "<|im_end|>" + RESULT + ANSWER,
    }),
    "two results": (CHATML, {}, [*TOOL, {**TOOL[0], "content": "43"}], {
        "<tool_call>\nzoom(": "<|im_end|>" + RESULTS + ANSWER,
        "<tool_call>\nzoom({})\n</tool_call><|im_end|>": RESULTS + ANSWER,
    }),
    "a user's opener": (OPENERS, {}, USER, {
        "Fine.<|im_start|>": "\nAnd now?A:\n",
        "Fine.<|im_end|>": "<|im_start|>\nAnd now?A:\n",
        "Fine": "<|im_start|>\nAnd now?A:\n",
    }),
    "a tool's opener": (OPENERS, {}, TOOL, {
        "Fine.<|im_end|>": "\n42A:\n",
        "Fine.<|im_start|>": "<|im_end|>\n42A:\n",
        "": "<|im_end|>\n42A:\n",
    }),
    "plain text": (PLAIN_TEXT, {}, USER, {
        " Fine.<|endoftext|>": "\nUSER: And now?\nASSISTANT:",
        " Fine.": "\nUSER: And now?\nASSISTANT:",
        " Fine.\n": "USER: And now?\nASSISTANT:",
        # As the template writes a turn without content.
        "": " \nUSER: And now?\nASSISTANT:",
        " ": "\nUSER: And now?\nASSISTANT:",
    }),
    # Dropping the tail through the stop token would drop the new message.
    "a stop token inside the next turn": (STOPS_IN_USER_TURNS, {}, USER, {
        " Fine.<|endoftext|>": " USER: And now?<|endoftext|>ASSISTANT:",
        " Fine.": " USER: And now?<|endoftext|>ASSISTANT:",
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSES)
def test_close_of_a_completion(tiny_model, name):
    source, options, extension, cases = CLOSES[name]
    renderer = load(tiny_model, source)
    prompt = first_prompt(renderer, **options)
    for completion, written in cases.items():
        sampled = renderer.tokenizer.encode(completion)
        bridge = renderer.bridge_to_next_turn(prompt, sampled, extension, **options)
        assert bridge is not None, renderer.why_not_bridged
        base = len(prompt) + len(sampled)
        assert bridge.token_ids[:base] == prompt + sampled
        assert bridge.decode(base) == written, completion


CLOSED_WITH_CONTENT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}@HEAD@{% if m.reasoning_content %}<think>@IN@"
    "{{ m.reasoning_content }}@OUT@</think>{% endif %}"
    "{% if m.content %}@BEFORE@{{ m.content }}<|im_end|>@AFTER@{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant@HEAD@{% endif %}"
)
"""Turns are closed only where they hold content."""


@pytest.mark.parametrize("after", ["", "\n"])
@pytest.mark.parametrize("before", ["", "\n\n"])
@pytest.mark.parametrize("space", ["", "\n"])
def test_reasoning_alone_is_closed_as_the_template_closes_it(tiny_model, space, before, after):
    """Cut off anywhere in its reasoning or right after it, a turn goes on as in the whole rendering."""
    source = CLOSED_WITH_CONTENT
    for name, text in {"HEAD": "\n", "IN": space, "OUT": space, "BEFORE": before, "AFTER": after}.items():
        source = source.replace(f"@{name}@", f"{{{{ {text!r} }}}}")
    renderer = load(tiny_model, source)
    prompt = first_prompt(renderer)
    asked = [user("Hi")]
    for reasoning in ("b", "because", "because it is"):
        for content in ("", "Fine."):
            answer = {"role": "assistant", "content": content, "reasoning_content": reasoning}
            full = renderer.render_ids([*asked, answer, *USER], add_generation_prompt=True)
            ended = f"<think>{space}{reasoning}{space}</think>"
            said = f"{ended}{before}{content}"
            written = [said, f"{said}<|im_end|>"] if content else [f"<think>{space}{reasoning}", ended]
            for text in written:
                sampled = renderer.tokenizer.encode(text)
                bridge = renderer.bridge_to_next_turn(prompt, sampled, USER)
                assert bridge is not None, renderer.why_not_bridged
                assert renderer.decode(full).startswith(renderer.decode(prompt) + text)
                assert bridge.decode() == renderer.decode(full), text


def test_a_turn_is_continued_where_nothing_but_its_place_opens_it(tiny_model):
    """The blank before content is not written again, since the prompt does not end in a question."""
    renderer = load(tiny_model, NO_GENERATION_PROMPT)
    asked = [user("Hi")]
    fresh = renderer.render_ids(asked, add_generation_prompt=True)
    begun = renderer.render_ids([*asked, assistant("It is")], continue_final_message=True)
    for prompt, completion, written in (
        (fresh, "", " <|im_end|>"),
        (fresh, " ", "<|im_end|>"),
        (fresh, " It is", "<|im_end|>"),
        (begun, "", "<|im_end|>"),
        (begun, " a cow", "<|im_end|>"),
        (begun, "<|im_end|>", ""),
    ):
        sampled = renderer.tokenizer.encode(completion)
        bridge = renderer.bridge_to_next_turn(prompt, sampled, USER)
        assert bridge is not None, renderer.why_not_bridged
        assert bridge.decode(len(prompt) + len(sampled)) == f"{written}<|im_start|>And now?|"


def test_names_in_the_extension_and_empty_arrays(chatml):
    extension = [*TOOL, {"role": "system", "content": "Be brief."}, *USER]
    prompt = first_prompt(chatml)
    bridge = chatml.bridge_to_next_turn(prompt, chatml.tokenizer.encode("x<|im_end|>"), extension)
    assert (bridge.roles, bridge.tool_names) == (("tool", "system", "user"), ("zoom", None, None))
    assert [span.kind for span in bridge.spans[:2]] == ["prompt", "completion"]
    assert bridge.sampled_mask.sum() == 2
    bridge = chatml.bridge_to_next_turn(np.array([1], np.int32), np.array([], np.int64), USER)
    assert bridge.decode(1) == "<|im_end|>" + NEXT
    assert chatml.bridge_to_next_turn(np.array([], np.int32), [1], USER) is None
    assert chatml.why_not_bridged == "the previous prompt is empty"


def test_literal_special_tokens_of_new_messages_are_text(tiny_model, chatml, sentence):
    extension = [user("<|im_end|>")]
    stop = chatml.tokenizer.token_id("<|im_end|>")
    prompt = first_prompt(chatml)
    bridge = chatml.bridge_to_next_turn(prompt, [stop], extension)
    assert bridge.token_ids[len(prompt) :].count(stop) == 2
    strict = load(tiny_model, CHATML, content_special_tokens="error")
    error = error_of(SpecialTokenError, strict.bridge_to_next_turn, prompt, [stop], [*USER, *extension])
    assert error == sentence


PICTURE = shown(Image.new("RGB", (64, 64)))
MISTAKES = {
    "role": (MessageError, [1], [*USER, {"role": "nobody", "content": "x"}]),
    "dropped image": (PlaceholderError, [1], [*TOOL, {"role": "user", "content": [PICTURE]}]),
    "shape": (InputError, np.zeros((2, 2), np.int64), USER),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_errors_name_the_new_message(chatml, sentence, name):
    kind, prompt, extension = MISTAKES[name]
    assert error_of(kind, chatml.bridge_to_next_turn, prompt, [2], extension) == sentence


def test_the_sidecar_is_of_the_prompt(renderer, sentence):
    rendered = renderer.render([{"role": "user", "content": [PICTURE]}], add_generation_prompt=True)
    with pytest.raises(PlaceholderError) as error:
        renderer.bridge_to_next_turn([1, 2], [1], USER, previous_multi_modal_data=rendered.multi_modal_data)
    assert str(error.value) == sentence


def test_reason_is_that_of_the_thread_and_of_the_last_call(chatml, caplog):
    stop = chatml.get_stop_token_ids()[-1]
    with caplog.at_level(logging.DEBUG, "mmrender.bridge.bridge"):
        assert chatml.bridge_to_next_turn([1], [stop], []) is None
    assert [record.getMessage() for record in caplog.records] == ["no bridge: the extension is empty"]
    seen: list[str | None] = []
    thread = threading.Thread(target=lambda: seen.append(chatml.why_not_bridged))
    thread.start()
    thread.join()
    assert seen == [None]
    assert chatml.why_not_bridged == "the extension is empty"
    with pytest.raises(MessageError):
        chatml.bridge_to_next_turn([1], [stop], [{"role": "nobody"}])
    assert chatml.why_not_bridged is None
    sidecar = MultiModalData()
    assert chatml.bridge_to_next_turn([1], [stop], USER, previous_multi_modal_data=sidecar) is not None
    assert chatml.why_not_bridged is None
