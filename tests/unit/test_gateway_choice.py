"""A call that the model must make, and kinds of conversations."""

import json

import pytest

from gateway_cases import ASKED, Recording, gateway, results, said
from kit import error_of
from mmrender.client.types import Prompt
from mmrender.content import normalize_messages
from mmrender.errors import InputError
from mmrender.gateway.call import Call, Origin
from mmrender.gateway.kinds import kind_of, select_samples
from mmrender.gateway.tool_choice import call_grammar
from mmrender.sidecar import MultiModalData
from rollout_cases import TOOLS
from rollout_cases import call as spoken

ZOOM = {"type": "function", "function": {"name": 'zoom "in"'}}
NOTHING = Prompt([], MultiModalData(), None)


def call_of(*tools, **fields):
    return Call("chat", "m", normalize_messages(ASKED), tools or None, **fields)


def format_of(renderer, call, prompt=NOTHING):
    return json.loads(call_grammar(renderer, call, prompt, {})["structural_tag"])["format"]


async def test_a_call_grammar_is_sampled_under_its_grammar(renderers):
    session = Recording(renderers("qwen3_vl"), lambda request: spoken(1))
    step, answer = await session.ask(ASKED, tool_choice="required")
    sent = session.backend.requests[-1].sampling_params["structured_outputs"]
    assert sent == gateway(step)["structured_outputs"]
    assert step.extra["restricted"] == ["structural_tag"]
    assert gateway(step)["tool_choice"] == "required"
    later, _ = await session.ask([*ASKED, said(answer), *results(answer, "1")], tool_choice="auto")
    assert later.previous is step
    assert "structured_outputs" not in session.backend.requests[-1].sampling_params


@pytest.mark.parametrize(
    ("model", "begin", "end", "style"),
    [
        ("qwen3_vl", '<tool_call>\n{"name": "zoom \\"in\\"", "arguments": ', "}\n</tool_call>", None),
        ("qwen3_5", '<tool_call>\n<function=zoom "in">\n', "\n</function>\n</tool_call>", "qwen_xml"),
        ("glm4_5v", '<tool_call>zoom "in"\n', "\n</tool_call>", "glm_xml"),
    ],
)
def test_the_grammar_of_a_family(renderers, model, begin, end, style):
    renderer = renderers(model)
    calls = format_of(renderer, call_of(ZOOM, tool_choice="required"))
    content = {"type": "json_schema", "json_schema": {"type": "object"}}
    content |= {} if style is None else {"style": style}
    assert calls == {
        "type": "tags_with_separator",
        "tags": [{"type": "tag", "begin": begin, "content": content, "end": end}],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": False,
    }
    calls = format_of(
        renderer,
        call_of(ZOOM, *TOOLS, tool_choice="required", named_tools=("look",), parallel_tool_calls=False),
    )
    [tag] = calls["tags"]
    assert tag["content"]["json_schema"] == TOOLS[0]["function"]["parameters"]
    assert calls["stop_after_first"]


@pytest.mark.parametrize("model", ["qwen3_vl", "qwen3_5", "glm4_5v"])
def test_a_call_may_be_of_the_named_tools_alone(renderers, model):
    calls = format_of(renderers(model), call_of(ZOOM, *TOOLS, named_tools=("look",)))
    assert {**calls, "tags": None} == {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": None,
        "at_least_one": False,
        "stop_after_first": False,
    }
    [tag] = calls["tags"]
    assert "look" in tag["begin"]
    assert tag["begin"].startswith("<tool_call>")


