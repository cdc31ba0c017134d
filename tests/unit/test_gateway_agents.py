"""Recorded agents played over HTTP: against our gateway, and against a server that has none."""

import json
from dataclasses import replace

import msgspec
import pytest

from agent_cases import ANSWERS
from kit import free_port
from mmrender.gateway import Gateway
from mmrender.gateway.call import AnswerCall, Call
from mmrender.gateway.protocols import PROTOCOLS
from mmrender.testing.agents.__main__ import main
from mmrender.testing.agents.player import Player
from mmrender.testing.agents.recordings import (
    PATHS,
    AgentAnswer,
    RecordedCall,
    load_recording,
    recording_names,
)
from mmrender.testing.agents.replies import read_answer
from mmrender.trajectory import load_trajectories

# --- the program ---


def played(tmp_path, tiny_model, gateway, port, *options):
    """Exit status of the program, and its results by recording."""
    results = tmp_path / "results.json"
    status = main(
        [gateway, "--model", str(tiny_model), "--port", str(port), "--json", str(results), *options]
    )
    return status, {each["name"]: each for each in json.loads(results.read_text())["recordings"]}


def test_our_gateway_continues_every_recorded_agent(tmp_path, tiny_model, renderers, capsys):
    port = free_port()
    out = tmp_path / "rollouts.mmr"
    gateway = Gateway(f"http://127.0.0.1:{port}", renderers("tiny"), model="scripted", out=out)
    url = gateway.start()
    try:
        status, found = played(tmp_path, tiny_model, url + "/s/{session}", port)
        names = [session.name for session in gateway.sessions()]
        for name in names:
            gateway.run(gateway.run(gateway.session(name)).finish())
    finally:
        gateway.stop()
    assert status == 0
    assert list(found) == recording_names()
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(found)  # and no problem
    for name, recording in found.items():
        calls = recording["calls"]
        assert [call["status"] for call in calls] == [200] * len(load_recording(name))
        assert all(call["is_good"] for call in calls)
        new = [call["repeats"] is None for call in calls]
        assert sum(new) == {"browser-use": 6, "claude-code": 2, "opencode": 2}.get(name, 1)
        assert [call["is_continued"] for call in calls] == [not each for each in new]
    trajectories = {each.trajectory_id.rpartition("-")[0]: each for each in load_trajectories(out)}
    for name, trajectory in trajectories.items():
        recording = found[name]
        assert sum(map(len, trajectory.steps)) == sum(
            call["prompt_tokens"] + call["completion_tokens"] for call in recording["calls"]
        )
        assert sum(len(sample.token_ids) for sample in trajectory.samples()) == recording["chained_tokens"]


def test_a_server_that_renders_each_prompt_breaks_at_odd_json(tmp_path, tiny_model, capsys):
    port = free_port()
    names = ["openai", "codex", "claude-code"]
    status, found = played(tmp_path, tiny_model, f"http://127.0.0.1:{port}", port, "--only", *names)
    assert status == 1
    for name, broken in {"openai": [2, 5], "codex": [2, 5], "claude-code": [3, 6]}.items():
        calls = found[name]["calls"]
        assert [call["error"] for call in calls] == [None] * len(calls)
        assert [call["wrong"] for call in calls] == [None] * len(calls)
        assert [int(call["name"].rpartition("-")[2]) for call in calls if call["broken"]] == broken
        for call in calls:
            if call["broken"]:
                assert call["repeats"] == f"{name}-{int(call['name'].rpartition('-')[2]) - 1}"
                assert call["broken"]["is_sampled"]
                assert "caf\\u00e9" in call["broken"]["expected"] or '  "' in call["broken"]["expected"]
        last = calls[-1]["prompt_tokens"] + calls[-1]["completion_tokens"]
        assert found[name]["chained_tokens"] > 1.5 * last
    problems = [line for line in capsys.readouterr().out.splitlines() if "breaks" in line]
    assert len(problems) == 6
    assert problems[0].startswith("openai-2: breaks openai-1 at token ")


