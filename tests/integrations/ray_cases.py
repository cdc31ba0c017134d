"""Conversations for the Ray tests, and the driver that one of them kills.

Usage: `python ray_cases.py MODEL FOLDER COUNT SHARD WORKERS`: render to files, and print each shard that is done.
`RAY_GATES` names a folder: from the shard STARTS["NAME"] on, workers wait for the file NAME in it.
"""

import asyncio
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import ray
from PIL import Image

from harnesses.scripted_model import ScriptedModel
from mmrender.integrations.ray import render_to_files

SHARDS = 12
STARTS = {"first": 3, "last": 9}
"""Shards that workers begin after a gate is open, by the gate's name."""


def train_on(message) -> bool:
    """Choose the answers, once the gate of their conversation is open."""
    if message.role != "assistant":
        return False
    index, count = map(int, re.findall(r"\d+", str(message.content)))
    shard = index // max(count // SHARDS, 1)
    gates = [Path(os.environ["RAY_GATES"], name) for name, start in STARTS.items() if shard >= start]
    for _ in range(6000):
        if all(gate.exists() for gate in gates):
            return True
        time.sleep(0.02)
    raise TimeoutError(f"a gate of shard {shard} stays closed")


class GatedModel(ScriptedModel):
    """Streams its tokens, and ends turns whose prompt says "Wait." last once its folder has the file `open`.

    The file `waiting-NAME` then contains its process id, where the prompt says "session NAME".
    """

    folder: Path

    async def generate(self, request, transport, *, on_tokens=None):
        response = await super().generate(request, transport, on_tokens=on_tokens)
        prompt = self.renderer.tokenizer.decode(request.prompt_ids)
        if "Wait." in prompt.rpartition("step-")[2]:
            name = re.search(r"session (\S+):", prompt)[1]
            (self.folder / f"waiting-{name}").write_text(str(os.getpid()))
            for _ in range(6000):
                if (self.folder / "open").exists():
                    return response
                await asyncio.sleep(0.02)
            raise TimeoutError("the gate stays closed")
        return response


def gated_model(folder: Path, renderer) -> GatedModel:
    """Return the engine of a gateway. Answer n of a session is "This is step-n."."""
    model = GatedModel(renderer, [f"This is step-{n}." for n in range(1, 20)], tool_marker="")
    model.folder = folder
    return model


def conversations(count: int, side: int = 224) -> list:
    """Conversations of one picture each; every third picture is shared with the one before."""
    made = []
    for index in range(count):
        values = np.random.default_rng(index - (index % 3 == 2)).integers(0, 255, (side, side, 3), np.uint8)
        ask = [{"type": "image", "image": Image.fromarray(values)}, {"type": "text", "text": f"No. {index}?"}]
        made.append(
            [{"role": "user", "content": ask}, {"role": "assistant", "content": f"Noise {index} of {count}."}]
        )
    return made


def rendered(model: str, folder: str, count: int, shard: int, workers: int) -> Iterator:
    """Render on a cluster of this machine; yield the samples."""
    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, configure_logging=False)
    started = time.perf_counter()

    def progress(done: int, shards: int) -> None:
        print(f"shard {done} of {shards} after {time.perf_counter() - started:.1f} s", flush=True)

    try:
        yield from render_to_files(
            conversations(count),
            model,
            folder,
            shard_size=shard,
            in_flight=2 * workers,
            on_progress=progress,
            train_on=train_on,
        )
    finally:
        ray.shutdown()


if __name__ == "__main__":
    model, folder, *numbers = sys.argv[1:]
    print(sum(1 for _ in rendered(model, folder, *map(int, numbers))), "samples")
