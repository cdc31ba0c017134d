"""Environments, and `run_episode`: a model and an environment take turns until one of them ends it."""

import hashlib
import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, Unpack, runtime_checkable

from mmrender.client.types import RequestOptions
from mmrender.content import normalize_messages
from mmrender.errors import InputError, MessageError
from mmrender.messages import Message
from mmrender.rollout.client import RendererClient, Turn
from mmrender.trajectory.tree import Trajectory

Result = TypeVar("Result")
MaybeAwaitable: TypeAlias = Result | Awaitable[Result]

StopReason: TypeAlias = Literal["done", "max_turns", "max_length", "prompt_too_long", "abort", "error"]
"""Why a rollout ended: the environment is done, a maximum of turns or tokens was reached, a prompt was too
long under the policy `stop`, the engine aborted a turn, or an error, which the trajectory names."""


@dataclass(frozen=True, slots=True)
class Observation:
    """An environment's answer, at the start and after each turn of the model.

    Attributes:
        messages: New messages: tool results and user turns with their images, in any form that a renderer
            takes, but no assistant's. May be empty only when `done`.
        reward: Reward of the turn, ignored at a reset.
        done: Whether the episode is over.
        sampling_params: For the next turn, in vLLM's names. They take precedence over the rollout's.
        info: Plain data that is kept with the trajectory, such as counts that become metrics.
    """

    messages: Sequence[Any] = ()
    reward: float = 0.0
    done: bool = False
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """One episode at a time. Methods may be plain or `async`; plain ones run in the event loop.

    An optional `close()`, plain or `async`, is called when the rollout ends for any reason.
    """

    @property
    def tools(self) -> Sequence[Any] | None:
        """Definitions of the tools that the model may call, or None."""
        ...

    def reset(self, prompt: Sequence[Any], extras: Mapping[str, Any]) -> MaybeAwaitable[Observation]:
        """Begin an episode.

        Args:
            prompt: Messages of the data set. The environment may show them, or others.
            extras: Other fields of the data set, such as a seed or the answer.

        Returns:
            All opening messages.
        """
        ...

    def step(self, turn: Turn) -> MaybeAwaitable[Observation]:
        """Act on a turn of the model, and return the next observation."""
        ...


async def run_episode(
    client: RendererClient,
    environment: Environment,
    prompt: Sequence[Any],
    extras: Mapping[str, Any],
    *,
    trajectory: Trajectory,
    sampling_params: Mapping[str, Any] | None = None,
    seed_name: str | None = None,
    max_turns: int | None = None,
    max_length: int | None = None,
    **request_options: Unpack[RequestOptions],
) -> StopReason:
    """Roll out one episode. The trajectory receives each turn with its reward.

    Args:
        client: Samples the turns.
        environment: Reset first, and closed at the end.
        prompt: Messages of the data set, passed to the environment.
        extras: Other fields of the data set, passed to the environment.
        trajectory: Receives the turns. Its `extra` receives `stop_reason` and the last `info`.
        sampling_params: Take precedence over the client's. Each turn derives its own `seed`.
        seed_name: Name of the rollout from which seeds are derived, by default the trajectory's id.
        max_turns: Maximum turns of the model, by default the environment's choice.
        max_length: Number of tokens of prompt and completion after which no further turn begins.
        **request_options: Options of every request.

    Raises:
        Exception: Any error of environment or client. The trajectory has the turns so far.
    """
    params = {**client.sampling_params, **(sampling_params or {})}
    name = trajectory.trajectory_id if seed_name is None else seed_name
    try:
        observation = await _observed(environment.reset(prompt, extras), "reset")
        conversation = _messages_of(observation, "reset")
        reason: StopReason = "done"
        while not observation.done:
            if max_turns is not None and len(trajectory) >= max_turns:
                reason = "max_turns"
                break
            sampling = {**params, **observation.sampling_params}
            if sampling.get("seed") is not None:
                sampling["seed"] = turn_seed(sampling["seed"], name, len(trajectory))
            turn = await client.create_completion(
                conversation,
                trajectory=trajectory,
                parent=trajectory.steps[-1] if len(trajectory) else None,
                tools=environment.tools,
                sampling_params=sampling,
                **request_options,
            )
            if turn.step is None or turn.finish_reason == "abort":
                reason = "prompt_too_long" if turn.step is None else "abort"
                break
            observation = await _observed(environment.step(turn), "step")
            turn.step.reward = observation.reward
            trajectory.extra["info"] = dict(observation.info)
            conversation = [*conversation, turn.message, *_messages_of(observation, "step")]
            if not observation.done and max_length is not None and len(turn.step) >= max_length:
                reason = "max_length"
                break
    finally:
        client.forget(trajectory)
        close = getattr(environment, "close", None)
        if callable(close):
            await _result_of(close())
    trajectory.extra["stop_reason"] = reason
    return reason


async def _result_of(value: MaybeAwaitable[Result]) -> Result:
    return await value if inspect.isawaitable(value) else value


async def _observed(answer: MaybeAwaitable[Any], method: str) -> Observation:
    observation = await _result_of(answer)
    if not isinstance(observation, Observation):
        expected, got = "an Observation(messages, reward=..., done=...)", type(observation).__name__
        raise InputError(
            "an environment returned something else", where=f"{method}()", expected=expected, got=got
        )
    return observation


def _messages_of(observation: Observation, method: str) -> list[Message]:
    """Return the messages of an observation in canonical form.

    Raises:
        InputError: There are none before the end, or one is an assistant's.
    """
    where = f"{method}().messages"
    if not observation.messages and not observation.done:
        problem, expected = "an observation without messages must be done", "messages for the model to answer"
        raise InputError(problem, where=where, expected=expected)
    messages = list(normalize_messages(observation.messages, where=where)) if observation.messages else []
    if method == "step" and any(message.role == "assistant" for message in messages):
        raise MessageError(
            "an observation must not contain assistant messages",
            where=where,
            expected="tool, user and system messages",
            got="an assistant message",
        )
    return messages


def turn_seed(seed: int, name: str, turn: int) -> int:
    """Return the seed (63 bits) of one turn of one rollout, equal in every process."""
    digest = hashlib.blake2b(f"{seed}/{name}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
