"""Dropping the sidecars that a later step of the same run of turns repeats in full."""

from collections.abc import Mapping, Sequence
from typing import Any

from mmrender.trajectory.deltas import common_prefix, read_ids
from mmrender.trajectory.sidecars import FIELDS, same_item
from mmrender.trajectory.steps import (
    BLOCK_PATHS,
    SIDECAR_KEY,
    at_path,
    get_field,
    parent_of,
    replaced,
    step_multi_modal_data,
    token_block,
)


def strip_intermediate_mm_data(trajectory: Sequence[Any]) -> list[Any]:
    """Return the steps with their sidecars left only where no continuation repeats them.

    A step loses its sidecar, in `tokens` and in `response.message.tokens`, if a step that continues it
    extends it: the later prompt begins with this step's prompt and completion, and the later sidecar with
    this one's entries. So in a plain multi-turn rollout the last step alone keeps its sidecar; before a
    branch or a compaction the step that would otherwise lose images keeps it. Where neither step says its
    token ids, the sidecars decide. A step continues the one named by its `parent`, or else the one before
    it.

    The input is not changed: steps that lose a sidecar are copied along the path to it, which then holds
    `None`; the others are returned as they are.

    Raises:
        TrajectoryError: Token ids are malformed, a parent comes after its child, or a step cannot be copied.
    """
    children: dict[int, list[Any]] = {}
    for index, step in enumerate(trajectory):
        parent = parent_of(step, index, f"steps[{index}]")
        if parent is not None:
            children.setdefault(parent, []).append((index, step))
    stripped = []
    for index, step in enumerate(trajectory):
        places = [path for path in BLOCK_PATHS if at_path(step, (*path, SIDECAR_KEY)) is not None]
        if places and any(_extends(child, step, number, index) for number, child in children.get(index, ())):
            for path in places:
                step = replaced(step, (*path, SIDECAR_KEY), None, f"steps[{index}]")  # noqa: PLW2901
        stripped.append(step)
    return stripped


def _extends(child: Any, parent: Any, child_index: int, parent_index: int) -> bool:
    tokens = _tokens_extend(child, parent, child_index, parent_index)
    if tokens is False:
        return False
    later = step_multi_modal_data(child)
    earlier = [at_path(parent, (*path, SIDECAR_KEY)) for path in BLOCK_PATHS]
    return all(_covers(later, sidecar, bool(tokens)) for sidecar in earlier if sidecar is not None)


def _tokens_extend(child: Any, parent: Any, child_index: int, parent_index: int) -> bool | None:
    """Whether the child's prompt begins with all the parent's tokens; `None` if neither says its tokens."""
    blocks = token_block(child), token_block(parent)
    if None in blocks:
        return None if blocks == (None, None) else False
    prompt, _ = read_ids(get_field(blocks[0], "prompt_ids"), f"steps[{child_index}].prompt_ids")
    for key in ("prompt_ids", "completion_ids"):
        part = get_field(blocks[1], key)
        ids, _ = read_ids([] if part is None else part, f"steps[{parent_index}].{key}")
        if common_prefix(ids, prompt) < len(ids):
            return False
        prompt = prompt[len(ids) :]
    return True


def _covers(later: Any, earlier: Any, tokens_extend: bool) -> bool:
    held = [field for field in FIELDS if isinstance(get_field(earlier, field), Mapping)]
    if not held:
        # What it holds is not known; but a prompt that goes on needs all that its beginning needed.
        return later is not None and (tokens_extend or same_item(later, earlier))
    return all(
        _begins_with(get_field(get_field(later, field), modality), entries)
        for field in held
        for modality, entries in get_field(earlier, field).items()
    )


def _begins_with(later: Any, earlier: Sequence[Any]) -> bool:
    head = list(later or ())[: len(earlier)]
    return len(head) == len(earlier) and all(map(same_item, head, earlier))
