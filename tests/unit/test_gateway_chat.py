"""OpenAI's chat completions at the gateway, as OpenAI's own client writes and reads them."""

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming

from agent_cases import ANSWERS, PICTURE_URL, Wire, answer, data_of, message_of, plain, sent, unlisted
from kit import error_of
from mmrender.errors import InputError
from mmrender.gateway import chat
from mmrender.gateway.protocols import PROTOCOLS
from mmrender.messages import AudioPart, ImagePart, Message, TextPart, ToolCall

CHAT = PROTOCOLS["chat"]
ASKED = [{"role": "user", "content": "How many?"}]


def client(wire):
    return openai.OpenAI(base_url="http://gateway/v1", api_key="k", http_client=wire.client(), max_retries=0)


def read(headers=(), **body):
    return CHAT.read({"model": "m", "messages": ASKED, **body}, dict(headers))


def message(**fields):
    return read(messages=[fields]).messages[0]


def tool(name="look"):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def assembled(caller, **options):
    with caller.chat.completions.stream(model="m", messages=ASKED, **options) as stream:
        try:
            return stream.get_final_completion()
        except openai.LengthFinishReasonError as error:  # its helper takes no answer that was cut
            return error.completion


# --- replies ---


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_a_stream_assembled_by_the_client_equals_the_whole_reply(name, share):
    with client(Wire(CHAT, [ANSWERS[name]], share=share)) as caller:
        whole = caller.chat.completions.create(model="m", messages=ASKED)
        streamed = assembled(caller, stream_options={"include_usage": True})
    expected, got = (
        plain(each.model_dump(), "created", "index", "parsed_arguments") for each in (whole, streamed)
    )
    assert got == expected


@pytest.mark.parametrize("name", ANSWERS)
def test_replies_and_chunks_have_the_forms_of_the_clients_types(name):
    call = read(stream_options={"include_usage": True})
    wire = Wire(CHAT, [ANSWERS[name]])
    ChatCompletion.model_validate(sent(CHAT.reply(call, wire.answers)))
    for chunk in data_of(b"".join(wire.events(call))):
        ChatCompletionChunk.model_validate(chunk)


@pytest.mark.parametrize("name", ANSWERS)
def test_a_repeated_answer_is_its_canonical_message(name):
    with client(Wire(CHAT, [ANSWERS[name]])) as caller:
        said = caller.chat.completions.create(model="m", messages=ASKED).choices[0].message
        streamed = assembled(caller, tools=[tool("look"), tool("go")]).choices[0].message
    for repeated in (said.model_dump(), said.model_dump(exclude_none=True), streamed.model_dump()):
        assert read(messages=[*ASKED, repeated, *ASKED]).messages[1] == message_of(ANSWERS[name])


def test_several_answers_are_choices_in_both_forms():
    answers = [ANSWERS["all"], answer("Four.", id="cD4" * 8)]
    with client(Wire(CHAT, answers)) as caller:
        whole = caller.chat.completions.create(model="m", messages=ASKED, n=2)
        streamed = assembled(caller, n=2, stream_options={"include_usage": True})
    assert [choice.message.content for choice in whole.choices] == [each.content for each in answers]
    assert [choice.message.content for choice in streamed.choices] == [each.content for each in answers]
    assert whole.usage.prompt_tokens == 100
    assert whole.usage.completion_tokens == 14
    assert streamed.usage == whole.usage


def test_logprobs_of_sampled_tokens_come_with_their_alternatives():
    said = answer(
        "ab", token_texts={5: "a", 6: "é", 7: "c"}, top_logprobs=(((5, -0.5), (7, -0.9)), ((6, -1.5),))
    )
    with client(Wire(CHAT, [said])) as caller:
        whole = caller.chat.completions.create(model="m", messages=ASKED, logprobs=True, top_logprobs=2)
        streamed = assembled(caller, logprobs=True, top_logprobs=2)
        silent = caller.chat.completions.create(model="m", messages=ASKED)
    entries = whole.choices[0].logprobs.content
    assert [(each.token, each.logprob, each.bytes) for each in entries] == [
        ("a", -0.5, [97]),
        ("é", -1.5, [195, 169]),
    ]
    assert [each.token for each in entries[0].top_logprobs] == ["a", "c"]
    assert streamed.choices[0].logprobs.content == entries
    assert silent.choices[0].logprobs is None
    assert read(logprobs=True).logprobs == 0
    assert read().logprobs is None


