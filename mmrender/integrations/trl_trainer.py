"""`GRPOTrainer`: TRL's, trained on trajectories: images in any turn, branches, and packed rows.

Groups, accumulation, optimiser, schedule, checkpoints, logs, and the engine with its weights are TRL's.
Rollouts, batches and the loss are mmrender's.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import trl

from mmrender.errors import InputError
from mmrender.integrations.trl_rollouts import Rollouts
from mmrender.protocols import RendererProtocol
from mmrender.rollout.client import RendererClient
from mmrender.training.batch import TrainingBatch
from mmrender.training.collate import collate
from mmrender.training.families import ModelFamily
from mmrender.training.heads import score_tokens
from mmrender.training.logprobs import importance_weights
from mmrender.training.losses import cispo_loss, dr_grpo_loss, grpo_loss, gspo_loss, ppo_loss
from mmrender.training.packing import first_fit_decreasing
from mmrender.training.tensor_list import torch
from mmrender.trajectory.sample import TrainingSample
from mmrender.trajectory.tree import Trajectory

_LOSSES: Final = ("bnpo", "cispo", "dapo", "dr_grpo", "grpo")
_OFF: Final[Mapping[str, Any]] = {
    "beta": 0.0,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "mask_truncated_completions": False,
    "use_adaptive_entropy": False,
    "multi_objective_aggregation": "sum_then_normalize",
}
"""Settings of TRL's own loss that this one does not have, and their values without effect."""


@dataclass(slots=True)
class _Part:
    """The samples of one accumulation step, and what their loss is divided by."""

    samples: list[TrainingSample]
    tokens: float
    old: Any = None


