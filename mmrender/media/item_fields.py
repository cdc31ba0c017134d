"""Reading plain data that came over a wire: every value is checked, and an error names its path."""

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import mmcodecs
from mmrender.errors import MediaError

_INT_MAX: Final = 2**31 - 1


def wire_error(problem: str, where: str, expected: str, got: Any) -> MediaError:
    """Build the error of a value at `where` that cannot be read."""
    return MediaError(problem, where=where, expected=expected, got=described(got))


def described(value: Any) -> str:
    """Say in a few characters what a value is."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    text = repr(value) if isinstance(value, str | bytes | int | float | list | tuple | None) else ""
    return text if 0 < len(text) <= 80 else type(value).__name__


class WireFields:
    """The entries of one mapping, read by name and type.

    Args:
        value: What stands at `where`.
        where: Path for errors.
        names: The keys that it must have, no others.

    Raises:
        MediaError: It is no mapping with these keys.
    """

    def __init__(self, value: Any, where: str, names: Collection[str]) -> None:
        if not isinstance(value, Mapping):
            raise wire_error("a part of an item is malformed", where, "a mapping", value)
        if set(value) != set(names):
            raise MediaError(
                "a part of an item has other fields",
                where=where,
                expected=", ".join(sorted(names)),
                got=", ".join(sorted(map(str, value))) or "none",
            )
        self._value = value
        self.where = where

    def __getitem__(self, name: str) -> Any:
        return self._value[name]

    def path(self, name: str) -> str:
        """Return the path of a field."""
        return f"{self.where}.{name}"

    def text(self, name: str, choices: Collection[str] = ()) -> str:
        """Return a text, one of `choices` if there are any."""
        value = self._value[name]
        if not isinstance(value, str) or (choices and value not in choices):
            expected = " or ".join(map(repr, choices)) if choices else "text"
            raise wire_error("a field of an item is malformed", self.path(name), expected, value)
        return value

    def integer(self, name: str, most: int = _INT_MAX, least: int = 0) -> int:
        """Return an integer in `least..most`."""
        return checked_integer(self._value[name], self.path(name), most, least)

    def integers(self, name: str, count: int | None = None, most: int = _INT_MAX) -> tuple[int, ...]:
        """Return `count` integers in `0..most`."""
        value, path = self._value[name], self.path(name)
        if not isinstance(value, list | tuple) or count not in (None, len(value)):
            expected = "integers" if count is None else f"{count} integers"
            raise wire_error("a field of an item is malformed", path, expected, value)
        return tuple(checked_integer(entry, f"{path}[{i}]", most) for i, entry in enumerate(value))

    def real(self, name: str) -> float:
        """Return a finite number."""
        return _checked_real(self._value[name], self.path(name))

    def reals(self, name: str, count: int) -> tuple[float, ...]:
        """Return `count` finite numbers."""
        value, path = self._value[name], self.path(name)
        if not isinstance(value, list | tuple) or len(value) != count:
            raise wire_error("a field of an item is malformed", path, f"{count} numbers", value)
        return tuple(_checked_real(entry, f"{path}[{i}]") for i, entry in enumerate(value))

    def digest(self, name: str) -> str:
        """Return an identity: 32 bytes on the wire, 64 hex digits here."""
        value = self._value[name]
        if not isinstance(value, bytes) or len(value) != 32:
            raise wire_error("an identity is malformed", self.path(name), "32 bytes", value)
        return value.hex()

    def array(self, name: str, kinds: str, ndim: int | None = None) -> npt.NDArray[Any]:
        """Return an array as a read-only view.

        Args:
            name: The field.
            kinds: numpy's letters of the kinds of dtype allowed.
            ndim: Number of dimensions, None for any.
        """
        value = self._value[name]
        if isinstance(value, mmcodecs.Shared):
            value = value.value
        fits = isinstance(value, np.ndarray) and value.dtype.kind in kinds and value.flags.c_contiguous
        if not fits or not value.dtype.isnative or ndim not in (None, value.ndim):
            expected = f"a C-contiguous array of kind {kinds!r}" + (f" and {ndim} dimensions" if ndim else "")
            raise wire_error("an array of an item is malformed", self.path(name), expected, value)
        view: npt.NDArray[Any] = value.view()
        view.flags.writeable = False
        return view


def checked_integer(value: Any, where: str, most: int = _INT_MAX, least: int = 0) -> int:
    """Return `value`, an integer in `least..most`.

    Raises:
        MediaError: It is none.
    """
    if type(value) is not int or not least <= value <= most:
        raise wire_error("a field of an item is malformed", where, f"an integer in {least}..{most}", value)
    return value


def _checked_real(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise wire_error("a field of an item is malformed", where, "a finite number", value)
    return float(value)
