"""What a completion must be before anyone trains on it."""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from mmrender.errors import EngineReplyError

LOGPROB_SENTINEL: Final = -9999.0
"""What vLLM writes where it has no logprob."""


def checked_completion(
    ids: Sequence[Any], logprobs: Sequence[Any], vocab_size: int | None = None, *, where: str = "completion"
) -> tuple[list[int], list[float]]:
    """Return a completion's tokens with one finite logprob for each.

    Args:
        ids: The sampled tokens.
        logprobs: What the engine said of each.
        vocab_size: Ids at or above it are refused; None where it is not known.
        where: The completion in errors.

    Raises:
        EngineReplyError: Their numbers differ, a token is outside the vocabulary, or a logprob is missing,
            not finite, or the sentinel for one that the engine does not have.
    """
    if len(ids) != len(logprobs):
        raise EngineReplyError(
            "tokens and logprobs are not equally many",
            where=where,
            expected=f"{len(ids)} logprobs, one for each token",
            got=str(len(logprobs)),
        )
    if not _plausible(ids, logprobs, vocab_size):
        for index, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            _check_token(token, vocab_size, f"{where}[{index}]")
            _check_logprob(token, logprob, f"{where}[{index}]")
    return [int(token) for token in ids], [float(logprob) for logprob in logprobs]


def _plausible(ids: Sequence[Any], logprobs: Sequence[Any], vocab_size: int | None) -> bool:
    """Whether everything is right, seen at once; where not, a walk finds what is wrong."""
    try:
        tokens, values = np.asarray(ids), np.asarray(logprobs)
    except (ValueError, OverflowError):
        return False
    if not tokens.size:
        return True
    if (
        tokens.dtype.kind not in "iu"
        or values.dtype.kind not in "fiu"
        or tokens.ndim != 1
        or values.ndim != 1
    ):
        return False
    inside = tokens.min() >= 0 and (vocab_size is None or tokens.max() < vocab_size)
    return bool(inside and np.isfinite(values).all() and (values != LOGPROB_SENTINEL).all())


def _check_token(token: Any, vocab_size: int | None, where: str) -> None:
    is_id = isinstance(token, int | np.integer) and not isinstance(token, bool) and token >= 0
    if not is_id or (vocab_size is not None and token >= vocab_size):
        raise EngineReplyError(
            "the engine gave a token that is outside the vocabulary",
            where=where,
            expected="an id of 0 or more" if vocab_size is None else f"an id from 0 to {vocab_size - 1}",
            got=repr(token),
        )


def _check_logprob(token: Any, logprob: Any, where: str) -> None:
    is_number = isinstance(logprob, int | float | np.number) and not isinstance(logprob, bool)
    if not is_number or not math.isfinite(logprob):
        raise EngineReplyError(
            f"the engine gave no finite logprob for the token {token}",
            where=where,
            expected="a finite number",
            got=repr(logprob),
        )
    if logprob == LOGPROB_SENTINEL:
        raise EngineReplyError(
            f"the engine has no logprob for the token {token}",
            where=where,
            expected="a finite number",
            got=f"{LOGPROB_SENTINEL}, which stands for none",
        )
