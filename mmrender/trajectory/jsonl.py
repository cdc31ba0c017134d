"""Trajectories as lines of JSON, for people and for tools that read nothing else.

JSON has no arrays, no bytes and no NaN. What cannot be said in it is refused by name, never written as the
text `tensor(...)`: pixels belong into the container that `save_trajectories` writes. A line names each medium
by identity, size and place.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from mmrender.errors import TrajectoryError
from mmrender.trajectory.message_wire import MediaSources, plain_message
from mmrender.trajectory.tree import Trajectory
from mmrender.trajectory.tree_step import Step

_DEPTH: Final = 100


def is_json_serializable(value: Any) -> bool:
    """Whether a value is JSON: None, booleans, finite numbers, Unicode text, lists, and dicts with text keys.

    Tuples count as lists. Arrays, tensors, bytes, NaN and infinities are none, nor is what holds itself.
    """
    return find_unserializable(value) is None


def find_unserializable(value: Any, path: str = "$") -> tuple[str, str] | None:
    """Return path and description of the first thing that is not JSON, None if everything is."""
    return _find(value, path, 0)


def _find(value: Any, path: str, depth: int) -> tuple[str, str] | None:
    if depth > _DEPTH:
        return path, f"more than {_DEPTH} levels"
    if value is None or isinstance(value, bool | int):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else (path, str(value))
    if isinstance(value, str):
        return None if _is_unicode(value) else (path, "text with a lone surrogate")
    if isinstance(value, list | tuple):
        entries = ((f"{path}[{index}]", entry) for index, entry in enumerate(value))
    elif isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or not _is_unicode(key):
                return path, f"the key {key!r}"
        entries = ((f"{path}.{key}", entry) for key, entry in value.items())
    else:
        return path, _described(value)
    return next((odd for name, entry in entries if (odd := _find(entry, name, depth + 1))), None)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _described(value: Any) -> str:
    name = f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"{len(value)} bytes"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{name} {value.dtype} {list(value.shape)}"
    return name


def write_jsonl(
    path: str | os.PathLike[str],
    trajectories: Iterable[Trajectory],
    *,
    mode: Literal["a", "w"] = "a",
    media_sources: MediaSources = "drop",
) -> int:
    """Write one line for each trajectory and return how many were written.

    Args:
        path: The file, made if it is not there.
        trajectories: Those to write.
        mode: `"a"` appends, `"w"` starts a new file.
        media_sources: `"drop"` puts None in place of images in messages; `"keep"` refuses those that are no
            text.

    Raises:
        TrajectoryError: Something in `extra`, a reward or a message is not JSON; the message names its path.
            Lines before it stay in the file.
        OSError: The file cannot be written.
    """
    count = 0
    with Path(path).open(mode, encoding="utf-8", newline="\n") as file:
        for trajectory in trajectories:
            # One write, so that a line is there whole or not at all unless the machine fails.
            file.write(json_line(trajectory, media_sources=media_sources) + "\n")
            file.flush()
            count += 1
    return count


def json_line(trajectory: Trajectory, *, media_sources: MediaSources = "drop") -> str:
    """Return a trajectory as one line of JSON, without the line break.

    Token ids and messages of a step are those that it adds to its parent's, as in `Step`.

    Raises:
        TrajectoryError: Something in it is not JSON; the message names its path.
    """
    plain = {
        "trajectory_id": trajectory.trajectory_id,
        "reward": trajectory.reward,
        "error": trajectory.error,
        "extra": trajectory.extra,
        "steps": [_plain_step(step, media_sources) for step in trajectory.steps],
    }
    odd = find_unserializable(plain, trajectory.trajectory_id or "trajectory")
    if odd is not None:
        raise TrajectoryError(
            "this cannot be written as JSON",
            where=odd[0],
            expected="null, booleans, finite numbers, text, lists and objects",
            got=odd[1],
            remedy="Use save_trajectories, which keeps arrays and bytes as they are",
        )
    return json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _plain_step(step: Step, media_sources: MediaSources) -> dict[str, Any]:
    reward = step.reward
    return {
        "index": step.index,
        "parent": None if step.parent is None else step.parent.index,
        "keep": step.keep,
        "prompt_delta": step.prompt_delta.tolist(),
        "completion_ids": step.completion_ids.tolist(),
        "logprobs": None if step.logprobs is None else step.logprobs.tolist(),
        "finish_reason": step.finish_reason,
        "weight_versions": [list(span) for span in step.weight_versions],
        "reward": reward.tolist() if isinstance(reward, np.ndarray) else reward,
        "media": [
            {
                "modality": entry.item.modality,
                "identity": entry.item.identity,
                "size": list(entry.item.size),
                "offset": entry.range.offset,
                "length": entry.range.length,
            }
            for entry in step.own_entries
        ],
        "routed_experts": _plain_experts(step),
        "messages_keep": step.messages_keep,
        "messages": [plain_message(message, media_sources) for message in step.new_messages],
        "extra": step.extra,
    }


def _plain_experts(step: Step) -> Mapping[str, Any] | None:
    """Return where the rows are and how many; the rows themselves are for the container."""
    experts = step.own_routed_experts
    return None if experts is None else {"start": experts.start, "shape": list(experts.shape)}