def test_errors_are_the_clients_own():
    wire = Wire(CHAT, [answer()])
    wire.failure = (400, "context_length_exceeded", "prompt is too long: 9 tokens > 8 maximum")
    with client(wire) as caller:
        with pytest.raises(openai.BadRequestError) as caught:
            caller.chat.completions.create(model="m", messages=ASKED)
        wire.fails_in_stream = True
        with pytest.raises(openai.APIError) as broken:
            list(caller.chat.completions.create(model="m", messages=ASKED, stream=True))
    assert caught.value.code == broken.value.code == "context_length_exceeded"
    assert broken.value.message == "prompt is too long: 9 tokens > 8 maximum"


# --- fields ---


def test_every_field_of_the_client_is_read_ignored_or_refused_by_name():
    assert not unlisted(CompletionCreateParamsStreaming, chat)


def test_a_clip_is_read_in_both_forms():
    parts = [
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "https://host/a.flac"}},
    ]
    (message,) = read(messages=[{"role": "user", "content": parts}]).messages
    assert message.content == (AudioPart("data:wav;base64,UklGRg=="), AudioPart("https://host/a.flac"))


def test_sampling_parameters_have_their_own_names():
    call = read(temperature=0.2, top_p=0.9, top_k=5, stop=["a"], seed=3, max_tokens=9, frequency_penalty=0.3)
    assert call.sampling_params == {
        "temperature": 0.2, "top_p": 0.9, "top_k": 5, "stop": ["a"], "seed": 3, "max_tokens": 9,
        "frequency_penalty": 0.3,
    }  # fmt: skip
    assert read(max_completion_tokens=4, max_tokens=9).sampling_params == {"max_tokens": 4}


def test_the_form_of_the_answer_becomes_structured_outputs():
    def form(**fields):
        return read(response_format=fields).sampling_params.get("structured_outputs")

    assert form(type="text") is None
    assert form(type="json_object") == {"json_object": True}
    assert form(type="json_schema", json_schema={"name": "x", "schema": {"a": 1}}) == {"json": {"a": 1}}


