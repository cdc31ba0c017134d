"""Common prefixes of two sequences: of tokens, of the media behind placeholders, and of messages.

Placeholders of two images of one size are the same tokens, so tokens alone do not tell where prompts part.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from mmrender.errors import TrajectoryError
from mmrender.spans import MediaSpan, common_prefix

Int32Array: TypeAlias = npt.NDArray[np.int32]
_NO_IDS: Final[Int32Array] = np.zeros(0, np.int32)
_LARGEST: Final = np.iinfo(np.int32).max
_ENCODE: Final = msgspec.msgpack.Encoder().encode


class SharedPrefix(NamedTuple):
    """The first `length` tokens agree, media included, and end inside no placeholder range.

    Where the tokens alone agree further, up to `tokens`, `conflict` is the medium that only one of the two
    sequences has there, and `known` says whether it is the earlier one.
    """

    length: int
    tokens: int
    conflict: MediaSpan | None = None
    known: bool = False


NOTHING_SHARED: Final = SharedPrefix(0, 0)


def media_before(media: Sequence[MediaSpan], stop: int) -> Sequence[MediaSpan]:
    """Return the media that begin before the token `stop`; they are in prompt order."""
    return media[: bisect_left(media, stop, key=lambda span: span.range.offset)]


def media_from(media: Sequence[MediaSpan], start: int) -> Sequence[MediaSpan]:
    """Return the media that begin at the token `start` or later; they are in prompt order."""
    return media[bisect_left(media, start, key=lambda span: span.range.offset) :]


def shared_prefix(
    start: int,
    known_ids: Int32Array,
    known: Sequence[MediaSpan],
    prompt: Int32Array,
    media: Sequence[MediaSpan],
) -> SharedPrefix:
    """Compare a prompt with the part of a known sequence that begins at `start`; before that they agree.

    Args:
        start: Number of tokens that agree already, media included.
        known_ids: Tokens of the known sequence from `start` on.
        known: Its media from `start` on.
        prompt: All tokens of the prompt.
        media: All its media.
    """
    tokens = start + common_prefix(known_ids, prompt[start:])
    ours = media_before(media_from(media, start), tokens)
    for first, second in zip_longest(ours, media_before(known, tokens)):
        places = [tokens if span is None else span.start for span in (first, second)]
        if places[0] != places[1]:
            is_known = places[1] < places[0]
            return SharedPrefix(min(places), tokens, second if is_known else first, is_known)
        if first.range != second.range or first.item.identity != second.item.identity:
            return SharedPrefix(first.start, first.start)  # another image: a branch that starts here
    length = ours[-1].start if ours and ours[-1].stop > tokens else tokens
    return SharedPrefix(length, length)


def check_ids(value: Any, where: str, *, start: int = 0) -> Int32Array:
    """Return token ids as int32 of shape `(n,)`.

    Args:
        value: A flat list, tuple or integer array; None for no tokens.
        where: Path for errors.
        start: Index of the first of them, for errors.

    Raises:
        TrajectoryError: They are not flat integers of 32 bits, or one is negative.
    """
    if value is None:
        return _NO_IDS
    try:
        array = np.asarray(value) if isinstance(value, list | tuple | np.ndarray) else None
    except (ValueError, OverflowError):  # a ragged list, or an integer beyond 64 bits
        array = None
    if array is not None and array.shape == (0,):
        return _NO_IDS
    if array is None or array.ndim != 1 or array.dtype.kind not in "iu" or array.max() > _LARGEST:
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)[:80]
        raise TrajectoryError(
            "token ids must be a flat list, tuple or numpy array of integers of 32 bits", where=where, got=got
        )
    if array.min() < 0:
        at = int(np.argmax(array < 0))
        raise TrajectoryError("a token id is negative", where=f"{where}[{start + at}]", got=str(array[at]))
    return array.astype(np.int32)


def same_messages(known: Sequence[Any], messages: Sequence[Any]) -> int:
    """Return how many leading messages two conversations share."""
    for index, (first, second) in enumerate(zip(known, messages, strict=False)):
        if first is second:
            continue
        try:
            same = _ENCODE(first) == _ENCODE(second)  # plain data, compared at C speed with its types
        except (TypeError, ValueError, OverflowError, RecursionError):
            same = False
        if not same and not same_value(first, second):
            return index
    return min(len(known), len(messages))


def same_value(first: Any, second: Any) -> bool:
    """Whether two values have equal content: one object, equal identities, or equal values and arrays."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    identity = getattr(first, "identity", None)
    if isinstance(identity, str):
        return bool(identity == second.identity)
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(same_value(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same_value, first, second))
    if isinstance(first, msgspec.Struct):
        return same_value(msgspec.structs.astuple(first), msgspec.structs.astuple(second))
    if hasattr(first, "dtype") and hasattr(first, "shape"):
        if first.dtype != second.dtype or tuple(first.shape) != tuple(second.shape):
            return False
        if isinstance(first, np.ndarray):
            return np.array_equal(first, second, equal_nan=first.dtype.kind in "fc")
        return bool(first.equal(second))  # a torch tensor
    return bool(first == second)
