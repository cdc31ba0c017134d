"""Every error that mmcodecs raises, as one tree.

```
CodecError (ValueError)
├── EncodeError                 the value, key or buffer given to a writer is wrong
│   ├── UnsupportedTypeError    a value that the wire cannot keep as it is
│   └── BufferTooSmallError     the caller's buffer cannot hold the message; `needed` is its length
├── DecodeError                 the input is malformed or truncated, or not of the type that was asked for
│   └── MissingKeyError         a shared array that this reader does not hold; `keys` lists them
├── LimitError                  a bound of `Limits` is exceeded, while writing or while reading
└── MissingPackageError         torch or xxhash is needed and not installed. An ImportError too
```

Each carries `where` (a path such as `$.steps[3].pixels`, or the part of the message), `expected`, `got` and
`remedy`, and prints them in that order. A decoder raises nothing else, whatever its input.
"""

from collections.abc import Iterable
from importlib import import_module
from typing import Any, Final, Self

_LONGEST_PART: Final = 1000
"""Maximum characters of one part of a printed message. The attributes hold all of it."""


class DetailedError(Exception):
    """An error in parts: the problem, its place, the expected and the actual value, and a remedy.

    Args:
        problem: One clause.
        where: Path of the offending value, such as `$.steps[3].pixels`, or a part of the message.
        expected: The accepted values.
        got: The actual value.
        remedy: Advice to the caller.
    """

    def __init__(
        self,
        problem: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        got: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.problem = problem
        self.where = where
        self.expected = expected
        self.got = got
        self.remedy = remedy
        super().__init__(problem)

    def __str__(self) -> str:
        problem = _excerpt(self.problem)
        text = f"{self.where}: {problem}" if self.where else problem
        pairs = (("expected", self.expected), ("got", self.got))
        if parts := [f"{name} {_excerpt(value)}" for name, value in pairs if value is not None]:
            text += f" - {', '.join(parts)}"
        return f"{text}. {self.remedy}" if self.remedy else text

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only fields do not survive the default pickling of exceptions between processes.
        return _rebuild, (type(self), self.__dict__.copy())

    def at(self, where: str) -> Self:
        """Fill in `where` if it is not known yet, and return the error itself."""
        if self.where is None:
            self.where = where
        return self


def _excerpt(text: str) -> str:
    """Cut a text from outside, which may have any length."""
    return text if len(text) <= _LONGEST_PART else f"{text[:_LONGEST_PART]}... ({len(text):,} characters)"


class CodecError(DetailedError, ValueError):
    """Base of the tree."""

    def under(self, step: str) -> Self:
        """Prepend one step (`.name` or `[3]`) to the path, and return the error itself."""
        rest = "" if self.where is None else self.where.removeprefix("$")
        self.where = f"${step}{rest}"
        return self


class EncodeError(CodecError):
    """The value cannot be written."""


class UnsupportedTypeError(EncodeError):
    """The wire has no form that keeps this value as it is."""


class BufferTooSmallError(EncodeError):
    """The caller's buffer is shorter than the message; `needed` and `available` are in bytes."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(
            "the buffer cannot hold the message",
            where="buffer",
            expected=f"at least {needed:,} bytes",
            got=f"{available:,}",
        )
        self.needed = needed
        self.available = available


class DecodeError(CodecError):
    """The input is malformed, truncated, inconsistent, or does not fit the type that was asked for."""


class MissingKeyError(DecodeError):
    """The message refers to shared arrays that this decoder does not hold: `keys`, each once, in order."""

    def __init__(self, keys: Iterable[bytes]) -> None:
        self.keys = tuple(keys)
        shown = ", ".join(key.hex() for key in self.keys[:3]) + (", ..." if len(self.keys) > 3 else "")
        super().__init__(
            f"{len(self.keys)} shared array(s) are not in the table",
            got=shown,
            remedy="Decode every message of an Encoder, in order, by one Decoder. After a loss, reset() both",
        )


class LimitError(CodecError):
    """A bound of `Limits` is exceeded. The message names the field."""


class MissingPackageError(CodecError, ImportError):
    """An optional package that this call needs is not installed."""


def limit_exceeded(name: str, bound: int, got: int | None = None, remedy: str | None = None) -> LimitError:
    """Build the error for a value beyond the bound `Limits.<name>`."""
    return LimitError(
        f"Limits.{name} exceeded",
        expected=f"at most {bound}",
        got=None if got is None else str(got),
        remedy=remedy,
    )


def require(name: str, purpose: str) -> Any:
    """Import an optional package, or raise `MissingPackageError`."""
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingPackageError(
            f"{purpose} needs the package {name}, which is not installed", remedy=f"pip install {name}"
        ) from error


def _rebuild(kind: type[CodecError], state: dict[str, object]) -> CodecError:
    """Build an error again in another process, without running its constructor."""
    error = kind.__new__(kind, state["problem"])
    error.__dict__.update(state)
    return error
