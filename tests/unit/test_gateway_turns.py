"""Turns of the gateway: prompts, answers and records, over a scripted engine and Qwen3-VL's template."""

import asyncio
import json

import pytest

from gateway_cases import ASKED, Recording, gateway, results, said
from kit import data_url, noise, until
from mmrender.content import normalize_messages
from mmrender.errors import EngineConnectionError, InputError
from mmrender.gateway.call import Call
from mmrender.gateway.protocols import PROTOCOLS
from mmrender.gateway.reading import UNPARSED
from mmrender.gateway.turn import take_turn
from mmrender.renderer import Renderer
from rollout_cases import TOOLS
from rollout_cases import call as spoken


@pytest.fixture(scope="module")
def renderer(renderers):
    return renderers("qwen3_vl")


def numbered(text="I look."):
    """A model that looks once more with each turn."""
    count = iter(range(1, 1000))
    return lambda request: f"{text}\n{spoken(next(count))}"


async def test_a_conversation_is_bridged(renderer):
    session, messages = Recording(renderer, numbered("  I look. \n")), [*ASKED]
    for turn in range(4):
        step, answer = await session.ask(messages)
        assert gateway(step)["prompt"] == ("bridged" if turn else "rendered")
        assert step.previous is (session.trajectory.steps[turn - 1] if turn else None)
        messages += [said(answer, content=answer.content.strip()), *results(answer, f"result {turn}")]
    assert len(session.trajectory.branches()) == 1


async def test_a_changed_result_begins_a_branch_that_keeps_the_turns_after_it(renderer):
    session, messages = Recording(renderer, numbered(" I  look")), [*ASKED]
    for turn in range(3):
        step, answer = await session.ask(messages)
        messages += [said(answer), *results(answer, f"result {turn}")]
    messages[3] = {**messages[3], "content": "another result"}
    step, _ = await session.ask(messages)
    first, second, third = session.trajectory.steps[:3]
    record = gateway(step)
    assert (record["prompt"], record["why_branched"]) == ("joined", "messages[3] differs from step 1's")
    assert step.parent is first
    assert step.keep == len(first)
    rest = step.prompt_ids.tolist()[len(first) :]
    for turn in (second, third):
        sampled = turn.completion_ids.tolist()
        assert any(rest[at : at + len(sampled)] == sampled for at in range(len(rest)))


async def test_a_later_system_message_is_not_lost(renderer):
    session = Recording(renderer, numbered())
    _, answer = await session.ask(ASKED)
    late = {"role": "system", "content": "Hurry up."}
    step, _ = await session.ask([*ASKED, said(answer), *results(answer, "1"), late])
    text = renderer.decode(step.prompt_ids.tolist())
    assert text.count("<system-reminder>\nHurry up.\n</system-reminder>") == 1
    assert gateway(step)["prompt"] == "bridged"
    assert gateway(step)["notes"] == ["messages[4]: a later system message, rendered as a user's reminder"]


async def test_pictures_of_tool_results(renderer):
    session = Recording(renderer, numbered())
    _, answer = await session.ask(ASKED)
    picture = {"type": "image_url", "image_url": {"url": data_url(noise(1))}}
    messages = [*ASKED, said(answer), *results(answer, [picture])]
    step, answer = await session.ask(messages)
    assert len(step.own_media) == 1
    assert gateway(step)["prompt"] == "bridged"
    step, _ = await session.ask([*messages, said(answer), *results(answer, "seen")])
    assert (len(step.own_media), len(step.media)) == (0, 1)
    assert gateway(step)["prompt"] == "bridged"


async def test_a_conversation_that_ends_in_an_answer_is_refused(renderer, sentence):
    session = Recording(renderer, numbered())
    with pytest.raises(InputError) as caught:
        await session.ask([*ASKED, {"role": "assistant", "content": "I"}])
    assert str(caught.value) == sentence
    assert not session.trajectory.steps


