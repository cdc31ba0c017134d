"""Anthropic's messages at the gateway, as Anthropic's own client writes and reads them."""

import pytest

from agent_cases import (
    ANSWERS,
    GO,
    LOOK,
    PICTURE,
    PICTURE_URL,
    Wire,
    answer,
    data_of,
    message_of,
    plain,
    sent,
    unlisted,
)
from kit import error_of
from mmrender.errors import InputError
from mmrender.gateway import messages
from mmrender.gateway.protocols import PROTOCOLS
from mmrender.messages import ImagePart, Message, TextPart, ToolCall

MESSAGES = PROTOCOLS["messages"]
ASKED = [{"role": "user", "content": "How many?"}]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}


def client(wire):
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(
        base_url="http://gateway", api_key="k", http_client=wire.client(), max_retries=0
    )


def read(headers=(), **body):
    return MESSAGES.read({"model": "m", "max_tokens": 64, "messages": ASKED, **body}, dict(headers))


def messages_of(*blocks, role="user"):
    more = [] if role == "user" else ASKED
    return read(messages=[{"role": role, "content": [*blocks]}, *more]).messages[
        : None if role == "user" else 1
    ]


def text(words, **fields):
    return {"type": "text", "text": words, **fields}


def result(content, call="c", **fields):
    return {"type": "tool_result", "tool_use_id": call, "content": content, **fields}


# --- replies ---


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_a_stream_assembled_by_the_client_equals_the_whole_reply(name, share):
    with client(Wire(MESSAGES, [ANSWERS[name]], share=share)) as caller:
        whole = caller.messages.create(model="m", max_tokens=64, messages=ASKED)
        with caller.messages.stream(model="m", max_tokens=64, messages=ASKED) as stream:
            streamed = stream.get_final_message()
    assert plain(streamed.model_dump(), "parsed_output") == plain(whole.model_dump())


@pytest.mark.parametrize("name", ANSWERS)
def test_a_repeated_answer_is_its_canonical_message(name):
    content = sent(MESSAGES.reply(read(), [ANSWERS[name]]))["content"]
    repeated = {"role": "assistant", "content": content}
    assert read(messages=[*ASKED, repeated, *ASKED]).messages[1] == message_of(ANSWERS[name])


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_as_the_client_holds_it_is_its_canonical_message(name):
    with client(Wire(MESSAGES, [ANSWERS[name]])) as caller:
        with caller.messages.stream(model="m", max_tokens=64, messages=ASKED) as stream:
            streamed = stream.get_final_message()
        content = [block.model_dump() for block in streamed.content]
    repeated = {"role": "assistant", "content": content}
    assert read(messages=[*ASKED, repeated, *ASKED]).messages[1] == message_of(ANSWERS[name])


@pytest.mark.parametrize("name", ANSWERS)
def test_replies_and_events_have_the_forms_of_the_clients_types(name):
    pytest.importorskip("anthropic")
    from anthropic.types import Message as Reply
    from anthropic.types import RawMessageStreamEvent
    from pydantic import TypeAdapter

    wire = Wire(MESSAGES, [ANSWERS[name]])
    Reply.model_validate(sent(MESSAGES.reply(read(), wire.answers)))
    adapter = TypeAdapter(RawMessageStreamEvent)
    for event in data_of(b"".join(wire.events(read(stream=True)))):
        if event["type"] != "ping":  # the client skips it
            adapter.validate_python(event)


def test_why_an_answer_ended():
    def ending(**fields):
        reply = MESSAGES.reply(read(), [answer(**fields)])
        return reply["stop_reason"], reply["stop_sequence"]

    assert ending() == ("end_turn", None)
    assert ending(calls=[LOOK]) == ("tool_use", None)
    assert ending(finish_reason="length") == ("max_tokens", None)
    assert ending(stop="END") == ("stop_sequence", "END")


