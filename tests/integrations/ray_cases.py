"""Conversations for the Ray tests, and the driver that one of them kills.

Usage: `python ray_cases.py MODEL FOLDER COUNT SHARD WORKERS`: render to files, and print each shard that is done.
"""

import sys
import time
from collections.abc import Iterator

import numpy as np
import ray
from PIL import Image

from mmrender.integrations.ray import render_to_files


def conversations(count: int, side: int = 224) -> list:
    """Conversations of one picture each; every third picture is shared with the one before."""
    made = []
    for index in range(count):
        values = np.random.default_rng(index - (index % 3 == 2)).integers(0, 255, (side, side, 3), np.uint8)
        ask = [{"type": "image", "image": Image.fromarray(values)}, {"type": "text", "text": f"No. {index}?"}]
        made.append([{"role": "user", "content": ask}, {"role": "assistant", "content": f"Noise {index}."}])
    return made


def rendered(model: str, folder: str, count: int, shard: int, workers: int) -> Iterator:
    """Render on a cluster of this machine; yield the samples."""
    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, configure_logging=False)
    started = time.perf_counter()

    def progress(done: int, shards: int) -> None:
        print(f"shard {done} of {shards} after {time.perf_counter() - started:.1f} s", flush=True)

    try:
        yield from render_to_files(
            conversations(count), model, folder, shard_size=shard, in_flight=2 * workers, on_progress=progress
        )
    finally:
        ray.shutdown()


if __name__ == "__main__":
    model, folder, *numbers = sys.argv[1:]
    print(sum(1 for _ in rendered(model, folder, *map(int, numbers))), "samples")
