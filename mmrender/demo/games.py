"""Rollouts in the example environment: played, saved, and compared with what a second process received."""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mmrender.demo.digest import trajectory_digest
from mmrender.demo.proofs import Proof
from mmrender.errors import ShippingConnectionError
from mmrender.renderer import Renderer
from mmrender.rollout.find_cell import FindCell, FindCellSettings
from mmrender.rollout.generator import VLMGenerator
from mmrender.rollout.metrics import rollout_metrics
from mmrender.rollout.renderer_client import RendererClient
from mmrender.rollout.rows import total_reward
from mmrender.rollout.types import GeneratorInput, TrajectoryID
from mmrender.shipping import Sender
from mmrender.trajectory.saving import load_trajectories, save_trajectories
from mmrender.trajectory.tree import Trajectory

BOARDS = 2
ROLLOUTS = 4
_PATIENCE = 60.0


@dataclass(frozen=True)
class Arrival:
    """What a second process says of the trajectories that it received: by name, what each digests to."""

    digests: dict[str, str]
    modules: list[str]
    sent_bytes: int


def settings_for(renderer: Renderer) -> FindCellSettings:
    """A small board. Each turn is one of the calls that make sense: nothing taught the model to call."""
    images_in = "tool" if "tool" in renderer.profile.image_roles else "user"
    return FindCellSettings(
        grid=3, distractors=2, view_pixels=160, max_turns=4, images_in=images_in, holds_to_choices=True
    )


async def play(client: RendererClient, renderer: Renderer) -> list[Trajectory]:
    """Roll out several games of each of several boards, all at once."""
    settings = settings_for(renderer)
    generator = VLMGenerator(
        client,
        {"find-cell": lambda: FindCell(settings)},
        sampling_params={"seed": 11, "temperature": 1.5, "max_tokens": 64},
        failures="raise",
    )
    games = [TrajectoryID(f"board-{board}", game) for board in range(BOARDS) for game in range(ROLLOUTS)]
    batch: GeneratorInput = {
        "prompts": [[]] * len(games),
        "env_classes": ["find-cell"] * len(games),
        "env_extras": [{"seed": int(game.instance_id.removeprefix("board-"))} for game in games],
        "trajectory_ids": games,
    }
    return await generator.roll_out(batch)


def prove_games(trajectories: Sequence[Trajectory]) -> list[Proof]:
    """Show that no later turn was rendered anew, and that pictures are kept once."""
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    later = [step for step in steps if step.index]
    bridged = sum(step.extra["why_rendered"] is None for step in later)
    shown = sum(len(step.entries) for step in steps)
    kept = {item.identity: item for trajectory in trajectories for item in trajectory.items}
    return [
        Proof("every later turn is bridged", bridged == len(later), f"{bridged} of {len(later)}"),
        Proof(
            "a picture is kept once",
            all(len({item.identity for item in each.items}) == len(each.items) for each in trajectories),
            f"{len(kept)} of them, in prompts {shown} times",
        ),
    ]


def game_lines(trajectories: Sequence[Trajectory]) -> list[str]:
    """One line a game: what the model did, and what it got."""
    lines = []
    for trajectory in trajectories:
        moves = [_move(step.messages[-1]) for step in trajectory.steps]
        lines.append(f"{trajectory.trajectory_id}: {', '.join(moves)}; reward {total_reward(trajectory):g}")
    metrics = rollout_metrics(trajectories)
    lines.append(
        f"{metrics['rollout/turns']:.1f} turns and {metrics['rollout/length']:,.0f} tokens on average"
    )
    return lines


def _move(message: dict[str, object]) -> str:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return "says something"
    return " and ".join(str(call["function"]["name"]) for call in calls)


def save(trajectories: Sequence[Trajectory], folder: Path) -> tuple[Path, Proof]:
    """Write trajectories as one group to a file, and compare what is read back."""
    path = folder / "games.mmc"
    save_trajectories(path, [list(trajectories)])
    same = list(map(trajectory_digest, load_trajectories(path))) == list(map(trajectory_digest, trajectories))
    return path, Proof("read back from a file", same, f"{path.stat().st_size:,} bytes")


async def ship(trajectories: Sequence[Trajectory], folder: Path) -> Arrival:
    """Send trajectories over a Unix socket to a process that is started for it.

    Raises:
        ShippingError: They did not arrive, or the process failed.
    """
    url = f"unix://{folder / 'games.sock'}"
    command = (sys.executable, "-m", "mmrender.demo.receiving", url, str(len(trajectories)))
    receiver = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    printed = asyncio.create_task(receiver.communicate())
    sent = asyncio.create_task(_sent(url, trajectories))
    try:
        await asyncio.wait({printed, sent}, return_when=asyncio.FIRST_COMPLETED)
        if printed.done() and receiver.returncode != 0:
            raise ShippingConnectionError(
                "the second process failed", where=url, got=f"exit status {receiver.returncode}"
            )
        num_bytes = await sent
        said = json.loads((await asyncio.wait_for(printed, _PATIENCE))[0])
    finally:
        sent.cancel()
        if receiver.returncode is None:
            receiver.kill()
        await asyncio.gather(printed, sent, return_exceptions=True)
    return Arrival(said["digests"], said["modules"], num_bytes)


async def _sent(url: str, trajectories: Sequence[Trajectory]) -> int:
    """Send all, and return how many bytes that took once they are acknowledged."""
    async with Sender(url) as sender:
        for trajectory in trajectories:
            await sender.send(trajectory)
        await sender.flush(_PATIENCE)
        return sender.stats.sent_bytes


def prove_arrival(trajectories: Sequence[Trajectory], arrival: Arrival) -> list[Proof]:
    """Compare what the second process decoded with what was sent."""
    ours = {trajectory.trajectory_id: trajectory_digest(trajectory) for trajectory in trajectories}
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    whole = sum(step.multi_modal_data.nbytes + 4 * len(step) for step in steps)
    detail = f"{arrival.sent_bytes:,} bytes; step by step {whole:,}"
    return [
        Proof("a second process has the same", arrival.digests == ours, detail),
        Proof("it needed no torch", "torch" not in arrival.modules, "tokens, masks, logprobs and pixels"),
    ]
