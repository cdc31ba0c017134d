"""Templates that look back: each gives no bridge, with a reason that names what it looks at."""

from pathlib import Path

import pytest
from PIL import Image

from mmrender.media.resolve import MediaCache
from mmrender.renderer import Renderer
from mmrender.testing.tiny_model import build_tiny_model

USER = [{"role": "user", "content": "And now?"}]
TOOL = [{"role": "tool", "content": "42"}]
NAMED_TOOL = [{"role": "tool", "content": "42", "name": "zoom", "tool_call_id": "call00007"}]

CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}"
PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n@HEAD@"
    "{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{% if p.type == 'image' %}@IMAGE@<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}" + CALLS + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n@PROMPT@{% endif %}"
)


def template(*, before: str = "", head: str = "", image: str = "", prompt: str = "") -> str:
    """A ChatML template with one peculiarity: before the loop, at a message's head, at an image, in the prompt."""
    return before + PLAIN.replace("@HEAD@", head).replace("@IMAGE@", image).replace("@PROMPT@", prompt)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("bridge") / "tiny", weights=False)


def load(directory: Path, source: str) -> Renderer:
    return Renderer.from_pretrained(
        directory, chat_template=source, image_backend="pil", media_cache=MediaCache()
    )


def reason(renderer: Renderer, extension: list[dict[str, object]], **options: object) -> str | None:
    prompt = renderer.render_ids([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    completion = [*renderer.tokenizer.encode("Hello."), renderer.get_stop_token_ids()[-1]]
    found = renderer.bridge_to_next_turn(prompt, completion, extension, **options)
    assert (found is None) == (renderer.why_not_bridged is not None)
    return renderer.why_not_bridged


LAST_USER = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
IF_USER = "{% if m.role == 'user' %}@{% endif %}"
IF_TOOL = "{% if m.role == 'tool' %}@{% endif %}"


def seen(condition: str) -> str:
    """Sets `ns.seen` where a message meets the condition."""
    return (
        "{% set ns = namespace(seen=0) %}{% for m in messages %}{% if " + condition + " %}"
        "{% set ns.seen = ns.seen + 1 %}{% endif %}{% endfor %}"
    )


COUNTEREXAMPLES = {
    "system-in-last-user": (
        template(
            before=LAST_USER,
            head="{% if loop.index0 == ns.last and messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}",
        ),
        USER,
        "the system prompt",
    ),
    "tools-in-last-user": (
        template(before=LAST_USER, head="{% if tools and loop.index0 == ns.last %}{{ tools | tojson }}{% endif %}"),
        USER,
        "the tool definitions",
    ),
    "message-number": (template(head="{{ loop.index }}. "), USER, "the number of earlier turns"),
    "every-tenth-message": (
        template(head="{% if loop.index % 10 == 0 %}Keep to the rules.\n{% endif %}"), USER, "depends on",
    ),
    "long-conversation": (
        template(head="{% if loop.index > 50 %}Be brief.\n{% endif %}"), USER, "the number of earlier turns",
    ),
    "earlier-tool-use": (
        template(before=seen("m.role == 'assistant' and m.tool_calls"), head=IF_USER.replace("@", "{{ ns.seen > 0 }}")),
        USER,
        "tool calls",
    ),
    "tool-results-so-far": (
        template(before=seen("m.role == 'tool'"), head=IF_TOOL.replace("@", "{{ ns.seen }}:")), NAMED_TOOL, "tool",
    ),
    "earlier-reasoning": (
        template(before=seen("m.reasoning_content"), prompt="{% if ns.seen %}<think>\n{% endif %}"),
        USER,
        "earlier reasoning",
    ),
    "number-of-calls": (
        template(head=IF_TOOL.replace("@", "{{ loop.previtem.tool_calls | length }}/")),
        NAMED_TOOL,
        "the number of tool calls",
    ),
    "name-of-call": (
        template(head=IF_TOOL.replace("@", "{{ loop.previtem.tool_calls[0].function.name }}:")),
        TOOL,
        "the name, id or arguments of a tool call",
    ),
    "id-of-call": (
        template(head=IF_TOOL.replace("@", "{{ loop.previtem.tool_calls[0].id }}:")),
        TOOL,
        "the name, id or arguments of a tool call",
    ),
    "arguments-of-call": (
        template(head=IF_TOOL.replace("@", "{{ loop.previtem.tool_calls[0].function.arguments | length }}:")),
        NAMED_TOOL,
        "the name, id or arguments of a tool call",
    ),
    "unanswered-call": (
        template(head="{% if m.role == 'user' and loop.previtem and loop.previtem.tool_calls %}(no result)\n{% endif %}"),
        USER,
        "tool calls that nothing answers",
    ),
    "length-of-answer": (
        template(head="{% if m.role == 'user' and loop.previtem and loop.previtem.content | length > 900 %}!{% endif %}"),
        USER,
        "the assistant's text",
    ),
    "first-message": (
        template(prompt="{% if messages[0].role == 'assistant' %}!{% endif %}"), USER, "the role of the first message",
    ),
    "word-in-system-prompt": (
        template(prompt="{% if messages[0].role == 'system' and '/no_think' in messages[0].content %}<think></think>{% endif %}"),
        USER,
        "'/no_think' in the system prompt",
    ),
    "word-in-earlier-turn": (
        template(before=seen("m.content is string and m.content.startswith('STOP')"), prompt="{{ ns.seen > 0 }}"),
        USER,
        "'STOP' in",
    ),
    "own-field": (
        template(prompt="{% if messages[0].persona is defined %}{{ messages[0].persona }}{% endif %}"),
        USER,
        "the field 'persona'",
    ),
    "documents": (
        template(prompt="{% if documents %}Sources: {{ documents | length }}\n{% endif %}"), USER, "the documents",
    ),
    "system-and-images-together": (
        template(
            before=seen("m.content is not string and m.content is not none and m.role == 'user'"),
            prompt="{% if messages[0].role == 'system' and messages | length > 6 %}!{% endif %}",
        ),
        USER,
        "the system prompt",
    ),
    "answer-quoted": (
        template(head="{% if m.role == 'user' and loop.previtem %}> {{ loop.previtem.content }}\n{% endif %}"),
        USER,
        "writes earlier messages again",
    ),
    "images-in-answer-order": (
        template(before=seen("m.role == 'tool' and m.content is not string"), prompt="{{ ns.seen }}"),
        USER,
        "images in tool results",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTEREXAMPLES)
def test_template_that_looks_back_gives_no_bridge(directory: Path, name: str) -> None:
    source, extension, looks_at = COUNTEREXAMPLES[name]
    found = reason(load(directory, source), extension)
    assert found is not None
    assert looks_at in found


def test_without_a_peculiarity_there_is_a_bridge(directory: Path) -> None:
    renderer = load(directory, template())
    assert [reason(renderer, extension) for extension in (USER, TOOL, NAMED_TOOL)] == [None] * 3


def test_two_things_looked_at_together_are_both_named(directory: Path) -> None:
    both = "{% if messages[0].role == 'system' and tools %}!{% endif %}"
    assert reason(load(directory, template(prompt=both)), USER) == (
        "what the template writes for this extension depends on the system prompt together with the tool definitions"
    )


def test_name_of_a_call_is_known_from_the_result_that_states_it(directory: Path) -> None:
    source = template(head=IF_TOOL.replace("@", "{{ loop.previtem.tool_calls[0].function.name }}:"))
    renderer = load(directory, source)
    assert reason(renderer, NAMED_TOOL) is None


def test_new_system_message_that_moves_to_the_front_is_refused(directory: Path) -> None:
    source = (
        "{% for m in messages if m.role == 'system' %}<|im_start|>system\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    extension = [{"role": "system", "content": "Be brief."}, *USER]
    found = reason(load(directory, source), extension)
    assert found == "the template writes a new message before the assistant's turn"


def test_date_in_the_tail_is_that_of_the_clock(directory: Path) -> None:
    source = template(head=IF_USER.replace("@", "{{ strftime_now('%Y') }}: "))
    assert reason(load(directory, source), USER) is None
    assert reason(load(directory, source), USER, history="template") == (
        "the template writes the date, which may have changed since"
    )


def test_numbering_of_images_is_known_from_the_sidecar(directory: Path) -> None:
    source = "{% set n = namespace(images=0) %}" + template(
        image="{% set n.images = n.images + 1 %}Picture {{ n.images }}: "
    )
    renderer = load(directory, source)
    picture = {"type": "image", "image": Image.new("RGB", (64, 64), "teal")}
    messages = [{"role": "user", "content": [picture, picture]}]
    prompt = renderer.render(messages, add_generation_prompt=True)
    completion = [*renderer.tokenizer.encode("Two."), renderer.get_stop_token_ids()[-1]]
    extension = [{"role": "user", "content": [picture]}]
    bridge = renderer.bridge_to_next_turn(
        prompt.token_ids, completion, extension, previous_multi_modal_data=prompt.multi_modal_data
    )
    assert bridge is not None
    assert "Picture 3: " in bridge.text
    assert renderer.bridge_to_next_turn(prompt.token_ids, completion, extension) is None
    assert renderer.why_not_bridged == (
        "the template counts media, and previous_multi_modal_data lacks those of the prompt"
    )


REASONING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}" + CALLS + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_history_policy(directory: Path) -> None:
    renderer = load(directory, REASONING)
    assert reason(renderer, USER) is None
    assert reason(renderer, USER, history="template") == (
        "the template would write earlier turns differently once this extension follows "
        "(seen by varying the assistant's reasoning)"
    )
    assert reason(renderer, NAMED_TOOL, history="template") is None


def test_text_of_an_extension_has_a_proof_of_its_own(directory: Path) -> None:
    """A proof for plain text says nothing of text that the template looks for."""
    hook = "{% if m.role == 'user' and '/count' in m.content %}{{ messages | length }}{% endif %}"
    renderer = load(directory, template(head=hook))
    assert reason(renderer, USER) is None
    found = reason(renderer, [{"role": "user", "content": "/count"}])
    assert found == "what the template writes for this extension depends on the number of earlier turns"
    assert reason(renderer, USER) is None


def test_message_that_the_template_leaves_out_is_named(directory: Path) -> None:
    source = (
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    extension = [*USER, {"role": "system", "content": "Be brief."}]
    assert reason(load(directory, source), extension) == (
        "the template does not print the text of new_messages[1]"
    )
