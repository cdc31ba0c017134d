"""One versioned form of trajectories as plain data for the codec, files and sockets, and back.

The form is a dict of lists, scalars and arrays:

- `format` and `version`.
- `trajectories`: id, number of steps, reward, error and extra of each.
- `steps`, uint8: a msgpack list with one `StepRecord` for each step.
- `tokens`, int32, and `logprobs`, float32: pools that steps take theirs from, in order.
- `messages`, uint8, and `message_ends`, int64: distinct messages, each encoded by the codec, back to back.
- `placeholders`, int32 `[P, 4]`, and `spans`, int32 `[S, 2]`: new media of the steps, in order, as
  `mmrender.media.wire.ranges_to_array` writes them. Offsets count from the first token of the prompt.
- `items`: the distinct media items, as `mmrender.media.wire.items_to_wire` writes them.
- `experts`: step, first position and array `[rows, layers, top_k]` for each step that has router choices.
- `extras`: step and mapping, for each step that has one.

Pools are used up from front to back, so the form is linear in distinct content: an item, a token or a message
is written once, however many steps, branches and trajectories show it.

Messages travel without the sources of their media by default, since the pixels travel in the items: encoded
bytes, arrays, PIL images and `data:` URLs become None. Paths, other URLs, text and tool calls stay.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

import mmcodecs
from mmrender.errors import TrajectoryError
from mmrender.media.wire import items_from_wire, items_to_wire, ranges_from_array, ranges_to_array
from mmrender.messages import Message
from mmrender.spans import MediaItem, MediaSpan, MultiModalData, PlaceholderRange
from mmrender.trajectory.engine_data import (
    RoutedExperts,
    WeightVersionSpan,
    check_experts,
    check_versions,
)
from mmrender.trajectory.prefix import (
    NO_IDS,
    NOTHING_SHARED,
    Int32Array,
    check_ids,
    media_before,
    media_from,
    shared_prefix,
)
from mmrender.trajectory.step import Step, check_logprobs, check_reward

FORMAT: Final = "mmrender.trees"
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
VERSION: Final = 2
MediaSources: TypeAlias = Literal["drop", "keep"]
"""Whether messages keep the sources of their media, or hold None in their place."""

_MAX_TOKENS: Final = 1 << 26
"""Most tokens of all steps of one form together; on the wire, roots may share theirs."""
_DEPTH: Final = 60
_MEDIA_TYPES: Final = frozenset(
    {"image", "image_url", "input_image", "image_pil", "video", "video_url", "input_video"}
)
_MEDIA_KEYS: Final = frozenset({"image", "image_url", "image_pil", "video", "video_url"})
"""Types and keys of content parts that show a medium, as `mmrender.content` reads parts."""


class Record(NamedTuple):
    """The content of one trajectory."""

    trajectory_id: str
    steps: Sequence[Step]
    reward: float | None
    error: str | None
    extra: Mapping[str, Any]


class StepRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One step; numbers of steps and messages are rows of the whole form.

    Attributes:
        parent: The parent, -1 for a root.
        base: The parent; for a root the root of an earlier trajectory with the same first tokens, or -1.
        keep: Tokens that are taken from the base.
        added: Prompt tokens that follow them.
        sampled: Sampled tokens.
        media: Number of new media.
        has_logprobs: Whether it has log probabilities.
        messages_keep: Messages that it shares with the parent's conversation.
        messages: The messages that follow them.
        finish_reason: As in `Step`.
        reward: One number, one for each sampled token, or None.
        weight_versions: Version, start and stop of each span.
    """

    parent: int
    base: int
    keep: int
    added: Count
    sampled: Count
    media: int
    has_logprobs: bool
    messages_keep: int
    messages: list[int]
    finish_reason: str | None
    reward: float | list[float] | None
    weight_versions: list[WeightVersionSpan]