def test_tools_stay_as_they_are_and_the_choice_is_read():
    tools = [tool("look"), {**tool("go"), "function": {"name": "go", "strict": True}}]
    call = read(
        tools=tools, tool_choice={"type": "function", "function": {"name": "go"}}, parallel_tool_calls=False
    )
    assert (list(call.tools), call.tool_choice, call.named_tools) == (tools, "required", ("go",))
    assert not call.parallel_tool_calls
    assert read(tools=tools, tool_choice="required").tool_choice == "required"
    assert read(tools=tools, tool_choice="none").offered is None
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "go"}}]}
    call = read(tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert (len(call.offered), call.tool_choice, call.named_tools) == (2, "auto", ("go",))
    assert read(tools=[], tool_choice="auto").tools == ()


def test_thinking_is_read_where_it_is_clearly_on_or_off():
    assert read(reasoning_effort="none").thinking is False
    assert read(enable_thinking=True).thinking is True
    assert read(thinking={"type": "disabled"}).thinking is False
    assert read(thinking={"type": "enabled", "budget_tokens": 5}).notes == ("thinking.budget_tokens",)
    call = read(reasoning_effort="high", verbosity="low")
    assert (call.thinking, call.notes) == (None, ("verbosity", "reasoning_effort"))
    assert read(chat_template_kwargs={"enable_thinking": False}).template_arguments == {
        "enable_thinking": False
    }


# --- messages ---


def test_messages_become_canonical():
    assert message(role="developer", content="Be brief.") == Message(role="system", content="Be brief.")
    one = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
    assert message(role="user", content=one) == Message(role="user", content="a")
    image = {"type": "image_url", "image_url": {"url": PICTURE_URL, "detail": "auto"}}
    shown = message(role="tool", tool_call_id="c", content=[{"type": "text", "text": "see"}, image])
    parts = (TextPart("see"), ImagePart(PICTURE_URL))
    assert shown == Message(role="tool", tool_call_id="c", content=parts)


def test_volatile_members_of_an_answer_are_dropped():
    function = {"name": "look", "arguments": '{ "at": 3 }'}
    call = {"id": "c", "type": "function", "index": 0, "function": function, "provider_specific_fields": {}}
    said = {
        "role": "assistant", "content": "", "tool_calls": [call], "provider_specific_fields": {"a": 1},
        "annotations": [], "refusal": None, "audio": None, "function_call": None, "reasoning_content": "",
    }  # fmt: skip
    expected = Message(role="assistant", content=None, tool_calls=(ToolCall("look", {"at": 3}, "c"),))
    assert message(**said) == expected


@pytest.mark.parametrize("raw", ['{"a": ', "[1]", "nope", "null", '{"a": NaN}'])
def test_unreadable_arguments_are_kept_as_text(raw):
    said = message(role="assistant", tool_calls=[{"id": "c", "function": {"name": "x", "arguments": raw}}])
    assert said.tool_calls[0].arguments == {"__unparsed": raw}


@pytest.mark.parametrize("raw", ["", "{}", {}, None])
def test_absent_arguments_are_none_at_all(raw):
    said = message(role="assistant", tool_calls=[{"id": "c", "function": {"name": "x", "arguments": raw}}])
    assert said.tool_calls[0].arguments == {}


def test_where_a_call_comes_from():
    opencode = {"x-session-id": "s2", "x-parent-session-id": "s1", "user-agent": "opencode/1"}
    origin = read(headers=opencode).origin
    assert (origin.thread, origin.agent, origin.parent_agent, origin.kind) == ("s2", "s2", "s1", "subagent")
    assert read(headers={"idempotency-key": "k"}).idempotency_key == "k"


# --- refusals ---

BROKEN = {
    "no messages": {"messages": []},
    "messages": {"messages": {"role": "user"}},
    "message": {"messages": ["hello"]},
    "role": {"messages": [{"role": "robot", "content": "x"}]},
    "member": {"messages": [{"role": "user", "content": "x", "colour": 1}]},
    "content": {"messages": [{"role": "user", "content": 3}]},
    "part": {"messages": [{"role": "user", "content": [{"type": "sound"}]}]},
    "audio": {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
    "file of audio": {"messages": [{"role": "user", "content": [{"type": "audio_url", "audio_url": "/x.wav"}]}]},
    "file": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "/etc/passwd"}]}]},
    "file URL": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}]},
    "frames": {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": ["/x"]}]}]},
    "sound": {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": "data:,", "audio": "/x"}]}]},
    "picture of an answer": {"messages": [{"role": "assistant", "content": [{"type": "image_url", "image_url": "/x"}]}]},
    "calls of a user": {"messages": [{"role": "user", "content": "", "tool_calls": [{"function": {"name": "x"}}]}]},
    "arguments": {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": 3}}]}]},
    "unknown field": {"colour": 1},
    "n": {"n": 0},
    "many": {"n": 1000},
    "top_logprobs": {"top_logprobs": 3},
    "tool type": {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
    "tool name": {"tools": [{"type": "function", "function": {}}]},
    "tools": {"tools": {"name": "x"}},
    "required without tools": {"tool_choice": "required"},
    "unknown tool": {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "fly"}}},
    "allowed tools": {"tools": [tool()], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
    "format": {"response_format": {"type": "grammar"}},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    "two formats": {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
    "modalities": {"modalities": ["text", "audio"]},
    "prefill": {"continue_final_message": True},
    "temperature": {"temperature": 3},
    "stop": {"stop": ""},
    "max_tokens": {"max_tokens": 0},
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_request_is_refused_at_its_place(name, sentence):
    assert error_of(InputError, read, **BROKEN[name]) == sentence
