"""Typed objects: the neutral form each travels in, and how the caller's own types are filled again.

The wire names no class, so decoding never imports or runs one. A msgspec Struct, a dataclass and a pydantic
model travel as a map of their fields (an `array_like` Struct as a list), a named tuple as a tuple, an enum
member as its value. `decode(..., type=T)` builds the types that the caller names; without it the neutral form
comes out.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from typing import Any

import msgspec

from mmcodecs.errors import CodecError, ConversionError


def neutral_form(value: Any) -> Any:
    """Give the neutral form of a typed object, one level deep, or `NotImplemented` for any other value."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, msgspec.Struct):
        return _of_struct(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    pydantic = sys.modules.get("pydantic")
    if pydantic is not None and isinstance(value, pydantic.BaseModel):
        return _of_pydantic(value)
    return NotImplemented


def _of_struct(value: msgspec.Struct) -> dict[str, Any] | list[Any]:
    config = value.__struct_config__
    names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
    fields = {key: getattr(value, name) for key, name in names}
    if config.array_like:
        return ([] if config.tag is None else [config.tag]) + list(fields.values())
    kept: dict[str, Any] = {key: item for key, item in fields.items() if item is not msgspec.UNSET}
    return kept if config.tag is None else {str(config.tag_field): config.tag, **kept}


def _of_pydantic(model: Any) -> Any:
    kind = type(model)
    if "root" in kind.model_fields:
        return model.root
    config = kind.model_config
    by_name = config.get("populate_by_name") or config.get("validate_by_name")
    out = {}
    for name, field in kind.model_fields.items():
        alias = field.validation_alias
        out[alias if isinstance(alias, str) and not by_name else name] = getattr(model, name)
    return {**out, **(model.model_extra or {})}


def convert(value: Any, target: Any) -> Any:
    """Build `target` from a decoded value.

    Raises:
        ConversionError: The value does not fit; the message says where.
    """
    try:
        return msgspec.convert(value, target, dec_hook=_fill)
    except CodecError:
        raise
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `")
        raise ConversionError(problem, where=where.rstrip("`") or "$") from error
    except Exception as error:  # a validator or constructor of the caller's may raise anything
        raise ConversionError(f"cannot build {target}: {error}") from error


def _fill(target: Any, value: Any) -> Any:
    """Fill the types that msgspec leaves to us: arrays and paths as they are, models by pydantic."""
    if isinstance(target, type) and isinstance(value, target):
        return value
    validate = getattr(target, "model_validate", None)
    if validate is not None:
        return validate(value)
    raise NotImplementedError(f"no way to build {target} from {type(value).__name__}")
