"""Bytes and time to ship rollouts whose turns each add an image, with and without repetition.

    python benchmarks/bench_sidecar.py [--turns 1 2 4 8 16 32] [--image-mb 8.87] [--rounds 3] [--json FILE]

Every turn adds one image and 600 tokens. Three ways to ship all the steps:

- cumulative: each step with the sidecar of the whole conversation, as rollouts hold them;
- last only: `strip_intermediate_mm_data`, so that the last turn alone has its sidecar;
- content-addressed: `pack_sidecars` or `pack_group`, one message.

The groups are 8 rollouts of the given number of turns that begin with the same 4 images. "ms out" is from
steps to messages in one reused buffer, "ms in" from messages to steps; both are medians. Steps are shipped
one message each, but for the packed form, since the codec itself writes an array that stands twice in a
message once.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs")]

import mmcodecs  # noqa: E402
from mmrender.trajectory import (  # noqa: E402
    pack_group,
    pack_sidecars,
    strip_intermediate_mm_data,
    unpack_group,
    unpack_sidecars,
)

TOKENS_PER_TURN = 600
PATCH_WIDTH = 1176
GROUP = 8
SHARED_IMAGES = 4
Step = dict[str, Any]


def make_item(name: str, image_bytes: int) -> dict[str, Any]:
    patches = image_bytes // 4 // PATCH_WIDTH
    pixels = np.full((patches, PATCH_WIDTH), hash(name) % 97, np.float32)
    return {"pixel_values": pixels, "image_grid_thw": np.array([[1, 2, patches // 2]])}


def make_rollout(turns: int, image_bytes: int, first: list[tuple[str, Any]], name: str) -> list[Step]:
    """Steps that hold, as rollouts do, all the images so far; the item objects are shared."""
    images = list(first)
    steps: list[Step] = []
    prompt = list(range(1000))
    for turn in range(turns):
        key = f"{name}-{turn}"
        images.append((key, make_item(key, image_bytes)))
        prompt = prompt + [len(key)] * TOKENS_PER_TURN
        sidecar = {
            "mm_hashes": {"image": [key for key, _ in images]},
            "mm_placeholders": {"image": [{"offset": 9 * i, "length": 8} for i in range(len(images))]},
            "mm_items": {"image": [item for _, item in images]},
        }
        completion = list(range(turn, turn + 100))
        block = {"prompt_ids": prompt, "completion_ids": completion, "multi_modal_data": sidecar}
        steps.append({"tokens": block, "reward": 0.0, "parent": turn - 1 if turn else None})
        prompt = prompt + completion
    return steps


def nbytes(messages: list[memoryview]) -> int:
    return sum(len(message) for message in messages)


class Channel:
    """Writes messages into one buffer that is reused, as a sender does, and says how long they are."""

    def __init__(self, capacity: int) -> None:
        self.buffer = memoryview(mmcodecs.encode(np.zeros(capacity, np.uint8)).obj)  # aligned, and warm

    def send(self, value: Any) -> memoryview:
        return mmcodecs.encode(value, buffer=self.buffer)


Receive = Callable[[Any], Any]


def messages_of(way: str, rollouts: list[list[Step]]) -> Iterator[Any]:
    if way == "content-addressed":
        yield pack_group(rollouts) if len(rollouts) > 1 else pack_sidecars(rollouts[0])
        return
    for rollout in rollouts:
        yield from strip_intermediate_mm_data(rollout) if way == "last only" else rollout


def receive_of(way: str, rollouts: list[list[Step]]) -> Receive:
    if way != "content-addressed":
        return lambda value: value
    return unpack_group if len(rollouts) > 1 else unpack_sidecars


def measure(way: str, rollouts: list[list[Step]], channel: Channel, rounds: int) -> dict[str, Any]:
    """Ship the rollouts `rounds` times; each message is read before the next one takes its buffer."""
    sent, out, back = 0, [], []
    receive = receive_of(way, rollouts)
    for _ in range(rounds):
        sent, spent_out, spent_in = 0, 0.0, 0.0
        start = time.perf_counter()
        for value in messages_of(way, rollouts):
            message = channel.send(value)
            middle = time.perf_counter()
            receive(mmcodecs.decode(message))
            end = time.perf_counter()
            sent += len(message)
            spent_out += middle - start
            spent_in += end - middle
            start = end
        out.append(spent_out)
        back.append(spent_in)
    return {"bytes": sent, "ms_out": 1e3 * statistics.median(out), "ms_in": 1e3 * statistics.median(back)}


def report(case: str, turns: int, found: dict[str, dict[str, Any]]) -> None:
    whole = found["cumulative"]["bytes"]
    for way, row in found.items():
        print(
            f"{case:9} {turns:5} {way:18} {row['bytes'] / 1e6:10.1f} {whole / row['bytes']:7.1f}x "
            f"{row['ms_out']:9.1f} {row['ms_in']:9.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--group-turns", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--image-mb", type=float, default=8.87)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    image = int(options.image_mb * 1e6)
    most = max([*options.turns, *(GROUP * t + SHARED_IMAGES for t in options.group_turns)])
    channel = Channel((most + 1) * image + (64 << 20))
    rows = []
    print(f"{'case':9} {'turns':>5} {'way':18} {'MB':>10} {'saved':>8} {'ms out':>9} {'ms in':>9}")
    cases = [("rollout", turns) for turns in options.turns] + [
        ("group", turns) for turns in options.group_turns
    ]
    for case, turns in cases:
        if case == "rollout":
            rollouts = [make_rollout(turns, image, [], "r")]
        else:
            first = [(f"shared-{i}", make_item(f"shared-{i}", image)) for i in range(SHARED_IMAGES)]
            rollouts = [make_rollout(turns, image, first, f"r{number}") for number in range(GROUP)]
        ways = ("cumulative", "last only", "content-addressed")
        found = {way: measure(way, rollouts, channel, options.rounds) for way in ways}
        report(case, turns, found)
        rows += [{"case": case, "turns": turns, "way": way, **row} for way, row in found.items()]
        if case == "rollout" and turns == 32:
            ratio = found["cumulative"]["bytes"] / found["content-addressed"]["bytes"]
            verdict = "reached" if ratio >= 16 else "MISSED"
            print(f"bar: content-addressed at most 1/16 of cumulative at 32 turns: 1/{ratio:.1f}, {verdict}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
