"""The guide to rollouts: its code runs, with the tiny model in place of a server's."""

import asyncio
import re
from pathlib import Path

import pytest
from PIL import Image

from mmrender.client.local import LocalBackend
from mmrender.rollout.client import RendererClient
from mmrender.rollout.environment import Environment

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rollout.md"


@pytest.fixture(scope="module")
def blocks():
    return re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def client(renderer, tiny_model):
    return RendererClient(
        renderer, backend=LocalBackend(tiny_model), sampling_params={"max_tokens": 6, "seed": 1}
    )


@pytest.fixture
def names(blocks, client):
    """Names of the first example, whose client is one of the tiny model."""
    code, _ = blocks[0].split("client = RendererClient(")
    rest = blocks[0][blocks[0].index("async def main") :]
    names = {"client": client}
    exec(code + rest, names)
    return names


QUESTIONS = [{"answer": "cow", "picture": Image.new("RGB", (64, 64))}] * 2


def test_an_environment_of_ones_own(names, capsys):
    assert isinstance(names["Guess"](), Environment)
    asyncio.run(names["main"](QUESTIONS))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1:] for line in lines] == [["4", "max_turns"]] * 2


def test_a_batch(blocks, names):
    names["questions"] = QUESTIONS
    exec(blocks[2], names)
    output = names["output"]
    assert output["errors"] == [None] * 2
    assert output["stop_reasons"] == ["max_turns"] * 2
    assert sum(output["rewards"][0]) == pytest.approx(-0.2)


def test_turn_by_turn(blocks, client):
    code = "async def talk(client, messages, tools, results):\n"
    code += "".join(f"    {line}\n" for line in blocks[1].splitlines()) + "    return turn, trajectory\n"
    names = {}
    exec(code, names)
    opening, more = ([{"role": "user", "content": words}] for words in ("Which one?", "Why?"))
    turn, trajectory = asyncio.run(names["talk"](client, opening, None, more))
    assert turn.why_rendered is None
    assert len(trajectory) == 2
