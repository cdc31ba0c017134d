"""The second process: `python -m mmrender.demo.receiving URL COUNT`.

Receives so many trajectories and prints, as JSON, what each digests to and which packages that took.
"""

import asyncio
import json
import sys

from mmrender.demo.digest import trajectory_digest
from mmrender.shipping import Receiver

_PATIENCE = 60.0


async def receive(url: str, count: int) -> dict[str, str]:
    """Take trajectories until there are `count`, and return their digests by name.

    Raises:
        TimeoutError: They did not come.
    """
    digests: dict[str, str] = {}
    async with Receiver(url) as receiver:
        while len(digests) < count:
            received = await receiver.receive(_PATIENCE)
            digests[received.id] = trajectory_digest(received.value)
    return digests


def main() -> None:
    """Run the process."""
    url, count = sys.argv[1:]
    digests = asyncio.run(receive(url, int(count)))
    modules = sorted({name.partition(".")[0] for name in sys.modules})
    sys.stdout.write(json.dumps({"digests": digests, "modules": modules}) + "\n")


if __name__ == "__main__":
    main()
