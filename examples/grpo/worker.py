"""The worker's side: games against whatever samples, as trajectories."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Final

from grpo.config import Config
from grpo.games import HELD_OUT, RECORDED, ZoomedCell, game_of
from grpo.trainer import Trainer, reward_of
from mmrender import Renderer
from mmrender.rollout import RendererClient, TrajectoryID, VLMGenerator
from mmrender.training import Collator
from mmrender.trajectory import Trajectory

_WARM_UP_CHECK: Final = 5
"""Updates on recorded games between plays of the held-out boards."""


class Worker:
    """Plays games.

    Args:
        config: The run's.
        renderer: Of the model.
        client: The server that samples; None where `backend` is a model in this process.
        options: Further options of `RendererClient`, such as `backend`.

    Attributes:
        renderer: The renderer.
    """

    def __init__(self, config: Config, renderer: Renderer, client: Any = None, **options: Any) -> None:
        self.renderer, self._config = renderer, config
        sampler = RendererClient(renderer, client, forbid_media_tokens=True, **options)
        concurrency = config.boards * config.rollouts
        self._generator = VLMGenerator(
            sampler, {"game": game_of(config, renderer)}, max_concurrency=concurrency, failures="raise"
        )

    async def stream(self, step: int) -> AsyncGenerator[Trajectory, None]:
        """Play the boards of a step, each as often as a group has games; yield each game when it ends."""
        config = self._config
        number = step % config.cycle if config.cycle else step
        first = ((config.seed << 20) + number) * config.boards
        games = [
            (board, game) for board in range(first, first + config.boards) for game in range(config.rollouts)
        ]
        async for trajectory in self._play(games, temperature=1.0, seed=config.seed + step):
            trajectory.extra["step"] = step
            yield trajectory

    async def train_rollouts(self, step: int) -> list[Trajectory]:
        """Play the boards of a step; `extra` says which each game is."""
        played = [trajectory async for trajectory in self.stream(step)]
        return sorted(played, key=lambda each: (each.extra["group"], each.extra["game"]))

    async def held_out(self) -> float:
        """Play the boards that are never trained on greedily; return the share of right answers."""
        games = [(HELD_OUT + board, 0) for board in range(self._config.held_out)]
        rewards = [reward_of(trajectory) async for trajectory in self._play(games, temperature=0.0)]
        return sum(rewards) / len(rewards)

    async def _play(self, games: list[tuple[int, int]], **sampling: Any) -> AsyncGenerator[Trajectory, None]:
        names = [TrajectoryID(str(board), game) for board, game in games]
        named = {name.to_string(): game for name, game in zip(names, games, strict=True)}
        played = self._generator.stream(
            {
                "prompts": [[]] * len(games),
                "env_classes": ["game"] * len(games),
                "env_extras": [{"seed": board} for board, _ in games],
                "trajectory_ids": names,
                "sampling_params": sampling,
            }
        )
        async with aclosing(played):
            async for trajectory in played:
                board, game = named[trajectory.extra["name"]]
                trajectory.extra |= {"group": board, "game": game}
                yield trajectory


async def warm_up(
    config: Config, trainer: Trainer, worker: Worker, show: Callable[[dict[str, float]], None]
) -> dict[str, float]:
    """Train on recorded games of an expert, until the model plays well enough; return what was seen."""
    game = game_of(config, worker.renderer)()
    if not isinstance(game, ZoomedCell):
        raise SystemExit("only the game `zoom` records games")
    collator = Collator(
        trainer.family, pad_token_id=0, renderer=worker.renderer, packed=True, max_length=config.row_tokens
    )
    seen = {"loss": 0.0, "held_out": await worker.held_out(), "updates": 0}
    for update in range(config.warm_up):
        if seen["held_out"] >= config.warm_up_until:
            break
        first = RECORDED + (config.seed << 20) + update * config.recorded
        seeds = range(first, first + config.recorded)
        games = [{"messages": game.recorded(seed), "tools": game.tools} for seed in seeds]
        seen |= {"loss": trainer.imitate(collator.batch(games)), "updates": update + 1}
        if (update + 1) % _WARM_UP_CHECK == 0 or update + 1 == config.warm_up:
            seen["held_out"] = await worker.held_out()
        show(seen)
    return seen


def counts_of(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Count what is done once: turns, those that were bridged, different pictures shown, and items held.

    Also means of what the game says of itself.
    """
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    means = {
        name: sum(each.extra["info"][name] for each in trajectories) / len(trajectories)
        for name in trajectories[0].extra["info"]
    }
    return {
        "turns": len(steps),
        "later_turns": len(steps) - len(trajectories),
        "bridged": sum(step.extra["why_rendered"] is None for step in steps),
        "pictures": sum(
            len({span.item.identity for span in trajectory.steps[-1].media}) for trajectory in trajectories
        ),
        "items": sum(len(trajectory.items) for trajectory in trajectories),
        **means,
    }
