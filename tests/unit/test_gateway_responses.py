"""OpenAI's responses at the gateway, as OpenAI's own client writes and reads them."""

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming
from pydantic import TypeAdapter

from agent_cases import ANSWERS, LOOK, PICTURE_URL, Wire, answer, data_of, message_of, plain, sent, unlisted
from kit import error_of
from mmrender.errors import InputError
from mmrender.gateway import responses
from mmrender.gateway.call import AnswerCall, Delta
from mmrender.gateway.protocols import PROTOCOLS
from mmrender.messages import ImagePart, Message, TextPart, ToolCall

RESPONSES = PROTOCOLS["responses"]
ASKED = {"role": "user", "content": "How many?"}
ENDS = ("response.completed", "response.incomplete")


def client(wire):
    return openai.OpenAI(base_url="http://gateway/v1", api_key="k", http_client=wire.client(), max_retries=0)


def read(headers=(), **body):
    return RESPONSES.read({"model": "m", "input": "How many?", **body}, dict(headers))


def items(*values):
    return read(input=[*values]).messages


def tool(name="look", **fields):
    return {"type": "function", "name": name, "parameters": {"type": "object"}, **fields}


def call(name="look", call_id="c", arguments='{ "at": 3 }', **fields):
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **fields}


def said(words, **fields):
    content = [{"type": "output_text", "text": words, "annotations": [], "logprobs": []}]
    return {"type": "message", "role": "assistant", "content": content, **fields}


def thought(words, **fields):
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": words}], **fields}


def streamed(caller, **options):
    with caller.responses.create(model="m", input="How many?", stream=True, **options) as stream:
        return list(stream)


# --- replies ---


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_a_stream_assembled_by_the_client_equals_the_whole_reply(name, share):
    with client(Wire(RESPONSES, [ANSWERS[name]], share=share)) as caller:
        whole = caller.responses.create(model="m", input="How many?")
        with caller.responses.stream(model="m", input="How many?") as stream:
            final = [event.response for event in stream if event.type in ENDS]
    dropped = ("created_at", "parsed", "parsed_arguments")
    assert [plain(each.model_dump(), *dropped) for each in final] == [plain(whole.model_dump(), *dropped)]


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_events_count_up_and_items_are_opened_filled_and_closed(name, share):
    with client(Wire(RESPONSES, [ANSWERS[name]], share=share)) as caller:
        events = streamed(caller)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == added
    assert [item.to_dict() for item in done] == [item.to_dict() for item in events[-1].response.output]
    for kind, field in (
        ("output_text", "text"),
        ("reasoning_summary_text", "text"),
        ("reasoning_text", "text"),
        ("function_call_arguments", "arguments"),
    ):
        pieces = [event for event in events if event.type.startswith(f"response.{kind}.")]
        whole = [getattr(event, field) for event in pieces if event.type.endswith("done")]
        assert "".join(event.delta for event in pieces if event.type.endswith("delta")) == "".join(whole)


@pytest.mark.parametrize("name", ANSWERS)
def test_replies_and_events_have_the_forms_of_the_clients_types(name):
    wire = Wire(RESPONSES, [ANSWERS[name]])
    Response.model_validate(sent(RESPONSES.reply(read(), wire.answers)))
    adapter = TypeAdapter(ResponseStreamEvent)
    for event in data_of(b"".join(wire.events(read()))):
        adapter.validate_python(event)


@pytest.mark.parametrize("name", ANSWERS)
def test_a_repeated_answer_is_its_canonical_message(name):
    with client(Wire(RESPONSES, [ANSWERS[name]])) as caller:
        output = caller.responses.create(model="m", input="How many?").output
        with caller.responses.stream(
            model="m", input="How many?", tools=[tool("look"), tool("go")]
        ) as stream:
            final = [event.response for event in stream if event.type in ENDS]
    for repeated in (
        [item.model_dump() for item in final[0].output],
        [item.model_dump() for item in output],
        [item.to_dict() for item in output],
    ):
        assert items(ASKED, *repeated, ASKED)[1] == message_of(ANSWERS[name])


def test_a_tool_of_a_namespace_keeps_its_two_names():
    spawned = answer("", calls=[AnswerCall("c", "agents.spawn", "{}"), LOOK])
    namespace = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [tool("spawn")]}
    with client(Wire(RESPONSES, [spawned])) as caller:
        output = caller.responses.create(model="m", input="Go.", tools=[namespace, tool()]).output
    assert [(item.namespace, item.name) for item in output] == [("agents", "spawn"), (None, "look")]
    assert items(ASKED, *[item.model_dump() for item in output])[1] == message_of(spawned)


