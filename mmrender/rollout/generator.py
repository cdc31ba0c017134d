"""`VLMGenerator`: a batch of rollouts in environments, as rows to train on."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from mmrender.errors import InputError, MissingDependencyError, MMRenderError
from mmrender.rollout.digest import digest_of
from mmrender.rollout.environment import Environment
from mmrender.rollout.episode import run_episode
from mmrender.rollout.metrics import rollout_metrics
from mmrender.rollout.renderer_client import RendererClient
from mmrender.rollout.rows import Row, TensorKind, image_tensors, rows_of
from mmrender.rollout.shelf import ASKED, TrajectoryShelf, batch_file
from mmrender.rollout.types import EnvironmentClass, GeneratorInput, GeneratorOutput, TrajectoryID
from mmrender.spans import TensorDtype
from mmrender.trajectory.tree import Trajectory

Failures: TypeAlias = Literal["keep", "raise"]
"""What becomes of a rollout that fails: `keep` gives a row that is not trained on, and the others go on;
`raise` ends the batch."""

_log = logging.getLogger("mmrender.rollout")


@dataclass(frozen=True, slots=True)
class _Rollout:
    """One rollout of a batch."""

    name: TrajectoryID
    prompt: Sequence[Any]
    kind: EnvironmentClass
    make: Callable[[], Environment]
    extras: Mapping[str, Any]


@dataclass(frozen=True)
class VLMGenerator:
    """Rolls out many episodes at once, each in an environment of its own.

    Attributes:
        client: Samples the turns.
        environments: What makes an environment, by the name that `env_classes` uses.
        sampling_params: For every turn, over those of the client; a batch's own come over these. A `seed` is
            spread: each turn of each rollout has its own, decided by the rollout's name.
        max_turns: The most turns of the model in a rollout; None leaves it to the environment.
        max_length: No further turn once a rollout has this many tokens.
        max_concurrency: Rollouts under way at once.
        step_wise: Whether each turn is a row of its own; see `mmrender.rollout.rows.rows_of`.
        tensors: Whether rows come with `pixel_values` and `image_grid_thw`, and as what.
        dtype: Of `pixel_values`.
        failures: What becomes of a rollout that fails.
        save_to: Folder in which each rollout is saved when it ends, in a file for each phase and step of
            `batch_metadata`. A rollout that is there and has not failed is not repeated if its name, prompt,
            environment, extras, sampling parameters and bounds are the same. The weights are not looked at.
        progress: Whether to show a progress bar. Needs the `cli` extra.
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
    save_to: Path | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        if self.max_concurrency < 1:
            raise InputError(
                "is too small", where="max_concurrency", expected="1 or more", got=str(self.max_concurrency)
            )

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Roll out a batch; rows come in the order of the input.

        Raises:
            InputError: The batch is malformed, or `tensors` does not fit the model.
            Exception: A rollout failed, and `failures` is `raise`.
        """
        trajectories = await self.roll_out(input_batch)
        names = [rollout.name for rollout in self._rollouts(input_batch)]
        rows = [
            row
            for trajectory, name in zip(trajectories, names, strict=True)
            for row in rows_of(trajectory, name, step_wise=self.step_wise)
        ]
        return self._output(rows, rollout_metrics(trajectories))

    async def roll_out(self, input_batch: GeneratorInput) -> list[Trajectory]:
        """Roll out a batch; the trajectories themselves, in the order of the input.

        Raises:
            InputError: The batch is malformed.
            Exception: A rollout failed, and `failures` is `raise`.
        """
        rollouts = self._rollouts(input_batch)
        sampling = {**self.sampling_params, **(input_batch.get("sampling_params") or {})}
        if self.save_to is None:
            return await self._run(rollouts, sampling, None)
        path = batch_file(self.save_to, input_batch.get("batch_metadata"))
        with await asyncio.to_thread(TrajectoryShelf, path) as shelf:
            return await self._run(rollouts, sampling, shelf)

    async def _run(
        self, rollouts: Sequence[_Rollout], sampling: Mapping[str, Any], shelf: TrajectoryShelf | None
    ) -> list[Trajectory]:
        found: dict[int, Trajectory] = {}
        queue = iter(enumerate(rollouts))
        with _progress(len(rollouts), shown=self.progress) as advance:

            async def work() -> None:
                for index, rollout in queue:
                    found[index] = await self._finished(rollout, sampling, shelf)
                    advance()

            workers = [asyncio.create_task(work()) for _ in range(min(self.max_concurrency, len(rollouts)))]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
        return [found[index] for index in range(len(rollouts))]

    async def _finished(
        self, rollout: _Rollout, sampling: Mapping[str, Any], shelf: TrajectoryShelf | None
    ) -> Trajectory:
        """One rollout to its end, or as it was saved."""
        trajectory = Trajectory(rollout.name.to_string())
        try:
            if shelf is not None:
                asked = await asyncio.to_thread(self._asked, rollout, sampling)
                saved = shelf.get(trajectory.trajectory_id, asked)
                if saved is not None:
                    return saved
                trajectory.extra[ASKED] = asked
            await run_episode(
                self.client,
                rollout.make(),
                rollout.prompt,
                rollout.extras,
                trajectory=trajectory,
                sampling_params=sampling,
                max_turns=self.max_turns,
                max_length=self.max_length,
            )
        except Exception as error:
            if self.failures == "raise":
                raise
            _note_failure(trajectory, error)
        if shelf is not None:
            await self._save(trajectory, shelf)
        return trajectory

    async def _save(self, trajectory: Trajectory, shelf: TrajectoryShelf) -> None:
        try:
            await asyncio.to_thread(shelf.put, trajectory)
        except OSError:
            raise  # a full disk is no matter of this rollout
        except Exception as error:
            if self.failures == "raise":
                raise
            _note_failure(trajectory, error)

    def _asked(self, rollout: _Rollout, sampling: Mapping[str, Any]) -> str:
        """Digest of what decides a rollout, except for weights; an environment with a name goes by it."""
        every_turn = {**self.client.sampling_params, **sampling}
        bounds = (self.max_turns, self.max_length)
        return digest_of(rollout.prompt, rollout.kind, rollout.extras, every_turn, bounds)

    def _rollouts(self, batch: GeneratorInput) -> list[_Rollout]:
        prompts = batch.get("prompts")
        if prompts is None:
            raise InputError("there are no prompts", where="input_batch['prompts']", expected="a list")
        count = len(prompts)
        classes = batch.get("env_classes")
        if classes is None:
            raise InputError("there are no environments", where="input_batch['env_classes']")
        extras = batch.get("env_extras") or [{}] * count
        names = batch.get("trajectory_ids") or [TrajectoryID(str(index)) for index in range(count)]
        for key, listed in (("env_classes", classes), ("env_extras", extras), ("trajectory_ids", names)):
            if len(listed) != count:
                raise InputError(
                    "is not one for each prompt",
                    where=f"input_batch[{key!r}]",
                    expected=f"{count} entries",
                    got=str(len(listed)),
                )
        if len({name.to_string() for name in names}) != count:
            raise InputError("two rollouts have one name", where="input_batch['trajectory_ids']")
        return [
            _Rollout(names[index], prompts[index], kind, self._maker(kind, index), extras[index] or {})
            for index, kind in enumerate(classes)
        ]

    def _maker(self, kind: EnvironmentClass, index: int) -> Callable[[], Environment]:
        if not isinstance(kind, str):
            return kind
        if kind not in self.environments:
            raise InputError(
                "there is no such environment",
                where=f"input_batch['env_classes'][{index}]",
                expected=", ".join(sorted(self.environments)) or "an environment that the generator knows",
                got=repr(kind),
            )
        return self.environments[kind]

    def _output(self, rows: Sequence[Row], metrics: dict[str, float]) -> GeneratorOutput:
        sidecars = [row.multi_modal_data for row in rows]
        images = image_tensors(sidecars, self.tensors, self.dtype) if self.tensors is not None else None
        experts = [row.expert_indices for row in rows]
        return GeneratorOutput(
            prompt_token_ids=[row.prompt_token_ids for row in rows],
            response_ids=[row.response_ids for row in rows],
            rewards=[row.rewards for row in rows],
            loss_masks=[row.loss_mask for row in rows],
            stop_reasons=[row.stop_reason for row in rows],
            rollout_metrics=metrics,
            rollout_logprobs=[row.logprobs for row in rows],
            trajectory_ids=[row.trajectory_id for row in rows],
            rollout_expert_indices=experts if any(each is not None for each in experts) else None,
            is_last_step=[row.is_last_step for row in rows],
            multi_modal_data=sidecars,
            pixel_values=images[0] if images is not None else None,
            image_grid_thw=images[1] if images is not None else None,
            errors=[row.error for row in rows],
        )


def _note_failure(trajectory: Trajectory, error: Exception) -> None:
    described = f"{type(error).__name__}: {error}"
    trajectory.error = trajectory.error or described
    # Errors of ours say what and where; of others one wants to see the place.
    trace = None if isinstance(error, MMRenderError) else error
    _log.warning("rollout %s failed: %s", trajectory.trajectory_id, described, exc_info=trace)


@contextmanager
def _progress(total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Yield what is called after each rollout."""
    if not shown:
        yield lambda: None
        return
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError as error:
        raise MissingDependencyError.of_extra("rich", "cli", "a progress bar") from error
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as bars:
        task = bars.add_task("rollouts", total=total)
        yield lambda: bars.advance(task)
