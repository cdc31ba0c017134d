"""Whatever a request holds, a protocol reads it or refuses it by name."""

import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_cases import ANSWERS, GO, LOOK, PICTURE, PICTURE_URL, answer, data_of
from mmrender.errors import InputError
from mmrender.gateway.protocols import PROTOCOLS
from mmrender.messages import Message

SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": PICTURE_URL}}]},
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": 3}'}}
            ]},
            {"role": "tool", "tool_call_id": "c", "content": "three"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        "stop": ["a"], "temperature": 0.5, "max_tokens": 5, "n": 2, "logprobs": True, "top_logprobs": 1,
        "stream_options": {"include_usage": True}, "metadata": {"a": "b"},
    },
    "responses": {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": PICTURE_URL}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}], "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c", "name": "look", "namespace": "n", "arguments": '{"at": 3}'},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
        ],
        "tools": [{"type": "function", **FUNCTION}, {"type": "namespace", "name": "n", "tools": [{"type": "function", **FUNCTION}]}, {"type": "web_search"}],
        "tool_choice": {"type": "function", "name": "look"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"], "max_output_tokens": 5,
    },
    "messages": {
        "model": "m",
        "max_tokens": 5,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "r", "signature": "s"}, {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c", "name": "look", "input": {"at": 3, "__unparsedToolInput": {"raw": "{"}}},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "x"}], "is_error": True}]},
        ],
        "tools": [{"name": "look", "description": "Looks.", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "w"}],
        "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 5}, "stop_sequences": ["a"], "metadata": {"user_id": "{}"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    },
}  # fmt: skip
ODD = st.sampled_from([
    None, True, -1, 0, 10**30, 1.5, "", "x", "auto", "text", [], ["x"], [None], {}, {"type": "text"}, {"type": "tool"},
    {"type": ["x"]}, {"role": "user"}, {"a": {"b": {}}}, [[[]]], "data:", "file:///etc/passwd", "/etc/passwd",
    {"type": "image", "path": "/etc/passwd"}, {"type": "text", "text": "x"}, {"url": "file:///etc/passwd"},
])  # fmt: skip


def places(value, path=()):
    """The path of every member and item."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def paths_in(message: Message):
    """Sources of the pictures of a message."""
    return [part.source for _, part in message.media()]


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_bodies_are_read_as_they_are(name):
    call = PROTOCOLS[name].read(BODIES[name], {})
    assert call.named_tools == ("look",)
    assert [message.role for message in call.messages][-3:] == ["user", "assistant", "tool"]


@settings(max_examples=50)
@pytest.mark.parametrize("name", PROTOCOLS)
@given(data=st.data())
def test_a_changed_body_is_read_or_refused_by_name(name, data):
    body = copy.deepcopy(BODIES[name])
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(places(body)) or [("model",)]))
        holder: Any = body
        for key in path[:-1]:
            holder = holder[key]
        change = data.draw(st.sampled_from(["replace", "remove", "add", "repeat"]))
        odd = copy.deepcopy(data.draw(ODD))
        if change == "remove":
            del holder[path[-1]]
        elif change == "add" and isinstance(holder, dict):
            holder["colour"] = odd
        elif change == "repeat" and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[path[-1]]))
        else:
            holder[path[-1]] = odd
    try:
        call = PROTOCOLS[name].read(body, {})
        assert len(call.digests.messages) == len(call.messages)
    except InputError:
        return
    for message in call.messages:
        assert all(source.lower().startswith(("data:", "http")) for source in paths_in(message))
    msgspec.json.encode([msgspec.to_builtins(message) for message in call.messages])


headers = st.dictionaries(
    st.sampled_from(["user-agent", "x-session-id", "x-parent-session-id", "thread-id", "x-codex-turn-metadata",
                     "x-claude-code-agent-id", "x-openai-subagent", "idempotency-key"]),
    st.text(max_size=20) | st.sampled_from(["{", "[]", '{"request_kind": []}', "null", "compact"]),
)  # fmt: skip


@pytest.mark.parametrize("name", PROTOCOLS)
@given(headers=headers)
def test_any_headers_are_read(name, headers):
    origin = PROTOCOLS[name].read(BODIES[name], headers).origin
    assert origin.kind in (None, "subagent", "compaction")


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@settings(max_examples=30)
@pytest.mark.parametrize("name", PROTOCOLS)
@given(
    content=texts, reasoning=texts, calls=st.lists(st.sampled_from([LOOK, GO]), max_size=2), cut=st.booleans()
)
def test_a_stream_without_deltas_holds_the_whole_answer(name, content, reasoning, calls, cut):
    """A caller that comes again gets the answer in one piece."""
    said = answer(content, reasoning=reasoning or None, calls=calls)
    call = PROTOCOLS[name].read(BODIES[name], {})
    writer = PROTOCOLS[name].events(call, [said.id, said.id])
    events = writer.begin() + writer.end([said])
    sent = "".join([str(event) for event in data_of(events)])
    for text in (content, reasoning, *[each.id for each in calls]):
        assert repr(text)[1:-1] in sent or text in sent


def test_answers_are_never_empty_events():
    assert all(
        data_of(PROTOCOLS[name].events(PROTOCOLS[name].read(BODIES[name], {}), ["a"]).end([each]))
        for name in PROTOCOLS
        for each in ANSWERS.values()
    )
