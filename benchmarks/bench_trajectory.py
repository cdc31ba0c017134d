"""Trajectory trees: bytes and time from steps to messages and back, in memory.

    python benchmarks/bench_trajectory.py [--rounds 5] [--json FILE]

Images are those of the Qwen family, 640 x 960 pixels, 600 tokens each; every turn adds one, 20 tokens of
text and 100 sampled ones. The cases:

- rollout: one trajectory of 16 turns;
- group: 8 rollouts of 16 turns that show the same 16 images;
- long: one trajectory of 1,000 short turns, an image of the 16 every fourth;
- long text: the same without images;
- search: a tree of 200 steps over 8 images, each step starting from a random earlier one.

Three ways to ship each of them, all with images as uint8 planes; float32 patches would be eight times the
bytes. "cumulative" sends every step with all of its tokens and images; "last only" sends images for the
ends of branches alone; "tree" is what `Trajectory.to_frames` sends. Bytes of the first two are counted,
not sent. Times are medians of processor time, of the tree's four parts: appending all steps, packing and
encoding as frames, decoding and unpacking, samples of all branches. "again" is a second message with the
same images over a connection with a shared table. "peak" is the memory that packing, encoding, decoding
and unpacking take at most, besides the images.
"""

import argparse
import gc
import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs"), str(ROOT / "benchmarks")]

from batch_cases import PROCESSOR  # noqa: E402
from measure import shown_ms, table  # noqa: E402

import mmcodecs  # noqa: E402
from mmrender.media.load import load_image  # noqa: E402
from mmrender.media.processors.patches import PatchItem  # noqa: E402
from mmrender.sidecar import MultiModalData, PlaceholderRange  # noqa: E402
from mmrender.trajectory.tree import Trajectory, trajectories_from_wire, trajectories_to_wire  # noqa: E402

IMAGE_TOKENS = 600
TEXT = [5] * 20
SAMPLED = 100
Calls = list[dict[str, Any]]


def images(count: int, seed: int = 0) -> list[PatchItem]:
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 256, (count, 640, 960, 3), np.uint8)
    items = [PROCESSOR.process(load_image(Image.fromarray(picture))) for picture in pixels]
    return [item for item in items if isinstance(item, PatchItem)]


class Line:
    """A conversation that grows turn by turn."""

    def __init__(self, prompt: list[int], entries: list[tuple[PlaceholderRange, PatchItem]]) -> None:
        self.prompt, self.entries = prompt, entries

    def shown(self, item: PatchItem) -> "Line":
        placeholder = PlaceholderRange(len(self.prompt), IMAGE_TOKENS)
        prompt = [*self.prompt, *[9] * IMAGE_TOKENS, *TEXT]
        return Line(prompt, [*self.entries, (placeholder, item)])

    def call(self, random: np.random.Generator, sampled: int = SAMPLED) -> tuple[dict[str, Any], "Line"]:
        completion = random.integers(10, 50_000, sampled).tolist()
        call = {
            "prompt_ids": self.prompt,
            "completion_ids": completion,
            "logprobs": [-0.5] * sampled,
            "multi_modal_data": MultiModalData.of(self.entries),
            "finish_reason": "stop",
            "reward": 0.0,
        }
        return call, Line(self.prompt + completion, self.entries)


def rollout(items: list[PatchItem], seed: int) -> Calls:
    random = np.random.default_rng(seed)
    line, calls = Line(list(range(500)), []), []
    for item in items:
        call, line = line.shown(item).call(random)
        calls.append(call)
    return calls


