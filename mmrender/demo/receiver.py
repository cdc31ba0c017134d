"""The second process: `python -m mmrender.demo.receiver URL`.

Receives one trajectory and prints, as JSON, its digest and the packages that this process has imported.
"""

import asyncio
import json
import sys

from blake3 import blake3

from mmrender.shipping import Receiver
from mmrender.trajectory import Trajectory

TIMEOUT = 60.0
"""Seconds that either process waits for the other."""


def trajectory_digest(trajectory: Trajectory) -> str:
    """Hex digest of what a trainer reads: tokens, masks, log-probabilities, pixel values and messages."""
    digest = blake3(trajectory.trajectory_id.encode())
    for sample in trajectory.samples(once=False):
        logprobs = b"" if sample.logprobs is None else sample.logprobs.tobytes()
        digest.update(sample.token_ids.tobytes() + sample.loss_mask.tobytes() + logprobs)
        digest.update(repr(sorted(sample.multi_modal_data.mm_placeholders.items())).encode())
    for item in trajectory.items:
        for name, values in sorted(item.tensors("float32").items()):
            digest.update(name.encode() + values.tobytes())
    for step in trajectory.steps:
        digest.update(json.dumps(step.messages, sort_keys=True, default=str).encode())
    return digest.hexdigest()


async def _receive(url: str) -> str:
    async with Receiver(url) as receiver:
        return trajectory_digest((await receiver.receive(TIMEOUT)).value)


if __name__ == "__main__":
    digest = asyncio.run(_receive(sys.argv[1]))
    modules = sorted({name.partition(".")[0] for name in sys.modules})
    sys.stdout.write(json.dumps({"digest": digest, "modules": modules}) + "\n")
