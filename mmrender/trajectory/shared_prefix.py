"""How far a prompt agrees with a sequence that is known already: in its tokens and in the media behind them.

Placeholders of two images of one size are the same tokens, so tokens alone do not tell where prompts part.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, NamedTuple

from mmrender.spans import MediaItem, MultiModalData, PlaceholderRange
from mmrender.trajectory.deltas import common_prefix
from mmrender.trajectory.packed import Int32Array


class MediaEntry(NamedTuple):
    """One medium in a sequence: where it stands, and what it is."""

    range: PlaceholderRange
    item: MediaItem

    @property
    def offset(self) -> int:
        """Position of its first token."""
        return self.range.offset

    @property
    def stop(self) -> int:
        """Position after its last token."""
        return self.range.offset + self.range.length

    def same(self, other: "MediaEntry") -> bool:
        """Whether both are the same medium at the same place."""
        return self.range == other.range and self.item.identity == other.item.identity


class Conflict(NamedTuple):
    """A medium that stands in only one of two sequences whose tokens agree there.

    `known` says that it is the known sequence that has it.
    """

    entry: MediaEntry
    known: bool


class SharedPrefix(NamedTuple):
    """The first `length` tokens agree, media included, and end inside no range.

    Where only the tokens agree further, up to `tokens`, `conflict` says which medium stands against it.
    """

    length: int
    tokens: int
    conflict: Conflict | None = None


NOTHING_SHARED: Final = SharedPrefix(0, 0)


def entries_of(sidecar: MultiModalData) -> list[MediaEntry]:
    """Return the media of all modalities, in prompt order."""
    entries = [
        MediaEntry(found, item)
        for modality, items in sidecar.mm_items.items()
        for found, item in zip(sidecar.mm_placeholders[modality], items, strict=True)
    ]
    entries.sort(key=lambda entry: entry.range.offset)
    return entries


def entries_before(entries: Sequence[MediaEntry], stop: int) -> Sequence[MediaEntry]:
    """Return the entries that begin before the token `stop`; they are in prompt order."""
    return entries[: _first_from(entries, stop)]


def entries_from(entries: Sequence[MediaEntry], start: int) -> Sequence[MediaEntry]:
    """Return the entries that begin at the token `start` or later; they are in prompt order."""
    return entries[_first_from(entries, start) :]


def _first_from(entries: Sequence[MediaEntry], position: int) -> int:
    return bisect_left(entries, position, key=lambda entry: entry.range.offset)


def shared_prefix(
    start: int,
    known_ids: Int32Array,
    known: Sequence[MediaEntry],
    prompt: Int32Array,
    entries: Sequence[MediaEntry],
) -> SharedPrefix:
    """Compare a prompt with the part of a known sequence that begins at `start`; before that they agree.

    Args:
        start: Number of tokens that agree already, media included.
        known_ids: Tokens of the known sequence from `start` on.
        known: Its media from `start` on.
        prompt: All tokens of the prompt.
        entries: All its media.
    """
    tokens = start + common_prefix(known_ids, prompt[start:])
    ours = entries[_first_from(entries, start) : _first_from(entries, tokens)]
    theirs = entries_before(known, tokens)
    for first, second in zip(ours, theirs, strict=False):
        if first.same(second):
            continue
        if first.offset == second.offset:  # another image at the same place: a branch that starts here
            return SharedPrefix(first.offset, first.offset)
        conflict = Conflict(first, False) if first.offset < second.offset else Conflict(second, True)
        return SharedPrefix(conflict.entry.offset, tokens, conflict)
    if len(ours) != len(theirs):
        more, count = (ours, len(theirs)) if len(ours) > len(theirs) else (theirs, len(ours))
        return SharedPrefix(more[count].offset, tokens, Conflict(more[count], more is theirs))
    length = ours[-1].offset if ours and ours[-1].stop > tokens else tokens
    return SharedPrefix(length, length)