async def test_a_picture_moves_out_of_a_result_that_would_drop_it(renderers):
    """GLM-4.5V prints no pictures in tool results."""
    session = Recording(renderers("glm4_5v"), lambda request: GLM_CALL)
    _, answer = await session.ask(ASKED)
    made = answer.calls[0].id
    pictures = [{"type": "image_url", "image_url": {"url": data_url(noise(seed))}} for seed in (1, 2)]
    shown = [{"type": "text", "text": "here"}, *pictures]
    more = {"role": "tool", "tool_call_id": "other", "content": "no picture"}
    messages = [*ASKED, said(answer), *results(answer, shown), more, {"role": "user", "content": "So?"}]
    step, answer = await session.ask(messages)
    record = gateway(step)
    assert record["prompt"] == "bridged"
    assert record["notes"] == ["messages[3]: media of a tool result, rendered in a user message"]
    assert len(step.media) == 2
    text = session.renderer.decode(step.prompt_ids.tolist()[-2000:])
    assert text.index("no picture") < text.index(f"From the result of look ({made}):") < text.index("So?")
    step, _ = await session.ask([*messages, said(answer), *results(answer, "seen")])
    assert gateway(step)["prompt"] == "bridged"
    assert [message["role"] for message in step.messages] == [
        *("system", "user", "assistant", "tool", "tool", "user", "user", "assistant", "tool", "assistant")
    ]


GLM_CALL = "<think></think>\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"


@pytest.mark.parametrize(
    ("model", "is_printed"), [("qwen3_vl", False), ("qwen3_5", False), ("qwen3_vl_thinking", True)]
)
async def test_system_messages_after_the_first(renderers, model, is_printed):
    """At the beginning and later: as they are if the template prints them, otherwise as a user's."""
    session = Recording(renderers(model), lambda request: "</think>\n\nSo." if model != "qwen3_vl" else "So.")
    second = {
        "role": "system",
        "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}],
    }
    messages = [ASKED[0], second, ASKED[1]]
    step, answer = await session.ask(messages)
    messages += [said(answer), {"role": "user", "content": "And?"}, {"role": "system", "content": "Hurry."}]
    later, _ = await session.ask(messages)
    text = session.renderer.decode(later.prompt_ids.tolist())
    assert gateway(later)["prompt"] == "bridged"
    assert all(text.count(words) == 1 for words in ("Be kind.", "Hurry."))
    assert ("<system-reminder>\nHurry." in text) is not is_printed
    notes = [gateway(each).get("notes", []) for each in (step, later)]
    assert [len(each) for each in notes] == ([0, 0] if is_printed else [1, 1])


async def test_history_from_elsewhere_is_taken_from_the_template(renderer):
    """A turn that was not sampled here, after one that was: its tokens are the template's, with bridges around."""
    session = Recording(renderer, numbered())
    first, answer = await session.ask(ASKED)
    foreign = {"role": "assistant", "content": "I was written by hand."}
    messages = [*ASKED, said(answer), *results(answer, "1"), foreign, {"role": "user", "content": "So?"}]
    step, _ = await session.ask(messages)
    assert gateway(step)["prompt"] == "joined"
    assert gateway(step)["why_branched"] == "messages[4] was not sampled here"
    whole = renderer.render(messages, add_generation_prompt=True, tools=list(step.tools)).token_ids
    assert step.prompt_ids.tolist() == whole
    assert step.parent is first


async def test_a_changed_system_message_keeps_the_sampled_turns(renderer):
    """The words of a turn are not what the template would write: they come from the sampled tokens."""
    odd = '<tool_call>\n{"name":  "look", "arguments": {"at": 1.0}}\n</tool_call>'
    session = Recording(renderer, lambda request: odd)
    first, answer = await session.ask(ASKED)
    messages = [{"role": "system", "content": "Be kind."}, ASKED[1], said(answer), *results(answer, "1")]
    step, _ = await session.ask(messages)
    assert gateway(step)["prompt"] == "joined"
    assert "the system message differs" in str(gateway(step))
    assert odd in renderer.decode(step.prompt_ids.tolist())
    assert "root" in gateway(step)
    assert step.keep < len(first.prompt_ids)


