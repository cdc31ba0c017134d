"""`VLMGenerator`: many rollouts at once, as trajectories when they finish, or as a batch of rows to train on.

Inputs and outputs have the shapes that SkyRL's trainers read.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from mmrender.errors import InputError, MMRenderError, check_count
from mmrender.rollout.client import RendererClient
from mmrender.rollout.environment import Environment, run_episode
from mmrender.sidecar import MultiModalData, TensorDtype
from mmrender.trajectory.step import Branch, step_sample
from mmrender.trajectory.tree import Trajectory

EnvironmentClass: TypeAlias = str | Callable[[], Environment]
"""Name of an environment that the generator knows, or a function that makes one."""

TensorKind: TypeAlias = Literal["numpy", "torch"]

Failures: TypeAlias = Literal["keep", "raise"]
"""Policy for a failed rollout: `keep` returns a row with an empty loss mask and goes on with the rest,
`raise` ends the batch."""

_log = logging.getLogger("mmrender.rollout")


@dataclass(frozen=True, slots=True)
class TrajectoryID:
    """Name of a rollout: number `repetition_id` of the rollouts of a prompt."""

    instance_id: str
    repetition_id: int = 0

    def to_string(self) -> str:
        """`instance_id_repetition_id`."""
        return f"{self.instance_id}_{self.repetition_id}"


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
        async with aclosing(self._finished(input_batch)) as finished:
            trajectories = {index: trajectory async for index, trajectory in finished}
        return [trajectories[index] for index in range(len(trajectories))]

    async def stream(self, input_batch: GeneratorInput) -> AsyncGenerator[Trajectory, None]:
        """Roll out a batch and yield each trajectory when it finishes. Its name is `extra["name"]`.

        Closing the iterator cancels the rollouts in flight.

        Raises:
            InputError: The batch is malformed.
            Exception: A rollout failed, and `failures` is `raise`.
        """
        async with aclosing(self._finished(input_batch)) as finished:
            async for _, trajectory in finished:
                yield trajectory

    async def _finished(self, input_batch: GeneratorInput) -> AsyncGenerator[tuple[int, Trajectory], None]:
        """Yield trajectories with their indices in the batch when they finish."""
        rollouts = self._rollouts(input_batch)
        sampling = {**self.sampling_params, **(input_batch.get("sampling_params") or {})}
        queue = iter(enumerate(rollouts))
        ended: asyncio.Queue[tuple[int, Trajectory] | BaseException] = asyncio.Queue()

        async def work() -> None:
            try:
                for index, rollout in queue:
                    trajectory = await self._one(rollout, sampling)
                    ended.put_nowait((index, trajectory))
            except BaseException as error:  # noqa: BLE001 - raised for the caller
                ended.put_nowait(error)

        workers = [asyncio.create_task(work()) for _ in range(min(self.max_concurrency, len(rollouts)))]
        try:
            for _ in rollouts:
                result = await ended.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

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
            problem = f"the environment ended by {type(error).__name__}"
            ended = MMRenderError(problem, where=f"rollout {rollout.name}", got=str(error) or None)
            ended.__cause__, error = error, ended
        if self.failures == "raise":
            raise error
        described = f"{type(error).__name__}: {error}"
        trajectory.error = trajectory.error or described
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


# --- rows ---


@dataclass(frozen=True, slots=True)
class Row:
    """One row. Attributes as in `GeneratorOutput`, in the singular."""

    trajectory_id: TrajectoryID
    stop_reason: str
    error: str | None
    prompt_token_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    expert_indices: npt.NDArray[np.integer[Any]] | None = None
    is_last_step: bool = True
    multi_modal_data: MultiModalData = field(default_factory=MultiModalData)


def rows_of(trajectory: Trajectory, trajectory_id: TrajectoryID, *, step_wise: bool) -> list[Row]:
    """Make the rows of one rollout: one or more, and an empty one if nothing was sampled.

    Step-wise, each turn with sampled tokens is a row of its prompt and its completion. Otherwise the rollout
    is one row: the sequence up to its last turn, which contains every turn if all prompts were bridged. A
    reward without tokens in the rows, since a later prompt was rendered in full or a completion was empty, is
    added to the last sampled token before it, so that rewards sum to the environment's.

    A failed rollout has rows of its sampled tokens, with a loss mask of zeros and no rewards.
    """
    steps, reason, failed = trajectory.steps, stop_reason(trajectory), trajectory.error is not None
    if not steps:
        return [Row(trajectory_id, reason, trajectory.error)]
    if step_wise:
        kept = [step for step in steps if len(step.completion_ids)] or steps[:1]
        samples = [step_sample(step, trajectory.trajectory_id) for step in kept]
        starts = [step.prompt_length for step in kept]
    else:
        kept = steps[-1:]
        samples = [Branch(trajectory.trajectory_id, 0, steps[-1]).sample()]
        sampled = samples[0].loss_mask
        starts = [int(sampled.argmax()) if sampled.any() else len(sampled)]
    earned = [
        np.zeros(len(sample), np.float32) if sample.rewards is None else sample.rewards.astype(np.float32)
        for sample in samples
    ]

    def add(rewards: Sequence[npt.NDArray[np.float32]], missing: float) -> None:
        """Add a reward to the last token of the last of these rows with a response."""
        for row in reversed(range(len(rewards))):
            if len(rewards[row]) > starts[row] and abs(missing) > 1e-6:  # not a rounding error
                rewards[row][-1] += missing
                return

    if not step_wise:
        add(earned, total_reward(trajectory) - float(earned[0].sum()))
    else:
        for step in steps:
            if not len(step.completion_ids) and step.reward is not None:
                before = sum(other.index < step.index for other in kept)
                add(earned[: before or 1], float(np.sum(step.reward)))
    rows = []
    for index, (sample, start, rewards) in enumerate(zip(samples, starts, earned, strict=True)):
        experts = sample.routed_experts
        row = Row(
            trajectory_id,
            reason,
            trajectory.error,
            prompt_token_ids=sample.token_ids[:start].tolist(),
            response_ids=sample.token_ids[start:].tolist(),
            rewards=(rewards[start:] * (not failed)).tolist(),
            loss_mask=(sample.loss_mask[start:] * np.int64(not failed)).tolist(),
            logprobs=[] if sample.logprobs is None else sample.logprobs[start:].tolist(),
            # Missing rows would shift all later ones, so partial choices are left out.
            expert_indices=experts.data if experts is not None and experts.start == 0 else None,
            is_last_step=index == len(samples) - 1,
            multi_modal_data=sample.multi_modal_data,
        )
        rows.append(row)
    return rows


def stop_reason(trajectory: Trajectory) -> str:
    """Return why a rollout ended, see `mmrender.rollout.environment.StopReason`."""
    return "error" if trajectory.error is not None else str(trajectory.extra.get("stop_reason", "error"))


def total_reward(trajectory: Trajectory) -> float:
    """Return the sum of the rewards of all turns."""
    return float(sum(np.sum(step.reward) for step in trajectory.steps if step.reward is not None))


def image_tensors(
    sidecars: Iterable[MultiModalData], kind: TensorKind, dtype: TensorDtype
) -> tuple[list[Any], list[Any]] | tuple[None, None]:
    """Return `pixel_values` and `image_grid_thw` of each row, or None for both if no row has images.

    Rows without images have shapes `(0, values)` and `(0, 3)`, as `TensorList.from_rows` takes them.

    Raises:
        InputError: The model's family has other tensors than these two.
    """
    names = ("pixel_values", "image_grid_thw")
    join: Callable[[list[Any]], Any] = np.concatenate
    if kind == "torch":
        import torch

        join = torch.cat
    rows: list[tuple[Any, ...]] = []
    for sidecar in sidecars:
        items = [item.tensors(dtype, framework=kind) for item in sidecar.mm_items.get("image", ())]
        for tensors in items:
            if set(tensors) != set(names):
                raise InputError(
                    "images of this model have other tensors",
                    where="tensors",
                    expected="pixel_values and image_grid_thw",
                    got=", ".join(sorted(tensors)),
                    remedy="Take them from multi_modal_data",
                )
        rows.append(tuple(join([tensors[name] for tensors in items]) for name in names) if items else ())
    example = next(filter(None, rows), None)
    if example is None:
        return None, None
    pixels, grids = zip(*(row or tuple(each[:0] for each in example) for row in rows), strict=True)
    return list(pixels), list(grids)


# --- metrics ---


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return means over the rollouts, and some extremes.

    `rollout/...` covers all rollouts: reward, turns, sampled tokens, length, and the shares of failed ones,
    of each reason to stop, and of later turns whose prompt was rendered in full. `environment/...` covers the
    rollouts whose last observation reported that name in `info`.
    """
    if not trajectories:
        return {}

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values) if values else 0.0

    rewards = [total_reward(trajectory) for trajectory in trajectories]
    lengths = [len(trajectory.steps[-1]) if len(trajectory) else 0 for trajectory in trajectories]
    sampled = [sum(len(step.completion_ids) for step in trajectory.steps) for trajectory in trajectories]
    later = [step for trajectory in trajectories for step in trajectory.steps if step.index]
    reasons = [stop_reason(trajectory) for trajectory in trajectories]
    metrics = {
        "rollout/reward": mean(rewards),
        "rollout/reward_min": min(rewards),
        "rollout/reward_max": max(rewards),
        "rollout/turns": mean([len(trajectory) for trajectory in trajectories]),
        "rollout/sampled_tokens": mean(sampled),
        "rollout/length": mean(lengths),
        "rollout/length_max": float(max(lengths)),
        "rollout/rendered_anew": mean([step.extra.get("why_rendered") is not None for step in later]),
        "rollout/failed": mean([trajectory.error is not None for trajectory in trajectories]),
    }
    for reason in sorted(set(reasons)):
        metrics[f"rollout/ended_{reason}"] = mean([each == reason for each in reasons])
    reported: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.extra.get("info", {}).items():
            if isinstance(value, int | float):
                reported[f"environment/{name}"].append(value)
    return metrics | {name: mean(values) for name, values in sorted(reported.items())}
