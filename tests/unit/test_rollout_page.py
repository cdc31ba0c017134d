"""The guide to rollouts: its code runs, with the tiny model in place of a server's."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from mmrender import rollout
from mmrender.client.local import LocalBackend
from mmrender.renderer import Renderer
from mmrender.rollout.environment import Environment
from mmrender.rollout.generator import VLMGenerator
from mmrender.rollout.renderer_client import RendererClient

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rollout.md"


@pytest.fixture(scope="module")
def blocks():
    return re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def client(tiny_model):
    renderer = Renderer.from_pretrained(tiny_model, image_backend="pil")
    return RendererClient(
        renderer, backend=LocalBackend(tiny_model), sampling_params={"max_tokens": 6, "seed": 1}
    )


def test_the_first_example(blocks, tiny_model):
    server = '    "http://127.0.0.1:8000", model="MODEL", backend="vllm",'
    assert server in blocks[0]
    code = blocks[0].replace(server, '    backend=LocalBackend("MODEL"),').replace("512", "6")
    code = code.replace("* 8", "* 2").replace("range(8)", "range(2)")
    names = {}
    exec(code.replace('"MODEL"', repr(str(tiny_model))), names)
    assert names["output"]["errors"] == [None] * 2
    assert len(names["output"]["response_ids"]) == 2


def test_an_environment_of_ones_own(blocks, client):
    names = {}
    exec(blocks[1], names)
    assert isinstance(names["Guess"](), Environment)
    generator = VLMGenerator(client, {"guess": names["Guess"]}, max_turns=2)
    extras = [{"answer": "cow", "picture": Image.new("RGB", (64, 64))}]
    out = asyncio.run(generator.generate({"prompts": [[]], "env_classes": ["guess"], "env_extras": extras}))
    assert out["stop_reasons"] == ["max_turns"]
    assert sum(out["rewards"][0]) == pytest.approx(-0.2)


def test_turn_by_turn(blocks, client):
    code = "async def talk(client, messages, tools, results):\n"
    code += "".join(f"    {line}\n" for line in blocks[2].splitlines()) + "    return turn, trajectory\n"
    names = {}
    exec(code, names)
    opening, more = ([{"role": "user", "content": words}] for words in ("Which one?", "Why?"))
    turn, trajectory = asyncio.run(names["talk"](client, opening, None, more))
    assert turn.why_rendered is None
    assert len(trajectory) == 2


def test_its_names_are_imported_at_first_use():
    code = (
        "import sys, mmrender.rollout as rollout\n"
        "early = sorted({'torch', 'transformers', 'aiohttp', 'PIL', 'mmrender.renderer'} & set(sys.modules))\n"
        "found = [getattr(rollout, name).__name__ for name in rollout.__all__]\n"
        "print(early, found == rollout.__all__, set(rollout.__all__) <= set(dir(rollout)))\n"
        "print(sorted({'torch', 'transformers', 'aiohttp', 'stamina'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] True True\n[]\n"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = rollout.nothing