class GRPOTrainer(trl.GRPOTrainer):
    """TRL's GRPOTrainer on trajectories.

    Each row of the data set is played `num_generations` times. The reward of a trajectory is its own and that
    of its turns, and the mean over its branches. A sampled token is trained on once, with the mean advantage
    of the branches that hold it. Samples are packed, unless the family takes no packed rows. The weights of
    `vllm_importance_sampling_correction` correct for any sampler, up to
    `vllm_importance_sampling_clip_max`.

    Args:
        model: As for TRL's.
        play: Makes the trajectory of a row. Its first argument is a client of the trainer's own engine, see
            `mmrender.integrations.trl.trainer_client`.
        renderer: Renders the model's prompts.
        row_tokens: Maximum length of a packed row, by default of the longest sample.
        concurrency: Maximum number of trajectories in flight.
        options: Of TRL's, such as `args`, `train_dataset` and `processing_class`.

    Raises:
        InputError: A setting is not supported. `where` names it.
    """

    _signature_columns: Any
    _buffered_inputs: Any
    _last_loaded_step: int

    def __init__(
        self,
        model: Any,
        play: Callable[[RendererClient, Any], Awaitable[Trajectory]],
        *,
        renderer: RendererProtocol,
        row_tokens: int = 0,
        concurrency: int = 64,
        **options: Any,
    ) -> None:
        for name in ("reward_funcs", "rollout_func", "environment_factory", "tools"):
            if options.get(name):
                raise InputError("play makes the trajectories and their rewards", where=name, expected="none")
        super().__init__(model, _no_reward, **options)
        for name, value in _OFF.items():
            if getattr(self.args, name, value) not in (value, None):
                raise InputError(
                    "this setting is not supported on trajectories",
                    where=f"GRPOConfig.{name}",
                    expected=repr(value),
                    got=repr(getattr(self.args, name)),
                )
        if self.loss_type not in _LOSSES:
            raise InputError(
                "this loss is not supported on trajectories",
                where="GRPOConfig.loss_type",
                expected=", ".join(_LOSSES),
                got=repr(self.loss_type),
            )
        self.rollouts = Rollouts(play, renderer, concurrency)
        self.family = ModelFamily.from_config(self.accelerator.unwrap_model(self.model).config)
        self.row_tokens = row_tokens

    def _set_signature_columns_if_needed(self) -> None:
        """Keep every column of the data set, which `play` is passed."""
        self._signature_columns = self._signature_columns or list(self.train_dataset.column_names or ())

    def _prepare_inputs(self, generation_batch: Sequence[Mapping[str, Any]]) -> _Part:
        """Play the rows of a generation batch, and return the samples of this accumulation step."""
        steps = self.args.steps_per_generation
        if not self.model.training:
            return self._parts(generation_batch, self.num_generations_eval, 1)[0]
        if self._step % (steps * self.num_iterations) == 0 or self._buffered_inputs is None:
            self._buffered_inputs = self._parts(generation_batch, self.num_generations, steps)
        part: _Part = self._buffered_inputs[self._step % steps]
        return part

    def _parts(self, rows: Sequence[Mapping[str, Any]], group: int, count: int) -> list[_Part]:
        """Play rows, and return their samples in `count` parts of equally many trajectories."""
        if self.use_vllm and self.state.global_step != self._last_loaded_step:
            self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step
        trajectories = self.rollouts.trajectories(rows, self)
        advantages, scales = self._advantages(trajectories, group)
        samples = [
            _samples(trajectory, baseline, scale)
            for trajectory, baseline, scale in zip(trajectories, advantages, scales, strict=True)
        ]
        device = self.accelerator.device
        trained = torch.tensor([sum(int(sample.loss_mask.sum()) for each in samples for sample in each)])
        tokens = float(self.accelerator.gather(trained.to(device)).sum()) / self.accelerator.num_processes
        order = torch.randperm(len(samples)).tolist() if count > 1 else range(len(samples))
        size = len(samples) // count
        parts = [
            _Part([sample for index in order[first : first + size] for sample in samples[index]], tokens)
            for first in range(0, size * count, size)
        ]
        if self.model.training and self.args.gradient_accumulation_steps % (count * self.num_iterations):
            # The weights change before all parts are trained on, and ratios are to those that sampled.
            with torch.no_grad():
                for part in parts:
                    part.old = self._scores(self.model, self._batch(part)).logprobs
        return parts

    def _advantages(self, trajectories: Sequence[Trajectory], group: int) -> tuple[list[float], list[float]]:
        """Return the mean reward of each trajectory's group, and the factor of its advantages."""
        device = self.accelerator.device
        own = torch.tensor([reward_of(trajectory) for trajectory in trajectories], device=device)
        rewards = self.accelerator.gather(own)
        groups = rewards.view(-1, group)
        means = groups.mean(1).repeat_interleave(group)
        deviations = torch.zeros_like(rewards)
        if self.scale_rewards == "group" and group > 1:
            deviations = groups.std(1).repeat_interleave(group)
        elif self.scale_rewards == "batch" and len(rewards) > 1:
            deviations = rewards.std().expand_as(rewards)
        scales = torch.ones_like(rewards)
        if self.scale_rewards != "none":
            scales = 1 / (deviations + 1e-4)
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["reward"].append(float(rewards.mean()))
        self._metrics[mode]["frac_reward_zero_std"].append(
            float((groups == groups[:, :1]).all(1).float().mean())
        )
        first = self.accelerator.process_index * len(trajectories)
        local = slice(first, first + len(trajectories))
        return means[local].tolist(), scales[local].tolist()

    def _batch(self, part: _Part) -> TrainingBatch:
        """Collate the samples of a part: packed, or each in its own row."""
        rows = None
        if "packed" not in self.family.refused:
            lengths = [len(sample) for sample in part.samples]
            rows = first_fit_decreasing(lengths, max(self.row_tokens, *lengths, 1))
        model = self.accelerator.unwrap_model(self.model)
        batch = collate(
            part.samples, self.family, pad_token_id=self._tokenizer.pad_token_id, rows=rows, dtype=model.dtype
        )
        return batch.to(self.accelerator.device)

    def _scores(self, model: Any, batch: TrainingBatch) -> Any:
        with self.accelerator.autocast():
            return score_tokens(model, batch, temperature=self.temperature, entropy=True)

    def _compute_loss(self, model: Any, inputs: _Part) -> Any:
        """Return the loss of one accumulation step, divided as TRL's of the same name is."""
        mode = "train" if self.model.training else "eval"
        if not inputs.samples:
            return sum(parameter.sum() for parameter in model.parameters()) * 0.0
        batch = self._batch(inputs)
        scores = self._scores(model, batch)
        steps = self.current_gradient_accumulation_steps if mode == "train" else 1
        # The tokens of all parts, scaled to those of one optimiser step.
        tokens: Any = inputs.tokens * (steps / self.args.steps_per_generation if mode == "train" else 1.0)
        old = scores.logprobs.detach() if inputs.old is None else inputs.old
        options: dict[str, Any] = {"old": old, "low": self.epsilon_low, "high": self.epsilon_high}
        if self.vllm_importance_sampling_correction:
            most = self.vllm_importance_sampling_clip_max
            options["weights"] = importance_weights(old, batch, most=2.0 if most is None else most)
        count = len(inputs.samples) * steps
        if self.importance_sampling_level == "sequence":
            loss = gspo_loss(scores.logprobs, batch, samples=count, **options)
        elif self.loss_type == "grpo":
            loss = grpo_loss(scores.logprobs, batch, samples=count, **options)
        elif self.loss_type == "dr_grpo":
            length = self.max_completion_length
            loss = dr_grpo_loss(scores.logprobs, batch, samples=count, max_tokens=length, **options)
        elif self.loss_type == "bnpo":
            loss = ppo_loss(scores.logprobs, batch, tokens=int(batch.loss_mask.sum()) * steps, **options)
        elif self.loss_type == "cispo":
            options |= {"low": 1.0, "high": self.epsilon_high - 1}
            loss = cispo_loss(scores.logprobs, batch, tokens=tokens, **options)
        else:
            loss = ppo_loss(scores.logprobs, batch, tokens=tokens, **options)
        if self.entropy_coef:
            entropy = scores.entropy[batch.loss_mask].mean()
            loss = loss - self.entropy_coef * entropy / steps
        self._record(mode, batch, scores)
        return loss

    def _record(self, mode: str, batch: TrainingBatch, scores: Any) -> None:
        """Note how far sampler and trainer differ, in nats, and the entropy of the trained tokens."""
        mask = batch.loss_mask
        difference = (batch.logprobs - scores.logprobs.detach())[mask]
        metrics = self._metrics[mode]
        metrics["sampler_trainer/mean"].append(float(difference.mean()))
        metrics["sampler_trainer/max"].append(float(difference.abs().max()))
        metrics["entropy"].append(float(scores.entropy.detach()[mask].mean()))