async def test_a_bridge_that_is_refused_is_a_rendering_with_the_reason(renderer):
    """An answer right after another cannot be bridged."""
    session = Recording(renderer, lambda request: "So.")
    _, answer = await session.ask(ASKED)
    foreign = {"role": "assistant", "content": "By hand."}
    step, _ = await session.ask([*ASKED, said(answer), foreign, {"role": "user", "content": "So?"}])
    assert gateway(step)["prompt"] == "rendered"
    assert gateway(step)["why_rendered"] == "the extension is empty"
    assert "root" not in gateway(step)


async def test_a_truncated_turn_is_bridged(renderer):
    session = Recording(renderer, lambda request: "I was cut o", cut=True)
    first, answer = await session.ask(ASKED)
    assert answer.finish_reason == "length"
    step, _ = await session.ask([*ASKED, said(answer), {"role": "user", "content": "Go on."}])
    assert gateway(step)["prompt"] == "bridged"
    assert step.previous is first


async def test_the_same_call_again_is_a_sibling(renderer):
    session = Recording(renderer, numbered())
    first, answer = await session.ask(ASKED)
    second, other = await session.ask(ASKED)
    assert (gateway(second)["prompt"], second.keep) == ("repeated", first.prompt_length)
    for made, step in ((answer, first), (other, second)):
        later, _ = await session.ask([*ASKED, said(made), *results(made, "1")])
        assert later.previous is step


async def test_calls_side_by_side(renderer):
    """Subagents with one task: equal requests, answered at once, and each goes on from its own answer."""
    session = Recording(renderer, numbered())
    call = Call("chat", "m", normalize_messages(ASKED), tuple(TOOLS))
    taken = await asyncio.gather(
        *(
            take_turn(session.engine, session.trajectory, session.index, call, number=each)
            for each in range(8)
        )
    )
    assert sorted(step.index for step, _ in taken) == [*range(8)]
    assert len({name.id for _, answer in taken for name in answer.calls}) == 8
    for step, answer in taken:
        assert step is session.trajectory.steps[answer.step]
        later, _ = await session.ask([*ASKED, said(answer), *results(answer, "1")])
        assert later.previous is step
    assert len(session.trajectory.branches()) == 8


async def test_a_call_that_fails_or_is_cancelled_leaves_no_trace(renderer):
    session = Recording(renderer, lambda request: EngineConnectionError("gone"))
    with pytest.raises(EngineConnectionError):
        await session.ask(ASKED)
    session.backend.say = lambda request: None
    task = asyncio.create_task(session.ask(ASKED))
    await until(lambda: session.backend.busy)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (len(session.trajectory), len(session.index)) == (0, 0)


async def test_text_streams_before_the_turn_ends(renderer):
    text = "  I look at all of it, from the left to the right, and count. "
    session = Recording(renderer, lambda request: f"{text}\n{spoken(1)}")
    session.backend.streams = True
    deltas = []
    session.options = {"on_delta": deltas.append, "number": 2}
    _, answer = await session.ask(ASKED)
    assert len(deltas) > 1
    assert {(delta.index, delta.field) for delta in deltas} == {(2, "content")}
    assert "".join(delta.text for delta in deltas) == answer.content == text


@pytest.mark.parametrize(
    ("said_text", "content", "names"),
    [
        (f"x\n{spoken(1)}\n{spoken(2)}", "x", ["look", "look"]),
        ('<tool_call>\n{"name": "gone", "arguments": {}}\n</tool_call>', "", ["gone"]),
        (BROKEN := '<tool_call>\n{"name": "look", "arguments": {"at": \n</tool_call>', "", ["look"]),
        (f"x\n{BROKEN}\n{spoken(1)}", "x", ["look", "look"]),
        (UNNAMED := "<tool_call>\nlook(1)\n</tool_call>", UNNAMED, []),
        (f"x\n{UNNAMED}\n{spoken(1)}", f"x\n{UNNAMED}", ["look"]),
        ("", "", []),
    ],
)
async def test_what_the_agent_gets(renderer, said_text, content, names):
    """Calls of unknown tools and with wrong arguments are calls, others are text. What is repeated is found."""
    session = Recording(renderer, lambda request: said_text)
    step, answer = await session.ask(ASKED)
    assert (answer.content, [call.name for call in answer.calls]) == (content, names)
    assert answer.finish_reason == ("tool_calls" if names else "stop") == step.finish_reason
    assert all(call.id.startswith("call_") and len(call.id) == 29 for call in answer.calls)
    contents = ["1"] * len(names)
    asked = [*ASKED, said(answer), *results(answer, *contents), {"role": "user", "content": "So?"}]
    read = PROTOCOLS["chat"].read(
        {"model": "m", "messages": asked, "tools": TOOLS}, {}
    )  # takes any arguments
    later, _ = await session.take(read)
    assert later.previous is step


