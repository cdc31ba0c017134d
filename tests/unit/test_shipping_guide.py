"""The guide's consumer that keeps before it acknowledges, run as it stands there, twice."""

import asyncio
import contextlib
import textwrap
from pathlib import Path
from typing import Any

from mmrender.shipping import Receiver, Sender
from mmrender.trajectory import Trajectory, load_trajectories
from tree_cases import Call

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "shipping.md"


def consumer() -> Any:
    """The guide's block as a coroutine function of `url` and `path`."""
    blocks = GUIDE.read_text().split("```python\n")[1:]
    (block,) = [each.split("```")[0] for each in blocks if "writer.append" in each]
    source = "async def consume(url, path):\n" + textwrap.indent(block, "    ")
    names: dict[str, Any] = {"Receiver": Receiver}
    exec(source, names)
    return names["consume"]


def rollout(number: int) -> Trajectory:
    made = Trajectory(f"task/{number}")
    Call([10, ("A", 3), 11], [20 + number], number).append_to(made)
    return made


async def run(folder: Path) -> None:
    url, path = f"unix://{folder}/socket", folder / "kept.mmc"
    for first, last in ((0, 3), (1, 5)):  # the second worker starts over from its second rollout
        task = asyncio.ensure_future(consumer()(url, path))
        async with Sender(url) as sender:
            for number in range(first, last):
                await sender.send(rollout(number), id=f"task/{number}")
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert [each.trajectory_id for each in load_trajectories(path)] == [f"task/{n}" for n in range(5)]


def test_the_guide_keeps_each_rollout_once(tmp_path):
    asyncio.run(run(tmp_path))
