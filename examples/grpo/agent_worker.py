"""The worker's side with an agent: it calls a gateway over HTTP, which trajectories leave."""

import asyncio
import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import msgspec
import openai

from grpo.agent import Agent, Parts
from grpo.config import Config
from grpo.games import HELD_OUT, game_of
from grpo.trainer import reward_of
from grpo.worker import games_of
from mmrender import Renderer, Trajectory
from mmrender.gateway import Gateway
from mmrender.messages import Message, ToolCall
from mmrender.rollout import Observation, TrajectoryID, Turn

_MAX_TURNS: Final = 2
"""Calls of a game. The gateway refuses further ones, and the game is lost."""
_OVER: Final = {"type": "text", "text": "The game is over."}


class AgentWorker:
    """Plays games by an agent that calls a gateway of this process. Use it as an async context manager.

    Args:
        config: The run's.
        renderer: Of the model.
        backend: Samples.

    Attributes:
        renderer: The renderer.
        tools: The tools of the game.
        gateway: The gateway.
    """

    def __init__(self, config: Config, renderer: Renderer, backend: Any) -> None:
        self.renderer, self._config = renderer, config
        self._new_game = game_of(config, renderer)
        self.tools = self._new_game().tools
        self.gateway = Gateway(backend, renderer)
        self._finished = self.gateway.finished()
        self._agent = Agent()

    async def __aenter__(self) -> Self:
        self.gateway.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        self.gateway.run(self._agent.client.close())
        self.gateway.stop()

    async def train_rollouts(self, step: int) -> list[Trajectory]:
        """Play the boards of a step, each as often as a group has games. `extra` says which each game is.

        Sessions have the names of `Worker`'s rollouts, by which turns get their seeds, so that both workers
        sample equal tokens if equal tokens are allowed.
        """
        sampling = {"temperature": 1.0, "seed": self._config.seed + step}
        again = f"_step-{step}" if self._config.cycle else ""  # a name is used once
        games = games_of(self._config, step)
        names = [TrajectoryID(str(board), game).to_string() + again for board, game in games]
        return await self._play(games, sampling, names)

    async def held_out(self) -> float:
        """Play the boards that are never trained on greedily; return the share of right answers."""
        games = [(HELD_OUT + board, 0) for board in range(self._config.held_out)]
        played = await self._play(games, {"temperature": 0.0}, [None] * len(games))
        return sum(map(reward_of, played)) / len(played)

    async def _play(
        self, games: Sequence[tuple[int, int]], sampling: Mapping[str, Any], names: Sequence[str | None]
    ) -> list[Trajectory]:
        """Play games on the gateway's event loop; return trajectories in the order of the games."""
        return await asyncio.to_thread(self.gateway.run, self._play_all(games, sampling, names))

    async def _play_all(
        self, games: Sequence[tuple[int, int]], sampling: Mapping[str, Any], names: Sequence[str | None]
    ) -> list[Trajectory]:
        async with asyncio.TaskGroup() as playing:
            for (board, number), name in zip(games, names, strict=True):
                playing.create_task(self._play_one(board, number, sampling, name))
        played = [await anext(self._finished) for _ in games]
        return sorted(played, key=lambda each: (int(each.extra["group"]), each.extra["game"]))

    async def _play_one(self, board: int, number: int, sampling: Mapping[str, Any], name: str | None) -> None:
        """Let the agent play one game, and finish its session with the reward."""
        game = self._new_game()
        (question,) = game.reset([], {"seed": board}).messages
        session = await self.gateway.open_session(
            name,
            group=str(board),
            metadata={"game": number},
            sampling_params={**game.sampling, **sampling},
            max_turns=_MAX_TURNS,
        )

        judged: Observation | None = None

        def call_tool(tool: str, arguments: str) -> Parts:
            nonlocal judged
            if judged is None:
                call = ToolCall(tool, object_of(arguments), "call")
                seen = game.step(Turn(Message(role="assistant", tool_calls=(call,))))
                if not seen.done:
                    return with_urls(seen.messages[0]["content"])
                judged = seen
            return [_OVER]

        ask = session.base_url, session.api_key, with_urls(question["content"])
        try:
            answer = await self._agent.answer(*ask, self.tools, call_tool)
        except openai.PermissionDeniedError:  # all turns are used up
            answer = ""
        if judged is None:
            judged = game.step(Turn(Message(role="assistant", content=answer)))
        trajectory = await session.finish(reward=judged.reward)
        trajectory.extra |= {**trajectory.extra.pop("metadata"), "info": judged.info}


def object_of(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call. Text that is no JSON object names no cell, and loses the game."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}


def with_urls(parts: Sequence[Mapping[str, Any]]) -> Parts:
    """Return parts of a message as OpenAI's clients send them: pictures are PNG files in `data:` URLs."""
    return [_with_url(part) if part["type"] == "image" else part for part in parts]


def _with_url(part: Mapping[str, Any]) -> Mapping[str, Any]:
    file = io.BytesIO()
    part["image"].save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}
