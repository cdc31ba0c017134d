"""The worker's side: games against whatever samples, as trajectories."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final, Protocol

from grpo.config import Config
from grpo.games import HELD_OUT, RECORDED, ZoomedCell, game_of
from grpo.trainer import Trainer, reward_of
from mmrender import Renderer, RendererClient, Trajectory
from mmrender.rollout import TrajectoryID, Turn, VLMGenerator
from mmrender.training import Collator
from mmrender.trajectory import Step

_WARM_UP_CHECK: Final = 5
"""Updates on recorded games between plays of the held-out boards."""


class BranchingClient(RendererClient):
    """Samples each turn after the first several times: branches that share the prompt and all before it."""

    def __init__(self, *arguments: Any, answers: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._answers = answers

    async def create_completion(
        self,
        messages: Sequence[Any],
        *,
        parent: Step | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Turn:
        """Sample a turn and its siblings; return the first, which the environment sees."""
        given = dict(sampling_params or {})
        sample = partial(super().create_completion, messages, **options)
        turn = await sample(parent=parent, sampling_params=given)
        if parent is not None and turn.step is not None:
            siblings = [{**given, "seed": given["seed"] ^ number} for number in range(1, self._answers)]
            await asyncio.gather(*(sample(parent=turn.step, sampling_params=each) for each in siblings))
        return turn


class Player(Protocol):
    """Plays games, as `Worker` does.

    Attributes:
        renderer: The renderer.
        tools: The tools of the game.
    """

    renderer: Renderer
    tools: Any

    async def train_rollouts(self, step: int) -> list[Trajectory]:
        """Play the boards of a step; `extra` says which each game is."""

    async def held_out(self) -> float:
        """Play the boards that are never trained on greedily; return the share of right answers."""


class Worker:
    """Plays games.

    Args:
        config: The run's.
        renderer: Of the model.
        client: The server that samples; None where `backend` is a model in this process.
        options: Further options of `RendererClient`, such as `backend`.

    Attributes:
        renderer: The renderer.
        tools: Those that the game offers.
    """

    def __init__(self, config: Config, renderer: Renderer, client: Any = None, **options: Any) -> None:
        self.renderer, self._config = renderer, config
        self.tools = game_of(config, renderer)().tools
        self._trained, self._tested = (
            VLMGenerator(
                BranchingClient(renderer, client, answers=answers, forbid_media_tokens=True, **options),
                {"game": game_of(config, renderer)},
                max_concurrency=config.boards * config.rollouts,
                failures="raise",
            )
            for answers in (config.answers, 1)
        )

    async def stream(
        self, step: int, games: list[tuple[int, int]] | None = None
    ) -> AsyncGenerator[Trajectory, None]:
        """Play games of a step, by default all of them; yield each game when it ends."""
        sampling = {"temperature": 1.0, "seed": self._config.seed + step}
        games = games_of(self._config, step) if games is None else games
        async for trajectory in self._play(self._trained, games, sampling):
            trajectory.extra["step"] = step
            trajectory.trajectory_id = f"step {step}, board {trajectory.extra['name']}"
            yield trajectory

    async def train_rollouts(self, step: int) -> list[Trajectory]:
        """Play the boards of a step; `extra` says which each game is."""
        played = [trajectory async for trajectory in self.stream(step)]
        return sorted(played, key=lambda each: (each.extra["group"], each.extra["game"]))

    async def held_out(self) -> float:
        """Play the boards that are never trained on greedily; return the share of right answers."""
        games = [(HELD_OUT + board, 0) for board in range(self._config.held_out)]
        played = self._play(self._tested, games, {"temperature": 0.0})
        rewards = [reward_of(trajectory) async for trajectory in played]
        return sum(rewards) / len(rewards)

    async def _play(
        self, generator: VLMGenerator, games: list[tuple[int, int]], sampling: Mapping[str, Any]
    ) -> AsyncGenerator[Trajectory, None]:
        names = [TrajectoryID(str(board), game) for board, game in games]
        named = {name.to_string(): game for name, game in zip(names, games, strict=True)}
        played = generator.stream(
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
                for sibling in trajectory.steps[2:]:  # of the last turn, which the environment did not see
                    said = sibling.messages[-1]["content"]
                    sibling.reward = float(said == trajectory.extra["info"]["answer"])
                yield trajectory


def games_of(config: Config, step: int) -> list[tuple[int, int]]:
    """The games of a step: board, and number in its group."""
    first = ((config.seed << 20) + (step % config.cycle if config.cycle else step)) * config.boards
    return [(board, game) for board in range(first, first + config.boards) for game in range(config.rollouts)]


def needs_warm_up(config: Config, trainer: Trainer, held_out: float) -> bool:
    """Whether a model that answers this share of held-out boards learns from recorded games first."""
    begins = trainer.step == 0 and trainer.updates < config.warm_up
    return begins and held_out < config.warm_up_until


def warm_up(config: Config, trainer: Trainer, renderer: Renderer) -> dict[str, float]:
    """Take the next updates on recorded games of an expert; return the last loss and their number so far."""
    game = game_of(config, renderer)()
    if not isinstance(game, ZoomedCell):
        raise SystemExit("only the game `zoom` records games; leave --warm-up out")
    collator = Collator(
        trainer.family, pad_token_id=0, renderer=renderer, packed=True, max_length=config.row_tokens
    )
    loss = 0.0
    for update in range(trainer.updates, min(trainer.updates + _WARM_UP_CHECK, config.warm_up)):
        first = RECORDED + (config.seed << 20) + update * config.recorded
        seeds = range(first, first + config.recorded)
        games = [{"messages": game.recorded(seed), "tools": game.tools} for seed in seeds]
        loss = trainer.imitate(collator.batch(games))
    return {"loss": loss, "updates": trainer.updates}


def is_rendered(step: Step) -> bool:
    """Whether the prompt of a turn was rendered in full, by what a rollout or a gateway says of it."""
    if "gateway" in step.extra:
        return bool(step.extra["gateway"]["prompt"] == "rendered")
    return step.extra["why_rendered"] is not None


def counts_of(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Count turns, branches, later turns that were not rendered anew, pictures shown, and items held.

    Also means of what the game says of itself.
    """
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    means = {
        name: sum(each.extra["info"][name] for each in trajectories) / len(trajectories)
        for name, value in trajectories[0].extra["info"].items()
        if isinstance(value, float)
    }
    return {
        "turns": len(steps),
        "later_turns": len(steps) - len(trajectories),
        "branches": sum(len(trajectory.branches()) for trajectory in trajectories),
        "bridged": sum(not is_rendered(step) for step in steps),
        "pictures": sum(
            len({span.item.identity for span in trajectory.steps[-1].media}) for trajectory in trajectories
        ),
        "items": sum(len(trajectory.items) for trajectory in trajectories),
        **means,
    }
