"""Rollouts with images, for any backend: what each of two sampled, turn by turn."""

import asyncio

from PIL import Image

from mmrender import RendererClient, Trajectory


def question(size):
    image = Image.effect_mandelbrot(size, (-2, -1, 1, 1), 40)
    return {
        "role": "user",
        "content": [{"type": "image", "image": image}, {"type": "text", "text": "Which?"}],
    }


async def sampled(backend, renderer):
    """Two rollouts at once, of two turns with an image each."""
    params = {"temperature": 0, "max_tokens": 6, "min_tokens": 6, "seed": 1}
    client = RendererClient(renderer, backend=backend, sampling_params=params, history="sampled")

    async def one(size):
        trajectory, conversation = Trajectory(), []
        for _ in range(2):
            conversation += [question(size)]
            turn = await client.create_completion(conversation, trajectory=trajectory)
            conversation += [turn.message]
        return [
            {
                "prompt": step.prompt_ids.tolist(),
                "ids": step.completion_ids.tolist(),
                "logprobs": step.logprobs.tolist(),
            }
            for step in trajectory.steps
        ]

    return await asyncio.gather(one((224, 224)), one((64, 40)))
