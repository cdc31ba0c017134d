"""Log-probabilities of a batch's own tokens, aligned to them as the sampler's are."""

from typing import Any

from mmrender.errors import BatchError
from mmrender.training._torch import torch
from mmrender.training.batch import TrainingBatch


def token_logprobs(logits: Any, batch: TrainingBatch, *, temperature: float = 1.0) -> Any:
    """Return the log-probability of each token given those before it in its sample.

    Args:
        logits: `(rows, width, vocabulary)`, as the model gives them for `batch.model_inputs()`.
        batch: Whose tokens are looked up.
        temperature: That of the sampler, if its log-probabilities are of the distribution it sampled from.

    Returns:
        float32 `(rows, width)`, 0.0 at padding and at the first token of each sample.

    Raises:
        BatchError: The logits are not those of this batch.
    """
    if tuple(logits.shape[:2]) != (len(batch), batch.width):
        raise BatchError(
            "the logits are not those of this batch",
            where="logits",
            expected=f"{[len(batch), batch.width, 'vocabulary']}",
            got=str(list(logits.shape)),
        )
    scaled = logits[:, :-1].float() / temperature
    targets = batch.input_ids[:, 1:, None]
    found = scaled.gather(-1, targets)[..., 0] - scaled.logsumexp(-1)
    # Not a product: what the model says at padding may be infinite or no number.
    return torch.where(predicted(batch), torch.nn.functional.pad(found, (1, 0)), 0.0)


def predicted(batch: TrainingBatch) -> Any:
    """Return which tokens have one of their own sample before them: bool `(rows, width)`."""
    mask = torch.zeros_like(batch.attention_mask)
    for row, segments in enumerate(batch.segments):
        for segment in segments:
            mask[row, segment.start + 1 : segment.stop] = True
    return mask
