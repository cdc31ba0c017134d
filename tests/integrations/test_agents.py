"""Agents of Python's frameworks, unmodified, each over a gateway of its own with scripted answers."""

from pathlib import Path

import pytest

from harnesses.checks import check_ids, count
from harnesses.runs import play
from mmrender.renderer import Renderer

NAMES = [
    "openai", "agents-chat", "agents-responses", "agents-stateful", "langchain-chat", "langchain-responses",
    "pydantic-chat", "pydantic-responses", "pydantic-messages", "smolagents",
]  # fmt: skip


@pytest.fixture(scope="module")
def qwen(shared_models):
    return Renderer.from_pretrained(shared_models / "qwen3_vl")


@pytest.mark.parametrize("name", NAMES)
def test_each_later_call_of_an_agent_continues_its_recorded_tokens(qwen, name, tmp_path):
    trajectory, model, output = play(name, qwen, tmp_path, Path("missing"))
    assert "four legs" in output
    check_ids(trajectory, model.exchanges)
    counted = count(trajectory)
    assert (counted.calls, counted.bridged) == (7, 6)
    assert counted.rendered == ("the conversation begins",)
