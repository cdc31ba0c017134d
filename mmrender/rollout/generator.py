"""`VLMGenerator`: many rollouts at once, as trajectories when they finish, or as a batch of rows to train on.

Inputs and outputs have the shapes that SkyRL's trainers read.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from mmrender.errors import InputError, MMRenderError, check_count
from mmrender.rollout.client import RendererClient
from mmrender.rollout.environment import Environment, run_episode
from mmrender.rollout.rows import TensorKind, TrajectoryID, image_tensors, rollout_metrics, rows_of
from mmrender.sidecar import MultiModalData, TensorDtype
from mmrender.trajectory.tree import Trajectory

EnvironmentClass: TypeAlias = str | Callable[[], Environment]
"""Name of an environment that the generator knows, or a function that makes one."""

Failures: TypeAlias = Literal["keep", "raise"]
"""Policy for a failed rollout: `keep` returns a row with an empty loss mask and goes on with the rest,
`raise` ends the batch."""

_log = logging.getLogger("mmrender.rollout")


class GeneratorInput(TypedDict, total=False):
    """A batch of rollouts. All lists have one entry per rollout.

    Attributes:
        prompts: Conversations of the data set. An environment may show them, or others.
        env_classes: Names of environments, or functions that make one.
        env_extras: Other fields of the data set, such as a seed, or None.
        sampling_params: In vLLM's names, for every turn. None for the generator's own.
        trajectory_ids: Names of the rollouts, different within the batch. None numbers them.
    """

    prompts: Sequence[Sequence[Any]]
    env_classes: Sequence[EnvironmentClass]
    env_extras: Sequence[Mapping[str, Any] | None] | None
    sampling_params: Mapping[str, Any] | None
    trajectory_ids: Sequence[TrajectoryID] | None


class GeneratorOutput(TypedDict):
    """Rows to train on, in the order of the input: one per rollout, or step-wise one per turn.

    Attributes:
        prompt_token_ids: The first prompt of the rollout, or of the turn.
        response_ids: The tokens after it: sampled ones, and the observations between.
        rewards: One per token of the response.
        loss_masks: 1 for sampled tokens, 0 for observations and for rows of failed rollouts.
        stop_reasons: Why the rollout ended, see `mmrender.rollout.environment.StopReason`.
        rollout_metrics: Means over the batch, by name.
        rollout_logprobs: The sampler's, with 0.0 on observations.
        trajectory_ids: Name of the row's rollout.
        rollout_expert_indices: Router choices of prompt and response, of shape `(tokens, layers, top_k)`, or
            None. None for all rows if no row has any.
        is_last_step: Whether the row is the last of its rollout.
        multi_modal_data: Media of prompt and response. Ranges count from the prompt's first token.
        pixel_values: By row, the joined patches of its images, of shape `(patches, values)`. Rows without
            images have 0 patches. None if not requested, or if no row has images.
        image_grid_thw: By row, int64 of shape `(images, 3)`, or None as `pixel_values`.
        errors: By row, the error that ended its rollout early, or None.
    """

    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]
    rewards: list[list[float]]
    loss_masks: list[list[int]]
    stop_reasons: list[str]
    rollout_metrics: dict[str, float]
    rollout_logprobs: list[list[float]]
    trajectory_ids: list[TrajectoryID]
    rollout_expert_indices: list[npt.NDArray[np.integer] | None] | None
    is_last_step: list[bool]
    multi_modal_data: list[MultiModalData]
    pixel_values: list[Any] | None
    image_grid_thw: list[Any] | None
    errors: list[str | None]


class _Rollout(NamedTuple):
    """One rollout of a batch. `kind` names or makes its environment."""

    name: str
    prompt: Sequence[Any]
    kind: EnvironmentClass
    extras: Mapping[str, Any]


@dataclass(frozen=True)
class VLMGenerator:
    """Rolls out many episodes at once, each in its own environment.

    Attributes:
        client: Samples the turns.
        environments: Functions that make an environment, by the names in `env_classes`.
        sampling_params: For every turn. They take precedence over the client's, and the batch's over these.
            Each turn derives its own `seed` by the rollout's name.
        max_turns: Maximum turns of the model in a rollout, by default the environment's choice.
        max_length: Number of tokens of a rollout after which no further turn begins.
        max_concurrency: Rollouts in flight.
        step_wise: Whether each turn is a row; see `rows_of`.
        tensors: Whether rows come with `pixel_values` and `image_grid_thw`, and in which framework.
        dtype: Dtype of `pixel_values`.
        failures: How a failed rollout is handled.
    """

    client: RendererClient
    environments: Mapping[str, Callable[[], Environment]] = field(default_factory=dict)
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    max_turns: int | None = None
    max_length: int | None = None
    max_concurrency: int = 64
    step_wise: bool = False
    tensors: TensorKind | None = None
    dtype: TensorDtype = "float32"
    failures: Failures = "keep"

    def __post_init__(self) -> None:
        check_count("max_concurrency", self.max_concurrency)

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Roll out a batch. Rows have the order of the input.

        Raises:
            InputError: The batch is malformed, or `tensors` does not fit the model.
            Exception: A rollout failed, and `failures` is `raise`.
        """
        trajectories = await self.roll_out(input_batch)
        names = _names(input_batch)
        rows = [
            row
            for trajectory, name in zip(trajectories, names, strict=True)
            for row in rows_of(trajectory, name, step_wise=self.step_wise)
        ]
        sidecars = [row.multi_modal_data for row in rows]
        pixels, grids = (None, None)
        if self.tensors is not None:
            pixels, grids = image_tensors(sidecars, self.tensors, self.dtype)
        experts = [row.expert_indices for row in rows]
        return GeneratorOutput(
            prompt_token_ids=[row.prompt_token_ids for row in rows],
            response_ids=[row.response_ids for row in rows],
            rewards=[row.rewards for row in rows],
            loss_masks=[row.loss_mask for row in rows],
            stop_reasons=[row.stop_reason for row in rows],
            rollout_metrics=rollout_metrics(trajectories),
            rollout_logprobs=[row.logprobs for row in rows],
            trajectory_ids=[row.trajectory_id for row in rows],
            rollout_expert_indices=experts if any(each is not None for each in experts) else None,
            is_last_step=[row.is_last_step for row in rows],
            multi_modal_data=sidecars,
            pixel_values=pixels,
            image_grid_thw=grids,
            errors=[row.error for row in rows],
        )

    async def roll_out(self, input_batch: GeneratorInput) -> list[Trajectory]:
        """Roll out a batch. Return its trajectories in the order of the input; errors as for `stream`."""
        async with aclosing(self.stream(input_batch)) as finished:
            trajectories = {trajectory.extra["name"]: trajectory async for trajectory in finished}
        return [trajectories[name.to_string()] for name in _names(input_batch)]

    async def stream(self, input_batch: GeneratorInput) -> AsyncGenerator[Trajectory, None]:
        """Roll out a batch and yield each trajectory when it finishes.

        Its `extra["name"]` is the rollout's name: without `trajectory_ids` that of prompt 3 is `"3_0"`.

        Closing the iterator cancels the rollouts in flight.

        Raises:
            InputError: The batch is malformed.
            Exception: A rollout failed, and `failures` is `raise`.
        """
        rollouts = self._rollouts(input_batch)
        sampling = {**self.sampling_params, **(input_batch.get("sampling_params") or {})}
        places = asyncio.Semaphore(self.max_concurrency)

        async def placed(rollout: _Rollout) -> Trajectory:
            async with places:
                return await self._one(rollout, sampling)

        tasks = [asyncio.create_task(placed(each)) for each in rollouts]
        try:
            for ended in asyncio.as_completed(tasks):
                yield await ended
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, rollout: _Rollout, sampling: Mapping[str, Any]) -> Trajectory:
        """Run one rollout to its end.

        It has a task of its own, so that an environment that cancels its task reaches no other rollout.
        """
        # Its id is unique, while its name may come again in a later epoch.
        trajectory = Trajectory(extra={"name": rollout.name})
        kind = rollout.kind

        async def play() -> BaseException | None:
            try:
                await run_episode(
                    self.client,
                    self.environments[kind]() if isinstance(kind, str) else kind(),
                    rollout.prompt,
                    rollout.extras,
                    trajectory=trajectory,
                    sampling_params=sampling,
                    seed_name=rollout.name,
                    max_turns=self.max_turns,
                    max_length=self.max_length,
                )
            except KeyboardInterrupt:  # the user's
                raise
            except BaseException as error:  # noqa: BLE001 - an environment may raise any error
                return error
            return None

        episode = asyncio.create_task(play())
        try:
            await asyncio.wait({episode})
        except asyncio.CancelledError:
            episode.cancel()
            await asyncio.wait({episode})
            raise
        # A task that is cancelled before it begins has no result.
        error = asyncio.CancelledError() if episode.cancelled() else episode.result()
        if error is None:
            return trajectory
        if not isinstance(error, Exception):
            problem = f"the environment or the engine ended it by {type(error).__name__}"
            ended = MMRenderError(problem, where=f"rollout {rollout.name}", got=str(error) or None)
            ended.__cause__, error = error, ended
        if self.failures == "raise":
            raise error
        described = f"{type(error).__name__}: {error}"
        trajectory.error = trajectory.error or described
        trajectory.extra["stop_reason"] = "error"
        # Our errors name the place, others need their traceback.
        trace = None if isinstance(error, MMRenderError) else error
        _log.warning("rollout %s failed: %s", rollout.name, described, exc_info=trace)
        return trajectory

    def _rollouts(self, batch: GeneratorInput) -> list[_Rollout]:
        prompts, kinds = batch.get("prompts", ()), batch.get("env_classes", ())
        extras = batch.get("env_extras") or [{}] * len(prompts)
        names = [name.to_string() for name in _names(batch)]
        for key, listed in (("env_classes", kinds), ("env_extras", extras), ("trajectory_ids", names)):
            if len(listed) != len(prompts):
                raise InputError(
                    "has another length",
                    where=f"input_batch[{key!r}]",
                    expected=f"one entry for each of {len(prompts)} prompts",
                    got=str(len(listed)),
                )
        if len(set(names)) != len(names):
            raise InputError("two rollouts have one name", where="input_batch['trajectory_ids']")
        for index, kind in enumerate(kinds):
            if isinstance(kind, str) and kind not in self.environments:
                raise InputError(
                    "unknown environment",
                    where=f"input_batch['env_classes'][{index}]",
                    expected=", ".join(sorted(self.environments)) or "a name in the generator's environments",
                    got=repr(kind),
                )
        columns = zip(names, prompts, kinds, extras, strict=True)
        return [_Rollout(name, prompt, kind, more or {}) for name, prompt, kind, more in columns]