WRONG = ('{"at": 1,}', '{"at": "a\\x"}', "[1]", '"{}"', '{"at":')


@pytest.mark.parametrize("written", WRONG)
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_arguments_that_are_no_object_come_and_return_as_the_model_wrote_them(
    renderer, protocol, written
):
    """Agents send the text back as it came, or wrapped. It is the turn that was sampled."""
    text = f'x\n<tool_call>\n{{"name": "look", "arguments": {written}}}\n</tool_call>'
    session = Recording(renderer, lambda request: text)
    step, answer = await session.ask(ASKED, protocol=protocol)
    [call] = answer.calls
    assert (answer.content, call.name, answer.finish_reason) == ("x", "look", "tool_calls")
    if protocol == "messages":
        assert json.loads(call.arguments) == {UNPARSED: written}
    else:
        assert call.arguments == written
    for repeated in (call.arguments, json.dumps({UNPARSED: written})):
        again = {"id": call.id, "type": "function", "function": {"name": "look", "arguments": repeated}}
        turn = said(answer, tool_calls=[again])
        asked = {"model": "m", "messages": [*ASKED, turn, *results(answer, "no JSON")], "tools": TOOLS}
        later, _ = await session.take(PROTOCOLS["chat"].read(asked, {}))
        record = gateway(later)
        assert (record["prompt"], record.get("rewritten")) in (("bridged", None), ("repeated", None))
        prompt = later.prompt_ids.tolist()
        assert prompt[: len(step)] == [*step.prompt_ids.tolist(), *step.completion_ids.tolist()]


async def test_calls_without_tools_are_text(renderer):
    session = Recording(renderer, lambda request: f"x\n{spoken(1)}")
    for fields in ({"tools": None}, {"tool_choice": "none"}):
        step, answer = await session.ask(ASKED, **fields)
        assert (answer.content, answer.calls, answer.finish_reason) == (f"x\n{spoken(1)}", (), "stop")
    assert step.tools == tuple(TOOLS)
    later, _ = await session.ask([*ASKED, said(answer), {"role": "user", "content": "So?"}])
    assert later.previous is step


KIMI = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}## {{ m.tool_call_id }}\n{% endif %}"
    "{{ m.content or '' }}{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}"
    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>"
    "{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
    '{"at": 1}<|tool_call_end|><|tool_calls_section_end|>'
)


async def test_results_name_the_id_that_the_model_sampled(tiny_model):
    """A format in which the model itself writes ids, and its template prints them with the results."""
    renderer = Renderer.from_pretrained(
        tiny_model, chat_template=KIMI, image_backend="pil", tool_call_grammar="kimi_sections"
    )
    session = Recording(renderer, lambda request: KIMI_CALL)
    first, answer = await session.ask(ASKED)
    assert [call.name for call in answer.calls] == ["look"]
    assert answer.calls[0].id.startswith("call_")
    step, _ = await session.ask([*ASKED, said(answer), *results(answer, "3 legs")])
    assert gateway(step)["prompt"] == "bridged"
    assert step.previous is first
    assert "tool\n## functions.look:0\n3 legs" in renderer.decode(step.prompt_ids.tolist())
    assert answer.calls[0].id not in renderer.decode(step.prompt_ids.tolist())


