"""Log-probabilities and entropies of a batch's tokens, over the tokens that could be sampled."""

from collections.abc import Iterable, Iterator
from itertools import chain
from math import log
from typing import Any, NamedTuple, Protocol

import numpy as np

from mmrender.errors import BatchError
from mmrender.training.batch import TrainingBatch
from mmrender.training.segments import Rows, placed, token_numbers
from mmrender.training.tensor_list import torch


class LimitedTokens(NamedTuple):
    """Tokens of a batch that were sampled from a part of the vocabulary.

    Attributes:
        rows: Row of each token, int64 `(n,)`.
        columns: Column of each token, int64 `(n,)`.
        owners: For each listed id the number of its token, int64 `(m,)`, rising.
        token_ids: The listed ids, token after token, int64 `(m,)`.
        forbids: Whether the ids could not be sampled. If False, only these could.
    """

    rows: Any
    columns: Any
    owners: Any
    token_ids: Any
    forbids: bool

    def only(self, chosen: Any) -> "LimitedTokens":
        """Return the tokens that `chosen`, bool `(n,)`, marks."""
        numbers, listed = chosen.cumsum(0) - 1, chosen[self.owners]
        owners = numbers[self.owners[listed]]
        return LimitedTokens(
            self.rows[chosen], self.columns[chosen], owners, self.token_ids[listed], self.forbids
        )


def limited_tokens(rows: Rows, device: Any) -> Iterator[LimitedTokens]:
    """Yield the tokens with listed ids that they could be, then those with ids that they could not be."""
    sets: dict[bool, list[tuple[int, int, tuple[int, ...]]]] = {False: [], True: []}
    for row, segment in placed(rows):
        for start, stop, token_ids, forbids in segment.in_row.allowed:
            # Nothing predicts the first token of a sample.
            columns = range(max(start, segment.start + 1), stop)
            sets[forbids] += [(row, column, token_ids) for column in columns]
    for forbids, tokens in sets.items():
        if tokens:
            counts = torch.tensor([len(token_ids) for _, _, token_ids in tokens], device=device)
            places = torch.tensor([place[:2] for place in tokens], device=device)
            listed = chain.from_iterable(token_ids for _, _, token_ids in tokens)
            ids = torch.from_numpy(np.fromiter(listed, np.int64)).to(device)
            owners = torch.arange(len(tokens), device=device).repeat_interleave(counts)
            yield LimitedTokens(places[:, 0], places[:, 1], owners, ids, forbids)


def allowed_logprobs(
    logits: Any, at: tuple[Any, ...], token_ids: Any, limited: LimitedTokens, temperature: float = 1.0
) -> Any:
    """Return the log-probability of each token over the tokens that could be sampled: float32 `(n,)`.

    Args:
        logits: `(..., vocabulary)`.
        at: Indices, each `(n,)`, of the logits that predict the tokens.
        token_ids: The tokens, int64 `(n,)`.
        limited: Their listed ids.
        temperature: The sampler's, as for `token_logprobs`.
    """
    chosen = logits[(*at, token_ids)].float() / temperature
    if limited.forbids:
        closed = torch.tensor(-torch.inf, device=logits.device)
        rest = (logits[at].float() / temperature).index_put((limited.owners, limited.token_ids), closed)
        return chosen - rest.logsumexp(-1)
    # The sets differ in size, so their sums are taken over one flat list.
    listed = logits[(*(index[limited.owners] for index in at), limited.token_ids)].float() / temperature
    largest = torch.full_like(chosen, -torch.inf).scatter_reduce(0, limited.owners, listed.detach(), "amax")
    scaled = (listed - largest[limited.owners]).exp()
    return chosen - largest - torch.zeros_like(chosen).index_add(0, limited.owners, scaled).log()