def write_records(records: Iterable[Record], *, media_sources: MediaSources, share: bool) -> dict[str, Any]:
    """Return trajectories as plain data; see `mmrender.trajectory.tree.trajectories_to_wire`."""
    writer = _Writer(media_sources)
    trajectories = []
    for number, record in enumerate(records):
        first = len(writer.rows)
        for step in record.steps:
            writer.add(step, first, f"trajectories[{number}].steps[{step.index}]")
        trajectories.append(
            {
                "id": record.trajectory_id,
                "steps": len(record.steps),
                "reward": None if record.reward is None else float(record.reward),
                "error": record.error,
                "extra": record.extra,
            }
        )
    placeholders, spans = ranges_to_array(writer.media)
    return {
        "format": FORMAT,
        "version": VERSION,
        "trajectories": trajectories,
        "steps": np.frombuffer(msgspec.msgpack.encode(writer.rows), np.uint8),
        "tokens": np.concatenate([NO_IDS, *writer.tokens]),
        "logprobs": np.concatenate([np.zeros(0, np.float32), *writer.logprobs]),
        "messages": np.frombuffer(b"".join(writer.messages), np.uint8),
        "message_ends": np.cumsum([len(each) for each in writer.messages], dtype=np.int64),
        "placeholders": placeholders,
        "spans": spans,
        "items": items_to_wire(writer.items, share=share),
        "experts": writer.experts,
        "extras": writer.extras,
    }


class _Writer:
    """Collects the pools and tables of steps."""

    def __init__(self, media_sources: MediaSources) -> None:
        if media_sources not in ("drop", "keep"):
            raise TrajectoryError(
                "unknown treatment of media sources",
                where="media_sources",
                expected="'drop' or 'keep'",
                got=repr(media_sources),
            )
        self.rows: list[StepRecord] = []
        self.tokens: list[Int32Array] = []
        self.logprobs: list[npt.NDArray[np.float32]] = []
        self.messages: dict[bytes, int] = {}
        self.media: list[tuple[int, PlaceholderRange]] = []
        self.items: list[MediaItem] = []
        self.experts: list[list[Any]] = []
        self.extras: list[list[Any]] = []
        self._media_sources = media_sources
        self._item_rows: dict[tuple[str, type], int] = {}
        self._roots: list[tuple[int, Step]] = []
        # The objects are kept beside their rows, or an id might come to mean another object.
        self._known_messages: dict[int, tuple[Any, int]] = {}

    def add(self, step: Step, first: int, where: str) -> None:
        """Add a step of the trajectory whose steps begin at the row `first`."""
        index = len(self.rows)
        if step.parent is not None:
            parent = base = first + step.parent.index
            keep = step.keep
        else:
            # The root of an earlier trajectory that shares the longest prefix lends its first tokens.
            parent, base, found = -1, -1, NOTHING_SHARED
            for row, other in self._roots:
                if row < first:
                    known = other.own_ids, other.own_media
                    shared = shared_prefix(0, *known, step.prompt_delta, step.own_media)
                    if shared.length > found.length:
                        base, found = row, shared
            keep = found.length
            self._roots.append((index, step))
        skipped = keep - step.keep
        media = media_from(step.own_media, keep)
        self.tokens.append(step.own_ids[skipped:])
        for span in media:
            row = self._item_rows.setdefault((span.item.identity, type(span.item)), len(self.items))
            if row == len(self.items):
                self.items.append(span.item)
            self.media.append((row, span.range))
        if step.logprobs is not None:
            self.logprobs.append(step.logprobs)
        reward = step.reward
        messages = enumerate(step.new_messages, step.messages_keep)
        self.rows.append(
            StepRecord(
                parent=parent,
                base=base,
                keep=keep,
                added=step.added - skipped,
                sampled=len(step.completion_ids),
                media=len(media),
                has_logprobs=step.logprobs is not None,
                messages_keep=step.messages_keep,
                messages=[self._message(each, f"{where}.messages[{number}]") for number, each in messages],
                finish_reason=step.finish_reason,
                reward=reward.tolist() if isinstance(reward, np.ndarray) else reward,
                weight_versions=list(step.weight_versions),
            )
        )
        if step.own_experts is not None:
            self.experts.append([index, step.own_experts.start, step.own_experts.data])
        if step.extra:
            self.extras.append([index, step.extra])

    def _message(self, message: Any, where: str) -> int:
        known = self._known_messages.get(id(message))
        if known is not None:
            return known[1]
        plain = plain_message(message, self._media_sources, where)
        try:
            encoded = bytes(mmcodecs.encode([isinstance(message, Message), plain]))
        except mmcodecs.CodecError as error:
            raise TrajectoryError(
                "a message cannot be encoded",
                where=where,
                got=str(error),
                remedy="Give media as bytes or URLs, or write with media_sources='drop'",
            ) from error
        row = self.messages.setdefault(encoded, len(self.messages))
        self._known_messages[id(message)] = message, row
        return row


