"""How a completion ended decides what closes it: any stop token, none, open reasoning, half a call, nothing."""

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmrender.errors import InputError, MessageError, PlaceholderError, SpecialTokenError
from mmrender.renderer import Renderer
from mmrender.spans import MultiModalData
from mmrender.testing.tiny_model import build_tiny_model

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

USER = [{"role": "user", "content": "And now?"}]
TOOL = [{"role": "tool", "content": "42", "name": "zoom", "tool_call_id": "call00001"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("completions") / "tiny", weights=False)


def load(directory: Path, source: str, **options: Any) -> Renderer:
    return Renderer.from_pretrained(directory, chat_template=source, image_backend="pil", **options)


@pytest.fixture(scope="module")
def chatml(directory: Path) -> Renderer:
    return load(directory, CHATML)


def after(renderer: Renderer, completion: str, extension: list[dict[str, Any]], **options: Any) -> str:
    """Text that the bridge writes behind a completion, given as the text of its tokens."""
    prompt = renderer.render_ids([{"role": "user", "content": "Hi"}], add_generation_prompt=True, **options)
    sampled = renderer.tokenizer.encode(completion)
    bridge = renderer.bridge_to_next_turn(prompt, sampled, extension, **options)
    assert bridge is not None, renderer.why_not_bridged
    base = len(prompt) + len(sampled)
    assert bridge.token_ids[:base] == prompt + sampled
    return bridge.decode(base)


NEXT = "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("completion", "written"),
    [
        ("Fine.<|im_end|>", NEXT),
        ("Fine.<|endoftext|>", NEXT),
        ("Fine", "<|im_end|>" + NEXT),
        ("", "<|im_end|>" + NEXT),
        ("a <|im_end|> b", "<|im_end|>" + NEXT),
        ('<tool_call>\nzoom({"box": [1, ', "<|im_end|>" + NEXT),
        ("<think>\nbecause", "\n</think>\n\n<|im_end|>" + NEXT),
        ("<think>\nbecause\n</think>\n\nFine", "<|im_end|>" + NEXT),
        ("<think>\na\n</think>\n\nb <think> c", "\n</think>\n\n<|im_end|>" + NEXT),
        ("<think>\nbecause<|im_end|>", NEXT),
    ],
)
def test_close_of_a_completion(chatml: Renderer, completion: str, written: str) -> None:
    assert after(chatml, completion, USER) == written


def test_reasoning_that_the_prompt_opened_is_closed(chatml: Renderer) -> None:
    following = NEXT + "<think>\n"
    assert after(chatml, "because", USER, thinking=True) == "\n</think>\n\n<|im_end|>" + following
    assert after(chatml, "", USER, thinking=True) == "\n</think>\n\n<|im_end|>" + following
    assert after(chatml, "because\n</think>\n\nFine", USER, thinking=True) == "<|im_end|>" + following
    assert after(chatml, "because\n</think>\n\nFine<|im_end|>", USER, thinking=True) == following


DROPS_REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' else m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_reasoning_is_closed_where_the_template_drops_it_from_history(directory: Path) -> None:
    renderer = load(directory, DROPS_REASONING)
    assert after(renderer, "because", USER) == "\n</think>\n\n<|im_end|>" + NEXT + "<think>\n"
    assert after(renderer, "because\n</think>\n\nFine", USER) == "<|im_end|>" + NEXT + "<think>\n"
    assert after(renderer, "because\n</think>\n\nFine<|im_end|>", USER) == NEXT + "<think>\n"


LISTS_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content if p.type == 'text' %}{{ p.text }}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL_OR_CONTENT = (
    "{% for m in messages %}{% if m.tool_calls and m.content %}{{ raise_exception('not both') }}{% endif %}"
    + CHATML.removeprefix("{% for m in messages %}").replace("{{ m.content }}", "{{ m.content or '' }}")
)


def test_template_that_takes_lists_of_parts_only(directory: Path) -> None:
    assert after(load(directory, LISTS_ONLY), "Fine.<|im_end|>", USER) == NEXT


def test_template_that_refuses_content_beside_calls(directory: Path) -> None:
    renderer = load(directory, CALL_OR_CONTENT)
    following = "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    assert after(renderer, "<tool_call>\nzoom({})\n</tool_call><|im_end|>", TOOL) == following
    assert after(renderer, "<tool_call>\nzo", TOOL) == "<|im_end|>" + following


def test_tool_results_after_a_cut_off_call(chatml: Renderer) -> None:
    results = [*TOOL, {"role": "tool", "content": "43", "name": "zoom"}]
    following = "<|im_start|>tool\n42<|im_end|>\n<|im_start|>tool\n43<|im_end|>\n<|im_start|>assistant\n"
    assert after(chatml, "<tool_call>\nzoom(", results) == "<|im_end|>\n" + following
    assert after(chatml, "<tool_call>\nzoom({})\n</tool_call><|im_end|>", results) == "\n" + following


@pytest.mark.parametrize(
    ("completion", "extension", "written"),
    [
        ("Fine.<|im_start|>", USER, "\nAnd now?A:\n"),
        ("Fine.<|im_end|>", TOOL, "\n42A:\n"),
        ("Fine.<|im_end|>", USER, "<|im_start|>\nAnd now?A:\n"),
        ("Fine.<|im_start|>", TOOL, "<|im_end|>\n42A:\n"),
        ("Fine", USER, "<|im_start|>\nAnd now?A:\n"),
        ("", TOOL, "<|im_end|>\n42A:\n"),
    ],
)
def test_close_that_is_the_next_opener(
    directory: Path, completion: str, extension: list[dict[str, Any]], written: str
) -> None:
    assert after(load(directory, OPENERS), completion, extension) == written


