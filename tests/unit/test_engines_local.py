"""The engine client over a real model in this process, greedy, with images."""

import asyncio

import pytest
from PIL import Image

from mmrender.client.local import LocalBackend
from mmrender.engines import ClientPolicy, InferenceEngineClient, LocalEngine
from mmrender.errors import EngineUnsupportedError
from mmrender.renderer import Renderer

PARAMS = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


def test_pauses_change_nothing_of_what_a_model_samples(tiny_model):
    """After an abort the prompt grows by what was sampled, and is computed in one go: the same tokens follow."""
    renderer = Renderer.from_pretrained(tiny_model)
    engines = [LocalEngine(LocalBackend(tiny_model), name=f"local{index}") for index in range(2)]
    prompts = [
        [
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": Image.new("RGB", (64 + 32 * seed, 64), (40 * seed, 90, 200))},
                    {"type": "text", "text": f"Which colour is picture {seed}?"},
                ],
            }
        ]
        for seed in range(6)
    ]
    batch = {"prompts": prompts, "sampling_params": PARAMS, "session_ids": list(range(6))}

    async def run(modes):
        client = InferenceEngineClient(engines, renderer=renderer, policy=ClientPolicy(concurrency=2))
        generating = asyncio.create_task(client.generate(batch))
        for mode in modes:
            await asyncio.sleep(0.03)
            await client.pause_generation(mode)
            assert not any(member.calls for member in client.members.values())
            await client.resume_generation()
        output = await generating
        with pytest.raises(EngineUnsupportedError, match=r"^local1: the engine cannot freeze requests"):
            await InferenceEngineClient(engines[1:]).pause_generation("keep")
        await client.teardown()
        assert len(asyncio.all_tasks()) == 1
        return output

    calm, paused = asyncio.run(run([])), asyncio.run(run(["abort", "wait", "abort", "abort"]))
    assert paused["response_ids"] == calm["response_ids"]
    assert paused["responses"] == calm["responses"]
    for one, other in zip(paused["response_logprobs"], calm["response_logprobs"], strict=True):
        assert one == pytest.approx(other, abs=1e-4)