def _no_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Stand for the rewards of the trajectories, without which TRL does not begin."""
    return [0.0] * len(completions)


def reward_of(trajectory: Trajectory) -> float:
    """Return a trajectory's own reward with those of its turns, as a mean over its branches."""
    branches = trajectory.branches()
    rewards = [_reward_of(steps.steps) for steps in branches]
    return (trajectory.reward or 0.0) + sum(rewards) / max(len(rewards), 1)


def _reward_of(steps: Sequence[Any]) -> float:
    return float(sum(np.sum(step.reward) for step in steps if step.reward is not None))


def _samples(trajectory: Trajectory, baseline: float, scale: float) -> list[TrainingSample]:
    """Return the samples of a trajectory, each sampled token once, with its advantages.

    The advantage of a turn is the mean reward of the branches that hold it, less the mean of the group.
    """
    branches, shared = trajectory.branches(), trajectory.reward or 0.0
    rewards: dict[int, list[float]] = {}
    for branch in branches:
        for step in branch.steps:
            rewards.setdefault(step.index, []).append(_reward_of(branch.steps) + shared)
    samples, trained = [], dict[int, int]()
    for branch in branches:
        sample = branch.sample(trained=trained)
        if not sample.loss_mask.any() or trajectory.error is not None:
            continue
        advantages = np.zeros(len(sample), np.float32)
        for part in branch.tip.parts():
            own = rewards[part.step.index]
            advantages[slice(*part.sampled)] = (sum(own) / len(own) - baseline) * scale
        advantages[~sample.loss_mask] = 0.0
        samples.append(replace(sample, advantages=advantages))
    return samples
