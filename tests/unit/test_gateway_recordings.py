"""Recorded requests of real agents, read by the gateway's protocols."""

import itertools
from collections import Counter

import pytest

from mmrender.gateway.protocols import PROTOCOLS
from mmrender.gateway.reading import UNPARSED
from mmrender.testing.agents.recordings import records


@pytest.fixture(scope="module")
def requests(shared_agents):
    return [
        (f"{path.stem}-{number}", PROTOCOLS[name], record["body"], record["headers"])
        for path in sorted(shared_agents.glob("*.jsonl"))
        for number, name, record in records(path)
    ]


def test_every_request_is_read_whole(requests):
    for name, protocol, body, headers in requests:
        call = protocol.read(body, headers)
        assert call.model == body["model"], name
        assert call.origin.client == headers["user-agent"], name
        assert call.stream == body.get("stream", False), name
        assert all(set(tool) == {"type", "function"} for tool in call.tools or ()), name
        pictures = sum(1 for message in call.messages for _ in message.media())
        assert pictures == str(body).count("'image/png'") + str(body).count("data:image/png"), name
    assert len(requests) > 150


def test_calls_and_results_keep_their_ids(requests):
    for name, protocol, body, headers in requests:
        messages = protocol.read(body, headers).messages
        calls = {call.id for message in messages for call in message.tool_calls}
        results = [message.tool_call_id for message in messages if message.role == "tool"]
        assert set(results) <= calls, name


def test_each_request_repeats_the_last_one_of_its_run(requests):
    """In a run without compaction or subagents, the messages of a request begin the next one's."""
    for run in (
        "claude",
        "codex",
        "langgraph",
        "langgraph_responses",
        "agents_chat",
        "pyd_chat",
        "pyd_anthropic",
    ):
        calls = [
            protocol.read(body, headers)
            for name, protocol, body, headers in requests
            if name.rpartition("-")[0] == run
        ]
        assert len(calls) >= 3
        for earlier, later in itertools.pairwise(calls):
            if len(earlier.messages) < 3:
                continue
            assert later.messages[: len(earlier.messages)] == earlier.messages, run
            assert later.tools == earlier.tools


def test_notes_name_what_has_no_effect(requests):
    notes = Counter(
        note for _, protocol, body, headers in requests for note in protocol.read(body, headers).notes
    )
    assert set(notes) == {
        "output_config.effort", "reasoning_effort", "thinking.budget_tokens", "tool_result.is_error",
        "tools.namespace.description", "tools.web_search",
    }  # fmt: skip


def test_odd_arguments_of_claude_and_codex_read_as_one(requests):
    """Both were given `{"command": "echo x", ...` cut short. Each sends it back in its own form."""
    texts = {}
    for name, protocol, body, headers in requests:
        for message in protocol.read(body, headers).messages:
            for call in message.tool_calls:
                if UNPARSED in call.arguments:
                    texts.setdefault(name.rpartition("-")[0], set()).add(call.arguments[UNPARSED])
    assert all(isinstance(text, str) and text.startswith("{") for found in texts.values() for text in found)
    assert {"claude_odd", "codex_odd"} <= texts.keys()


def test_kinds_and_threads_are_named_by_the_headers(requests):
    origins = {}
    for name, protocol, body, headers in requests:
        origins.setdefault(name.rpartition("-")[0], []).append(protocol.read(body, headers).origin)
    subagents = [origin for origin in origins["claude_task"] if origin.kind == "subagent"]
    assert len({origin.agent for origin in subagents}) == 2
    assert len({origin.thread for origin in origins["claude_task"]}) == 1
    spawned = [origin for origin in origins["opencode_task"] if origin.kind == "subagent"]
    assert {origin.parent_agent for origin in spawned} == {origins["opencode_task"][0].thread}
    assert all(origin.thread for run in ("codex", "claude", "opencode") for origin in origins[run])
    assert all(origin.thread is None for origin in origins["qwen"])