async def test_one_call_alone(renderer):
    session = Recording(renderer, lambda request: f"{spoken(1)}\n{spoken(2)}")
    step, answer = await session.ask(ASKED, parallel_tool_calls=False, protocol="messages")
    assert [call.arguments for call in answer.calls] == ['{"at": 1}']
    assert answer.calls[0].id.startswith("toolu_")
    assert gateway(step)["notes"] == ["1 of 2 calls were left out: parallel calls are off"]
    later, _ = await session.ask([*ASKED, said(answer), *results(answer, "1")])
    assert later.previous is step
    assert not gateway(later).get("rewritten")


async def test_the_session_decides_how_is_sampled(renderer):
    session = Recording(renderer, numbered(), limit=400)
    session.options = {
        "params": {"temperature": 1.0, "max_tokens": 100, "seed": 5},
        "template_arguments": {"add_vision_id": False},
        "number": 2,
        "options": {"cache_salt": "s"},
    }
    asked = {"temperature": 0.2, "frequency_penalty": 0.3, "max_tokens": 32000}
    step, _ = await session.ask(ASKED, sampling_params=asked, model="gpt", logprobs=2, notes=("x",))
    sent = session.backend.requests[-1]
    params = {"temperature": 1.0, "frequency_penalty": 0.3, "max_tokens": 100, "seed": 7, "logprobs": 2}
    assert {name: sent.sampling_params[name] for name in params} == params
    assert sent.cache_salt == "s"
    record = gateway(step)
    assert record["sampling_params"] == params
    assert record["replaced_params"] == {"temperature": 0.2, "max_tokens": 32000}
    assert (record["model"], record["notes"]) == ("gpt", ["x"])
    session.options = {}
    await session.ask(ASKED, sampling_params=asked)
    sent = session.backend.requests[-1]
    assert sent.sampling_params["max_tokens"] == 401 - len(sent.prompt_ids)


async def test_reasoning_is_turned_off_if_the_template_can(renderers):
    session = Recording(renderers("qwen3_5"), lambda request: "So.")
    step, _ = await session.ask(ASKED, thinking=False)
    text = session.renderer.decode(step.prompt_ids.tolist())
    assert text.endswith("<think>\n\n</think>\n\n")
    step, _ = await session.ask(ASKED, thinking=True)
    assert gateway(step)["why_rendered"] == "the template arguments differ from step 0's"
    session = Recording(renderers("qwen3_vl"), lambda request: "So.")
    step, _ = await session.ask(ASKED, thinking=False)
    assert gateway(step)["notes"] == ["reasoning turned off: the template cannot"]


async def test_a_schema_is_recorded_once(renderer):
    session = Recording(renderer, lambda request: "{}")
    schema = {"structured_outputs": {"json": {"type": "object"}}}
    first, _ = await session.ask(ASKED, sampling_params=schema)
    second, _ = await session.ask(ASKED, sampling_params=schema)
    assert gateway(first)["structured_outputs"] == schema["structured_outputs"]
    assert "structured_outputs" not in gateway(second)
    assert gateway(second)["structure"] == gateway(first)["structure"]
    assert all(step.extra["restricted"] == ["json"] for step in (first, second))


async def test_a_stop_string_is_not_part_of_the_answer(renderer):
    session = Recording(renderer, lambda request: "I look. Observation:")
    session.backend.stop_reason = "Observation:"
    step, answer = await session.ask(ASKED, sampling_params={"stop": ["Observation:"]})
    assert (answer.content, answer.stop) == ("I look. ", "Observation:")
    later, _ = await session.ask([*ASKED, said(answer), {"role": "user", "content": "So?"}])
    assert later.previous is step


async def test_names_of_tokens_for_log_probabilities(renderer):
    session = Recording(renderer, lambda request: "So.")
    _, answer = await session.ask(ASKED, logprobs=0)
    assert answer.token_texts.keys() == {*answer.token_ids}
    assert "".join(answer.token_texts[token] for token in answer.token_ids) == "So.<|im_end|>"
    _, answer = await session.ask(ASKED)
    assert answer.token_texts == {}
