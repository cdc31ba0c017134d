"""Recorded runs of real agents, replayed: their histories bridge, and nothing sampled is encoded again."""

import asyncio
from collections import Counter

import numpy as np
import pytest

from conftest import SHARED
from gateway_cases import gateway
from gateway_recordings import Replay, calls_of
from mmrender.gateway.kinds import select_samples
from mmrender.gateway.matching import Index
from mmrender.testing.agents.recordings import load_recording, recording_names

OWN = [f"own-{name}" for name in recording_names()]
FACTS = {path.stem: path for path in sorted((SHARED / "agents" / "requests").glob("*.jsonl"))}

WHY = {
    "own-browser-use": {"messages[1] differs from step": 5},
    "own-claude-code": {"the tools differ from step": 1},
    # Each step of browser-use is a conversation of its own, and its judge has another system message.
    "browser": {"messages[1] differs from step": 3, "the system message differs from step": 1},
    # Titles come first, with other tools.
    "claude_haiku": {"the tools differ from step": 1},
    "opencode": {"the tools differ from step": 1},
    "own-opencode": {"the tools differ from step": 1},
    # Two subagents with equal tasks share their prompts.
    "claude_task": {"the tools differ from step": 1},
    "opencode_task": {"the tools differ from step": 2},
    # The agent compacts: a call that sums up, and a conversation that goes on from the summary.
    "fault_opencode_400": {
        "the tools differ from step": 1,
        "the system message differs from step": 1,
        "messages[1] differs from step": 1,
    },
}
"""Calls after the first whose prompts are rendered in full, by the beginning of the reason."""


MODELS = ("qwen3_vl", "qwen3_vl_thinking", "qwen3_5", "glm4_5v")
ON_ALL_MODELS = (
    "claude",
    "claude_haiku",
    "codex",
    "langgraph_responses",
    "opencode_task",
    "pyd_chat",
    "smol_tool",
)
RUNS = [
    (name, model)
    for name in (*OWN, *FACTS)
    for model in MODELS
    if model == MODELS[0] or name in ON_ALL_MODELS
]


@pytest.fixture(scope="module", params=RUNS, ids="-".join)
def run(request, renderers):
    """A recording's name, its calls with steps and answers, and the session."""
    name, model = request.param
    calls = calls_of(FACTS[name]) if name in FACTS else load_recording(name.removeprefix("own-"))
    replay = Replay(calls, renderers(model))
    session = asyncio.run(replay.run())
    return name, replay.taken, session


def test_later_calls_are_bridged(run):
    name, taken, _ = run
    records = [gateway(step) for _, step, _ in taken]
    rendered = [record["why_rendered"] for record in records[1:] if record["prompt"] == "rendered"]
    assert records[0]["why_rendered"] == "the conversation begins"
    assert Counter(why.partition(" step ")[0] + " step" for why in rendered) == WHY.get(name, {})


def test_sampled_turns_stay_in_the_prompts_that_repeat_them(run):
    """Each answer that a request shows by its ids is in the prompt, token for token and in order."""
    _, taken, _ = run
    steps = {call.id: step for _, step, answer in taken for call in answer.calls}
    for call, step, _ in taken:
        prompt, position = step.prompt_ids.tolist(), 0
        for message in call.messages:
            for turn in dict.fromkeys(steps[each.id] for each in message.tool_calls if each.id in steps):
                position = _find(prompt, turn.completion_ids.tolist(), position)


def _find(ids, part, position):
    """The end of a part at or after a position."""
    for start in range(position, len(ids) - len(part) + 1):
        if ids[start] == part[0] and ids[start : start + len(part)] == part:
            return start + len(part)
    raise AssertionError("the turn is not in the prompt")


def test_each_sampled_token_is_trained_once(run):
    _, taken, session = run
    samples = select_samples(session.trajectory, ("main", "subagent", "compaction", "side"))
    sampled = sum(len(step.completion_ids) for _, step, _ in taken)
    assert sum(int(np.count_nonzero(sample.loss_mask)) for sample in samples) == sampled


def test_kinds(run):
    name, taken, _ = run
    kinds = "".join(gateway(step)["kind"][0] for _, step, _ in taken)
    expected = {
        "browser": "mmmms",
        "claude_haiku": "smmmmm",
        "claude_task": "mssssm",
        "fault_opencode_400": "smscc" + "c" * 3,
        "opencode": "s" + "m" * 5,
        "opencode_task": "sm" + "s" * 4 + "m",
        "qwen_loop": "m" * 8 + "c" * 40,
        "own-claude-code": "s" + "m" * 7,
        "own-opencode": "s" + "m" * 7,
    }
    assert kinds == expected.get(name, "m" * len(taken))


def test_an_index_read_back_finds_the_same_places(run):
    _, taken, session = run
    again = Index.of(session.trajectory.steps)
    for call, _, _ in taken:
        assert again.place(call) == session.index.place(call)


def test_a_tree_holds_fewer_tokens_than_calls_as_samples(run):
    _, taken, session = run
    tree = sum(len(step.own_ids) for step in session.trajectory.steps)
    calls = sum(len(step) for step in session.trajectory.steps)
    later = [step for _, step, _ in taken[1:] if gateway(step)["prompt"] == "bridged"]
    assert calls - tree >= sum(step.keep for step in later)
