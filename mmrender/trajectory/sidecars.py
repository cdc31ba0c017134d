"""Steps of other libraries without repeated sidecars: each image stays in its last step only.

Rollout libraries of the verifiers kind write every step of a multi-turn rollout with all images so far, so a
rollout grows with the square of its turns. A step is a mapping or an object of any class. Its token block
(`prompt_ids`, `completion_ids`, `multi_modal_data`) lies at `tokens`, and a second one may lie at
`response.message.tokens`. A step continues its `parent` (an index, None for a root), or without this field
the step before it.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from mmrender.errors import TrajectoryError
from mmrender.sidecar import common_prefix
from mmrender.trajectory.conversation import same_value
from mmrender.trajectory.step import check_ids

_Path: TypeAlias = tuple[str, ...]
_BLOCKS: Final[tuple[_Path, ...]] = (("tokens",), ("response", "message", "tokens"))
_SIDECAR: Final = "multi_modal_data"
_FIELDS: Final = ("mm_hashes", "mm_placeholders", "mm_items")


def strip_intermediate_mm_data(trajectory: Sequence[Any]) -> list[Any]:
    """Return the steps without sidecars that a continuation repeats.

    A step loses its sidecar, in both token blocks, if a step that continues it extends it: the later prompt
    begins with this step's prompt and completion, and the later sidecar with this step's entries. In a plain
    multi-turn rollout the last step alone keeps its sidecar. A step before a branch or a compaction keeps
    images that would be lost. If neither step has token ids, the sidecars decide.

    The input is not changed: steps that lose a sidecar are copied along the path to it, which then holds
    None. Other steps are returned as they are.

    Raises:
        TrajectoryError: Token ids are malformed, a parent comes after its child, or a step cannot be copied.
    """
    stripped = list(trajectory)
    for index, children in enumerate(_children(trajectory)):
        held = [sidecar for _, sidecar in _sidecars(trajectory[index])]
        for child in children if held else ():
            extends = _tokens_extend(trajectory, child, index)
            later = sidecar_of(trajectory[child])
            if extends is not False and all(_covers(later, one, bool(extends)) for one in held):
                for path, _ in _sidecars(trajectory[index]):
                    stripped[index] = _replaced(stripped[index], path, None, f"steps[{index}]")
                break
    return stripped


def _children(trajectory: Sequence[Any]) -> list[list[int]]:
    """Return which steps continue each step."""
    children: list[list[int]] = [[] for _ in trajectory]
    for index, step in enumerate(trajectory):
        has_parent = "parent" in step if isinstance(step, Mapping) else hasattr(step, "parent")
        parent = _get(step, "parent") if has_parent else index - 1 if index else None
        if parent is None:
            continue
        if isinstance(parent, bool) or not isinstance(parent, int) or not 0 <= parent < index:
            raise TrajectoryError(
                "a step must come after the step that it continues",
                where=f"steps[{index}].parent",
                expected=f"None or an index in 0..{index - 1}" if index else "None",
                got=repr(parent),
                remedy="Order the steps so that parents come first",
            )
        children[parent].append(index)
    return children


def _tokens_extend(trajectory: Sequence[Any], child: int, parent: int) -> bool | None:
    """Whether the child's prompt begins with all the parent's tokens; None if neither has token ids."""
    blocks = _token_block(trajectory[child]), _token_block(trajectory[parent])
    if None in blocks:
        return None if blocks == (None, None) else False
    prompt = check_ids(_get(blocks[0], "prompt_ids"), f"steps[{child}].prompt_ids")
    for key in ("prompt_ids", "completion_ids"):
        ids = check_ids(_get(blocks[1], key), f"steps[{parent}].{key}")
        if common_prefix(ids, prompt) < len(ids):
            return False
        prompt = prompt[len(ids) :]
    return True


def _covers(later: Any, earlier: Any, tokens_extend: bool) -> bool:
    """Whether a sidecar begins with the entries of another."""
    held = [field for field in _FIELDS if isinstance(_get(earlier, field), Mapping)]
    if not held:
        # A sidecar of unknown form: a prompt that extends another one needs all of its media.
        return later is not None and (tokens_extend or same_value(later, earlier))
    return all(
        same_value(list(_get(_get(later, field), modality) or ())[: len(entries)], list(entries))
        for field in held
        for modality, entries in _get(earlier, field).items()
    )


def _get(node: Any, name: str) -> Any:
    return node.get(name) if isinstance(node, Mapping) else getattr(node, name, None)


def _at(step: Any, path: _Path) -> Any:
    for name in path:
        step = _get(step, name)
    return step


def _sidecars(step: Any) -> Iterator[tuple[_Path, Any]]:
    """Yield path and value of each sidecar of a step, also of empty ones."""
    for block in _BLOCKS:
        path = (*block, _SIDECAR)
        if (sidecar := _at(step, path)) is not None:
            yield path, sidecar


def sidecar_of(step: Any) -> Any:
    """Return the sidecar of the first token block that has one, or None."""
    return next((sidecar for _, sidecar in _sidecars(step)), None)


def _token_block(step: Any) -> Any:
    blocks = (_at(step, path) for path in _BLOCKS)
    return next((block for block in blocks if _get(block, "prompt_ids") is not None), None)


def _replaced(node: Any, path: _Path, value: Any, where: str) -> Any:
    """Return a copy of `node` with `value` at `path`. Only objects along the path are copied."""
    name, *rest = path
    if rest:
        value = _replaced(_get(node, name), tuple(rest), value, f"{where}.{name}")
    try:
        if isinstance(node, Mapping) and not isinstance(node, dict):
            return {**node, name: value}
        if hasattr(node, "model_copy"):  # pydantic
            return node.model_copy(update={name: value})
        if isinstance(node, tuple) and hasattr(node, "_replace"):
            return node._replace(**{name: value})
        clone = copy.copy(node)
        if isinstance(node, dict):
            clone[name] = value
        elif isinstance(node, msgspec.Struct):
            msgspec.structs.force_setattr(clone, name, value)
        else:
            # A frozen dataclass refuses setattr, and nothing else refers to the copy yet.
            object.__setattr__(clone, name, value)
        return clone
    except (AttributeError, TypeError, ValueError) as error:
        raise TrajectoryError(
            f"a {type(node).__name__} cannot be copied with another {name!r}",
            where=where,
            got=str(error),
            remedy="Use a mapping, a dataclass, a msgspec or pydantic model, or a plain object",
        ) from error
