"""`AsyncLLMBackend` with audio clips: run with the interpreter of an environment that has vLLM.

Usage: `python vllm_clips.py MODEL ANSWER`; the answer is JSON. See `test_vllm_offline.py`, which sets the path
of modules.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

sys.path.append(os.environ["PACKAGES_BELOW"])  # mmrender's own, if the environment lacks them

from serve import ENVIRONMENT

os.environ.update(ENVIRONMENT)

from vllm import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from audio_cases import asked, clip, heard
from integration.vllm_backends import SETTINGS
from mmrender import Renderer, generate
from mmrender.integrations.vllm import AsyncLLMBackend

MESSAGES = (
    [asked("One", heard(clip(0.4)), "two", heard(clip(2.2, 1)), "silence?")],
    [asked("One again", heard(clip(0.4)))],
)


async def answers(model):
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model, **SETTINGS | {"limit_mm_per_prompt": {"audio": 4}})
    )
    call = {
        "renderer": Renderer.from_pretrained(model, image_backend="pil"),
        "model": "m",
        "backend": AsyncLLMBackend(engine),
        "sampling_params": {"max_tokens": 6, "temperature": 1.0, "seed": 1},
    }
    try:
        turns = [await generate(messages=messages, **call) for messages in MESSAGES]
    finally:
        engine.shutdown()
    return [[turn.completion_ids, list(map(float, turn.logprobs))] for turn in turns]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(answers(sys.argv[1]))))
