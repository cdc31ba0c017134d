"""The trainer's side: from trajectories to an update of the weights, in plain PyTorch.

Advantages are rewards less the mean of their group, as GRPO's, without the division by its deviation,
which weighs boards that are almost always or almost never won more than others. The loss is a mean over
the tokens of the step, not of means over sequences, so that length does not weigh either (Liu et al.,
"Understanding R1-Zero-Like Training", 2025). And as sampler and trainer are different programs, each
token is weighted by the truncated ratio of its probabilities, which is 1 where they agree: `cispo_loss`.
Log-probabilities and entropies come from hidden states, without logits.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo.config import Config
from grpo.faults import fault_of
from mmrender import TrainingSample, Trajectory
from mmrender.audit import TrainerModel, Watch
from mmrender.model.tokenizer import Tokenizer
from mmrender.training import (
    ModelFamily,
    TrainingBatch,
    collate,
    first_fit_decreasing,
    score_tokens,
)
from mmrender.training.losses import cispo_loss
from mmrender.trajectory import Branch


class Trainer:
    """Trains a model on trajectories.

    Args:
        config: The run's.
        model: A Transformers model.
        tokenizer: Its tokenizer, which only a fault needs.

    Attributes:
        step: Updates on sampled games so far.
        updates: Updates on recorded games so far.
        reading: Place in the files of games after the last step, as of `TrajectoryDataset.state_dict`.
        model: The model.
        family: How it is given a batch.
    """

    def __init__(self, config: Config, model: Any, tokenizer: Tokenizer) -> None:
        self.step = self.updates = 0
        self.reading: Any = None
        self.model = model
        self.family = ModelFamily.from_config(model.config)
        self._config = config
        self._fault = fault_of(config.fault, tokenizer)
        self._optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, weight_decay=0.0)
        self._watch = Watch(
            TrainerModel(model),
            share=config.audit_share,
            tolerance=config.tolerance,
            explain=config.explain,
            decode=tokenizer.decode,
        )

    def imitate(self, batch: TrainingBatch) -> float:
        """Take one step on recorded games; return their loss in nats a token."""
        count, total = int(batch.loss_mask.sum()), 0.0
        for micro_batch in self._micro_batches(batch):
            loss = -score_tokens(self.model, micro_batch).logprobs.sum() / count
            loss.backward()
            total += float(loss.detach())
        self._take_step()
        self.updates += 1
        return total

    def update(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Take one step on the games of a step; return what it saw.

        `kl` is the mean of `sampler - trainer` over sampled tokens, an estimate of their divergence, and
        `difference` the largest one.
        """
        config = self._config
        samples = [self._fault(sample) for sample in with_advantages(trajectories)]
        rows = first_fit_decreasing([len(sample) for sample in samples], config.row_tokens)
        batch = collate(samples, self.family, pad_token_id=0, rows=rows)
        count = int(batch.loss_mask.sum())
        seen: defaultdict[str, float] = defaultdict(float)
        for micro_batch in self._micro_batches(batch):
            scores = score_tokens(self.model, micro_batch, entropy=True)
            cispo_loss(
                scores.logprobs,
                micro_batch,
                tokens=count,
                high=config.most_weight - 1,
                penalty=-config.entropy_bonus * scores.entropy,
            ).backward()
            parted = (micro_batch.logprobs - scores.logprobs.detach())[micro_batch.loss_mask]
            seen["kl"] += float(parted.sum()) / count
            seen["entropy"] += float(scores.entropy.detach().sum()) / count
            seen["difference"] = max(seen["difference"], float(parted.abs().max()))
        seen["gradient"] = self._take_step()
        self.step += 1
        rewards = [reward_of(trajectory) for trajectory in trajectories]
        return {"reward": sum(rewards) / len(rewards), "tokens": float(sum(map(len, samples))), **seen}

    def _micro_batches(self, batch: TrainingBatch) -> Iterable[TrainingBatch]:
        return batch.micro_batches(max(self._config.micro_batch_tokens, batch.width))

    def _take_step(self) -> float:
        """Change the weights by the gradients that were accumulated; return the norm that these had."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(norm)

    def audit(self, trajectories: Sequence[Trajectory]) -> None:
        """Compare sampler and trainer on games that these weights sampled, as many as the time allows.

        Raises:
            SystemExit: They differ by more than arithmetic explains; the message is the finding.
        """
        samples = [self._fault(sample) for one in trajectories for sample in one.samples()]
        report = self._watch(samples[::-1])  # `stale` leaves the first game as it is
        if report is not None and not report.ok:
            raise SystemExit(f"sampler and trainer differ before step {self.step}:\n{report.text()}")

    def save(self, path: Path) -> None:
        """Write weights, optimiser and step; a run that is killed meanwhile keeps what was there."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "updates": self.updates,
            "reading": self.reading,
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        """Read what `save` wrote."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.updates, self.reading = state["step"], state["updates"], state.get("reading")


def reward_of(trajectory: Trajectory) -> float:
    """The mean reward of its branches: the game's own, and the sum of the rewards of the branch's turns."""
    rewards = [_reward_of(trajectory, branch) for branch in trajectory.branches()]
    return sum(rewards) / len(rewards)


def _reward_of(trajectory: Trajectory, branch: Branch) -> float:
    of_turns = sum(np.sum(step.reward) for step in branch.steps if step.reward is not None)
    return float(of_turns) + (trajectory.reward or 0.0)


def with_advantages(trajectories: Sequence[Trajectory]) -> list[TrainingSample]:
    """Samples of all games; each sampled token is trained on once.

    Its advantage is the mean reward of the branches that hold its turn, less the mean of the group.
    """
    groups: defaultdict[Any, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.extra["group"]].append(reward_of(trajectory))
    samples = []
    for trajectory in trajectories:
        of_group, branches = groups[trajectory.extra["group"]], trajectory.branches()
        baseline = sum(of_group) / len(of_group)
        rewards: defaultdict[int, list[float]] = defaultdict(list)
        for branch in branches:
            reward = _reward_of(trajectory, branch)
            for step in branch.steps:
                rewards[step.index].append(reward)
        trained: dict[int, int] = {}
        for branch in branches:
            sample = branch.sample(trained=trained)
            advantages = np.zeros(len(sample), np.float32)
            for part in branch.tip.parts():
                own = rewards[part.step.index]
                advantages[slice(*part.sampled)] = sum(own) / len(own) - baseline
            advantages[~sample.loss_mask] = 0.0
            samples.append(replace(sample, advantages=advantages))
    return samples
