"""Long conversations: the sampled turns are those that follow their prompt, found in time that grows with the length."""

import random
from pathlib import Path
from typing import Any

import pytest

from bridge_cases import REAL
from mmrender import Renderer
from mmrender.content import normalize_messages
from mmrender.errors import TemplateError
from mmrender.messages import Message, RenderRequest
from mmrender.template.chat import ChatTemplate
from mmrender.template.known import KnownTemplate
from mmrender.template.text import plain
from mmrender.turns import sampled
from mmrender.turns.sampled import sampled_turns
from small_models import MODELS

LAST = """{% for m in messages %}{{ m.role }}:{{ m.content }}{% if loop.last %} (last){% endif %};{% endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}"""
COUNTED = "{{ messages | length > 9 }}" + LAST
PROMPTED = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}" \
    "assistant:{% if messages | length > 3 %} {% endif %}{% endif %}"  # fmt: skip
SOURCES = {"last": LAST, "counted": COUNTED, "prompted": PROMPTED}


def conversation(source: random.Random, rounds: int, kinds: str) -> tuple[Message, ...]:
    """Rounds of a user's question, tool calls and an answer, each with reasoning or without."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "S"}] if source.random() < 0.5 else []
    for number in range(rounds):
        messages.append({"role": "user", "content": f"question {number}"})
        for step in range(source.choice((0, 0, 1, 3)) if "t" in kinds else 0):
            call = {"id": f"call{number:03}{step:02}", "function": {"name": "f", "arguments": {"x": step}}}
            answer = {"role": "assistant", "content": source.choice(("", "so")), "tool_calls": [call]}
            messages += [answer, {"role": "tool", "content": f"result {step}", "tool_call_id": call["id"]}]
        messages.append(
            {"role": "assistant", "content": source.choice(("yes", " no\n", "<think>a</think>b"))}
        )
    for message in messages:
        if message["role"] == "assistant" and "r" in kinds and source.random() < 0.7:
            message["reasoning_content"] = "because"
    return normalize_messages(messages)


@pytest.fixture
def known(name: str, renderers: Any, tiny_model: Path) -> KnownTemplate:
    renderer = renderers(name) if name not in SOURCES else None
    if renderer is None:
        renderer = Renderer.from_pretrained(tiny_model, image_backend="pil", chat_template=SOURCES[name])
    return renderer.templates.find({}, has_tools=False)


@pytest.mark.parametrize("name", [*REAL, *SOURCES, *MODELS])
def test_turns_of_long_conversations_are_those_that_whole_prompts_show(name, known, monkeypatch):
    source = random.Random(name)
    compared = 0
    for kinds in ("", "r", "t", "rt", "rt"):
        messages = conversation(source, 9, kinds)
        try:
            text = known.render(RenderRequest(messages))
        except TemplateError:
            continue
        turns, rewritten = sampled_turns(text, RenderRequest(messages), known.profile, known.render)
        with monkeypatch.context() as patch:
            patch.setattr(sampled, "_MAX_WHOLE", len(messages))
            assert sampled_turns(text, RenderRequest(messages), known.profile, known.render) == (
                turns,
                rewritten,
            ), messages
        for turn in turns:
            if turn.prompt_stop is not None:
                prompt = known.render(RenderRequest(messages[: turn.message], add_generation_prompt=True))
                assert plain(prompt) == plain(text)[: turn.prompt_stop]
        asked = {index for index, message in enumerate(messages) if message.role == "assistant"}
        assert {*rewritten} == asked - {turn.message for turn in turns}
        compared += 1
    assert compared


@pytest.mark.parametrize("kinds", ["", "r", "t", "rt"])
@pytest.mark.parametrize("name", ["glm4_5v", "qwen3_vl_thinking", "reasoning_optional", "everything"])
def test_turns_are_found_in_time_that_grows_with_the_conversation(known, kinds, monkeypatch):
    rendered = []
    run = ChatTemplate.render

    def counting(self, request, *form):
        rendered.append(len(request.messages))
        return run(self, request, *form)

    assert known.profile.prefix_stable is False
    monkeypatch.setattr(ChatTemplate, "render", counting)
    for rounds in (25, 50):
        messages = conversation(random.Random(1), rounds, kinds)
        text = known.render(RenderRequest(messages))
        rendered.clear()
        sampled_turns(text, RenderRequest(messages), known.profile, known.render)
        assert sum(rendered) <= 16 * len(messages)
