"""`rendered.to_vllm_prompt()`, and the backends of engines in this process, against what vLLM saw and sampled.

Part of `make integration-vllm`.
"""

import json
import os
import pickle
import subprocess
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from integration.engine_server import environment_of, needs_tier
from integration.process_rollouts import sampled
from mmrender import generate
from mmrender.client.local import LocalBackend

pytestmark = [needs_tier("vllm"), pytest.mark.timeout(700)]

ROOT = Path(__file__).resolve().parents[2]
SIZES = ((64, 40), (224, 224), (300, 97))


def question(*sizes):
    images = [{"type": "image", "image": Image.effect_mandelbrot(size, (-2, -1, 1, 1), 40)} for size in sizes]
    return {"role": "user", "content": [*images, {"type": "text", "text": "<|image_pad|> Which?"}]}


@pytest.fixture(scope="module")
def renderings(renderer):
    first = renderer.render([question(SIZES[1])], add_generation_prompt=True)
    (stop,) = renderer.profile.end_ids
    return [
        renderer.render([question()], add_generation_prompt=True),
        first,
        renderer.render([question(*SIZES)], add_generation_prompt=True),
        renderer.bridge_to_next_turn(
            first.token_ids,
            [*renderer.tokenizer.encode("That one."), stop],
            [question(SIZES[0])],
            previous_multi_modal_data=first.multi_modal_data,
        ),
    ]


@pytest.fixture(scope="module")
def seen(renderings, tiny_model, tmp_path_factory):
    """vLLM's account of each prompt."""
    folder = tmp_path_factory.mktemp("offline")
    (folder / "prompts").write_bytes(pickle.dumps([rendered.to_vllm_prompt() for rendered in renderings]))
    python = environment_of("MMRENDER_VLLM_ENV", ".venv-vllm")
    command = [python, __file__.replace("test_", ""), tiny_model, folder / "prompts", folder / "answer"]
    subprocess.run(list(map(str, command)), check=True, timeout=600)
    return json.loads((folder / "answer").read_text())


def test_the_engine_widens_to_our_tokens(renderings, seen):
    assert [found["ids"] for found in seen] == [rendered.token_ids for rendered in renderings]


async def test_the_engine_sees_our_pixels(renderer, renderings, seen, tiny_model):
    """Greedy tokens equal those of Transformers on our own tensors."""
    backend = LocalBackend(tiny_model)
    for rendered, found in zip(renderings, seen, strict=True):
        ours = await generate(
            backend=backend,
            model="tiny",
            prompt_ids=rendered.token_ids,
            multi_modal_data=rendered.multi_modal_data,
            renderer=renderer,
            sampling_params={"temperature": 0, "max_tokens": 8, "ignore_eos": True},
        )
        assert found["sampled"] == ours.completion_ids


async def test_engines_of_a_process_sample_as_backends(renderer, tiny_model, tmp_path):
    """Tokens and logprobs equal those of Transformers at the same prompts."""
    python = environment_of("MMRENDER_VLLM_ENV", ".venv-vllm")
    command = [python, Path(__file__).with_name("vllm_backends.py"), tiny_model, tmp_path / "answer"]
    folders = [ROOT, ROOT / "codecs", ROOT / "tools/servers/vllm", Path(__file__).parent]
    path, below = os.pathsep.join(map(str, folders)), sysconfig.get_paths()["purelib"]
    variables = {**os.environ, "PYTHONPATH": path, "PACKAGES_BELOW": below}
    subprocess.run(list(map(str, command)), check=True, timeout=600, env=variables)
    found = json.loads((tmp_path / "answer").read_text())
    expected = await sampled(LocalBackend(tiny_model), renderer)
    assert set(found) == {"LLM", "AsyncLLM"}
    for rollouts in found.values():
        for ours, theirs in zip(sum(rollouts, []), sum(expected, []), strict=True):
            assert (ours["prompt"], ours["ids"]) == (theirs["prompt"], theirs["ids"])
            np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], atol=1e-4)