def _names(batch: GeneratorInput) -> Sequence[TrajectoryID]:
    """Return the names of the rollouts of a batch, or numbers."""
    numbers = range(len(batch.get("prompts", ())))
    return batch.get("trajectory_ids") or [TrajectoryID(str(number)) for number in numbers]


def rollouts(
    client: RendererClient,
    environment: Callable[[], Environment],
    prompts: Sequence[Sequence[Any]],
    *,
    extras: Sequence[Mapping[str, Any] | None] | None = None,
    sampling_params: Mapping[str, Any] | None = None,
    concurrency: int = 64,
    max_turns: int | None = None,
    max_length: int | None = None,
    failures: Failures = "keep",
) -> AsyncGenerator[Trajectory, None]:
    """Roll out prompts in environments of one kind and yield each trajectory when it finishes.

    `async for trajectory in rollouts(client, FindCell, prompts): ...` has the arguments and errors of
    `VLMGenerator.stream`.
    """
    generator = VLMGenerator(
        client,
        sampling_params=sampling_params or {},
        max_concurrency=concurrency,
        max_turns=max_turns,
        max_length=max_length,
        failures=failures,
    )
    batch = GeneratorInput(prompts=prompts, env_classes=[environment] * len(prompts), env_extras=extras)
    return generator.stream(batch)
