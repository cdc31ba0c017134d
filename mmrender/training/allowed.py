"""What sampled tokens were chosen among: their log-probabilities and entropies are of that alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from mmrender.training.tensor_list import torch

if TYPE_CHECKING:
    from mmrender.training.batch import TrainingBatch
    from mmrender.training.segments import Rows


class LimitedTokens(NamedTuple):
    """Tokens of a batch that were chosen among the same set: their places, and the set.

    `rows` and `columns` are int64 `(n,)`; with `forbids` the token ids are what could not be chosen.
    """

    rows: Any
    columns: Any
    token_ids: tuple[int, ...]
    forbids: bool


def limited_tokens(rows: Rows, device: Any) -> Iterator[LimitedTokens]:
    """Yield the tokens of each set that some were chosen among."""
    places: dict[tuple[tuple[int, ...], bool], list[tuple[int, int]]] = {}
    for row, segments in enumerate(rows):
        for segment in segments:
            for start, stop, token_ids, forbids in segment.allowed:
                found = places.setdefault((token_ids, forbids), [])
                # The first token of a sample is predicted by none.
                found += [(row, segment.start + place) for place in range(max(start, 1), stop)]
    for (token_ids, forbids), found in places.items():
        at = torch.tensor(found, dtype=torch.int64, device=device).reshape(-1, 2)
        yield LimitedTokens(at[:, 0], at[:, 1], token_ids, forbids)


def allowed_logsumexp(logits: Any, token_ids: tuple[int, ...], forbids: bool) -> Any:
    """Return the logarithm of the sum of exponentials of the allowed logits: `(n,)` of `(n, vocabulary)`."""
    listed = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    if forbids:
        return logits.index_fill(-1, listed, -torch.inf).logsumexp(-1)
    return logits[:, listed].logsumexp(-1)


def token_entropy(logits: Any, batch: TrainingBatch, *, temperature: float = 1.0) -> Any:
    """Return the entropy of the distribution that each sampled token was drawn from, in nats.

    Args:
        logits: `(rows, width, vocabulary)`, as the model gives them for `batch.model_inputs()`.
        batch: Its loss mask says which tokens were sampled, its samples what they were chosen among.
        temperature: That of the sampler, where its distribution is meant.

    Returns:
        float32 `(rows, width)`, aligned to tokens; 0.0 outside the loss mask.

    Raises:
        BatchError: The logits are not those of this batch.
    """
    batch.check_aligned(logits)
    places = batch.loss_mask.nonzero(as_tuple=True)
    own = logits[places[0], places[1] - 1].float() / temperature
    numbers = torch.full(batch.loss_mask.shape, -1, device=logits.device)
    numbers[places] = torch.arange(len(own), device=logits.device)
    for limited in limited_tokens(batch.segments, logits.device):
        listed = torch.tensor(limited.token_ids, dtype=torch.int64, device=logits.device)
        closed = torch.full(own.shape[-1:], not limited.forbids, device=logits.device)
        closed[listed] = limited.forbids
        at = numbers[limited.rows, limited.columns]
        at = at[at >= 0]
        own = own.index_put((at,), own[at].masked_fill(closed, -torch.inf))
    logprobs = own.log_softmax(-1)
    # What cannot be drawn adds nothing; minus infinity times zero would be no number.
    entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(-1)
    return torch.zeros_like(batch.loss_mask, dtype=torch.float32).index_put(places, entropy)
