"""Elements of sets and keys of maps: can the reader hash what they become, and still tell them apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from mmcodecs.errors import CodecError, EncodeError, UnsupportedTypeError
from mmcodecs.extensions import WRITERS
from mmcodecs.typed import neutral_form

_HASHABLE = frozenset((type(None), bool, int, float, str, bytes, memoryview)) | WRITERS.keys()


def check_keys(items: Iterable[Any]) -> None:
    """Check the elements of a set, or the keys of a map.

    Typed objects travel in neutral form: a frozen dataclass becomes a dict, which is no key, and an enum
    member may become what another key is already.

    Raises:
        UnsupportedTypeError: One of them would come back as something that cannot be hashed.
        EncodeError: Two of them would come back as the same.
    """
    seen: set[Any] = set()
    for item in items:
        try:
            neutral = _neutral(item)
        except CodecError as error:
            raise error.at(f"$[{item!r}]"[:120]) from error.__cause__
        if type(neutral) is not float and neutral in seen:
            raise EncodeError("two keys or elements come back as the same", where=f"$[{item!r}]"[:120])
        seen.add(neutral)


def _neutral(item: Any) -> Any:
    kind = type(item)
    if kind in _HASHABLE or isinstance(item, np.generic):
        return item
    if kind is tuple or kind is frozenset:
        return kind(_neutral(inner) for inner in item)
    neutral = neutral_form(item)
    if neutral is NotImplemented or isinstance(neutral, dict | list):
        raise UnsupportedTypeError(
            f"{kind.__name__} cannot be a key, or an element of a set, for the reader",
            remedy="Use strings, numbers, times or tuples of them",
        )
    return _neutral(neutral)
