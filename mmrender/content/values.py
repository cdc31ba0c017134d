"""Convert foreign objects to plain Python values, or refuse them with a `MessageError` that has their path.

Mappings, pydantic models, dataclasses and msgspec structs become new dicts. Strings become exact, encodable
`str`. Nested containers are copied to a bounded depth.
"""

import dataclasses
import math
import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import msgspec

from mmrender.errors import MessageError

MAX_DEPTH = 100
"""Maximum nesting of containers in arguments and extra values. Tool schemas in use nest below 20."""

_MAX_KEY_DEPTH = 32
_EXCERPT = 60
_MAX_INT = 4096  # bits. Python itself refuses to print more than 4300 digits


def describe(value: object) -> str:
    """Name a value in a few words for an error, without calling `repr` of a foreign class."""
    if isinstance(value, int) and value.bit_length() > _MAX_INT:
        return f"an int of {value.bit_length()} bits"
    if value is None or type(value) in (int, float, bool):
        return repr(value)
    if isinstance(value, str):
        return repr(excerpt(str.__str__(value)))
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with {keys_of(value)}" if value else f"empty {type(value).__name__}"
    if isinstance(value, list | tuple | bytes | bytearray):
        return f"{type(value).__name__} of length {len(value)}"
    return type(value).__name__


def excerpt(text: str) -> str:
    """Cut a text to one short piece."""
    return text if len(text) <= _EXCERPT else text[:_EXCERPT] + "…"


def keys_of(mapping: Mapping[Any, Any]) -> str:
    """List the first six keys of a mapping."""
    if not mapping:
        return "no keys"
    names = [describe(key) for key in list(mapping)[:6]]
    return ("key " if len(mapping) == 1 else "keys ") + ", ".join(names) + (", …" if len(mapping) > 6 else "")


def member(where: str, key: object) -> str:
    """Path of `key` inside `where`."""
    if isinstance(key, str) and key.isidentifier() and len(key) <= _EXCERPT:
        return f"{where}.{key}"
    return f"{where}[{describe(key)}]"


def as_sequence(value: Any) -> Sequence[Any] | None:
    """Return the items of a list, a tuple or an array of objects (from pandas), else None."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, str | bytes | bytearray | memoryview):
        return None
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return list(value) if value.ndim == 1 and value.dtype.kind in "OU" else None
    return list(value) if isinstance(value, Sequence) else None


def as_list(
    value: Any, where: str, problem: str, *, expected: str = "a list", remedy: str | None = None
) -> Sequence[Any]:
    """Return `as_sequence` of a value, or refuse it with `problem`."""
    items = as_sequence(value)
    if items is None:
        raise MessageError(problem, where=where, expected=expected, got=describe(value), remedy=remedy)
    return items


def is_record(value: object) -> bool:
    """Whether `as_fields` can read a value: a mapping or an object with named fields."""
    if isinstance(value, (dict, msgspec.Struct, Mapping)):
        return True
    if isinstance(value, (type, str)):
        return False
    return dataclasses.is_dataclass(value) or callable(getattr(value, "model_dump", None))


def as_fields(value: Any, where: str, expected: str) -> dict[str, Any]:
    """Copy the fields of a record into a dict, except fields that are None.

    Arrow fills every key that any row has, and pydantic dumps every optional field, so None means absent.
    """
    if type(value) is not dict:
        if not is_record(value):
            raise MessageError("cannot be read", where=where, expected=expected, got=describe(value))
        value = record_fields(value, where)
    return {key: field for key, field in value.items() if field is not None}


def record_fields(value: Any, where: str) -> Mapping[Any, Any]:
    """Return the fields of a record, all of them."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, msgspec.Struct):
        config = value.__struct_config__
        names = zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
        fields = {encoded: getattr(value, name) for name, encoded in names}
        tag = {} if config.tag_field is None else {config.tag_field: config.tag}
        return tag | {name: field for name, field in fields.items() if field is not msgspec.UNSET}
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    dump = f"model_dump() of {type(value).__name__}"
    try:
        dumped = value.model_dump()
    except Exception as error:  # A foreign serialiser may raise anything.
        raise MessageError(f"{dump} failed ({excerpt(str(error))})", where=where) from error
    if not isinstance(dumped, Mapping):
        raise MessageError(f"{dump} did not return a mapping", where=where)
    return dumped