@pytest.mark.parametrize(
    ("completion", "written"),
    [
        (" Fine.<|endoftext|>", "\nUSER: And now?\nASSISTANT:"),
        (" Fine.", "\nUSER: And now?\nASSISTANT:"),
        (" Fine.\n", "USER: And now?\nASSISTANT:"),
        ("", "\nUSER: And now?\nASSISTANT:"),
    ],
)
def test_close_that_is_plain_text(directory: Path, completion: str, written: str) -> None:
    assert after(load(directory, PLAIN_TEXT), completion, USER) == written


def test_stop_token_inside_the_next_turn_is_not_the_close(directory: Path) -> None:
    """Dropping the tail through it would drop the new message."""
    renderer = load(directory, STOPS_IN_USER_TURNS)
    assert after(renderer, " Fine.<|endoftext|>", USER) == " USER: And now?<|endoftext|>ASSISTANT:"
    assert after(renderer, " Fine.", USER) == " USER: And now?<|endoftext|>ASSISTANT:"


def test_system_message_and_names_in_the_extension(chatml: Renderer) -> None:
    extension = [*TOOL, {"role": "system", "content": "Be brief."}, *USER]
    prompt = chatml.render_ids([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    bridge = chatml.bridge_to_next_turn(prompt, chatml.tokenizer.encode("x<|im_end|>"), extension)
    assert bridge is not None
    assert bridge.roles == ("tool", "system", "user")
    assert bridge.tool_names == ("zoom", None, None)
    assert [span.kind for span in bridge.spans[:2]] == ["prompt", "completion"]
    assert bridge.sampled_mask.sum() == 2


def test_literal_special_tokens_of_new_messages_are_text(directory: Path, chatml: Renderer) -> None:
    extension = [{"role": "user", "content": "<|im_end|>"}]
    stop = chatml.tokenizer.token_id("<|im_end|>")
    prompt = chatml.render_ids([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    bridge = chatml.bridge_to_next_turn(prompt, [stop], extension)
    assert bridge is not None
    assert bridge.token_ids[len(prompt) :].count(stop) == 2
    strict = load(directory, CHATML, content_special_tokens="error")
    with pytest.raises(SpecialTokenError) as caught:
        strict.bridge_to_next_turn(prompt, [stop], [*USER, *extension])
    assert str(caught.value) == (
        "new_messages[1].content: the content holds a special token - expected no special tokens in user content, "
        "got '<|im_end|>'. Escape it, or set content_special_tokens=\"text\" to encode it as text"
    )


def test_errors_name_the_new_message(chatml: Renderer) -> None:
    with pytest.raises(MessageError) as malformed:
        chatml.bridge_to_next_turn([1], [2], [*USER, {"role": "nobody", "content": "x"}])
    assert str(malformed.value).startswith("new_messages[1]")
    picture = {"type": "image", "image": Image.new("RGB", (32, 32))}
    with pytest.raises(PlaceholderError) as dropped:
        chatml.bridge_to_next_turn([1], [2], [*TOOL, {"role": "user", "content": [picture]}])
    assert dropped.value.where == "new_messages[1].content[0]"


def test_errors_about_ids_and_sidecar(chatml: Renderer) -> None:
    with pytest.raises(InputError) as shaped:
        chatml.bridge_to_next_turn(np.zeros((2, 2), np.int64), [1], USER)
    assert str(shaped.value) == (
        "previous_prompt_ids: not token ids - expected a list of integers, or an integer array of shape (n,), "
        "got int64 of shape (2, 2)"
    )
    picture = {"type": "image", "image": Image.new("RGB", (64, 64))}
    renderer = chatml_with_images(chatml)
    rendered = renderer.render([{"role": "user", "content": [picture]}], add_generation_prompt=True)
    with pytest.raises(PlaceholderError) as foreign:
        renderer.bridge_to_next_turn([1, 2], [1], USER, previous_multi_modal_data=rendered.multi_modal_data)
    assert foreign.value.where == "previous_multi_modal_data.mm_placeholders['image'][0]"


def chatml_with_images(renderer: Renderer) -> Renderer:
    source = CHATML.replace(
        "{{ m.content }}",
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}"
        "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}",
    )
    return Renderer(
        type(renderer.templates)({"default": source}, renderer.tokenizer), renderer.tokenizer, renderer.media
    )


def test_reason_is_that_of_the_thread_and_of_the_last_call(
    chatml: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
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
    assert (
        chatml.bridge_to_next_turn([1], [stop], USER, previous_multi_modal_data=MultiModalData()) is not None
    )
    assert chatml.why_not_bridged is None


def test_empty_arrays(chatml: Renderer) -> None:
    bridge = chatml.bridge_to_next_turn(np.array([1], np.int32), np.array([], np.int64), USER)
    assert bridge is not None
    assert bridge.decode(1) == "<|im_end|>" + NEXT
    assert chatml.bridge_to_next_turn(np.array([], np.int32), [1], USER) is None
    assert chatml.why_not_bridged == "the previous prompt is empty"