def test_a_cached_prefix_is_counted_apart():
    usage = MESSAGES.reply(read(), [answer()])["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (36, 64, 7)


def test_errors_are_the_clients_own():
    anthropic = pytest.importorskip("anthropic")
    wire = Wire(MESSAGES, [answer()])
    wire.failure = (400, "context_length_exceeded", "prompt is too long: 9 tokens > 8 maximum")
    with client(wire) as caller:
        with pytest.raises(anthropic.BadRequestError) as caught:
            caller.messages.create(model="m", max_tokens=64, messages=ASKED)
        wire.fails_in_stream = True
        with pytest.raises(anthropic.APIStatusError) as broken:
            list(caller.messages.create(model="m", max_tokens=64, messages=ASKED, stream=True))
    expected = {"type": "invalid_request_error", "message": "prompt is too long: 9 tokens > 8 maximum"}
    assert caught.value.body["error"] == broken.value.body["error"] == expected


# --- fields ---


def test_every_field_of_the_client_is_read_ignored_or_refused_by_name():
    pytest.importorskip("anthropic")
    from anthropic.types import beta, message_create_params

    for params in (
        message_create_params.MessageCreateParamsStreaming,
        beta.message_create_params.MessageCreateParamsStreaming,
    ):
        assert not unlisted(params, messages)


def test_sampling_parameters_have_vllms_names():
    call = read(temperature=1, top_p=0.9, top_k=5, stop_sequences=["a"])
    assert call.sampling_params == {
        "temperature": 1,
        "top_p": 0.9,
        "top_k": 5,
        "stop": ["a"],
        "max_tokens": 64,
    }


def test_tools_become_openais_and_the_choice_is_read():
    tools = [
        {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}, "cache_control": {}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ]
    call = read(tools=tools, tool_choice={"type": "tool", "name": "look", "disable_parallel_tool_use": True})
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    assert call.tools == ({"type": "function", "function": function},)
    assert (call.tool_choice, call.named_tools, call.parallel_tool_calls) == ("required", ("look",), False)
    assert call.notes == ("tools.web_search_20250305",)
    assert read(tools=tools, tool_choice={"type": "any"}).tool_choice == "required"
    assert read(tools=tools, tool_choice={"type": "none"}).offered is None


def test_thinking_is_read_where_it_is_clearly_on_or_off():
    enabled = read(thinking={"type": "enabled", "budget_tokens": 1024})
    assert (enabled.thinking, enabled.notes) == (True, ("thinking.budget_tokens",))
    assert read(thinking={"type": "disabled"}).thinking is False
    adaptive = read(thinking={"type": "adaptive"}, output_config={"effort": "high"})
    assert (adaptive.thinking, adaptive.notes) == (None, ("output_config.effort",))


def test_the_form_of_the_answer_becomes_structured_outputs():
    form = {"type": "json_schema", "schema": {"a": 1}}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        assert read(**fields).sampling_params["structured_outputs"] == {"json": {"a": 1}}


# --- the conversation ---


def test_the_billing_line_and_cache_marks_leave_no_trace():
    def opened(version, **marks):
        billing = text(f"x-anthropic-billing-header: cc_version={version};")
        return read(system=[billing, text("You code.", **marks), text("Be brief.")]).messages

    assert opened("2.1.197.77f") == opened("2.1.197.84c", cache_control={"type": "ephemeral"})
    assert read(system="x-anthropic-billing-header: a\nYou code.").messages[0].content == "You code."
    assert opened("2")[0] == Message(role="system", content="You code.\n\nBe brief.")


def test_results_of_tools_are_messages_of_their_own():
    read_ = messages_of(
        result("one"), result([text("see"), IMAGE], "d", is_error=False), text("Now?"), text("Go.")
    )
    assert read_ == (
        Message(role="tool", content="one", tool_call_id="c"),
        Message(role="tool", content=(TextPart("see"), ImagePart(PICTURE_URL)), tool_call_id="d"),
        Message(role="user", content=(TextPart("Now?"), TextPart("Go."))),
    )
    assert messages_of(result(None)) == (Message(role="tool", content="", tool_call_id="c"),)
    assert read(messages=[{"role": "user", "content": [result("x", is_error=True)]}]).notes == (
        "tool_result.is_error",
    )


def test_system_messages_may_come_later():
    later = read(messages=[*ASKED, {"role": "system", "content": "Remember."}]).messages
    assert later[1] == Message(role="system", content="Remember.")


def test_an_answer_of_several_blocks_is_one_message():
    (said,) = messages_of(
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        text("I look"),
        text(" now."),
        {"type": "tool_use", "id": "c", "name": "look", "input": {"a": None}},
        {
            "type": "tool_use",
            "id": "d",
            "name": "go",
            "input": {"__unparsedToolInput": {"raw": '{"a', "len": 3}},
        },
        role="assistant",
    )
    calls = (ToolCall("look", {"a": None}, "c"), ToolCall("go", {"__unparsed": '{"a'}, "d"))
    assert said == Message(role="assistant", content="I look now.", reasoning_content="Hm.", tool_calls=calls)


def test_readable_arguments_that_claude_could_not_read_are_read():
    use = {
        "type": "tool_use",
        "id": "c",
        "name": "go",
        "input": {"__unparsedToolInput": {"raw": GO.arguments}},
    }
    (said,) = messages_of(use, role="assistant")
    assert said.tool_calls[0].arguments == {"d": None, "b": 1000.0}


def test_where_a_call_comes_from():
    headers = {
        "x-claude-code-session-id": "s", "x-claude-code-agent-id": "a", "x-claude-code-parent-agent-id": "p",
        "user-agent": "claude-cli/2",
    }  # fmt: skip
    origin = read(headers=headers).origin
    assert (origin.thread, origin.agent, origin.parent_agent, origin.kind) == ("s", "a", "p", "subagent")
    assert origin.client == "claude-cli/2"
    main = read(metadata={"user_id": '{"session_id": "s"}'}).origin
    assert (main.thread, main.agent, main.kind) == ("s", None, None)
    assert read(metadata={"user_id": "someone"}).origin.thread is None


BROKEN = {
    "no messages": {"messages": []},
    "message": {"messages": ["hello"]},
    "role": {"messages": [{"role": "tool", "content": "x"}]},
    "member": {"messages": [{"role": "user", "content": "x", "name": "y"}]},
    "content": {"messages": [{"role": "user", "content": None}]},
    "block": {"messages": [{"role": "user", "content": [text("a"), {"type": "document", "source": {}}]}]},
    "later block": {"messages": [{"role": "user", "content": [result("x"), "hello"]}]},
    "file": {"messages": [{"role": "user", "content": [{"type": "image", "source": {"path": "/etc/passwd"}}]}]},
    "file id": {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}]},
    "result": {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
    "result part": {"messages": [{"role": "user", "content": [result([{"type": "search_result"}])]}]},
    "answer block": {"messages": [{"role": "assistant", "content": [text("a"), {"type": "server_tool_use"}]}]},
    "prefill": {"messages": [*ASKED, {"role": "assistant", "content": "{"}]},
    "unknown field": {"colour": 1},
    "max_tokens": {"max_tokens": 0},
    "stop": {"stop": ["a"]},
    "system": {"system": [IMAGE]},
    "only a search": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    "tool type": {"tools": [{"type": "bash_20250124", "name": "bash"}]},
    "tool schema": {"tools": [{"name": "look"}]},
    "no tool": {"tool_choice": {"type": "tool"}},
    "required without tools": {"tool_choice": {"type": "any"}},
    "edits": {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
    "format": {"output_config": {"format": {"type": "grammar"}}},
    "task budget": {"output_config": {"task_budget": {}}},
    "thinking": {"thinking": {"type": "sometimes"}},
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_request_is_refused_at_its_place(name, sentence):
    assert error_of(InputError, read, **BROKEN[name]) == sentence