def as_text(value: Any, where: str) -> str:
    """Return a value as an exact `str` that UTF-8 can encode; subclasses are converted."""
    if not isinstance(value, str):
        raise MessageError("is not text", where=where, expected="a str", got=describe(value))
    text = value if type(value) is str else str.__str__(value)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise MessageError(
                "the text cannot be encoded as UTF-8",
                where=where,
                expected="no lone surrogates",
                got=f"U+{ord(text[error.start]):04X} at position {error.start}",
                remedy="Decode the original bytes with errors='replace'",
            ) from None
    return text


def as_identifier(value: Any, where: str) -> str:
    """Return an id or a name as text; an integer becomes its decimal digits."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= _MAX_INT:
        return str(int(value))
    return as_text(value, where)


def copy_json(value: Any, where: str, depth: int = MAX_DEPTH) -> Any:
    """Copy a JSON value. Tuples become lists, records dicts, numpy scalars Python numbers."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return as_text(value, where)
    if isinstance(value, int) and value.bit_length() <= _MAX_INT:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if not depth:
        raise too_deep(where)
    if is_record(value):
        copy: dict[str, Any] = {}
        for key, item in record_fields(value, where).items():
            if not isinstance(key, str):
                raise MessageError("JSON keys are text", where=where, expected="str keys", got=describe(key))
            copy[as_text(key, where)] = copy_json(item, member(where, key), depth - 1)
        return copy
    items = as_sequence(value)
    if items is not None:
        return [copy_json(item, f"{where}[{index}]", depth - 1) for index, item in enumerate(items)]
    raise MessageError(
        "is not a JSON value",
        where=where,
        expected="text, a finite number, bool, None, list or dict",
        got=describe(value),
    )


def copy_containers(value: Any, where: str, depth: int = MAX_DEPTH) -> Any:
    """Copy nested dicts, lists and tuples, with their other values as they are."""
    if isinstance(value, str):
        return value if value.isascii() else as_text(value, where)
    if not isinstance(value, (dict, list, tuple)):
        return value
    if not depth:
        raise too_deep(where)
    if isinstance(value, dict):
        return {key: copy_containers(item, where, depth - 1) for key, item in value.items()}
    copies = [copy_containers(item, where, depth - 1) for item in value]
    return tuple(copies) if isinstance(value, tuple) else copies


def too_deep(where: str) -> MessageError:
    """Build the error for nesting beyond `MAX_DEPTH`."""
    # The full path of a value this deep would fill the screen.
    return MessageError(
        "nests too deep",
        where=excerpt(where),
        expected=f"at most {MAX_DEPTH} levels of dicts and lists",
        remedy="A container that holds itself looks like this too",
    )


class NoKeyError(Exception):
    """A value cannot be part of a cache key."""


def plain_key(value: Any, depth: int = 0) -> Hashable:
    """Return a hashable that only equal plain values of equal types share.

    Raises:
        NoKeyError: The value is not plain, or nests deeper than 32 levels.
    """
    kind = type(value)
    if kind is str:
        return str(value)
    if kind is bool or kind is int or value is None:
        return kind, value
    if kind is float:
        return float, str(value.hex())  # 0.0 and -0.0 are equal, but print differently
    if depth < _MAX_KEY_DEPTH and kind is dict:
        # 1, 1.0 and True are one dict key, but three texts.
        return tuple(
            [(plain_key(name, depth + 1), plain_key(item, depth + 1)) for name, item in value.items()]
        )
    if depth < _MAX_KEY_DEPTH and (kind is list or kind is tuple):
        return kind, *[plain_key(item, depth + 1) for item in value]
    raise NoKeyError
