"""Rollouts for TRL's GRPOTrainer: a client of the engine that TRL keeps in sync, and TRL's fields."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

from mmrender.client.local import LocalBackend
from mmrender.client.vllm import VLLMBackend
from mmrender.errors import EngineUnsupportedError, TrajectoryError
from mmrender.integrations.synced import SyncedBackend
from mmrender.integrations.vllm import LLMBackend
from mmrender.protocols import RendererProtocol
from mmrender.rollout.client import RendererClient
from mmrender.trajectory.sample import TrainingSample
from mmrender.trajectory.tree import Trajectory

Result = TypeVar("Result")


@dataclass(frozen=True)
class Rollouts:
    """Plays a trajectory for each prompt, and returns its tokens to TRL.

    TRL trains on one sequence per prompt, and computes pixels itself from the data set's column of images. So
    a trajectory may have turns, with masked tokens of the environment, but no branches and no images after
    its prompt.

    TRL syncs its weights to its own engine alone. So `play` is passed a client of that engine, and a
    trajectory with turns of other weights is refused.

    Attributes:
        play: Makes the trajectory of one prompt, whose messages contain the row's images. Its first argument
            is the client, see `trainer_client`.
        renderer: Renders the model's prompts.
        concurrency: Maximum number of trajectories in flight.
    """

    play: Callable[[RendererClient, Any], Awaitable[Trajectory]]
    renderer: RendererProtocol
    concurrency: int = 64

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return the fields that TRL trains on, one entry for each prompt.

        Raises:
            TrajectoryError: A trajectory has branches, nothing to train on, no log probabilities, turns of
                other weights than the trainer's, or images that its first prompt lacks.
            EngineUnsupportedError: The trainer's engine cannot be sampled from. See `trainer_client`.
        """
        trajectories = self.trajectories(prompts, trainer)
        fields: dict[str, list[Any]] = {
            "prompt_ids": [],
            "completion_ids": [],
            "logprobs": [],
            "env_mask": [],
        }
        for index, trajectory in enumerate(trajectories):
            sample, logprobs, start = _only_sample(trajectory, f"prompts[{index}]")
            fields["prompt_ids"].append(sample.token_ids[:start].tolist())
            fields["completion_ids"].append(sample.token_ids[start:].tolist())
            fields["logprobs"].append(logprobs[start:].tolist())
            fields["env_mask"].append(sample.loss_mask[start:].astype(int).tolist())
        return fields

    def trajectories(self, prompts: Sequence[Any], trainer: Any) -> list[Trajectory]:
        """Play a trajectory for each prompt, with the trainer's present weights.

        Raises:
            TrajectoryError: A turn was sampled with other weights.
            EngineUnsupportedError: The trainer's engine cannot be sampled from. See `trainer_client`.
        """
        with trainer_client(trainer, self.renderer) as client:
            trajectories = _run(self._played(client, prompts))
        for index, trajectory in enumerate(trajectories):
            _require_weights(trajectory, _version(trainer), f"prompts[{index}]")
        return trajectories

    async def _played(self, client: RendererClient, prompts: Sequence[Any]) -> list[Trajectory]:
        free = asyncio.Semaphore(self.concurrency)

        async def one(prompt: Any) -> Trajectory:
            async with free:
                return await self.play(client, prompt)

        return await asyncio.gather(*map(one, prompts))


@contextmanager
def trainer_client(trainer: Any, renderer: RendererProtocol) -> Iterator[RendererClient]:
    """Open a client of the engine that TRL's trainer keeps in sync, with the trainer's sampling parameters.

    That is TRL's vLLM, as a server or in this process, or the trainer's model itself without `use_vllm`.
    TRL syncs the weights before it calls `rollout_func`. Turns are marked with the trainer's step.

    Raises:
        EngineUnsupportedError: The model is cut over several processes, or vLLM in this process over several
            GPUs.
    """
    params = {
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k,
        "min_p": trainer.min_p,
        "repetition_penalty": trainer.repetition_penalty,
        "max_tokens": trainer.max_completion_length,
        **(trainer.args.generation_kwargs or {}),
    }
    params = {name: value for name, value in params.items() if value is not None}
    version = _version(trainer)
    if not trainer.use_vllm:
        with _model_in_use(trainer) as model:
            # TRL compares log-probabilities at the temperature of sampling.
            local = LocalBackend(model, weight_version=version, processed_logprobs=True)
            try:
                yield RendererClient(renderer, backend=local, sampling_params=params)
            finally:
                _run(local.aclose())
        return
    engine = trainer.vllm_generation
    if engine.mode == "server":
        # The name comes from the main process, which has synced the weights by then.
        name = _from_main_process(engine.vllm_client.model if trainer.accelerator.is_main_process else None)
        url = engine.server_base_url or f"http://{engine.server_host}:{engine.server_port}"
        backend = SyncedBackend(VLLMBackend(), lambda: version)
        yield RendererClient(renderer, url, model=name, backend=backend, sampling_params=params)
        return
    if engine.tensor_parallel_size > 1:
        raise EngineUnsupportedError(
            "a vLLM in this process that is cut over several GPUs cannot be asked for single turns",
            where="GRPOConfig.vllm_tensor_parallel_size",
            expected="1",
            got=str(engine.tensor_parallel_size),
            remedy="Use vllm_mode='server'",
        )
    with _awake(engine):
        colocated = LLMBackend(engine.llm)
        try:
            backend = SyncedBackend(colocated, lambda: version)
            yield RendererClient(renderer, backend=backend, sampling_params=params)
        finally:
            _run(colocated.aclose())