def test_refused_calls_are_reported(tmp_path, tiny_model, renderers, capsys):
    port = free_port()
    gateway = Gateway(f"http://127.0.0.1:{port}", renderers("tiny"), model="scripted")
    url = gateway.start()
    try:
        status, found = played(tmp_path, tiny_model, url + "/nowhere", port, "--only", "openai", "codex")
    finally:
        gateway.stop()
    assert status == 1
    for name in ("openai", "codex"):
        assert {call["status"] for call in found[name]["calls"]} == {404}
        assert all("there is no route POST" in call["error"] for call in found[name]["calls"])
        assert found[name]["chained_tokens"] == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "codex: and 4 more"


def test_a_gateway_that_does_not_listen_ends_the_program(tiny_model, capsys):
    gateway = f"http://127.0.0.1:{free_port()}/s/{{session}}"
    assert main([gateway, "--model", str(tiny_model), "--port", str(free_port()), "--wait", "0"]) == 2
    assert "Connect call failed" in capsys.readouterr().err


# --- replies ---


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_stream_reads_as_the_whole_reply(protocol, name):
    call = Call(protocol=protocol, model="m", messages=(), with_usage=True)
    given = ANSWERS[name]
    whole = msgspec.json.encode(PROTOCOLS[protocol].reply(call, [given]))
    writer = PROTOCOLS[protocol].events(call, [given.id])
    events = writer.begin() + writer.keep_alive() + writer.end([given])
    read = read_answer(protocol, whole, streamed=False)
    assert read_answer(protocol, events, streamed=True) == read
    assert (read.content, read.reasoning) == (given.content, given.reasoning or "")
    assert [(each.id, each.name) for each in read.calls] == [(each.id, each.name) for each in given.calls]
    assert [json.loads(each.arguments) for each in read.calls] == [
        json.loads(each.arguments) for each in given.calls
    ]
    if protocol != "chat" and given.reasoning:
        assert read.signature
    if protocol == "responses":
        assert set(read.item_ids) == {
            *(["reasoning"] if given.reasoning else []),
            *(["message"] if given.content or not given.calls else []),
            *(each.id for each in given.calls),
        }


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_broken_streams_are_no_answers(protocol):
    call = Call(protocol=protocol, model="m", messages=())
    writer = PROTOCOLS[protocol].events(call, ["aB3" * 8])
    begin = writer.begin()
    with pytest.raises(ValueError, match="the stream ends without"):
        read_answer(protocol, begin, streamed=True)
    with pytest.raises(ValueError, match=r"the stream ends in an error: .*the engine failed"):
        read_answer(
            protocol, begin + writer.failure(400, "engine_refused", "the engine failed"), streamed=True
        )
    with pytest.raises(ValueError, match="the reply has another form"):
        read_answer(protocol, b'{"error": {"message": "no"}}', streamed=False)


# --- bodies ---

RECORDED = AgentAnswer(
    "  I look. ",
    (AnswerCall("call_old", "look", '{"at": "café"}'),),
    "Hm.",
    "sig-old",
    {"message": "msg_old"},
)
OWN = AgentAnswer(
    " I see.\n",
    (AnswerCall("call_new", "look", '{"at":"x"}'),),
    "Oh.",
    "sig-new",
    {"message": "msg_new", "reasoning": "rs_new", "call_new": "fc_new"},
)


def body_of(protocol, body, *, own=OWN, recorded=RECORDED):
    """The body of a second call, whose first call had another answer than was recorded."""
    first = RecordedCall("x-0", protocol, PATHS[protocol], {}, {"tools": []}, recorded, "")
    player = Player()
    player.note(first, own)
    played_body, before = player.body(replace(first, name="x-1", body=body))
    assert (None if before is None else before.call.name) == (None if before is None else "x-0")
    return played_body, before is not None


def test_chat_repeats_the_present_answer():
    call = {"id": "call_old", "function": {"name": "look", "arguments": '{"at": "café"}'}}
    turn = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_old", "content": "I look."}
    body, repeats = body_of("chat", {"tools": [], "messages": [turn, result]})
    assert repeats
    assert body["messages"] == [
        {
            "role": "assistant",
            "content": "I see.",
            "reasoning_content": "Oh.",
            "tool_calls": [{"id": "call_new", "function": {"name": "look", "arguments": '{"at":"x"}'}}],
        },
        {"role": "tool", "tool_call_id": "call_new", "content": "I look."},
    ]