def logprobs_of(
    logits: Any, token_ids: Any, limited: Iterable[LimitedTokens], temperature: float = 1.0
) -> Any:
    """Return the log-probability of each token at its logits: float32 `(rows, n)`.

    Args:
        logits: `(rows, n, vocabulary)`.
        token_ids: int64 `(rows, n)`.
        limited: Tokens with listed ids, by the columns of the logits that predict them.
        temperature: As for `token_logprobs`.
    """
    scaled = logits.float() / temperature
    logprobs = scaled.gather(-1, token_ids[..., None])[..., 0] - scaled.logsumexp(-1)
    for tokens in limited:
        at = (tokens.rows, tokens.columns)
        values = allowed_logprobs(logits, at, token_ids[at], tokens, temperature)
        logprobs = logprobs.index_put(at, values)
    return logprobs


def token_logprobs(logits: Any, batch: TrainingBatch, *, temperature: float = 1.0) -> Any:
    """Return the log-probability of each token given the tokens before it in its sample.

    If a token was sampled under a constraint, over the tokens that the constraint allowed.

    Args:
        logits: `(rows, width, vocabulary)`, from the model for `batch.model_inputs()`.
        batch: Its tokens are looked up.
        temperature: The sampler's, if its log-probabilities are of the distribution it sampled from.

    Returns:
        float32 `(rows, width)`, aligned to tokens as the sampler's are; 0.0 at padding and at the first token
        of each sample.

    Raises:
        BatchError: The logits are not aligned to the batch.
    """
    batch.check_aligned(logits)
    limited = (
        tokens._replace(columns=tokens.columns - 1)
        for tokens in limited_tokens(batch.segments, logits.device)
    )
    logprobs = logprobs_of(logits[:, :-1], batch.input_ids[:, 1:], limited, temperature)
    # Not a product: logits at padding may be infinite or not a number.
    predicted = token_numbers(batch.segments, batch.input_ids) > 0
    return torch.where(predicted, torch.nn.functional.pad(logprobs, (1, 0)), 0.0)


def token_entropy(logits: Any, batch: TrainingBatch, *, temperature: float = 1.0) -> Any:
    """Return the entropy of the distribution that each sampled token was drawn from, in nats.

    Args:
        logits: `(rows, width, vocabulary)`, from the model for `batch.model_inputs()`.
        batch: Its loss mask marks sampled tokens, and its samples say which tokens could be sampled.
        temperature: The sampler's, for the entropy of its distribution.

    Returns:
        float32 `(rows, width)`, aligned to tokens; 0.0 outside the loss mask.

    Raises:
        BatchError: The logits are not aligned to the batch.
    """
    batch.check_aligned(logits)
    places = batch.loss_mask.nonzero(as_tuple=True)
    scaled = logits[places[0], places[1] - 1].float() / temperature
    numbers = torch.full(batch.loss_mask.shape, -1, device=logits.device)
    numbers[places] = torch.arange(len(scaled), device=logits.device)
    for tokens in limited_tokens(batch.segments, logits.device):
        at = numbers[tokens.rows, tokens.columns]
        limited, at = tokens.only(at >= 0), at[at >= 0]
        closed = torch.zeros_like(scaled, dtype=torch.bool)
        closed[at] = not limited.forbids
        closed[at[limited.owners], limited.token_ids] = limited.forbids
        scaled = scaled.masked_fill(closed, -torch.inf)
    logprobs = scaled.log_softmax(-1)
    # A token of probability 0 adds nothing. Minus infinity times zero is not a number.
    entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0.0)).sum(-1)
    return torch.zeros_like(batch.loss_mask, dtype=torch.float32).index_put(places, entropy)


class SampledRows(Protocol):
    """A `TrainingBatch`, or a `SequenceShard` of it."""

    @property
    def loss_mask(self) -> Any:
        """Tokens to train on: bool `(rows, width)`."""

    @property
    def logprobs(self) -> Any:
        """The sampler's: float32 `(rows, width)`, or None."""

    def check_aligned(self, values: Any) -> None:
        """Raise `BatchError` unless a tensor is `(rows, width, ...)`."""


def importance_weights(logprobs: Any, batch: SampledRows, *, most: float = 2.0) -> Any:
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