def test_open_reasoning_comes_before_the_call(renderers):
    renderer = renderers("qwen3_vl_thinking")
    rendered = renderer.render(ASKED, tools=TOOLS, add_generation_prompt=True)
    prompt = Prompt(rendered.token_ids, MultiModalData(), None)
    sequence = format_of(renderer, call_of(*TOOLS, tool_choice="required"), prompt)
    thought, calls = sequence["elements"]
    assert thought == {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>\n\n"}
    assert calls["type"] == "tags_with_separator"


def test_a_call_is_refused_by_name(renderers, sentence):
    renderer, schema = renderers("qwen3_vl"), {"structured_outputs": {"json": {}}}
    cases = [
        (renderer, call_of(*TOOLS, tool_choice="required", sampling_params=schema)),
        (renderers("qwen2_5_vl"), call_of(*TOOLS, tool_choice="required")),
    ]
    errors = [error_of(InputError, call_grammar, each, call, NOTHING, {}) for each, call in cases]
    assert "\n".join(errors) == sentence


SUMMARY = "The agent has looked at three pictures and counted nine legs so far."
TEXTS = {"Title?": "Legs of animals", "Sum up.": SUMMARY, "Judge.": '{"verdict": true}'}
JUDGE = [{"role": "system", "content": "You judge."}, {"role": "user", "content": "Judge."}]


def say(renderer):
    """A model that answers a few questions in words, and looks otherwise."""

    def answer(request):
        text = renderer.decode(list(request.prompt_ids)[-40:])
        return next((said for asked, said in TEXTS.items() if f"{asked}<|im_end|>" in text), spoken(1))

    return answer


async def test_kinds_by_what_agents_send(renderers):
    """Title first; then the agent, its subagent, a summary with all tools left out, the conversation after it."""
    renderer = renderers("qwen3_vl")
    session = Recording(renderer, say(renderer))
    title = [{"role": "system", "content": "You write titles."}, {"role": "user", "content": "Title?"}]
    await session.ask(title, tools=None)
    _, answer = await session.ask(ASKED)
    history = [*ASKED, said(answer), *results(answer, "9 legs")]
    await session.ask(history)
    task = [{"role": "system", "content": "You help."}, ASKED[1]]
    other = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    await session.ask(task, tools=other)
    form = {"structured_outputs": {"json": {}}}
    await session.ask(JUDGE, tools=None, sampling_params=form)
    _, summary = await session.ask([*history, {"role": "user", "content": "Sum up."}], tools=None)
    after = [ASKED[0], {"role": "user", "content": f"So far:\n\n{summary.content}\n\nGo on."}]
    _, answer = await session.ask(after)
    await session.ask([*after, said(answer), *results(answer, "2")])
    await session.ask([{"role": "system", "content": "Be brief!"}, *history[1:]])
    kinds = [kind_of(step) for step in session.trajectory.steps]
    assert kinds == [
        *("side", "main", "main", "subagent", "side", "compaction", "compaction", "compaction", "main")
    ]
    trained = {
        kind: sum(int(sample.loss_mask.sum()) for sample in select_samples(session.trajectory, (kind,)))
        for kind in ("main", "subagent", "compaction", "side")
    }
    sampled = dict.fromkeys(trained, 0)
    for step in session.trajectory.steps:
        sampled[kind_of(step)] += len(step.completion_ids)
    assert trained == sampled
    assert sum(int(sample.loss_mask.sum()) for sample in select_samples(session.trajectory)) == sum(
        trained[kind] for kind in ("main", "subagent", "compaction")
    )


async def test_headers_name_the_kind_first(renderers):
    renderer = renderers("qwen3_vl")
    session = Recording(renderer, say(renderer))
    _, answer = await session.ask(ASKED)
    history = [*ASKED, said(answer), *results(answer, "1"), {"role": "user", "content": "Sum up."}]
    await session.ask(history, origin=Origin(kind="compaction"))
    await session.ask(JUDGE, origin=Origin(agent="a1", parent_agent="main"))
    await session.ask(JUDGE, origin=Origin(agent="a2"))
    assert [kind_of(step) for step in session.trajectory.steps] == [
        *("main", "compaction", "subagent", "subagent")
    ]
    assert gateway(session.trajectory.steps[2])["origin"] == {"agent": "a1", "parent_agent": "main"}
