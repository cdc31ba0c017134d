"""Environments, and `run_episode`: a model and an environment take turns until one of them ends it."""

import hashlib
import inspect
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, Unpack, runtime_checkable

from mmrender.content import normalize_messages
from mmrender.errors import InputError, MessageError
from mmrender.messages import Message
from mmrender.rollout.client import RendererClient, RequestOptions, Turn
from mmrender.trajectory.tree import Trajectory

Result = TypeVar("Result")
MaybeAwaitable: TypeAlias = Result | Awaitable[Result]

StopReason: TypeAlias = Literal["done", "max_turns", "max_length", "prompt_too_long", "abort", "error"]
"""Why a rollout ended: the environment is done; a bound of turns or tokens was reached; a prompt was too long
and the policy is to stop; the engine aborted a turn; or an error, which the trajectory names."""


@dataclass(frozen=True, slots=True)
class Observation:
    """An environment's answer, at the start and after each turn of the model.

    Attributes:
        messages: What joins the conversation: tool results and user turns with their images, in any form that
            a renderer takes; never an assistant's. May be empty only when `done`.
        reward: For the turn; ignored at a reset.
        done: Whether the episode is over.
        sampling_params: For the next turn, over those of the rollout, in vLLM's names.
        info: Kept with the trajectory, such as counts that become metrics. Plain data.
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
        """Definitions of the tools that the model may call; None without tools."""
        ...

    def reset(self, prompt: Sequence[Any], extras: Mapping[str, Any]) -> MaybeAwaitable[Observation]:
        """Begin an episode.

        Args:
            prompt: Messages that the data set gives; the environment shows them, or others.
            extras: What else the data set gives, such as a seed or the answer.

        Returns:
            The opening messages, all of them.
        """
        ...

    def step(self, turn: Turn) -> MaybeAwaitable[Observation]:
        """Act on a turn of the model, and return what follows."""
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
    """Roll out one episode; the trajectory receives each turn with its reward.

    Args:
        client: Samples the turns.
        environment: Reset first, and closed at the end.
        prompt: What the data set gives; passed to the environment.
        extras: What else it gives; passed to the environment.
        trajectory: Where turns are appended; its `extra` receives `stop_reason` and the last `info`.
        sampling_params: Take precedence over those of the client. From a `seed` each turn derives its own.
        seed_name: Name of the rollout from which seeds are derived; the trajectory's id by default.
        max_turns: The most turns of the model; None leaves it to the environment.
        max_length: No further turn once prompt and completion together have this many tokens.
        **request_options: Options of every request.

    Raises:
        Exception: Whatever environment or client raise; the turns so far are in the trajectory.
    """
    given = {**client.sampling_params, **(sampling_params or {})}
    name = trajectory.trajectory_id if seed_name is None else seed_name
    try:
        seen = await _result_of(environment.reset(prompt, extras))
        conversation = _shown_messages(seen, "reset")
        reason: StopReason = "done"
        while not seen.done:
            if max_turns is not None and len(trajectory) >= max_turns:
                reason = "max_turns"
                break
            sampling = {**given, **seen.sampling_params}
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
            seen = await _result_of(environment.step(turn))
            turn.step.reward = seen.reward
            trajectory.extra["info"] = dict(seen.info)
            conversation = [*conversation, turn.message, *_shown_messages(seen, "step")]
            if not seen.done and max_length is not None and len(turn.step) >= max_length:
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


def _shown_messages(seen: Observation, method: str) -> list[Message]:
    """Canonical messages of an observation, checked for what an environment may show."""
    where = f"{method}().messages"
    if not seen.messages and not seen.done:
        expected = "messages for the model to answer"
        raise InputError("the environment shows nothing and is not done", where=where, expected=expected)
    messages = list(normalize_messages(seen.messages, where=where)) if seen.messages else []
    if method == "step" and any(message.role == "assistant" for message in messages):
        raise MessageError(
            "an environment does not speak for the model",
            where=where,
            expected="tool, user and system messages",
            got="an assistant message",
        )
    return messages


def turn_seed(seed: int, name: str, turn: int) -> int:
    """A seed of 63 bits for one turn of one rollout; equal arguments give equal seeds in every process."""
    digest = hashlib.blake2b(f"{seed}/{name}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
