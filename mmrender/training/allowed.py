"""What sampled tokens were chosen among: their log-probabilities and entropies are of that alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmrender.training.tensor_list import torch

if TYPE_CHECKING:
    from mmrender.training.batch import TrainingBatch
    from mmrender.training.segments import Rows


class LimitedTokens(NamedTuple):
    """Tokens of a batch that were chosen among less than the vocabulary.

    Attributes:
        rows: Row of each token; int64 `(n,)`.
        columns: Its column; int64 `(n,)`.
        owners: For each listed id the number of its token; int64 `(m,)`, rising.
        token_ids: The listed ids, token after token; int64 `(m,)`.
        forbids: Whether the ids are those that could not be chosen, in place of those that could.
    """

    rows: Any
    columns: Any
    owners: Any
    token_ids: Any
    forbids: bool

    def only(self, chosen: Any) -> LimitedTokens:
        """Return the tokens that `chosen`, bool `(n,)`, marks."""
        numbers, listed = chosen.cumsum(0) - 1, chosen[self.owners]
        owners = numbers[self.owners[listed]]
        return LimitedTokens(
            self.rows[chosen], self.columns[chosen], owners, self.token_ids[listed], self.forbids
        )


def limited_tokens(rows: Rows, device: Any) -> Iterator[LimitedTokens]:
    """Yield the tokens that were chosen among listed ids, then those that were chosen among all but these."""
    sets: dict[bool, list[tuple[int, int, tuple[int, ...]]]] = {False: [], True: []}
    for row, segments in enumerate(rows):
        for segment in segments:
            for start, stop, token_ids, forbids in segment.allowed:
                # The first token of a sample is predicted by none.
                places = range(segment.start + max(start, 1), segment.start + stop)
                sets[forbids] += [(row, place, token_ids) for place in places]
    for forbids, tokens in sets.items():
        if tokens:
            counts = torch.tensor([len(token_ids) for _, _, token_ids in tokens], device=device)
            at = torch.tensor([place[:2] for place in tokens], device=device)
            listed = chain.from_iterable(token_ids for _, _, token_ids in tokens)
            ids = torch.from_numpy(np.fromiter(listed, np.int64)).to(device)
            owners = torch.arange(len(tokens), device=device).repeat_interleave(counts)
            yield LimitedTokens(at[:, 0], at[:, 1], owners, ids, forbids)


def allowed_logprobs(
    logits: Any, at: tuple[Any, ...], token_ids: Any, limited: LimitedTokens, temperature: float = 1.0
) -> Any:
    """Return the log-probability of each token among those that were allowed: float32 `(n,)`.

    Args:
        logits: `(..., vocabulary)`.
        at: Indices, each `(n,)`, of the logits that predict the tokens.
        token_ids: The tokens, int64 `(n,)`.
        limited: Their sets.
        temperature: That of the sampler, as for `token_logprobs`.
    """
    chosen = logits[(*at, token_ids)].float() / temperature
    if limited.forbids:
        closed = torch.tensor(-torch.inf, device=logits.device)
        left = (logits[at].float() / temperature).index_put((limited.owners, limited.token_ids), closed)
        return chosen - left.logsumexp(-1)
    # The sets differ in size, so their sums are taken over one flat list.
    listed = logits[(*(index[limited.owners] for index in at), limited.token_ids)].float() / temperature
    largest = torch.full_like(chosen, -torch.inf).scatter_reduce(0, limited.owners, listed.detach(), "amax")
    scaled = (listed - largest[limited.owners]).exp()
    return chosen - largest - torch.zeros_like(chosen).index_add(0, limited.owners, scaled).log()


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
    for tokens in limited_tokens(batch.segments, logits.device):
        at = numbers[tokens.rows, tokens.columns]
        limited, at = tokens.only(at >= 0), at[at >= 0]
        closed = torch.zeros_like(own, dtype=torch.bool)
        closed[at] = not limited.forbids
        closed[at[limited.owners], limited.token_ids] = limited.forbids
        own = own.masked_fill(closed, -torch.inf)
    logprobs = own.log_softmax(-1)
    # What cannot be drawn adds nothing; minus infinity times zero would be no number.
    entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(-1)
    return torch.zeros_like(batch.loss_mask, dtype=torch.float32).index_put(places, entropy)
