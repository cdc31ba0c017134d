"""The second process of the demonstration: `python -m mmrender.testing.receiver URL`.

Receives one trajectory and prints, as JSON, its digest and the packages that this process has imported.
"""

import asyncio
import json
import sys

from blake3 import blake3

from mmrender.shipping import Receiver
from mmrender.trajectory.tree import Trajectory

TIMEOUT = 60.0
"""Seconds that each process waits for the other."""


def trajectory_digest(trajectory: Trajectory) -> str:
    """Return the hex digest of a trajectory as it is shipped: tokens, pixels, messages and all else."""
    digest = blake3()
    for frame in trajectory.to_frames():
        digest.update(frame)
    return digest.hexdigest()


async def _receive(url: str) -> str:
    async with Receiver(url) as receiver:
        return trajectory_digest((await receiver.receive(TIMEOUT)).value)


if __name__ == "__main__":
    digest = asyncio.run(_receive(sys.argv[1]))
    modules = sorted({name.partition(".")[0] for name in sys.modules})
    sys.stdout.write(json.dumps({"digest": digest, "modules": modules}) + "\n")
