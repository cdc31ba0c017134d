"""What vLLM's `LLM.generate` makes of prompts: run with the interpreter of an environment that has it.

Usage: `python vllm_offline.py MODEL PROMPTS ANSWER`; the prompts are pickled, the answer is JSON. See
`test_vllm_offline.py`.
"""

import json
import os
import pickle
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "servers" / "vllm"))

from serve import ENVIRONMENT

os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0")

from vllm import LLM, SamplingParams


def main():
    model, prompts, answer = sys.argv[1:]
    llm = LLM(
        model,
        max_model_len=2048,
        enforce_eager=True,
        dtype="float32",
        max_num_seqs=8,
        kv_cache_memory_bytes=32 << 20,
        skip_mm_profiling=True,
        distributed_executor_backend="uni",
        limit_mm_per_prompt={"image": 4},
    )
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found = []
    for prompt in pickle.loads(Path(prompts).read_bytes()):
        (output,) = llm.generate(prompt, greedy, use_tqdm=False)
        sampled = list(output.outputs[0].token_ids)
        found.append({"ids": list(output.prompt_token_ids), "sampled": sampled})
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