def test_logprobs_come_if_they_are_included():
    sampled = answer(
        "ab", token_texts={5: "a", 6: "b", 7: "c"}, top_logprobs=(((5, -0.5), (7, -0.9)), ((6, -1.5),))
    )
    with client(Wire(RESPONSES, [sampled])) as caller:
        asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
        part = caller.responses.create(model="m", input="x", **asked).output[0].content[0]
        done = streamed(caller, **asked)[-1].response.output[0].content[0]
    assert [(each.token, each.logprob) for each in part.logprobs] == [("a", -0.5), ("b", -1.5)]
    assert done.logprobs == part.logprobs
    assert read().logprobs is None


def test_errors_are_the_clients_own():
    wire = Wire(RESPONSES, [answer()])
    wire.failure = (400, "context_length_exceeded", "prompt is too long: 9 tokens > 8 maximum")
    with client(wire) as caller:
        with pytest.raises(openai.BadRequestError) as caught:
            caller.responses.create(model="m", input="x")
        wire.fails_in_stream = True
        failed = streamed(caller)[-1]
    assert caught.value.code == "context_length_exceeded"
    assert (failed.type, failed.response.status) == ("response.failed", "failed")
    assert failed.response.error.code == "context_length_exceeded"
    assert failed.response.error.message == "prompt is too long: 9 tokens > 8 maximum"


# --- fields ---


def test_every_field_of_the_client_is_read_ignored_or_refused_by_name():
    assert not unlisted(ResponseCreateParamsStreaming, responses)


def test_sampling_parameters_have_vllms_names():
    call = read(temperature=0.2, top_p=0.9, top_k=5, max_output_tokens=9)
    assert call.sampling_params == {"temperature": 0.2, "top_p": 0.9, "top_k": 5, "max_tokens": 9}


def test_the_form_of_the_answer_becomes_structured_outputs():
    form = {"type": "json_schema", "name": "x", "strict": True, "schema": {"a": 1}}
    call = read(text={"format": form, "verbosity": "low"})
    assert call.sampling_params["structured_outputs"] == {"json": {"a": 1}}
    assert call.notes == ("text.verbosity",)
    assert "structured_outputs" not in read(text={"format": {"type": "text"}}).sampling_params


def test_tools_become_those_of_chat_and_the_choice_is_read():
    namespace = {
        "type": "namespace",
        "name": "agents",
        "description": "d",
        "tools": [tool("spawn", strict=False)],
    }
    tools = [
        tool(description="Looks.", strict=True),
        namespace,
        {"type": "web_search", "external_web_access": True},
    ]
    call = read(tools=tools, tool_choice={"type": "function", "name": "look"}, parallel_tool_calls=False)
    look = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    spawn = {"name": "agents.spawn", "parameters": {"type": "object"}}
    assert [each["function"] for each in call.tools] == [look, spawn]
    assert (call.tool_choice, call.named_tools, call.parallel_tool_calls) == ("required", ("look",), False)
    assert call.notes == ("tools.strict", "tools.namespace.description", "tools.web_search")
    named = {"type": "function", "name": "spawn", "namespace": "agents"}
    assert read(tools=tools, tool_choice=named).named_tools == ("agents.spawn",)
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [named, {"type": "function", "name": "look"}],
    }
    call = read(tools=tools, tool_choice=allowed)
    assert (call.tool_choice, call.named_tools) == ("required", ("agents.spawn", "look"))


def test_effort_is_noted_and_none_turns_thinking_off():
    assert read(reasoning={"effort": "none"}).thinking is False
    call = read(reasoning={"effort": "high", "summary": "auto"})
    assert (call.thinking, call.notes) == (None, ("reasoning.effort",))


# --- the conversation ---


def test_instructions_and_leading_developer_messages_are_one_system_message():
    read_ = read(
        instructions="Be brief.",
        input=[
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "You code."}],
            },
            {"role": "system", "content": "Today."},
            ASKED,
            {"role": "developer", "content": "Later."},
        ],
    ).messages
    assert read_ == (
        Message(role="system", content="Be brief.\n\nYou code.\n\nToday."),
        Message(role="user", content="How many?"),
        Message(role="system", content="Later."),
    )


def test_items_of_one_answer_are_one_message():
    read_ = items(
        ASKED,
        thought("Hm.", id="rs_1", encrypted_content="x", status=None),
        said("I look.", id="msg_1", status="completed"),
        call(id="fc_1", status="completed"),
        call("go", "d", ""),
        {"type": "function_call_output", "id": "fco_1", "call_id": "c", "output": "three"},
        {"type": "function_call_output", "call_id": "d", "output": [
            {"type": "input_text", "text": "see"},
            {"type": "input_image", "image_url": PICTURE_URL, "detail": "auto"},
        ]},
        thought("Done."),
        said("Three."),
    )  # fmt: skip
    calls = (ToolCall("look", {"at": 3}, "c"), ToolCall("go", {}, "d"))
    assert read_[1:] == (
        Message(role="assistant", content="I look.", reasoning_content="Hm.", tool_calls=calls),
        Message(role="tool", content="three", tool_call_id="c"),
        Message(role="tool", content=(TextPart("see"), ImagePart(PICTURE_URL)), tool_call_id="d"),
        Message(role="assistant", content="Three.", reasoning_content="Done."),
    )


