"""One versioned form of trajectories as plain data for the codec, files and sockets, and back.

The form is a dict:

- `format` and `version`.
- `table`, uint8: a msgpack `Table` of trajectories, their steps, and distinct messages. A message with arrays
  or other values that msgpack lacks is an extension of type 1, which holds a message of the codec. Versions 3
  and 4, which are read but not written, hold all messages as frames of the codec.
- `items`: the distinct media items, as `mmrender.media.wire.items_to_wire` writes them.
- `experts`: by name of the step, such as `trajectories[0].steps[3]`, the first position of its router choices
  and the array `[rows, layers, top_k]`.
- `extras`: by name of the trajectory or step, its mapping, if it is not empty.

It is linear in distinct content: an item, a token or a message is written once, however many steps, branches
and trajectories show it. Readers leave out unknown fields, so a field can be added without another version,
unless it changes the meaning of other fields.

`TrajectoryPieces` writes a trajectory that grows. A piece has the same form under another name. It holds the
steps since the piece before, and refers to items, tools and steps of earlier pieces by their rows.

Messages travel without the sources of their media by default, since the pixels travel in the items: encoded
bytes, arrays, PIL images and `data:` URLs become None. Paths, other URLs, text and tool calls stay.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
from blake3 import blake3

import mmcodecs
from mmcodecs.structs import ready
from mmrender.errors import TrajectoryError
from mmrender.media.wire import items_from_wire, items_to_wire
from mmrender.messages import Message
from mmrender.sidecar import Count, MediaItem, MediaSpan, MultiModalData, PlaceholderRange
from mmrender.trajectory.conversation import MediaSources, plain_message
from mmrender.trajectory.engine_data import AllowedTokens, RoutedExperts, WeightVersionSpan
from mmrender.trajectory.prefix import NOTHING_SHARED, shared_prefix
from mmrender.trajectory.step import Step, Tools, check_ids, shared_tools

FORMAT: Final = "mmrender.trees"
PIECE_FORMAT: Final = "mmrender.pieces"
VERSION: Final = 5
_VERSIONS: Final = (3, 4, VERSION)
"""Versions that are read."""

_MAX_TOKENS: Final = 1 << 26
"""Maximum number of tokens of all steps together. On the wire, roots may share tokens."""
_CODED: Final = 1
"""Type of the extension for messages that msgpack cannot keep."""
_IDS: Final = np.dtype("<i4")
_LOGPROBS: Final = np.dtype("<f4")


class MediaRow(msgspec.Struct, frozen=True, array_like=True):
    """One medium of a step: its row in `items`, and its placeholder range within the prompt."""

    item: Count
    offset: Count
    length: Count
    embed_spans: tuple[tuple[Count, Count], ...] | None = None


class StepRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step. Steps and messages are named by their row in the whole form.

    Attributes:
        base: The parent. For a root the root of an earlier trajectory with the same first tokens, or None.
        keep: Number of tokens that are taken from the base.
        added: Number of `tokens` that belong to the prompt. The rest was sampled.
        tokens: The tokens after them, int32, little-endian.
        media: The media that begin in `tokens`.
        logprobs: One for each sampled token, float32, little-endian, or None.
        messages_keep: Messages that it shares with the parent's conversation.
        messages: The messages after them.
        finish_reason: As in `Step`.
        reward: One number, one for each sampled token, or None.
        weight_versions: Version, start and stop of each span.
        allowed: Start, stop, row of the token ids in `Table.token_sets`, and whether they were forbidden.
        tools: Row in `Table.tools`, or None without tools.
    """

    base: Count | None = None
    keep: Count = 0
    added: Count = 0
    tokens: memoryview = memoryview(b"")
    media: list[MediaRow] = []
    logprobs: memoryview | None = None
    messages_keep: Count = 0
    messages: list[Count] = []
    finish_reason: str | None = None
    reward: float | list[float] | None = None
    weight_versions: list[WeightVersionSpan] = []
    allowed: list[tuple[Count, Count, Count, bool]] = []
    tools: Count | None = None


class TrajectoryRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One trajectory without its `extra`."""

    id: str
    steps: list[StepRow] = []
    reward: float | None = None
    error: str | None = None


class Table(msgspec.Struct, frozen=True, omit_defaults=True):
    """The trajectories, and their shared content.

    Attributes:
        trajectories: Their rows.
        messages: The distinct messages: whether one was a `Message`, and its plain form.
        token_sets: The distinct sets of allowed tokens, int32, little-endian.
        tools: The distinct lists of tool definitions.
    """

    trajectories: list[TrajectoryRow]
    messages: list[Any]
    token_sets: list[memoryview] = []
    tools: list[Tools] = []


class _Form(msgspec.Struct):
    table: Any
    items: Any
    experts: dict[str, tuple[Count, Any]]
    extras: dict[str, dict[str, Any]]


@dataclass
class Writer:
    """Makes rows of steps, and the tables that these refer to. `roots` may lend their first tokens."""

    media_sources: MediaSources
    roots: list[tuple[int, Step]] = field(default_factory=list)
    messages: dict[bytes, int] = field(default_factory=dict)
    token_sets: dict[tuple[int, ...], int] = field(default_factory=dict)
    tools: list[Tools] = field(default_factory=list)
    items: list[MediaItem] = field(default_factory=list)
    experts: dict[str, tuple[int, Any]] = field(default_factory=dict)
    extras: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    _item_rows: dict[tuple[str, type], int] = field(default_factory=dict)
    # By identity, with the objects, so that no id can come to mean another object.
    _known_messages: dict[int, tuple[Any, int]] = field(default_factory=dict)
    _tool_rows: dict[bytes, int] = field(default_factory=dict)

    def form(self, name: str, rows: list[TrajectoryRow], *, share: bool) -> dict[str, Any]:
        """Return rows and the tables that these refer to."""
        sets = [np.array(ids, _IDS).data for ids in self.token_sets]
        messages = list(map(msgspec.Raw, self.messages))
        table = msgspec.msgpack.encode(Table(rows, messages, sets, self.tools))
        return {
            "format": name,
            "version": VERSION,
            "table": np.frombuffer(table, np.uint8),
            "items": items_to_wire(self.items, share=share),
            "experts": self.experts,
            "extras": self.extras,
        }

    def enter(self, step: Step) -> None:
        """Enter the items and tools of a step into the tables."""
        for span in step.own_media:
            self._medium(span)
        if step.tools is not None:
            self._tools_row(step.tools)

    def next_piece(self) -> "Writer":
        """Return a writer with empty tables that knows the rows of items and tools."""
        return Writer(self.media_sources, _item_rows=self._item_rows, _tool_rows=self._tool_rows)

    def step(self, step: Step, first: int = 0, owner: str = "") -> StepRow:
        """Return the row of a step of the trajectory `owner`, whose steps begin at the row `first`."""
        name = f"{owner}steps[{step.index}]"
        base, keep = (None, 0) if step.parent is None else (first + step.parent.index, step.keep)
        if base is None:
            # The root of an earlier trajectory that shares the longest prefix lends its first tokens.
            found = NOTHING_SHARED
            for row, root in self.roots:
                shared = shared_prefix(0, root.own_ids, root.own_media, step.prompt_delta, step.own_media)
                if shared.length > found.length:
                    base, keep, found = row, shared.length, shared
        lent = keep - step.keep
        if step.own_experts is not None:
            self.experts[name] = step.own_experts.start, step.own_experts.data
        if step.extra:
            self.extras[name] = step.extra
        reward, logprobs = step._reward, step.logprobs
        messages = enumerate(step.new_messages, step.messages_keep)
        return StepRow(
            base=base,
            keep=keep,
            added=step.added - lent,
            tokens=np.asarray(step.own_ids[lent:], _IDS).data,
            media=[self._medium(span) for span in step.own_media if span.range.offset >= keep],
            logprobs=None if logprobs is None else np.asarray(logprobs, _LOGPROBS).data,
            messages_keep=step.messages_keep,
            messages=[self._message(each, f"{name}.messages[{number}]") for number, each in messages],
            finish_reason=step.finish_reason,
            reward=reward.tolist() if isinstance(reward, np.ndarray) else reward,
            weight_versions=list(step.weight_versions),
            allowed=[
                (start, stop, self.token_sets.setdefault(ids, len(self.token_sets)), forbids)
                for start, stop, ids, forbids in step.allowed
            ],
            tools=None if step.tools is None else self._tools_row(step.tools),
        )

    def _medium(self, span: MediaSpan) -> MediaRow:
        known = len(self._item_rows)
        row = self._item_rows.setdefault((span.item.identity, type(span.item)), known)
        if row == known:
            self.items.append(span.item)
        return MediaRow(row, span.range.offset, span.range.length, span.range.embed_spans)

    def _tools_row(self, tools: Tools) -> int:
        known = len(self._tool_rows)
        row = self._tool_rows.setdefault(blake3(msgspec.msgpack.encode(tools)).digest(), known)
        if row == known:
            self.tools.append(tools)
        return row

    def _message(self, message: Any, where: str) -> int:
        known = self._known_messages.get(id(message))
        if known is not None:
            return known[1]
        plain, is_exact = plain_message(message, self.media_sources, where)
        record, encoded = (isinstance(message, Message), plain), None
        if is_exact:
            with suppress(OverflowError, UnicodeEncodeError):  # for which the codec's error names the place
                encoded = msgspec.msgpack.encode(record)
        try:
            if encoded is None:
                encoded = msgspec.msgpack.encode(msgspec.msgpack.Ext(_CODED, bytes(mmcodecs.encode(record))))
        except mmcodecs.CodecError as error:
            raise TrajectoryError(
                "a message cannot be encoded",
                where=where,
                got=str(error),
                remedy="Pass media as bytes or URLs, or write with media_sources='drop'",
            ) from error
        row = self.messages.setdefault(encoded, len(self.messages))
        self._known_messages[id(message)] = message, row
        return row


def _unpacked(kind: int, data: memoryview) -> Any:
    if kind != _CODED:
        raise ValueError(f"extension {kind} is unknown")
    return mmcodecs.decode(bytes(data))


_MALFORMED: Final = (msgspec.MsgspecError, TypeError, AttributeError, ValueError, RecursionError)
"""Errors of reading a damaged table."""


@dataclass
class Reader:
    """Builds steps. `experts` and `extras` belong to rows that are still to come."""

    steps: list[Step] = field(default_factory=list)
    items: list[MediaItem] = field(default_factory=list)
    messages: Sequence[Any] = ()
    experts: dict[str, RoutedExperts] = field(default_factory=dict)
    extras: dict[str, dict[str, Any]] = field(default_factory=dict)
    token_sets: Sequence[tuple[int, ...]] = ()
    tools: list[Tools] = field(default_factory=list)
    _media: list[list[MediaSpan]] = field(default_factory=list)
    _total: int = 0

    def take(self, wire: Any, name: str) -> list[TrajectoryRow]:
        """Take the tables of a form, and return its rows. Items and tools add to earlier ones."""
        marks = [wire.get(key) for key in ("format", "version")] if isinstance(wire, Mapping) else None
        # Compared as text, since damaged data may hold anything here, arrays among them.
        if str(marks) not in [str([name, version]) for version in _VERSIONS]:
            raise TrajectoryError(
                "the data does not hold trajectories that this release can read",
                where="wire",
                expected=f"format {name!r}, version {', '.join(map(str, _VERSIONS))}",
                got=f"format {marks[0]!r}, version {marks[1]!r}"[:120] if marks else type(wire).__name__,
                remedy="Write and read with the same release of mmrender",
            )
        try:
            form = msgspec.convert(wire, ready(_Form))
            data = form.table
            if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 1:
                got = f"{getattr(data, 'dtype', type(data).__name__)} {np.shape(data)}"
                raise TypeError(f"table: expected an array of uint8 (bytes,), got {got}")
            table = msgspec.msgpack.decode(
                np.ascontiguousarray(data).data, type=ready(Table), ext_hook=_unpacked
            )
        except _MALFORMED as error:
            raise TrajectoryError("trajectories are malformed", where="wire", got=str(error)) from error
        self.items += items_from_wire(form.items, where="wire.items")
        self.messages = [_read_message(frames, index) for index, frames in enumerate(table.messages)]
        self.experts = {name: _experts(name, *value) for name, value in form.experts.items()}
        self.extras = dict(form.extras)
        self.token_sets = [
            tuple(_numbers(ids, _IDS, f"wire.token_sets[{index}]").tolist())
            for index, ids in enumerate(table.token_sets)
        ]
        self.tools += [shared_tools(msgspec.msgpack.encode(tools)) for tools in table.tools]
        return table.trajectories

    def check_used(self) -> None:
        """Check that each value of `experts` and `extras` belongs to a row."""
        for name in (*self.experts, *self.extras):
            raise TrajectoryError("data of no step or trajectory is left over", where=f"wire.{name}")

    def step(self, row: StepRow, first: int = 0, owner: str = "") -> Step:
        """Return the next step, of the trajectory `owner`, whose steps begin at the row `first`."""
        number = len(self.steps)
        where = f"steps[{number - first}]"
        base = self.steps[row.base] if row.base is not None and row.base < number else None
        is_root = row.base is None or row.base < first
        if (base is None) != (row.base is None) or (is_root and base is not None and base.parent is not None):
            expected = f"a step before {number}, or a root of an earlier trajectory"
            raise _damaged("the base is malformed", f"{where}.base", expected, row.base)
        available = 0 if base is None else len(base)
        if row.keep > available:
            raise _damaged("more is kept than there is", f"{where}.keep", f"0..{available}", row.keep)
        parent = None if is_root else base
        known = 0 if parent is None else parent.messages_keep + len(parent.new_messages)
        if row.messages_keep > known or any(each >= len(self.messages) for each in row.messages):
            expected = f"at most {known} kept, and rows below {len(self.messages)}"
            got = [row.messages_keep, *row.messages]
            raise _damaged("messages are not in the table", f"{where}.messages", expected, got)
        path = f"{where}.tokens"
        own_ids = check_ids(_numbers(row.tokens, _IDS, path), path)
        lent = row.keep if is_root else 0
        self._total += lent + len(own_ids)
        if self._total > _MAX_TOKENS or row.added > len(own_ids):
            expected = f"{row.added} of the prompt or more, and at most {_MAX_TOKENS} of all steps together"
            raise _damaged("the number of tokens is wrong", path, expected, len(own_ids))
        if base is not None and lent:
            own_ids = np.concatenate([base.own_ids[:lent], own_ids])
        if any(place >= len(self.token_sets) for _, _, place, _ in row.allowed):
            expected = f"token sets below {len(self.token_sets)}"
            raise _damaged("token ids are not in the table", f"{where}.allowed", expected, row.allowed)
        if row.tools is not None and row.tools >= len(self.tools):
            expected = f"a row below {len(self.tools)}"
            raise _damaged("the tools are not in the table", f"{where}.tools", expected, row.tools)
        step = Step(
            index=number - first,
            parent=parent,
            keep=row.keep - lent,
            own_ids=own_ids,
            added=lent + row.added,
            own_media=self._own_media(row, is_root, row.keep + row.added, where),
            logprobs=None if row.logprobs is None else _numbers(row.logprobs, _LOGPROBS, f"{where}.logprobs"),
            finish_reason=row.finish_reason,
            own_experts=self.experts.pop(owner + where, None),
            weight_versions=tuple(row.weight_versions),
            allowed=tuple(
                AllowedTokens(start, stop, self.token_sets[place], forbids)
                for start, stop, place, forbids in row.allowed
            ),
            messages_keep=row.messages_keep,
            new_messages=tuple(self.messages[each] for each in row.messages),
            tools=None if row.tools is None else self.tools[row.tools],
            _reward=row.reward,
            extra=self.extras.pop(owner + where, {}),
        )
        self.steps.append(step)
        return step

    def _own_media(
        self, row: StepRow, is_root: bool, prompt_length: int, where: str
    ) -> tuple[MediaSpan, ...]:
        """Return the media that a step adds, for a root with the media from another tree."""
        known = [] if row.base is None else self._media[row.base]
        known = [span for span in known if span.range.offset < row.keep]
        if known and known[-1].range.offset + known[-1].range.length > row.keep:
            expected = "no position within the range of a medium"
            raise _damaged("a medium is kept in part", f"{where}.keep", expected, row.keep)
        spans: list[MediaSpan] = []
        if row.media:
            where = f"{where}.media"
            table = len(self.items)
            if any(medium.item >= table for medium in row.media):
                rows = [medium.item for medium in row.media]
                raise _damaged("items are not in the table", where, f"rows below {table}", rows)
            added = MultiModalData.of(
                (PlaceholderRange(medium.offset, medium.length, medium.embed_spans), self.items[medium.item])
                for medium in row.media
            )
            spans = added.spans(prompt_length, where=where)
            if (first := spans[0].range.offset) < row.keep:
                problem = "a medium begins before the step's own tokens"
                raise _damaged(problem, where, f"{row.keep} or more", first)
            counts = Counter(each.modality for each in known)
            spans = [span._replace(position=span.position + counts[span.modality]) for span in spans]
        self._media.append([*known, *spans])
        return tuple(self._media[-1] if is_root else spans)


def _experts(name: str, start: int, data: Any) -> RoutedExperts:
    try:
        return RoutedExperts(data, start)
    except TrajectoryError as error:
        error.where = f"wire.{name}.{error.where}"
        raise


def _read_message(row: Any, index: int) -> Any:
    try:
        is_coded = isinstance(row, list) and all(isinstance(part, bytes) for part in row)  # version 3 or 4
        is_message, plain = msgspec.convert(mmcodecs.decode(row) if is_coded else row, tuple[bool, Any])
        return msgspec.convert(plain, ready(Message)) if is_message else plain
    except (mmcodecs.CodecError, msgspec.ValidationError) as error:
        where = f"wire.messages[{index}]"
        raise TrajectoryError("a message is damaged", where=where, got=str(error)) from error


def _numbers(data: memoryview, dtype: np.dtype[Any], where: str) -> Any:
    if len(data) % 4:
        raise _damaged("numbers are cut off", where, "a multiple of 4 bytes", len(data))
    return np.frombuffer(data, dtype)


def _damaged(problem: str, where: str, expected: str, got: Any) -> TrajectoryError:
    return TrajectoryError(problem, where=where, expected=expected, got=repr(got)[:80])
