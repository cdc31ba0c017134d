r"""Losses of policy gradients and preferences, over the values of one batch.

Every function returns one micro-batch's share of the loss of a whole step: a sum, divided by counts of the
whole step. So losses and gradients of micro-batches, and of ranks, add up to the loss of the step, however
the samples are spread. If gradients are averaged over ranks, as by DDP and FSDP, multiply the loss by the
number of ranks. `step_counts` counts.

With the log-probability $l_t$ of a token, its log-probability $m_t$ when it was sampled, its advantage $A_t$
and the ratio $r_t = \exp(l_t - m_t)$, a token's loss is for

- PPO, GRPO, Dr. GRPO: $-\min(r_t A_t, \operatorname{clip}(r_t, 1 - \epsilon, 1 + \epsilon') A_t)$
- GSPO: the same with the ratio of its sample, $\exp(\frac{1}{n} \sum_t (l_t - m_t))$
- CISPO: $-\operatorname{sg}(\operatorname{clip}(r_t, 1 - \epsilon, 1 + \epsilon')) A_t l_t$, and sg passes no
  gradient

The mean is taken over tokens (PPO, CISPO), over the tokens of a sample and then over samples (GRPO, GSPO), or
over samples and a fixed length (Dr. GRPO). A sample is a branch of a trajectory, and its tokens are those of
its loss mask.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypedDict, Unpack

from mmrender.errors import BatchError
from mmrender.training.batch import TrainingBatch
from mmrender.training.predictions import BatchRows
from mmrender.training.tensor_list import torch


class StepCounts(NamedTuple):
    """Counts of a whole step.

    Attributes:
        tokens: Tokens to train on.
        samples: Samples that have some.
    """

    tokens: int
    samples: int


def step_counts(batches: Iterable[TrainingBatch], group: Any = None) -> StepCounts:
    """Count tokens and samples of a step.

    Args:
        batches: All micro-batches of this rank.
        group: The process group of the data-parallel ranks, whose counts are added. None counts this rank's.
    """
    tokens = samples = 0
    for batch in batches:
        tokens += int(batch.loss_mask.sum())
        samples += int(batch.sample_numbers[batch.loss_mask].unique().numel())
    if group is not None:
        counts = torch.tensor([tokens, samples], device=batch.loss_mask.device)
        torch.distributed.all_reduce(counts, group=group)
        tokens, samples = counts.tolist()
    return StepCounts(tokens, samples)


class PolicyOptions(TypedDict, total=False):
    """Options of the losses of a policy.

    Attributes:
        old: Log-probabilities under the weights that the ratio starts from, `(rows, width)`. Without them the
            sampler's. With the trainer's own, `weights` corrects for the sampler.
        low: How far the ratio may fall below 1 before its gradient stops.
        high: How far it may rise above 1.
        weights: Factors of the policy's term, `(rows, width)`, such as `importance_weights(old, batch)`:
            truncated importance sampling (Yao et al., "Your Efficient RL Framework Secretly Brings You
            Off-Policy RL Training", 2025). They pass no gradient.
        penalty: Added to each token's loss, `(rows, width)`, such as `beta * scores.kl`.
    """

    old: Any
    low: float
    high: float
    weights: Any
    penalty: Any


def ppo_loss(logprobs: Any, rows: BatchRows, *, tokens: int, **options: Unpack[PolicyOptions]) -> Any:
    """Return the clipped loss, as a mean over tokens.

    Source: Schulman et al., "Proximal Policy Optimization Algorithms", 2017, equation 7. With `high` above
    `low` the loss of Yu et al., "DAPO", 2025, equation 8.

    Args:
        logprobs: The model's, `(rows, width)`, such as `score_tokens(model, batch).logprobs`.
        rows: Has advantages, the loss mask and the sampler's log-probabilities. A shard for a shard's values.
        tokens: Tokens to train on in the whole step.
        **options: See `PolicyOptions`. The bounds are 0.2 by default.

    Raises:
        BatchError: A tensor is not aligned to the rows, or the rows are without advantages or
            log-probabilities.
    """
    losses = _clipped(_log_ratio(logprobs, rows, options), rows, options)
    return _total(losses, rows, options) / tokens


def grpo_loss(logprobs: Any, rows: BatchRows, *, samples: int, **options: Unpack[PolicyOptions]) -> Any:
    """Return the clipped loss, as a mean over the tokens of each sample and over samples.

    Source: Shao et al., "DeepSeekMath", 2024, equation 3. Its last term is
    `penalty=beta * kl_estimate(logprobs, reference)`.

    Arguments and errors as for `ppo_loss`. `samples` are the samples of the whole step that have tokens to
    train on.
    """
    losses = _clipped(_log_ratio(logprobs, rows, options), rows, options)
    return _total(losses, rows, options, by_sample=True) / samples


def dr_grpo_loss(
    logprobs: Any, rows: BatchRows, *, samples: int, max_tokens: int, **options: Unpack[PolicyOptions]
) -> Any:
    """Return the clipped loss, as a sum over tokens divided by samples and by one length for all.

    Source: Liu et al., "Understanding R1-Zero-Like Training", 2025, section 3.2. Its advantages are rewards
    less the mean of their group, without the division by the deviation.

    Arguments and errors as for `ppo_loss`. `samples` are the samples of the whole step, and `max_tokens` is
    the maximum number of sampled tokens, the same in all steps.
    """
    return ppo_loss(logprobs, rows, tokens=samples * max_tokens, **options)


def gspo_loss(
    logprobs: Any, rows: BatchRows, *, samples: int, group: Any = None, **options: Unpack[PolicyOptions]
) -> Any:
    """Return the loss with one clipped ratio a sample, as a mean over samples.

    Source: Zheng et al., "Group Sequence Policy Optimization", 2025, equations 5 and 7, with the bounds of
    its section 5.1, 0.0003 and 0.0004. Advantages may differ within a sample (GSPO-token, equation 13).

    Arguments and errors as for `grpo_loss`. `group` is, for a shard, the process group of the ranks that
    split its rows.
    """
    log_ratio = _log_ratio(logprobs, rows, options)
    fixed = log_ratio.detach()
    mean = _sample_sums(fixed, rows, group) / rows.trained_tokens.clamp(min=1)
    losses = _clipped(mean + (log_ratio - fixed), rows, options, low=3e-4, high=4e-4)
    return _total(losses, rows, options, by_sample=True) / samples


def cispo_loss(logprobs: Any, rows: BatchRows, *, tokens: int, **options: Unpack[PolicyOptions]) -> Any:
    """Return the loss whose clipped ratio is a factor, so that every token has a gradient, over tokens.

    Source: MiniMax, "MiniMax-M1", 2025, equations 4 and 5, which leaves the ratio without a lower bound. By
    default it lies between 0 and 5. Arguments and errors as for `ppo_loss`.
    """
    low, high = options.get("low", 1.0), options.get("high", 4.0)
    ratio = _log_ratio(logprobs, rows, options).detach().exp().clamp(1 - low, 1 + high)
    return _total(-ratio * _advantages(rows) * logprobs, rows, options) / tokens


def dpo_loss(
    logprobs: Any,
    reference: Any,
    batch: TrainingBatch,
    preferences: Sequence[tuple[str, str]],
    *,
    pairs: int,
    beta: float = 0.1,
) -> Any:
    r"""Return the loss of preferences between samples, as a mean over pairs.

    Samples are for example branches of a trajectory.
    A pair's loss is $-\log \sigma(\beta (\sum (l - l^{ref})_{chosen} - \sum (l - l^{ref})_{rejected}))$, the
    sums over the tokens to train on. Tokens that both branches have before they part cancel out.

    Source: Rafailov et al., "Direct Preference Optimization", 2023, equation 7.

    Args:
        logprobs: The model's, `(rows, width)`.
        reference: The reference's, likewise, without gradients.
        batch: Has both samples of each pair. `collate(rows=[[0, 1], [2, 3]])` keeps pairs in one row, and so
            in one micro-batch.
        preferences: Names of the chosen sample and of the rejected one, for each pair of this batch.
        pairs: Pairs of the whole step.
        beta: Strength of the reference.

    Raises:
        BatchError: A sample is not in the batch, a tensor is not aligned to it, or tokens that two branches
            share are trained on in one of them only.
    """
    batch.check_aligned(logprobs)
    batch.check_aligned(reference)
    numbers = {name: number for number, name in enumerate(batch.sample_ids)}
    gains = batch.split(torch.where(batch.loss_mask, logprobs - reference.detach(), 0.0))
    ids, masks = batch.split(batch.input_ids), batch.split(batch.loss_mask)
    margins = [logprobs.new_zeros(0)]
    for index, names in enumerate(preferences):
        for name in names:
            if name not in numbers:
                expected = ", ".join(map(repr, batch.sample_ids[:4]))
                raise BatchError(
                    "a preferred sample is not in the batch",
                    where=f"preferences[{index}]",
                    expected=expected,
                    got=repr(name),
                )
        chosen, rejected = (numbers[name] for name in names)
        length = min(len(ids[chosen]), len(ids[rejected]))
        shared = (ids[chosen][:length] == ids[rejected][:length]).cumprod(0) > 0
        if (masks[chosen][:length] != masks[rejected][:length])[shared].any():
            raise BatchError(
                "tokens that two branches share are trained on in one of them only",
                where=f"preferences[{index}]",
                got=" and ".join(map(repr, names)),
                remedy="Make the samples by trajectory.samples(once=False)",
            )
        margins.append((gains[chosen].sum() - gains[rejected].sum())[None])
    return -torch.nn.functional.logsigmoid(beta * torch.cat(margins)).sum() / pairs


def kl_estimate(logprobs: Any, reference: Any) -> Any:
    r"""Return an estimate of the divergence from a reference at each token, from the sampled token alone.

    $\exp(l^{ref} - l) - (l^{ref} - l) - 1$, which is never negative and right on average (Schulman,
    "Approximating KL Divergence", 2020, `k3`). `score_tokens(reference=...)` has the divergence itself.

    Args:
        logprobs: The model's, `(rows, width)`.
        reference: The reference's, likewise. It gets no gradient.
    """
    difference = reference.detach() - logprobs
    return difference.expm1() - difference


def _log_ratio(logprobs: Any, rows: BatchRows, options: PolicyOptions) -> Any:
    """Return `log r`, 0.0 outside the loss mask."""
    rows.check_aligned(logprobs)
    old = options.get("old", rows.logprobs)
    if old is None:
        raise BatchError(
            "the batch is without log-probabilities of a sampler",
            where="logprobs",
            remedy="Batch rollouts, or pass `old`",
        )
    rows.check_aligned(old)
    return torch.where(rows.loss_mask, logprobs - old.detach(), 0.0)


def _advantages(rows: BatchRows) -> Any:
    if rows.advantages is None:
        remedy = "Set `advantages` of the samples before `collate`"
        raise BatchError("the batch is without advantages", where="advantages", remedy=remedy)
    return rows.advantages


def _clipped(
    log_ratio: Any, rows: BatchRows, options: PolicyOptions, *, low: float = 0.2, high: float = 0.2
) -> Any:
    ratio, advantages = log_ratio.exp(), _advantages(rows)
    bounded = ratio.clamp(1 - options.get("low", low), 1 + options.get("high", high))
    return -torch.minimum(ratio * advantages, bounded * advantages)


def _total(losses: Any, rows: BatchRows, options: PolicyOptions, *, by_sample: bool = False) -> Any:
    """Return the sum of the losses of the tokens to train on, or of the means of each sample."""
    weights, penalty = options.get("weights"), options.get("penalty")
    if weights is not None:
        rows.check_aligned(weights)
        losses = losses * weights.detach()
    if penalty is not None:
        rows.check_aligned(penalty)
        losses = losses + penalty
    # Not a product: values outside the mask may be infinite.
    losses = torch.where(rows.loss_mask, losses, 0.0)
    return (losses / rows.trained_tokens.clamp(min=1) if by_sample else losses).sum()


def _sample_sums(values: Any, rows: BatchRows, group: Any) -> Any:
    """Return for each token the sum of the values of its sample's tokens."""
    places = rows.sample_numbers + 1
    sums = values.new_zeros(len(rows.sample_ids) + 1).index_add(0, places.reshape(-1), values.reshape(-1))
    if group is not None:
        torch.distributed.all_reduce(sums, group=group)
    return sums[places]