def test_an_answer_whose_text_came_in_parts_is_one_message():
    whole = answer("One. Two.", reasoning="Hm.", calls=[LOOK])
    writer = RESPONSES.events(read(), [whole.id])
    parts = [Delta(0, "content", "One."), Delta(0, "reasoning", "Hm."), Delta(0, "content", " Two.")]
    events = writer.begin() + b"".join(map(writer.delta, parts)) + writer.end([whole])
    output = data_of(events)[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "reasoning", "message", "function_call"]
    assert len({item["id"] for item in output}) == 4
    assert items(ASKED, *output)[1] == message_of(whole)


def test_answers_next_to_each_other_are_kept_apart_by_their_ids():
    one, two = answer("One.", id="aB3" * 8), answer("Two.", reasoning="Hm.", id="cD4" * 8)
    repeated = [item for each in (one, two) for item in RESPONSES.reply(read(), [each])["output"]]
    assert items(ASKED, *repeated)[1:] == (message_of(one), message_of(two))


def test_an_item_out_of_order_begins_another_answer():
    read_ = items(ASKED, said("One."), said("Two."), call(), thought("Hm."), call("go"))
    assert [(each.content, each.reasoning_content, [c.name for c in each.tool_calls]) for each in read_[1:]] == [
        ("One.", None, []), ("Two.", None, ["look"]), (None, "Hm.", ["go"]),
    ]  # fmt: skip


def test_reasoning_is_read_from_its_content_before_its_summary():
    content = [{"type": "reasoning_text", "text": "All of it."}]
    assert items(ASKED, thought("Short.", content=content), said("x"))[1].reasoning_content == "All of it."
    assert items(ASKED, {"type": "reasoning", "summary": [], "encrypted_content": "x"}, said("x"))[
        1
    ] == Message(role="assistant", content="x")


@pytest.mark.parametrize("raw", ['{"a": ', "[1]", "nope"])
def test_unreadable_arguments_are_kept_as_text(raw):
    assert items(ASKED, call(arguments=raw))[1].tool_calls[0].arguments == {"__unparsed": raw}


def test_a_search_that_the_model_did_not_make_is_noted():
    read_ = read(input=[ASKED, {"type": "web_search_call", "id": "ws_1", "status": "completed"}])
    assert (len(read_.messages), read_.notes) == (1, ("web_search_call",))


def test_where_a_call_comes_from():
    headers = {"thread-id": "t", "session-id": "s", "user-agent": "codex_exec/0"}
    main = read(headers=headers).origin
    assert (main.thread, main.agent, main.kind, main.client) == ("t", None, None, "codex_exec/0")
    compaction = {**headers, "x-codex-turn-metadata": '{"request_kind": "compaction"}'}
    assert read(headers=compaction).origin.kind == "compaction"
    spawned = read(
        headers={**headers, "x-codex-parent-thread-id": "p", "x-openai-subagent": "collab_spawn"}
    ).origin
    assert (spawned.agent, spawned.parent_agent, spawned.kind) == ("t", "p", "subagent")
    assert read(headers={**headers, "x-codex-turn-metadata": "{"}).origin.kind is None


BROKEN = {
    "no items": {"input": []},
    "input": {"input": 3},
    "item": {"input": ["hello"]},
    "item type": {"input": [ASKED, {"type": "item_reference", "id": "msg_1"}]},
    "hosted item": {"input": [{"type": "computer_call_output"}]},
    "role": {"input": [{"role": "tool", "content": "x"}]},
    "member": {"input": [{"role": "user", "content": "x", "colour": 1}]},
    "no call id": {"input": [{"type": "function_call", "name": "x", "arguments": ""}]},
    "part": {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
    "file": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "/etc/passwd"}]}]},
    "file id": {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
    "reasoning": {"input": [{"type": "reasoning", "summary": ["x"]}]},
    "unknown field": {"colour": 1},
    "include": {"include": ["file_search_call.results"]},
    "top_logprobs": {"top_logprobs": 21},
    "background": {"background": True},
    "only a search": {"tools": [{"type": "web_search"}]},
    "tool type": {"tools": [{"type": "computer_use_preview"}]},
    "namespace": {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "x"}]}]},
    "dot": {"tools": [tool("a.b")]},
    "required without tools": {"tool_choice": "required"},
    "hosted tool": {"tools": [tool()], "tool_choice": {"type": "file_search"}},
    "format": {"text": {"format": {"type": "grammar"}}},
    "max_output_tokens": {"max_output_tokens": 0},
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_request_is_refused_at_its_place(name, sentence):
    assert error_of(InputError, read, **BROKEN[name]) == sentence