def plain_message(message: Any, sources: MediaSources, where: str = "message") -> Any:
    """Return a message as dicts, lists and scalars, with or without the sources of its media."""
    plain = _plain(message, 0, where)
    if sources == "drop" and isinstance(plain, dict) and "content" in plain:
        content = plain["content"]
        parts = [_without_source(part) for part in content] if isinstance(content, list) else content
        plain["content"] = _without_source(parts)
    return plain


def _plain(value: Any, depth: int, where: str) -> Any:
    if depth > _DEPTH:
        raise TrajectoryError("a message is nested too deeply, or holds itself", where=where)
    if isinstance(value, msgspec.Struct):
        tag = value.__struct_config__.tag
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        value = fields if tag is None else {str(value.__struct_config__.tag_field): tag, **fields}
    if isinstance(value, Mapping):
        return {key: _plain(entry, depth + 1, where) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, depth + 1, where) for entry in value]
    return value


def _without_source(part: Any) -> Any:
    """Return a content part without its image or video; any other is returned as it is."""
    if _is_binary(part):
        return {"type": "image"}
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    media = kind in _MEDIA_TYPES if kind is not None else not _MEDIA_KEYS.isdisjoint(part)
    return {key: _blanked(value, key) for key, value in part.items()} if media else part


def _blanked(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _blanked(entry, name) for name, entry in value.items()}
    if isinstance(value, list):
        return None if any(_blanked(entry) is not entry for entry in value) else value
    is_data = isinstance(value, str) and (key == "data" or value[:5].lower() == "data:")
    return None if is_data or _is_binary(value) else value


def _is_binary(value: Any) -> bool:
    if isinstance(value, bytes | bytearray | memoryview | np.ndarray):
        return True
    return type(value).__module__.partition(".")[0] in ("PIL", "torch")


def read_records(wire: Any) -> list[Record]:
    """Return the content of trajectories from plain data, which may come from anywhere: all of it is checked.

    Raises:
        TrajectoryError: The data is something else, of another version, or damaged.
        MediaError: A media item or a placeholder range is damaged.
        PlaceholderError: Placeholder ranges do not fit the tokens.
    """
    marks = [wire.get(key) for key in ("format", "version")] if isinstance(wire, Mapping) else None
    # Compared as text, since damaged data may hold anything here, arrays among them.
    if str(marks) != str([FORMAT, VERSION]):
        raise TrajectoryError(
            "the data does not hold trajectories that this release can read",
            where="wire",
            expected=f"format {FORMAT!r}, version {VERSION}",
            got=f"format {marks[0]!r}, version {marks[1]!r}"[:120] if marks else type(wire).__name__,
            remedy="Write and read with the same release of mmrender",
        )
    try:
        form = msgspec.convert(wire, _Form)
    except (msgspec.ValidationError, TypeError, AttributeError, ValueError) as error:
        raise TrajectoryError("trajectories are malformed", where="wire", got=str(error)) from error
    return _Reader(form).records()


