"""Templates that look back: each gives no bridge, with a reason that names what it looks at."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bridge_cases import Messages
from kit import assistant, shown, user
from mmrender.errors import TemplateLimitError
from mmrender.renderer import Renderer
from mmrender.template.known import KnownTemplate

HI, HELLO = user("Hi"), assistant("Hello.")
USER = [user("And now?")]
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


def load(directory: Path, source: str) -> Renderer:
    return Renderer.from_pretrained(directory, chat_template=source, image_backend="pil")


def reason(
    renderer: Renderer,
    extension: Messages,
    *,
    says: str = "Hello.",
    open_to_all: bool = False,
    **options: object,
) -> str | None:
    """Why there is no bridge; `open_to_all`: the prompt and the completion hold every added token."""
    prompt = renderer.render_ids([HI], add_generation_prompt=True)
    completion = [*renderer.tokenizer.encode(says), renderer.get_stop_token_ids()[-1]]
    if open_to_all:
        added = sorted(renderer.tokenizer.added_ids.values())
        prompt, completion = [*added, *prompt], [*added, *completion]
    found = renderer.bridge_to_next_turn(prompt, completion, extension, **options)
    assert (found is None) == (renderer.why_not_bridged is not None)
    return renderer.why_not_bridged


LAST_USER = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
IF_USER = "{% if m.role == 'user' %}@{% endif %}"
IF_TOOL = "{% if m.role == 'tool' %}@{% endif %}"
NAME_OF_CALL = IF_TOOL.replace("@", "{{ loop.previtem.tool_calls[0].function.name }}:")


def seen(condition: str) -> str:
    """Sets `ns.seen` where a message meets the condition."""
    return (
        "{% set ns = namespace(seen=0) %}{% for m in messages %}{% if " + condition + " %}"
        "{% set ns.seen = ns.seen + 1 %}{% endif %}{% endfor %}"
    )


ANY_ROLE = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

COUNTEREXAMPLES = {
    "system-in-last-user": (USER, template(
        before=LAST_USER,
        head="{% if loop.index0 == ns.last and messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}",
    )),
    "tools-in-last-user": (USER, template(
        before=LAST_USER, head="{% if tools and loop.index0 == ns.last %}{{ tools | tojson }}{% endif %}",
    )),
    "message-number": (USER, template(head="{{ loop.index }}. ")),
    "every-tenth-message": (USER, template(head="{% if loop.index % 10 == 0 %}Keep to the rules.\n{% endif %}")),
    "long-conversation": (USER, template(head="{% if loop.index > 50 %}Be brief.\n{% endif %}")),
    "earlier-tool-use": (USER, template(
        before=seen("m.role == 'assistant' and m.tool_calls"), head=IF_USER.replace("@", "{{ ns.seen > 0 }}"),
    )),
    "tool-results-so-far": (NAMED_TOOL, template(
        before=seen("m.role == 'tool'"), head=IF_TOOL.replace("@", "{{ ns.seen }}:"),
    )),
    "earlier-reasoning": (USER, template(
        before=seen("m.reasoning_content"), prompt="{% if ns.seen %}<think>\n{% endif %}",
    )),
    "number-of-calls": (NAMED_TOOL, template(head=IF_TOOL.replace("@", "{{ loop.previtem.tool_calls | length }}/"))),
    "name-of-call": (TOOL, template(head=NAME_OF_CALL)),
    "id-of-call": (TOOL, template(head=IF_TOOL.replace("@", "{{ loop.previtem.tool_calls[0].id }}:"))),
    "arguments-of-call": (NAMED_TOOL, template(
        head=IF_TOOL.replace("@", "{{ loop.previtem.tool_calls[0].function.arguments | length }}:"),
    )),
    "unanswered-call": (USER, template(
        head="{% if m.role == 'user' and loop.previtem and loop.previtem.tool_calls %}(no result)\n{% endif %}",
    )),
    "length-of-answer": (USER, template(
        head="{% if m.role == 'user' and loop.previtem and loop.previtem.content | length > 900 %}!{% endif %}",
    )),
    "first-message": (USER, template(prompt="{% if messages[0].role == 'assistant' %}!{% endif %}")),
    "word-in-system-prompt": (USER, template(
        prompt="{% if messages[0].role == 'system' and '/no_think' in messages[0].content %}<think></think>{% endif %}",
    )),
    "word-in-earlier-turn": (USER, template(
        before=seen("m.content is string and m.content.startswith('STOP')"), prompt="{{ ns.seen > 0 }}",
    )),
    "own-field": (USER, template(
        prompt="{% if messages[0].persona is defined %}{{ messages[0].persona }}{% endif %}",
    )),
    "documents": (USER, template(prompt="{% if documents %}Sources: {{ documents | length }}\n{% endif %}")),
    "system-and-images-together": (USER, template(
        before=seen("m.content is not string and m.content is not none and m.role == 'user'"),
        prompt="{% if messages[0].role == 'system' and messages | length > 6 %}!{% endif %}",
    )),
    "system-and-tools-together": (USER, template(prompt="{% if messages[0].role == 'system' and tools %}!{% endif %}")),
    "images-in-answer-order": (USER, template(
        before=seen("m.role == 'tool' and m.content is not string"), prompt="{{ ns.seen }}",
    )),
    "images-in-an-earlier-turn-and-no-videos": (USER, template(
        head="{% for p in m.content or [] if m.content is not string and p.type == 'video' %}{{ raise_exception('no') }}"
        "{% endfor %}",
        prompt="{% if messages | length > 3 and messages[0].content is not string %}!{% endif %}",
    )),
    "answer-quoted": (USER, template(
        head="{% if m.role == 'user' and loop.previtem %}> {{ loop.previtem.content }}\n{% endif %}",
    )),
    "new-system-message-to-the-front": (
        [{"role": "system", "content": "Be brief."}, *USER],
        "{% for m in messages if m.role == 'system' %}" + ANY_ROLE
        + "{% for m in messages if m.role != 'system' %}" + ANY_ROLE + PROMPT,
    ),
    "new-message-left-out": (
        [*USER, {"role": "system", "content": "Be brief."}],
        "{% for m in messages if m.role != 'system' %}" + ANY_ROLE + PROMPT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTEREXAMPLES)
def test_template_that_looks_back_gives_no_bridge(tiny_model, sentence, name):
    extension, source = COUNTEREXAMPLES[name]
    renderer = load(tiny_model, source)
    assert reason(renderer, extension, open_to_all=True) == sentence
    if reason(renderer, extension) is None:
        # What the template looks at is not in this conversation, as its tokens show.
        prompt = renderer.render_ids([HI], add_generation_prompt=True)
        full = renderer.render_ids([HI, HELLO, *extension], add_generation_prompt=True)
        completion = [*renderer.tokenizer.encode("Hello."), renderer.get_stop_token_ids()[-1]]
        bridge = renderer.bridge_to_next_turn(prompt, completion, extension)
        sampled = prompt + completion
        assert bridge.token_ids == full or full[: len(sampled)] != sampled


def test_tokens_that_only_some_arguments_write_rule_no_call_out(tiny_model):
    quoted = CALLS.replace(
        "</tool_call>", "{% for v in c.function.arguments.values() %}<think>{{ v }}{% endfor %}</tool_call>"
    )
    for head, extension, says in (
        (
            IF_USER.replace("@", "{{ ((loop.previtem or {}).tool_calls or []) | length }}"),
            USER,
            "<tool_call>zoom",
        ),
        (NAME_OF_CALL, TOOL, "<tool_call>zoom</tool_call>"),
    ):
        renderer = load(tiny_model, template(head=head).replace(CALLS, quoted))
        assert reason(renderer, extension, says=says) is not None


def test_a_history_whose_prompt_is_rewritten_is_not_ruled_out_by_how_a_turn_begins(tiny_model):
    extension, source = COUNTEREXAMPLES["system-in-last-user"]
    renderer = load(
        tiny_model, source.replace("<|im_start|>{{ m.role }}\n", "<|im_start|>{{ m.role }}\n ", 1)
    )
    prompt = renderer.render_ids([HI], add_generation_prompt=True)
    for completion in (" Hello", " Hello<|im_end|>"):
        assert renderer.bridge_to_next_turn(prompt, renderer.tokenizer.encode(completion), extension) is None
        assert "the system prompt" in (renderer.why_not_bridged or "")


def test_stated_roles_rule_histories_out(tiny_model):
    extension, source = COUNTEREXAMPLES["system-in-last-user"]
    renderer = load(tiny_model, source)
    assert reason(renderer, extension, previous_roles=("user",)) is None
    assert "the system prompt" in (reason(renderer, extension, previous_roles=("system", "user")) or "")


FIRST_RESULT = "{% if m.role == 'tool' and not ns.seen %}first{% set ns.seen = 1 %}{% endif %}"
STARTED = "{% set ns = namespace(seen=0) %}"


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_stated_roles_choose_the_history(tiny_model, rounds):
    """A template that writes the first result of a conversation in its own way."""
    renderer = load(tiny_model, template(before=STARTED, head=FIRST_RESULT))
    calling = assistant("Hm.", tool_calls=[{"function": {"name": "zoom", "arguments": {}}}])
    before = [HI, *[calling, *TOOL, HELLO, *USER] * rounds]
    prompt = renderer.render(before, add_generation_prompt=True)
    full = renderer.render_ids([*before, calling, *TOOL], add_generation_prompt=True)
    completion = renderer.tokenizer.encode("Hm.<tool_call>zoom</tool_call><|im_end|>")
    given = (prompt.token_ids, completion, TOOL)
    bridge = renderer.bridge_to_next_turn(*given, previous_roles=prompt.roles)
    assert bridge is not None, renderer.why_not_bridged
    assert bridge.token_ids == full
    # Without a call in it, the prompt's tokens show as much.
    assert (renderer.bridge_to_next_turn(*given) is None) == (rounds > 0)
    # Where results are counted, their role says too little.
    counting = load(tiny_model, COUNTEREXAMPLES["tool-results-so-far"][1])
    counted = counting.bridge_to_next_turn(*given, previous_roles=prompt.roles)
    assert (counted is None) == (rounds > 0)


def test_the_stop_token_that_was_sampled_chooses_the_history(tiny_model):
    """A call has a stop token of its own, and says so to a user who answers instead of a tool."""
    head = IF_USER.replace("@", "{{ '(no result)' if loop.previtem and loop.previtem.tool_calls }}")
    renderer = load(
        tiny_model,
        template(head=head).replace("<|im_end|>", "{{ '<|endoftext|>' if m.tool_calls else '<|im_end|>' }}"),
    )
    prompt = renderer.render_ids([HI], add_generation_prompt=True)
    for completion, written in {
        "Hm.<tool_call>zoom</tool_call><|endoftext|>": "(no result)And now?",
        "Hm.<|im_end|>": "And now?",
    }.items():
        sampled = renderer.tokenizer.encode(completion)
        bridge = renderer.bridge_to_next_turn(prompt, sampled, USER)
        assert bridge is not None, renderer.why_not_bridged
        expected = f"\n<|im_start|>user\n{written}<|im_end|>\n<|im_start|>assistant\n"
        assert bridge.decode(len(prompt) + len(sampled)) == expected


def test_without_a_peculiarity_there_is_a_bridge(tiny_model):
    renderer = load(tiny_model, template())
    assert [reason(renderer, extension) for extension in (USER, TOOL, NAMED_TOOL)] == [None] * 3
    # The result states the name of the call.
    assert reason(load(tiny_model, template(head=NAME_OF_CALL)), NAMED_TOOL) is None


def test_date_in_the_tail_is_that_of_the_clock(tiny_model, sentence):
    renderer = load(tiny_model, template(head=IF_USER.replace("@", "{{ strftime_now('%Y') }}: ")))
    assert reason(renderer, USER) is None
    assert reason(renderer, USER, history="template") == sentence


def test_numbering_of_images_is_known_from_the_sidecar(tiny_model, sentence):
    source = "{% set n = namespace(images=0) %}" + template(
        image="{% set n.images = n.images + 1 %}Picture {{ n.images }}: "
    )
    renderer = load(tiny_model, source)
    picture = shown(Image.new("RGB", (64, 64), "teal"))
    messages = [{"role": "user", "content": [picture, picture]}]
    prompt = renderer.render(messages, add_generation_prompt=True)
    completion = [*renderer.tokenizer.encode("Two."), renderer.get_stop_token_ids()[-1]]
    extension = [{"role": "user", "content": [picture]}]
    bridge = renderer.bridge_to_next_turn(
        prompt.token_ids, completion, extension, previous_multi_modal_data=prompt.multi_modal_data
    )
    assert "Picture 3: " in bridge.text
    assert renderer.bridge_to_next_turn(prompt.token_ids, completion, extension) is None
    assert renderer.why_not_bridged == sentence


@pytest.mark.parametrize(
    ("modality", "source"),
    [("image", Image.new("RGB", (64, 64))), ("video", np.zeros((2, 64, 64, 3), np.uint8))],
)
def test_a_template_that_looks_at_several_media_counts_them(tiny_model, modality, source):
    at = "{% if p.type == '@' %}{% set n.seen = n.seen + 1 %}<|vision_start|><|@_pad|><|vision_end|>".replace(
        "@", modality
    )
    several = "{% set n = namespace(seen=0) %}" + template(
        head=IF_USER.replace("@", "{{ '!' if n.seen > 1 }}")
    )
    renderer = load(tiny_model, re.sub(r"{% if p.type.*?end\|>", lambda _: at, several))
    part = {"type": modality, modality: source}
    for count in (1, 2, 3):
        messages = [{"role": "user", "content": [part] * count}]
        prompt = renderer.render(messages, add_generation_prompt=True)
        completion = renderer.tokenizer.encode("Hello.<|im_end|>")
        bridge = renderer.bridge_to_next_turn(
            prompt.token_ids, completion, USER, previous_multi_modal_data=prompt.multi_modal_data
        )
        full = renderer.render_ids([*messages, HELLO, *USER], add_generation_prompt=True)
        assert bridge is not None, renderer.why_not_bridged
        assert bridge.token_ids == full


def test_history_policy(tiny_model, sentence):
    recent = "{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    renderer = load(tiny_model, template(before=LAST_USER, head=recent))
    assert reason(renderer, USER) is None
    thought = "<think>Because.</think>Hello."
    assert reason(renderer, USER, says=thought, history="template") == sentence
    assert reason(renderer, NAMED_TOOL, says=thought, history="template") is None
    # Nothing is dropped of a turn without reasoning, unless the turns before it have some.
    assert reason(renderer, USER, history="template") is None
    assert reason(renderer, USER, history="template", open_to_all=True) is not None


def test_only_a_prompt_with_results_has_turns_that_a_further_result_rewrites(tiny_model, sentence):
    shortened = (
        "{{ m.content[1:] if ns.seen > 1 and m.role == 'assistant' and not loop.last else m.content }}"
    )
    source = template(before=seen("m.role == 'tool'")).replace("{{ m.content }}", shortened)
    renderer = load(tiny_model, source)
    called = "Hm.<tool_call>zoom</tool_call>"
    assert reason(renderer, NAMED_TOOL, says=called, history="template") is None
    assert reason(renderer, NAMED_TOOL, says=called, history="template", open_to_all=True) == sentence


def test_text_of_an_extension_has_a_proof_of_its_own(tiny_model):
    hook = "{% if m.role == 'user' and '/count' in m.content %}{{ messages | length }}{% endif %}"
    renderer = load(tiny_model, template(head=hook))
    assert reason(renderer, USER) is None
    found = reason(renderer, [user("/count")])
    assert "the number of earlier turns" in (found or "")
    assert reason(renderer, USER) is None


def test_a_template_that_took_too_long_is_asked_again(tiny_model, monkeypatch, sentence):
    def too_long(*_: object, **__: object) -> None:
        raise TemplateLimitError("the chat template used too much: time")

    renderer = load(tiny_model, template())
    assert renderer.profile
    with monkeypatch.context() as patched:
        patched.setattr(KnownTemplate, "render", too_long)
        prompt, completion = [1], [renderer.get_stop_token_ids()[-1]]
        assert renderer.bridge_to_next_turn(prompt, completion, USER) is None
    assert renderer.why_not_bridged == sentence
    assert reason(renderer, USER) is None
