"""Bytes and processor time of one rollout, a new image of 1024² in each turn, for docs/scale.md to multiply.

    python benchmarks/bench_scale.py [MODEL_DIR] [--turns 20] --json docs/scale.json

Requests are weighed as in `bench_client.py`, in each way in which `VLLMBackend` sends images. Trajectories
travel over TCP on loopback; processor time there is that of both ends.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_client import MODES, SHARED_MODEL, pictures, roll_out
from measure import machine

from mmrender import Renderer, Trajectory
from mmrender.shipping import Receiver, Sender

SHIPPED = 8


def processor_seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.process_time()
    value = call()
    return time.process_time() - begun, value


def rolled_out(renderer: Renderer, images: list[Any]) -> tuple[Trajectory, int]:
    """A trajectory of as many turns as images, and the bytes of their tensors in float32."""
    trajectory, expanded = Trajectory(), 0
    messages: list[dict[str, Any]] = []
    for image in images:
        parts = [{"type": "image", "image": image}, {"type": "text", "text": "And this?"}]
        messages.append({"role": "user", "content": parts})
        prompt = renderer.render(messages, add_generation_prompt=True)
        sampled = [*renderer.tokenizer.encode("A few words on it. " * 6), renderer.get_stop_token_ids()[0]]
        data = prompt.multi_modal_data
        trajectory.append(prompt.token_ids, sampled, logprobs=[-0.5] * len(sampled), multi_modal_data=data)
        expanded += sum(each.nbytes for each in data.mm_items["image"][-1].tensors("float32").values())
        messages.append({"role": "assistant", "content": renderer.decode(sampled[:-1])})
    return trajectory, expanded


async def ship(trajectory: Trajectory) -> None:
    """Send over a connection of its own, which has seen none of the images."""
    async with Receiver("tcp://127.0.0.1:0") as receiver, Sender(receiver.url) as sender:
        await sender.send(trajectory)
        async for message in receiver:
            message.value.samples()
            break


def measure(directory: Path, turns: int) -> dict[str, Any]:
    renderer = Renderer.from_pretrained(directory, image_backend="pil")
    images, kind = pictures(turns)
    renderer.render_ids([{"role": "user", "content": [{"type": "image", "image": images[0]}]}])
    rendering, _ = processor_seconds(
        lambda: [
            renderer.render_ids([{"role": "user", "content": [{"type": "image", "image": image}]}])
            for image in images[1:]
        ]
    )
    requests = {}
    for mode in MODES:
        seconds, sent = processor_seconds(lambda mode=mode: asyncio.run(roll_out(renderer, mode, images)))
        requests[mode] = {"bytes": sum(sent), "seconds": seconds}
    trajectory, expanded = rolled_out(renderer, images)
    shipping = [processor_seconds(lambda: asyncio.run(ship(trajectory)))[0] for _ in range(SHIPPED)]
    return {
        "machine": machine(("aiohttp",)),
        "pictures": kind,
        "turns": turns,
        "image_seconds": rendering / (turns - 1),
        "requests": requests,
        "trajectory": {"bytes": len(trajectory.to_bytes()), "seconds": statistics.median(shipping)},
        "float32_bytes": expanded,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, default=SHARED_MODEL)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    text = json.dumps(measure(options.model, options.turns), indent=2)
    print(text)
    if options.json:
        options.json.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
