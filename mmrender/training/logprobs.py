"""Log-probabilities and entropies of a batch's tokens from logits, and importance weights."""

from math import log
from typing import Any

from mmrender.errors import BatchError
from mmrender.training.batch import TrainingBatch
from mmrender.training.predictions import BatchRows
from mmrender.training.scoring import Scoring
from mmrender.training.tensor_list import torch


def token_logprobs(logits: Any, batch: BatchRows, *, temperature: Any = 1.0) -> Any:
    """Return the log-probability of each token given the tokens before it in its sample.

    If a token was sampled under a constraint, over the tokens that the constraint allowed. For long samples
    `score_tokens` computes the same without logits.

    Args:
        logits: `(rows, width, vocabulary)`, from the model for `batch.model_inputs()`.
        batch: Its tokens are looked up.
        temperature: The sampler's, if its log-probabilities are of the distribution it sampled from. A
            number, or a tensor `(rows, width)` aligned to tokens.

    Returns:
        float32 `(rows, width)`, aligned to tokens as the sampler's are; 0.0 at padding and at the first token
        of each sample.

    Raises:
        BatchError: The logits or temperatures are not aligned to the batch, or a temperature is not above 0.
    """
    batch.check_aligned(logits)
    return Scoring(batch.predictions("all"), temperature).spread(logits, None).logprobs


def token_entropy(logits: Any, batch: TrainingBatch, *, temperature: Any = 1.0) -> Any:
    """Return the entropy of the distribution that each sampled token was drawn from, in nats.

    Arguments and errors as for `token_logprobs`. The result is float32 `(rows, width)`, aligned to tokens;
    0.0 outside the loss mask, which marks sampled tokens.
    """
    batch.check_aligned(logits)
    return Scoring(batch.predictions(), temperature, entropy=True).spread(logits, None).entropy


def importance_weights(logprobs: Any, batch: BatchRows, *, most: float = 2.0) -> Any:
    """Return the ratio of the model's probability of each sampled token to the sampler's, truncated.

    The truncated ratio `min(exp(model - sampler), most)` corrects for a sampler that differs from the trainer
    (Espeholt et al., 2018). It is a factor, not a path for gradients: it is detached.

    Args:
        logprobs: `(rows, width)`, such as from `token_logprobs`.
        batch: Has the sampler's. A shard for log-probabilities from `SequenceShard.token_logprobs`.
        most: Upper bound of a weight.

    Returns:
        float32 `(rows, width)`; 0.0 outside the loss mask.

    Raises:
        BatchError: The batch is without log-probabilities, or the tensor is not aligned to it.
    """
    batch.check_aligned(logprobs)
    if batch.logprobs is None:
        problem = "the batch is without log-probabilities of a sampler"
        raise BatchError(problem, where="logprobs", remedy="Batch rollouts, not recorded conversations")
    # The difference is cut before the exponential, which could overflow.
    difference = (logprobs.detach().float() - batch.logprobs).clamp(max=log(most))
    return torch.where(batch.loss_mask, difference.exp(), 0.0)