def long(items: list[PatchItem], turns: int) -> Calls:
    random = np.random.default_rng(2)
    line, calls = Line(list(range(500)), []), []
    for turn in range(turns):
        line = (
            line.shown(items[turn // 4 % len(items)])
            if items and turn % 4 == 0
            else Line([*line.prompt, *TEXT], line.entries)
        )
        call, line = line.call(random, 30)
        calls.append(call)
    return calls


def search(items: list[PatchItem], steps: int) -> Calls:
    random = np.random.default_rng(1)
    lines, calls = [Line(list(range(500)), [])], []
    for _ in range(steps):
        start = lines[int(random.integers(len(lines)))]
        call, line = start.shown(items[int(random.integers(len(items)))]).call(random)
        calls.append(call)
        lines.append(line)
    return calls


def grown(rollouts: list[Calls]) -> list[Trajectory]:
    trajectories = []
    for number, calls in enumerate(rollouts):
        trajectory = Trajectory(str(number))
        for call in calls:
            trajectory.append(**call)
        trajectories.append(trajectory)
    return trajectories


def plain_bytes(trajectories: list[Trajectory], *, tips_only: bool) -> int:
    """Size of steps with whole prompts and whole sidecars."""
    total = 0
    for trajectory in trajectories:
        tips = {branch.tip.index for branch in trajectory.branches()}
        for step in trajectory.steps:
            total += 4 * (len(step) + len(step.completion_ids))
            if step.index in tips or not tips_only:
                total += sum(span.item.nbytes for span in step.media)
    return total


def timed(call: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    seconds = []
    result: Any = None
    for _ in range(rounds):
        start = time.process_time()
        result = call()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds), result


def nbytes(frames: list[Any]) -> int:
    return sum(memoryview(frame).nbytes for frame in frames)


def measure(rollouts: list[Calls], rounds: int) -> dict[str, float]:
    append, group = timed(lambda: grown(rollouts), rounds)
    out, frames = timed(lambda: mmcodecs.encode_frames(trajectories_to_wire(group)), rounds)
    received = [bytes(frame) for frame in frames]
    back, read = timed(lambda: trajectories_from_wire(mmcodecs.decode(received)), rounds)
    sample, _ = timed(lambda: [trajectory.samples() for trajectory in read], rounds)
    encoder = mmcodecs.Encoder()
    encoder.encode_frames(trajectories_to_wire(group))
    again = nbytes(encoder.encode_frames(trajectories_to_wire(group)))
    tracemalloc.start()
    mmcodecs.encode_frames(trajectories_to_wire(group))
    trajectories_from_wire(mmcodecs.decode(received))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "cumulative_bytes": plain_bytes(group, tips_only=False),
        "last_only_bytes": plain_bytes(group, tips_only=True),
        "tree_bytes": nbytes(frames),
        "again_bytes": again,
        "append_s": append,
        "out_s": out,
        "in_s": back,
        "samples_s": sample,
        "peak_bytes": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    items = images(16)
    # Copies of each image, as workers that processed it separately would have.
    own = [[replace(item, frames=item.frames.copy()) for item in items] for _ in range(8)]
    cases = {
        "rollout, 16 turns": [rollout(items, 0)],
        "group, 8 x 16 turns": [rollout(own[number], number) for number in range(8)],
        "long, 1,000 turns": [long(items, 1000)],
        "long text, 1,000 turns": [long([], 1000)],
        "search, 200 steps": [search(items[:8], 200)],
    }
    gc.freeze()  # the collector must not walk the prompts of all cases
    found = {name: measure(rollouts, options.rounds) for name, rollouts in cases.items()}
    headings = ["case", "cumulative", "last only", "tree", "again", "append", "out", "in", "samples", "peak"]
    rows = []
    for name, row in found.items():
        sizes = [row[f"{key}_bytes"] for key in ("cumulative", "last_only", "tree", "again")]
        times = [row[f"{key}_s"] for key in ("append", "out", "in", "samples")]
        rows.append(
            [
                name,
                *(f"{size / 1e6:.2f}" for size in sizes),
                *map(shown_ms, times),
                f"{row['peak_bytes'] / 1e6:.2f}",
            ]
        )
    print(table(headings, rows))
    print("sizes in MB, times in ms")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
