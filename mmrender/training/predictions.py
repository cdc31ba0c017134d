"""`Predictions`: the tokens of a batch to score, the row that predicts each, and the ids that it could have.

Hidden states and logits lie at the token *before* the one that they predict. This shift is decided here, for
whole rows and for rows that are split over ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from mmrender.training.segments import Rows, placed
from mmrender.training.tensor_list import check_aligned, torch

IntArray: TypeAlias = npt.NDArray[np.int64]
Tokens: TypeAlias = Literal["trained", "all"] | Any
"""Tokens of a batch: of its loss mask, all that another token precedes, or of a mask `(rows, width)`."""


class Limits(NamedTuple):
    """Ids that tokens could be sampled from, or could not, as one list over all tokens.

    Attributes:
        bounds: Where the ids of each token begin in the list, and its end: int64 `(n + 1,)`, in memory.
        owners: The number of the token that each listed id belongs to, int64 `(m,)`, rising.
        token_ids: The listed ids, int64 `(m,)`.
        only: Whether a token could have its listed ids alone, bool `(n,)`, or all ids except these.
    """

    bounds: IntArray
    owners: Any
    token_ids: Any
    only: Any

    def closed(self, tokens: slice, ids: slice) -> Any:
        """Return which of some ids some tokens could not have, bool `(n, ids)`, or None for no limit."""
        listed = slice(int(self.bounds[tokens.start]), int(self.bounds[tokens.stop]))
        if listed.start == listed.stop:
            return None
        owners, width = self.owners[listed], ids.stop - ids.start
        places = self.token_ids[listed] - ids.start
        # Ids that lie elsewhere go to a column of their own, which asks for no count of the others.
        places = torch.where((places >= 0) & (places < width), places, width)
        closed = self.only[tokens, None].repeat(1, width + 1)
        closed[owners - tokens.start, places] = ~self.only[owners]
        return closed[:, :width]


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """Tokens to score.

    Attributes:
        shape: Rows and columns of their values.
        places: Place of each token's value in the flattened rows, int64 `(n,)`.
        sources: Place of the hidden state or of the logits that predict it, likewise.
        token_ids: The tokens, int64 `(n,)`.
        limits: The ids that they could have, or None if each could have any.
    """

    shape: tuple[int, int]
    places: Any
    sources: Any
    token_ids: Any
    limits: Limits | None

    @classmethod
    def of(
        cls,
        rows: Rows,
        input_ids: Any,
        tokens: IntArray,
        places: IntArray,
        *,
        shape: tuple[int, int],
        shift: int,
    ) -> "Predictions":
        """Return the predictions of some tokens.

        Args:
            rows: The samples in each row.
            input_ids: int64 `(rows, width)`.
            tokens: Places of the tokens in the flattened rows, `(n,)`.
            places: Places of their values in rows of `shape`, flattened.
            shape: Rows and columns of the values.
            shift: Columns from the hidden state that predicts a token to the place of its value.
        """
        device = input_ids.device
        at = torch.from_numpy(places).to(device)
        ids = input_ids.reshape(-1)[torch.from_numpy(tokens).to(device)]
        return cls(shape, at, at - shift, ids, _limits(rows, input_ids, tokens))

    def __len__(self) -> int:
        return len(self.token_ids)

    def spread(self, values: Any) -> Any:
        """Return values `(n,)` of the tokens in their places, else 0: `(rows, columns)`."""
        rows, columns = self.shape
        zeros = torch.zeros(rows * columns, dtype=values.dtype, device=values.device)
        return zeros.index_put((self.places.to(values.device),), values).view(rows, columns)


class BatchRows(Protocol):
    """A `TrainingBatch`, or a `SequenceShard` of it."""

    @property
    def loss_mask(self) -> Any:
        """Tokens to train on: bool `(rows, width)`."""

    @property
    def logprobs(self) -> Any:
        """The sampler's: float32 `(rows, width)`, or None."""

    @property
    def advantages(self) -> Any:
        """float32 `(rows, width)`, or None."""

    @property
    def sample_numbers(self) -> Any:
        """The number of each token's sample, int64 `(rows, width)`; -1 at padding."""

    @property
    def trained_tokens(self) -> Any:
        """Number of tokens to train on in each token's sample, int64 `(rows, width)`; 0 at padding."""

    @property
    def sample_ids(self) -> list[str]:
        """Names of the samples."""

    def model_inputs(self) -> dict[str, Any]:
        """Return the keyword arguments of the model's forward."""

    def predictions(self, tokens: Tokens = "trained") -> Predictions:
        """Return the predictions of some tokens."""

    def check_aligned(self, values: Any) -> None:
        """Raise `BatchError` unless a tensor is `(rows, width, ...)`."""


def predicted(rows: Rows, loss_mask: Any, tokens: Tokens) -> npt.NDArray[np.bool_]:
    """Return the mask of some tokens, bool `(rows, width)`. Nothing predicts the first token of a sample."""
    follows = np.zeros(tuple(loss_mask.shape), np.bool_)
    for row, segment in placed(rows):
        follows[row, segment.start + 1 : segment.stop] = True
    if isinstance(tokens, str) and tokens == "all":
        return follows
    mask = loss_mask if isinstance(tokens, str) else tokens
    check_aligned(mask, loss_mask.shape, "batch")
    return follows & np.asarray(mask.cpu(), np.bool_)


def _limits(rows: Rows, input_ids: Any, tokens: IntArray) -> Limits | None:
    numbers = np.full(input_ids.numel(), -1)
    numbers[tokens] = np.arange(len(tokens))
    sets = sorted(_sets(rows, numbers.reshape(input_ids.shape)))
    if not sets:
        return None
    counts, only = np.zeros(len(tokens) + 1, np.int64), np.zeros(len(tokens), np.bool_)
    for number, token_ids, forbids in sets:
        counts[number + 1], only[number] = len(token_ids), not forbids
    listed = np.fromiter(chain.from_iterable(token_ids for _, token_ids, _ in sets), np.int64)
    owners = np.repeat(np.arange(len(tokens)), counts[1:])
    moved = (torch.from_numpy(array).to(input_ids.device) for array in (owners, listed, only))
    return Limits(np.cumsum(counts), *moved)


def _sets(rows: Rows, numbers: IntArray) -> Iterator[tuple[int, tuple[int, ...], bool]]:
    """Yield number, listed ids and their kind of each token with a limit."""
    for row, segment in placed(rows):
        for start, stop, token_ids, forbids in segment.in_row.allowed:
            for number in numbers[row, start:stop]:
                if number >= 0 and (token_ids or not forbids):
                    yield int(number), token_ids, forbids
