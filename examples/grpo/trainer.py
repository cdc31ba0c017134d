"""The trainer's side: from trajectories to an update of the weights, in plain PyTorch.

The update is GRPO's with three changes that later work grounds. Advantages are rewards less the mean of
their group, without the division by its deviation, which weighs boards that are almost always or almost
never won more than others; the loss is a mean over the tokens of the step, not of means over sequences, so
that length does not weigh either (Liu et al., "Understanding R1-Zero-Like Training", 2025). And as sampler
and trainer are different programs, each token is weighted by the truncated ratio of its probabilities,
which is 1 where they agree (Espeholt et al., "IMPALA", 2018).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo.config import Config
from mmrender.audit import TrainerModel, audit
from mmrender.spans import MediaItem, MultiModalData
from mmrender.training import ModelFamily, collate, first_fit_decreasing, token_entropy, token_logprobs
from mmrender.training.batch import importance_weights
from mmrender.trajectory import TrainingSample, Trajectory


class Trainer:
    """Trains a model on trajectories.

    Args:
        config: The run's.
        model: A Transformers model.

    Attributes:
        step: Updates so far.
    """

    def __init__(self, config: Config, model: Any) -> None:
        self.step = 0
        self._shown: list[MediaItem] = []
        self.model = model
        self._config = config
        self._family = ModelFamily.from_config(model.config)
        self._optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, weight_decay=0.0)

    def update(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Take one step on the games of a step; return what it saw.

        `kl` is the mean of `sampler - trainer` over sampled tokens, an estimate of their divergence, and
        `difference` the largest one.
        """
        config = self._config
        samples = [self._faulty(sample) for sample in with_advantages(trajectories)]
        rows = first_fit_decreasing([len(sample) for sample in samples], config.row_tokens)
        batch = collate(samples, self._family, pad_token_id=0, rows=rows)
        count = int(batch.loss_mask.sum())
        seen: defaultdict[str, float] = defaultdict(float)
        for micro_batch in batch.micro_batches(max(config.micro_batch_tokens, batch.width)):
            logits = self.model(**micro_batch.model_inputs()).logits
            logprobs = token_logprobs(logits, micro_batch)
            weights = importance_weights(logprobs, micro_batch, most=config.most_weight)
            entropy = token_entropy(logits, micro_batch)
            gain = weights * micro_batch.advantages * logprobs + config.entropy_bonus * entropy
            (-gain[micro_batch.loss_mask].sum() / count).backward()
            parted = (micro_batch.logprobs - logprobs.detach())[micro_batch.loss_mask]
            seen["kl"] += float(parted.sum()) / count
            seen["entropy"] += float(entropy.detach().sum()) / count
            seen["difference"] = max(seen["difference"], float(parted.abs().max()))
        seen["gradient"] = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        rewards = [reward_of(trajectory) for trajectory in trajectories]
        return {"reward": sum(rewards) / len(rewards), "tokens": float(sum(map(len, samples))), **seen}

    def audit(self, trajectories: Sequence[Trajectory]) -> None:
        """Compare what sampler and trainer say of some games, which these weights sampled.

        Raises:
            SystemExit: They differ by more than arithmetic explains; the message is the finding.
        """
        samples = [self._faulty(sample) for one in trajectories for sample in one.samples()]
        report = audit(samples, TrainerModel(self.model), tolerance=self._config.tolerance, explain=1)
        if not report.ok:
            raise SystemExit(f"sampler and trainer differ before step {self.step}:\n{report.text()}")

    def _faulty(self, sample: TrainingSample) -> TrainingSample:
        """Return the sample with the fault that the settings ask for."""
        if self._config.fault == "shifted":
            mask, logprobs = np.roll(sample.loss_mask, -1), np.zeros(len(sample), np.float32)
            if sample.logprobs is not None:
                logprobs = np.roll(sample.logprobs, -1)
            advantages = None if sample.advantages is None else np.roll(sample.advantages, -1)
            return replace(sample, loss_mask=mask, logprobs=logprobs, advantages=advantages, allowed=())
        if self._config.fault == "stale":
            (item,) = sample.multi_modal_data.mm_items["image"]
            if not self._shown or item.identity != self._shown[-1].identity:
                self._shown = [*self._shown[-1:], item]
            ranges = sample.multi_modal_data.mm_placeholders["image"]
            return replace(sample, multi_modal_data=MultiModalData.of([(ranges[0], self._shown[0])]))
        return sample

    def save(self, path: Path) -> None:
        """Write weights, optimiser and step; a run that is killed meanwhile keeps what was there."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        """Read what `save` wrote."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]


def reward_of(trajectory: Trajectory) -> float:
    """The sum of the rewards of all turns."""
    return float(sum(np.sum(step.reward) for step in trajectory.steps if step.reward is not None))


def with_advantages(trajectories: Sequence[Trajectory]) -> list[TrainingSample]:
    """Samples of all games, each token's advantage the reward of its game less the mean of its group."""
    groups: defaultdict[Any, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.extra["group"]].append(reward_of(trajectory))
    samples = []
    for trajectory in trajectories:
        rewards = groups[trajectory.extra["group"]]
        advantage = reward_of(trajectory) - sum(rewards) / len(rewards)
        for sample in trajectory.samples():
            advantages = np.where(sample.loss_mask, advantage, 0.0).astype(np.float32)
            samples.append(replace(sample, advantages=advantages))
    return samples