class _Trajectory(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    steps: int
    reward: float | None
    error: str | None
    extra: dict[str, Any]


class _Form(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    trajectories: list[_Trajectory]
    steps: Any
    tokens: Any
    logprobs: Any
    messages: Any
    message_ends: Any
    placeholders: Any
    spans: Any
    items: Any
    experts: list[tuple[int, int, Any]]
    extras: list[tuple[int, dict[str, Any]]]


_ARRAYS: Final[Mapping[str, tuple[Any, tuple[int, ...]]]] = {
    "steps": (np.uint8, ()),
    "tokens": (np.int32, ()),
    "logprobs": (np.float32, ()),
    "messages": (np.uint8, ()),
    "message_ends": (np.int64, ()),
    "placeholders": (np.int32, (4,)),
    "spans": (np.int32, (2,)),
}
"""dtype, and shape after the first dimension."""


class _Pool:
    """A sequence that is used up from front to back."""

    def __init__(self, values: Any, name: str) -> None:
        self._values = values
        self._name = name
        self._taken = 0

    def take(self, count: int, where: str) -> Any:
        left = len(self._values) - self._taken
        _require(
            0 <= count <= left, f"more {self._name} are taken than there are", where, f"0..{left}", count
        )
        self._taken += count
        return self._values[self._taken - count : self._taken]

    def finish(self) -> None:
        count = len(self._values)
        _require(self._taken == count, "entries are left over", f"wire.{self._name}", self._taken, count)


class _Reader:
    """Builds steps from a form whose outline is right."""

    def __init__(self, form: _Form) -> None:
        for name, (dtype, rest) in _ARRAYS.items():
            value = getattr(form, name)
            right = isinstance(value, np.ndarray) and value.dtype == dtype and value.ndim == 1 + len(rest)
            shape = ", ".join(["n", *map(str, rest)])
            _require(
                right and value.shape[1:] == rest,
                "an array is malformed",
                f"wire.{name}",
                f"{np.dtype(dtype)} [{shape}]",
                value,
            )
        self._form = form
        try:
            self._rows = msgspec.msgpack.decode(form.steps.tobytes(), type=list[StepRecord])
        except msgspec.DecodeError as error:
            raise TrajectoryError("steps are malformed", where="wire.steps", got=str(error)) from error
        self._experts = {row[0]: row for row in form.experts}
        self._extras = dict(form.extras)
        for name, table in (("experts", form.experts), ("extras", form.extras)):
            numbers = [row[0] for row in table]
            right = numbers == sorted(set(numbers)) and set(numbers) <= set(range(len(self._rows)))
            _require(right, "rows must belong to steps, in order", f"wire.{name}", "each step once", numbers)
        self._messages = list(self._read_messages())
        self._items = items_from_wire(form.items, where="wire.items")
        ranges = ranges_from_array(form.placeholders, form.spans, len(self._items), "wire.placeholders")
        self._tokens = _Pool(form.tokens, "tokens")
        self._logprobs = _Pool(form.logprobs, "logprobs")
        self._new_media = _Pool(ranges, "media")
        self._steps: list[Step] = []
        self._media: list[list[MediaSpan]] = []
        self._total = 0

    def records(self) -> list[Record]:
        """Return the trajectories."""
        records = []
        steps = _Pool(self._rows, "steps")
        for index, each in enumerate(self._form.trajectories):
            where = f"wire.trajectories[{index}]"
            check_reward(each.reward, None, f"{where}.reward")
            first = len(self._steps)
            form: RoutedExperts | None = None
            for number, row in enumerate(steps.take(each.steps, f"{where}.steps"), first):
                step = self._step(row, first, number, form)
                self._steps.append(step)
                form = form or step.own_experts
            records.append(Record(each.id, self._steps[first:], each.reward, each.error, each.extra))
        for pool in (steps, self._tokens, self._logprobs, self._new_media):
            pool.finish()
        return records

    def _step(self, row: StepRecord, first: int, number: int, form: RoutedExperts | None) -> Step:
        where = f"wire.steps[{number}]"
        is_root = row.parent < 0
        # A root may take its first tokens from the root of an earlier trajectory.
        right = row.base < first if is_root else first <= row.parent == row.base < number
        base = self._steps[row.base] if right and row.base >= 0 else None
        right = right and not (is_root and base is not None and base.parent is not None)
        if not right:
            expected = f"a step before {number}, the base of a root in an earlier trajectory"
            raise _damaged("parent or base is malformed", where, expected, (row.parent, row.base))
        available = 0 if base is None else len(base)
        right = 0 <= row.keep <= available
        if not right:
            raise _damaged("more is kept than there is", f"{where}.keep", f"0..{available}", row.keep)
        own_ids = check_ids(self._tokens.take(row.added + row.sampled, where), f"{where}.tokens")
        shared = row.keep if is_root else 0
        self._total += shared + len(own_ids)
        right = self._total <= _MAX_TOKENS
        if not right:
            raise _damaged("there are too many tokens", where, f"at most {_MAX_TOKENS} in all", self._total)
        if base is not None and shared:
            own_ids = np.concatenate([base.own_ids[:shared], own_ids])
        own_ids.flags.writeable = False
        parent = None if is_root else base
        keep = row.keep - shared
        logprobs = self._logprobs.take(row.sampled, f"{where}.logprobs") if row.has_logprobs else None
        table = len(self._messages)
        known = 0 if parent is None else parent.messages_keep + len(parent.new_messages)
        right = 0 <= row.messages_keep <= known and all(0 <= each < table for each in row.messages)
        if not right:
            expected, got = (
                f"at most {known} kept, and rows below {table}",
                [row.messages_keep, *row.messages],
            )
            raise _damaged("messages are not in the table", f"{where}.messages", expected, got)
        experts = None
        if number in self._experts:
            _, start, data = self._experts[number]
            try:
                experts = check_experts(RoutedExperts(data, start), keep + len(own_ids), form, "")
            except (TrajectoryError, AttributeError) as error:
                raise TrajectoryError(
                    "routed experts are malformed", where=f"{where}.experts", got=str(error)
                ) from error
        return Step(
            index=number - first,
            parent=parent,
            keep=keep,
            own_ids=own_ids,
            added=shared + row.added,
            own_media=self._own_media(row, keep + shared + row.added, where),
            logprobs=check_logprobs(logprobs, row.sampled, f"{where}.logprobs"),
            finish_reason=row.finish_reason,
            own_experts=experts,
            weight_versions=check_versions(row.weight_versions, row.sampled, f"{where}.weight_versions"),
            messages_keep=row.messages_keep,
            new_messages=tuple(self._messages[each] for each in row.messages),
            _reward=check_reward(row.reward, row.sampled, f"{where}.reward"),
            extra=dict(self._extras.get(number, {})),
        )

    def _own_media(self, row: StepRecord, prompt_length: int, where: str) -> tuple[MediaSpan, ...]:
        """Return the media that a step adds, and for a root those that it takes from another tree, too."""
        known = media_before(self._media[row.base], row.keep) if row.base >= 0 else []
        if known and known[-1].stop > row.keep:
            expected = "no position within the range of a medium"
            raise _damaged("a medium is kept in part", f"{where}.keep", expected, row.keep)
        taken = self._new_media.take(row.media, where)
        spans: list[MediaSpan] = []
        if taken:
            added = MultiModalData.of((found, self._items[index]) for index, found in taken)
            spans = added.spans(prompt_length, where=f"{where}.media")
            if spans[0].start < row.keep:
                expected = f"{row.keep} or more"
                raise _damaged(
                    "a medium begins before the step's own tokens", where, expected, spans[0].start
                )
            counts = Counter(each.modality for each in known)
            spans = [span._replace(position=span.position + counts[span.modality]) for span in spans]
        self._media.append([*known, *spans])
        return tuple(self._media[-1] if row.parent < 0 else spans)

    def _read_messages(self) -> Iterable[Any]:
        data, start = self._form.messages, 0
        for index, end in enumerate(self._form.message_ends.tolist()):
            where = f"wire.messages[{index}]"
            right = start < end <= len(data)
            if not right:
                raise _damaged("the end of a message is malformed", where, f"{start + 1}..{len(data)}", end)
            try:
                encoded = np.ascontiguousarray(data[start:end]).data
                is_message, plain = mmcodecs.decode(encoded, type=tuple[bool, Any])
                yield msgspec.convert(plain, Message) if is_message else plain
            except (mmcodecs.CodecError, msgspec.ValidationError) as error:
                raise TrajectoryError("a message is damaged", where=where, got=str(error)) from error
            start = end
        _require(start == len(data), "entries are left over", "wire.messages", start, len(data))


def _require(right: bool, problem: str, where: str, expected: Any, got: Any) -> None:
    if not right:
        raise _damaged(problem, where, expected, got)


def _damaged(problem: str, where: str, expected: Any, got: Any) -> TrajectoryError:
    text = f"{got.dtype} {list(got.shape)}" if isinstance(got, np.ndarray) else repr(got)[:80]
    return TrajectoryError(problem, where=where, expected=str(expected), got=text)
