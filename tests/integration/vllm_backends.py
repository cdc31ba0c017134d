"""`LLMBackend` and `AsyncLLMBackend` on vLLM engines: run with the interpreter of an environment that has vLLM.

Usage: `python vllm_backends.py MODEL ANSWER`; the answer is JSON. See `test_vllm_offline.py`, which sets the
path of modules.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

sys.path.append(os.environ["PACKAGES_BELOW"])  # mmrender's own, if the environment lacks them

from serve import ENVIRONMENT

os.environ.update(ENVIRONMENT)

from process_rollouts import sampled
from vllm import LLM, AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from mmrender import Renderer
from mmrender.integrations.vllm import AsyncLLMBackend, LLMBackend

SETTINGS = {
    "max_model_len": 2048,
    "enforce_eager": True,
    "dtype": "float32",
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 32 << 20,
    "skip_mm_profiling": True,
    "distributed_executor_backend": "uni",
    "limit_mm_per_prompt": {"image": 4},
}


async def answers(model):
    renderer = Renderer.from_pretrained(model, image_backend="pil")
    llm = LLMBackend(LLM(model, **SETTINGS))
    found = {"LLM": await sampled(llm, renderer)}
    await llm.aclose()
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model, **SETTINGS))
    try:
        found["AsyncLLM"] = await sampled(AsyncLLMBackend(engine), renderer)
    finally:
        engine.shutdown()
    return found


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(answers(sys.argv[1]))))
