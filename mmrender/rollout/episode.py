"""One rollout: a model and an environment take turns until one of them ends it."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from mmrender.content import normalize_messages
from mmrender.errors import InputError, MessageError
from mmrender.messages import Message
from mmrender.rollout.environment import Environment, Observation, close_environment, resolved
from mmrender.rollout.renderer_client import Completion, RendererClient
from mmrender.trajectory.tree import Trajectory

StopReason: TypeAlias = Literal["done", "max_turns", "max_length", "prompt_too_long", "abort", "error"]
"""Why a rollout ended: the environment said so; a bound of turns or tokens was met; a prompt was too long and
the policy is to stop; the engine aborted a turn; or something failed, which the trajectory names."""


async def run_episode(
    client: RendererClient,
    environment: Environment,
    prompt: Sequence[Any],
    extras: Mapping[str, Any],
    *,
    trajectory: Trajectory,
    sampling_params: Mapping[str, Any] | None = None,
    max_turns: int | None = None,
    max_length: int | None = None,
    **request_options: Any,
) -> StopReason:
    """Roll out one episode; the trajectory receives each turn with its reward.

    Args:
        client: Samples the turns.
        environment: Is reset first, and closed at the end.
        prompt: What the data set gives; handed to the environment.
        extras: What else it gives; as `prompt`.
        trajectory: Where turns are appended; its `extra` receives the reason to stop and the last `info`.
        sampling_params: Over those of the client. A `seed` is spread: each turn of each trajectory has its
            own.
        max_turns: The most turns of the model; None leaves it to the environment.
        max_length: No further turn once prompt and completion together have this many tokens.
        **request_options: Options of `generate` for every call.

    Raises:
        Exception: Whatever environment or client raise; the turns so far are in the trajectory.
    """
    episode = _Episode(client, environment, trajectory, dict(sampling_params or {}), request_options)
    try:
        reason = await episode.run(prompt, extras, max_turns, max_length)
    finally:
        client.forget(trajectory)
        await close_environment(environment)
    trajectory.extra["stop_reason"] = reason
    return reason


class _Episode:
    def __init__(
        self,
        client: RendererClient,
        environment: Environment,
        trajectory: Trajectory,
        sampling_params: dict[str, Any],
        request_options: Mapping[str, Any],
    ) -> None:
        self._client = client
        self._environment = environment
        self._trajectory = trajectory
        self._sampling = sampling_params
        self._options = request_options

    async def run(
        self, prompt: Sequence[Any], extras: Mapping[str, Any], max_turns: int | None, max_length: int | None
    ) -> StopReason:
        seen = await resolved(self._environment.reset(prompt, extras))
        conversation = _shown(seen, "reset")
        while not seen.done:
            if max_turns is not None and len(self._trajectory) >= max_turns:
                return "max_turns"
            completion = await self._turn(conversation, seen)
            if completion.step is None or completion.message is None:
                return "prompt_too_long"
            if completion.finish_reason == "abort":
                return "abort"
            seen = await resolved(self._environment.step(completion.action))
            completion.step.reward = seen.reward
            self._trajectory.extra["info"] = dict(seen.info)
            conversation = [*conversation, completion.message, *_shown(seen, "step")]
            if not seen.done and max_length is not None and len(completion.step) >= max_length:
                return "max_length"
        return "done"

    async def _turn(self, conversation: Sequence[Message], seen: Observation) -> Completion:
        sampling = {**self._client.sampling_params, **self._sampling, **seen.sampling_params}
        if sampling.get("seed") is not None:
            sampling["seed"] = spread_seed(
                sampling["seed"], self._trajectory.trajectory_id, len(self._trajectory)
            )
        steps = self._trajectory.steps
        return await self._client.create_completion(
            conversation,
            trajectory=self._trajectory,
            parent=steps[-1] if steps else None,
            tools=self._environment.tools,
            sampling_params=sampling,
            choices=seen.choices,
            **self._options,
        )


def _shown(seen: Observation, method: str) -> list[Message]:
    """Canonical messages of an observation."""
    if not seen.messages:
        if seen.done:
            return []
        raise InputError(
            "the environment shows nothing and is not done",
            where=f"{method}().messages",
            expected="messages for the model to answer",
        )
    messages = list(normalize_messages(seen.messages, where=f"{method}().messages"))
    if method == "step" and any(message.role == "assistant" for message in messages):
        raise MessageError(
            "an environment does not speak for the model",
            where="step().messages",
            expected="tool, user and system messages",
            got="an assistant message",
        )
    return messages


def spread_seed(seed: int, trajectory_id: str, turn: int) -> int:
    """A seed of 63 bits for one turn of one trajectory; equal arguments give equal seeds in every process."""
    digest = hashlib.blake2b(f"{seed}/{trajectory_id}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
