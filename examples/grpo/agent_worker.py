"""The worker's side with an agent: it calls a gateway over HTTP, which trajectories leave."""

import asyncio
import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import openai

from grpo.agent import Agent, Parts
from grpo.config import Config
from grpo.games import HELD_OUT, game_of
from grpo.trainer import reward_of
from grpo.worker import games_of
from mmrender import Renderer
from mmrender.gateway import Gateway
from mmrender.messages import Message, ToolCall
from mmrender.rollout import Observation, Turn
from mmrender.trajectory import Trajectory

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
        started = asyncio.Event()
        self._serving = asyncio.create_task(self.gateway.serve(started=lambda _: started.set()))
        await started.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._agent.client.close()
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)

    async def train_rollouts(self, step: int) -> list[Trajectory]:
        """Play the boards of a step, each as often as a group has games. `extra` says which each game is."""
        sampling = {"temperature": 1.0, "seed": self._config.seed + step}
        return await self._play(games_of(self._config, step), sampling, f"step-{step}")

    async def held_out(self) -> float:
        """Play the boards that are never trained on greedily; return the share of right answers."""
        games = [(HELD_OUT + board, 0) for board in range(self._config.held_out)]
        played = await self._play(games, {"temperature": 0.0})
        return sum(map(reward_of, played)) / len(played)

    async def _play(
        self, games: Sequence[tuple[int, int]], sampling: Mapping[str, Any], name: str | None = None
    ) -> list[Trajectory]:
        """Play games at once; return the trajectories that leave the gateway, in the order of the games."""
        async with asyncio.TaskGroup() as playing:
            for board, number in games:
                session = None if name is None else f"{name}-board-{board}-{number}"
                playing.create_task(self._play_one(board, number, sampling, session))
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

        def call_tool(tool: str, arguments: Mapping[str, Any]) -> Parts:
            nonlocal judged
            if judged is None:
                call = ToolCall(tool, dict(arguments), "call")
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


def with_urls(parts: Sequence[Mapping[str, Any]]) -> Parts:
    """Return parts of a message as OpenAI's clients send them: pictures are PNG files in `data:` URLs."""
    return [_with_url(part) if part["type"] == "image" else part for part in parts]


def _with_url(part: Mapping[str, Any]) -> Mapping[str, Any]:
    file = io.BytesIO()
    part["image"].save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}
