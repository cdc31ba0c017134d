"""`rendered.to_vllm_prompt()`, and the backends of engines in this process, against what vLLM saw and sampled.

Part of `make integration-vllm`.
"""

import json
import os
import pickle
import subprocess
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from audio_cases import asked, clip, heard, logprobs_of, qwen2_audio, qwen2_audio_model
from integration.engine_server import environment_of, needs_tier
from integration.process_rollouts import sampled
from mmrender import Renderer, generate
from mmrender.client.local import LocalBackend

pytestmark = [needs_tier("vllm"), pytest.mark.timeout(700)]

ROOT = Path(__file__).resolve().parents[2]
SIZES = ((64, 40), (224, 224), (300, 97))
MESSAGES = (
    [asked("One", heard(clip(0.4)), "two", heard(clip(2.2, 1)), "silence?")],
    [asked("One again", heard(clip(0.4)))],
)
"""As in `vllm_clips.py`."""


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


def answer_of(script, model, folder):
    """What a script beside this file finds, run in the environment of vLLM."""
    python = environment_of("MMRENDER_VLLM_ENV", ".venv-vllm")
    command = [python, Path(__file__).with_name(script), model, folder / "answer"]
    folders = [ROOT, ROOT / "codecs", ROOT / "tools/servers/vllm", Path(__file__).parent, ROOT / "tests"]
    path, below = os.pathsep.join(map(str, folders)), sysconfig.get_paths()["purelib"]
    variables = {**os.environ, "PYTHONPATH": path, "PACKAGES_BELOW": below}
    subprocess.run(list(map(str, command)), check=True, timeout=600, env=variables)
    return json.loads((folder / "answer").read_text())


def test_an_engine_of_this_process_hears_our_clips(tmp_path):
    """Its logprobs are those of one forward on the items, and with muted clips they are not."""
    folder = qwen2_audio(tmp_path / "model", seconds=30)
    renderer = Renderer.from_pretrained(folder, image_backend="pil")
    model = qwen2_audio_model(renderer, seconds=30)
    model.save_pretrained(folder)
    found = answer_of("vllm_clips.py", folder, tmp_path)
    for messages, (ids, logprobs) in zip(MESSAGES, found, strict=True):
        rendered = renderer.render(messages, add_generation_prompt=True)
        data = rendered.multi_modal_data
        turn = SimpleNamespace(prompt_ids=rendered.token_ids, completion_ids=ids, multi_modal_data=data)
        np.testing.assert_allclose(logprobs, logprobs_of(model, turn), rtol=0, atol=1e-3)
        assert np.abs(logprobs - logprobs_of(model, turn, is_muted=True)).max() > 0.01


async def test_engines_of_a_process_sample_as_backends(renderer, tiny_model, tmp_path):
    """Tokens and logprobs equal those of Transformers at the same prompts."""
    found = answer_of("vllm_backends.py", tiny_model, tmp_path)
    expected = await sampled(LocalBackend(tiny_model), renderer)
    assert set(found) == {"LLM", "AsyncLLM"}
    for rollouts in found.values():
        for ours, theirs in zip(sum(rollouts, []), sum(expected, []), strict=True):
            assert (ours["prompt"], ours["ids"]) == (theirs["prompt"], theirs["ids"])
            np.testing.assert_allclose(ours["logprobs"], theirs["logprobs"], atol=1e-4)
