"""From trajectories to the plain form that `mmrender.trajectory.tree_wire` describes."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmrender.media.wire import items_to_wire, ranges_to_array
from mmrender.spans import MediaItem, PlaceholderRange
from mmrender.trajectory.deltas import NO_IDS
from mmrender.trajectory.message_wire import MediaSources, MessageTable
from mmrender.trajectory.packed import Int32Array
from mmrender.trajectory.row_chunks import write_rows
from mmrender.trajectory.shared_prefix import NOTHING_SHARED, entries_from, shared_prefix
from mmrender.trajectory.tree import Trajectory
from mmrender.trajectory.tree_step import Step


class StepRow(NamedTuple):
    """One row of the array of steps."""

    parent: int
    base: int
    keep: int
    added: int
    sampled: int
    media: int
    logprobs: int
    messages_keep: int
    messages: int


class TreePacker:
    """Packs trajectories that may share content; used once.

    Args:
        media_sources: What becomes of the sources of media in messages.
        share: Whether arrays of items are wrapped for an encoder with a table.
    """

    def __init__(self, media_sources: MediaSources, share: bool) -> None:
        self._share = share
        self._messages = MessageTable(media_sources)
        self._rows: list[StepRow] = []
        self._details: list[dict[str, Any]] = []
        self._experts: list[list[Any]] = []
        self._extras: list[list[Any]] = []
        self._tokens: list[Int32Array] = []
        self._logprobs: list[npt.NDArray[np.float32]] = []
        self._message_rows: list[int] = []
        self._media: list[tuple[int, PlaceholderRange]] = []
        self._items: list[MediaItem] = []
        self._item_rows: dict[tuple[str, type], int] = {}
        self._roots: list[tuple[int, Step]] = []

    def pack(self, trajectories: Iterable[Trajectory]) -> dict[str, Any]:
        """Return the fields of the plain form, format and version left out.

        Raises:
            TrajectoryError: A message has no plain form.
            MediaError: An item has none.
        """
        named = []
        for number, trajectory in enumerate(trajectories):
            first = len(self._rows)
            for step in trajectory.steps:
                self._add(step, first, f"trajectories[{number}].steps[{step.index}]")
            named.append(
                {
                    "id": trajectory.trajectory_id,
                    "steps": len(trajectory),
                    "reward": trajectory.reward,
                    "error": trajectory.error,
                    "extra": trajectory.extra,
                }
            )
        placeholders, spans = ranges_to_array(self._media)
        return {
            "trajectories": named,
            "steps": np.array(self._rows, np.int32).reshape(-1, len(StepRow._fields)),
            "details": write_rows(self._details, "details"),
            "experts": self._experts,
            "extras": self._extras,
            "tokens": np.concatenate([NO_IDS, *self._tokens]),
            "logprobs": np.concatenate([np.zeros(0, np.float32), *self._logprobs]),
            "messages": write_rows(self._messages.rows, "messages"),
            "message_rows": np.array(self._message_rows, np.int32),
            "placeholders": placeholders,
            "spans": spans,
            "items": items_to_wire(self._items, share=self._share),
        }

    def _add(self, step: Step, first: int, where: str) -> None:
        index = len(self._rows)
        parent = -1 if step.parent is None else first + step.parent.index
        base, keep = (parent, step.keep) if step.parent is not None else self._base(step, first)
        skipped = keep - step.keep
        entries = entries_from(step.own_entries, keep)
        self._tokens.append(step.own_ids[skipped:])
        self._media += [(self._item_row(entry.item), entry.range) for entry in entries]
        if step.logprobs is not None:
            self._logprobs.append(step.logprobs)
        self._message_rows += [
            self._messages.row(message, f"{where}.messages[{step.messages_keep + number}]")
            for number, message in enumerate(step.new_messages)
        ]
        self._rows.append(
            StepRow(
                parent=parent,
                base=base,
                keep=keep,
                added=step.added - skipped,
                sampled=len(step.completion_ids),
                media=len(entries),
                logprobs=int(step.logprobs is not None),
                messages_keep=step.messages_keep,
                messages=len(step.new_messages),
            )
        )
        self._details.append(_details(step))
        experts = step.own_routed_experts
        if experts is not None:
            self._experts.append([index, experts.start, experts.data])
        if step.extra:
            self._extras.append([index, step.extra])
        if step.parent is None:
            self._roots.append((index, step))

    def _base(self, root: Step, first: int) -> tuple[int, int]:
        """Return the root of an earlier trajectory that shares the longest prefix with this one's prompt."""
        best, found = -1, NOTHING_SHARED
        prompt = root.prompt_delta
        for index, other in self._roots:
            if index >= first:
                break
            shared = shared_prefix(0, other.own_ids, other.own_entries, prompt, root.own_entries)
            if shared.length > found.length:
                best, found = index, shared
        return best, found.length

    def _item_row(self, item: MediaItem) -> int:
        row = self._item_rows.setdefault((item.identity, type(item)), len(self._items))
        if row == len(self._items):
            self._items.append(item)
        return row


def _details(step: Step) -> dict[str, Any]:
    """Return the small things that are said of a step; absent where there is nothing to say."""
    fields: Sequence[tuple[str, Any]] = (
        ("finish_reason", step.finish_reason),
        ("reward", step.reward),
        ("weight_versions", [value for span in step.weight_versions for value in span] or None),
    )
    return {name: value for name, value in fields if value is not None}