def test_arguments_keep_the_form_in_which_the_agent_writes_them():
    def arguments(repeated, own):
        call = {"id": "call_old", "function": {"name": "look", "arguments": repeated}}
        made = replace(OWN, calls=(AnswerCall("call_new", "look", own),))
        turn = {"role": "assistant", "tool_calls": [call]}
        body, _ = body_of("chat", {"tools": [], "messages": [turn]}, own=made)
        return body["messages"][0]["tool_calls"][0]["function"]["arguments"]

    assert arguments('{"at": "café"}', '{"at":  "caf\\u00e9"}') == '{"at":  "caf\\u00e9"}'  # verbatim
    assert arguments('{"at":"café"}', '{"at":  "caf\\u00e9"}') == '{"at":"café"}'  # written anew
    assert arguments('{"at":"café"}', '{"at": "x"}') == '{"at": "x"}'
    assert arguments('{"at":"repaired"}', '{"at": "x"}') == '{"at":"repaired"}'  # the agent's own


def test_messages_repeat_the_present_answer():
    turn = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "sig-old"},
            {"type": "text", "text": "  I look. "},
            {"type": "tool_use", "id": "call_old", "name": "look", "input": {"at": "café"}},
        ],
    }
    result = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "call_old", "content": "Hm."}],
    }
    body, repeats = body_of("messages", {"tools": [], "messages": [turn, result]})
    assert repeats
    assert body["messages"][0]["content"] == [
        {"type": "thinking", "thinking": "Oh.", "signature": "sig-new"},
        {"type": "text", "text": " I see.\n"},
        {"type": "tool_use", "id": "call_new", "name": "look", "input": {"at": "x"}},
    ]
    assert body["messages"][1]["content"] == [
        {"type": "tool_result", "tool_use_id": "call_new", "content": "Hm."}
    ]


def test_responses_repeat_the_present_answer():
    items = [
        {"type": "message", "role": "user", "id": "msg_user", "content": "  I look. "},
        {"type": "reasoning", "id": "rs_old", "summary": [], "encrypted_content": "sig-old"},
        {"type": "message", "role": "assistant", "id": "msg_old", "content": "  I look. "},
        {
            "type": "function_call",
            "id": "fc_old",
            "call_id": "call_old",
            "name": "look",
            "arguments": '{"at": "café"}',
        },
        {"type": "function_call_output", "call_id": "call_old", "output": "seen"},
    ]
    body, repeats = body_of("responses", {"tools": [], "input": items})
    assert repeats
    assert body["input"][0] == items[0]
    assert [item.get("id") for item in body["input"]] == ["msg_user", "rs_new", "msg_new", "fc_new", None]
    assert body["input"][1]["encrypted_content"] == "sig-new"
    assert body["input"][2]["content"] == " I see.\n"
    assert body["input"][3]["arguments"] == '{"at":"x"}'
    assert [item.get("call_id") for item in body["input"][3:]] == ["call_new", "call_new"]


def test_an_answer_without_calls_is_known_by_its_text():
    recorded, own = AgentAnswer("Four  legs."), AgentAnswer("Three legs.")
    turn = {"role": "assistant", "content": "Four  legs."}
    body, repeats = body_of("chat", {"messages": [turn]}, own=own, recorded=recorded)
    assert repeats
    assert body["messages"] == [{"role": "assistant", "content": "Three legs."}]
    other = {"role": "assistant", "content": "Two legs."}
    body, repeats = body_of("chat", {"messages": [other]}, own=own, recorded=recorded)
    assert not repeats
    assert body["messages"] == [other]


def test_ids_inside_texts_are_replaced():
    text = "Calling tools:\n[{'id': 'call_old', 'function': {'name': 'look'}}]"
    body, repeats = body_of("chat", {"tools": [], "messages": [{"role": "assistant", "content": text}]})
    assert repeats
    assert body["messages"][0]["content"] == text.replace("call_old", "call_new")
