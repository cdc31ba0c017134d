"""Reading and rewriting trajectory steps, whatever class they are of.

A step is a mapping or an object. Its token block (`prompt_ids`, `completion_ids`, `multi_modal_data`, ...)
stands at `tokens`, and a second block of the same kind may stand at `response.message.tokens`. Anything on
the way may be absent or `None`.
"""

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final, TypeAlias

import msgspec

from mmrender.errors import TrajectoryError

Path: TypeAlias = tuple[str, ...]

TOKENS_PATH: Final[Path] = ("tokens",)
RESPONSE_PATH: Final[Path] = ("response", "message", "tokens")
BLOCK_PATHS: Final[tuple[Path, ...]] = (TOKENS_PATH, RESPONSE_PATH)
SIDECAR_KEY: Final = "multi_modal_data"


def get_field(node: Any, name: str) -> Any:
    """Return the entry or attribute `name` of a mapping or object, `None` where there is none."""
    if isinstance(node, Mapping):
        return node.get(name)
    return getattr(node, name, None)


def has_field(node: Any, name: str) -> bool:
    """Whether a mapping has the key or an object the attribute, be its value `None`."""
    return name in node if isinstance(node, Mapping) else hasattr(node, name)


def at_path(step: Any, path: Path) -> Any:
    """Return what stands at `path` below `step`, `None` as soon as something on the way is missing."""
    node = step
    for name in path:
        if node is None:
            return None
        node = get_field(node, name)
    return node


def step_multi_modal_data(step: Any) -> Any:
    """Return the sidecar of a step: of its `tokens`, else of its `response.message.tokens`, else `None`.

    An empty sidecar counts as one; only an absent one or `None` makes the second place be read.
    """
    for path in BLOCK_PATHS:
        sidecar = at_path(step, (*path, SIDECAR_KEY))
        if sidecar is not None:
            return sidecar
    return None


def token_block(step: Any) -> Any:
    """Return the first token block that holds `prompt_ids`, or `None`."""
    for path in BLOCK_PATHS:
        block = at_path(step, path)
        if get_field(block, "prompt_ids") is not None:
            return block
    return None


def parent_of(step: Any, index: int, where: str) -> int | None:
    """Return the index of the step that this one continues.

    That is its `parent` where it has such a field, `None` for a root, and otherwise the step before it.

    Raises:
        TrajectoryError: The parent is no index of an earlier step.
    """
    if not has_field(step, "parent"):
        return index - 1 if index else None
    parent = get_field(step, "parent")
    if parent is None:
        return None
    if isinstance(parent, bool) or not isinstance(parent, int) or not 0 <= parent < index:
        raise TrajectoryError(
            "a step must come after the step that it continues",
            where=f"{where}.parent",
            expected=f"None or an index in 0..{index - 1}" if index else "None",
            got=repr(parent),
            remedy="Order the steps so that parents come first",
        )
    return parent


def replaced(node: Any, path: Path, value: Any, where: str) -> Any:
    """Return a copy of `node` with `value` at `path`; only the objects along the path are copied.

    Raises:
        TrajectoryError: An object on the path can be neither copied nor changed.
    """
    name, *rest = path
    if rest:
        value = replaced(get_field(node, name), tuple(rest), value, f"{where}.{name}")
    try:
        return _with_field(node, name, value)
    except (AttributeError, TypeError, ValueError) as error:
        raise TrajectoryError(
            f"a {type(node).__name__} cannot be copied with another {name!r}",
            where=where,
            got=str(error),
            remedy="Use a mapping, a dataclass, a msgspec or pydantic model, or a plain object",
        ) from error


def _with_field(node: Any, name: str, value: Any) -> Any:
    if isinstance(node, Mapping):
        return _with_key(node, name, value)
    if hasattr(node, "model_copy"):  # pydantic
        return node.model_copy(update={name: value})
    if isinstance(node, msgspec.Struct):
        return msgspec.structs.replace(node, **{name: value})
    if isinstance(node, tuple) and hasattr(node, "_replace"):
        return node._replace(**{name: value})
    clone = copy.copy(node)
    try:
        setattr(clone, name, value)
    except AttributeError:
        # A frozen dataclass refuses setattr; its copy belongs to nobody yet, so it may still be filled in.
        object.__setattr__(clone, name, value)
    return clone


def _with_key(node: Mapping[str, Any], name: str, value: Any) -> Mapping[str, Any]:
    if isinstance(node, dict):
        clone = copy.copy(node)
        clone[name] = value
        return clone
    return {**node, name: value}


def as_fields(node: Any, where: str) -> dict[str, Any]:
    """Return the fields of a mapping or object as a new dict; the values are shared.

    Raises:
        TrajectoryError: The object does not say what its fields are, or a key is no text.
    """
    found = _fields_of(node)
    if found is None or not all(isinstance(key, str) for key in found):
        raise TrajectoryError(
            "a step, its token blocks and what leads to them must have named fields",
            where=where,
            expected="a mapping with text keys, a dataclass, a model or a plain object",
            got=type(node).__name__,
        )
    return found


def _fields_of(node: Any) -> dict[str, Any] | None:
    if isinstance(node, Mapping):
        return dict(node)
    if is_dataclass(node) and not isinstance(node, type):
        return {entry.name: getattr(node, entry.name) for entry in fields(node)}
    # msgspec structs, named tuples and pydantic models each list their fields on the class.
    for listing in ("__struct_fields__", "_fields", "model_fields"):
        names = getattr(type(node), listing, None)
        if names:
            extra = getattr(node, "__pydantic_extra__", None) or {}
            return {name: getattr(node, name) for name in names} | extra
    return dict(vars(node)) if hasattr(node, "__dict__") else None