def _version(trainer: Any) -> str:
    """Name of the trainer's present weights: its step."""
    return str(trainer.state.global_step)


@contextmanager
def _model_in_use(trainer: Any) -> Iterator[Any]:
    """Put the trainer's model into evaluation mode, and back.

    Raises:
        EngineUnsupportedError: It is cut over several processes.
    """
    for name in ("is_fsdp_enabled", "is_deepspeed_enabled"):
        if getattr(trainer, name, False):
            raise EngineUnsupportedError(
                "a model that is cut over several processes cannot be sampled from in one of them",
                where="GRPOConfig.use_vllm",
                expected="True, with FSDP or DeepSpeed",
                got="False",
            )
    model = trainer.accelerator.unwrap_model(trainer.model)
    was_training = model.training
    model.eval()
    try:
        yield model
    finally:
        model.train(was_training)


@contextmanager
def _awake(engine: Any) -> Iterator[None]:
    """Wake a vLLM that sleeps between steps, as TRL's `generate` does."""
    if not engine.enable_sleep_mode:
        yield
        return
    if engine._llm_weights_sleeping:  # they were dropped, and are pushed again
        engine.sync_weights()
    engine.llm.wake_up(tags=["kv_cache"])
    try:
        yield
    finally:
        engine.llm.sleep(level=2)
        engine._llm_weights_sleeping = True


def _from_main_process(value: Any) -> Any:
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([value], from_process=0)[0]


def _run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run to the end, in another thread if this one runs an event loop, as notebooks do."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1, "mmrender-trl") as thread:
        result: Result = thread.submit(copy_context().run, asyncio.run, coroutine).result()
        return result


def _require_weights(trajectory: Trajectory, version: str, where: str) -> None:
    """Require that every sampled token has the trainer's present weights."""
    for step in trajectory.steps:
        spans = step.weight_versions
        named = sum(span.stop - span.start for span in spans)
        if named == len(step.completion_ids) and {span.version for span in spans} <= {version}:
            continue
        versions = sorted({span.version for span in spans})
        raise TrajectoryError(
            "a turn was not sampled with the trainer's present weights",
            where=f"{where}, turn {step.index}",
            expected=f"every token with the weights {version!r}, the trainer's step",
            got=", ".join(map(repr, versions)) or "no name of weights",
            remedy="Sample with the client that is passed to play: TRL syncs its weights to its own engine "
            "alone. For another engine that you sync, name its weights by the trainer's step",
        )


def _only_sample(trajectory: Trajectory, where: str) -> tuple[TrainingSample, Any, int]:
    """Return the trajectory's one sample, its log probabilities, and the length of its first prompt."""
    samples = trajectory.samples()
    if len(samples) != 1:
        raise TrajectoryError(
            "TRL trains on one sequence for each prompt",
            where=where,
            expected="a trajectory of one branch, with sampled tokens",
            got=f"{len(samples)} samples",
            remedy="Train on trajectories with mmrender's own batches, or keep each turn's prompt a prefix",
        )
    (sample,) = samples
    start = int(sample.loss_mask.argmax())
    logprobs: Any = sample.logprobs  # `samples` requires them
    late = [span for span in sample.multi_modal_data.spans(len(sample)) if span.start >= start]
    if late:
        raise TrajectoryError(
            "an image appears after the first prompt, and TRL computes pixels of the data set's images alone",
            where=f"{where}, token {late[0].start}",
            expected="images in the prompt only",
            got=f"{len(late)} later ones",
            remedy="Put all images into the row's prompt, or train with mmrender's own batches",
        )
    return sample, logprobs, start
