"""Places of media items in the tokens: placeholder ranges, items, and the sidecar that carries both.

`MultiModalData` is the sidecar. `MultiModalData.spans` is the only validator of a sidecar against its tokens.
An item is decoded and processed once, and then shared across turns, steps, branches and the rollouts of a
group.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from mmrender.errors import PlaceholderError
from mmrender.messages import Modality

TensorDtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
Framework: TypeAlias = Literal["numpy", "torch"]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Text(msgspec.Struct, frozen=True, tag="text", tag_field="form"):
    """A piece of an expansion that is encoded as template text."""

    text: str


class Repeat(msgspec.Struct, frozen=True, tag="repeat", tag_field="form"):
    """A piece of an expansion: one added token, `count` times. `embeds`: it holds image features."""

    token: str
    count: Count
    embeds: bool = True


Expansion: TypeAlias = tuple[Text | Repeat, ...]
"""Replacement of one placeholder that the template wrote, piece by piece.

For the Qwen family it is `(Repeat("<|image_pad|>", 768),)`. Tiled families have rows, columns and separators.
Concatenated as text it equals the text of the model's own processor in place of the placeholder.
"""


def feature_count(expansion: Expansion) -> int:
    """Return the number of feature tokens of an expansion."""
    return sum(piece.count for piece in expansion if isinstance(piece, Repeat) and piece.embeds)


@dataclass(frozen=True, slots=True)
class PlaceholderRange:
    """Token range of one media item in the prompt: `[offset, offset + length)`.

    The range covers the whole expansion of the template's placeholder. If only some of those tokens hold
    features (others are rows, columns and separators), `embed_spans` lists their `(start, stop)` runs,
    relative to `offset`. `None` means all of them.
    """

    offset: int
    length: int
    embed_spans: tuple[tuple[int, int], ...] | None = None

    def shifted(self, by: int) -> "PlaceholderRange":
        """Return the same range, `by` tokens later."""
        return PlaceholderRange(self.offset + by, self.length, self.embed_spans)

    @property
    def num_embeds(self) -> int:
        """Number of feature tokens in the range."""
        if self.embed_spans is None:
            return self.length
        return sum(stop - start for start, stop in self.embed_spans)

    @property
    def is_embed(self) -> npt.NDArray[np.bool_]:
        """Boolean mask of shape `(length,)`: the feature tokens of the range."""
        mask = np.full(self.length, self.embed_spans is None)
        for start, stop in self.embed_spans or ():
            mask[start:stop] = True
        return mask


@runtime_checkable
class MediaItem(Protocol):
    """One processed image, video or audio clip."""

    @property
    def modality(self) -> Modality:
        """`"image"`, `"video"` or `"audio"`."""
        ...

    @property
    def identity(self) -> str:
        """Hex blake3 digest of the decoded pixels or samples and of the processor's settings.

        Equal identities mean equal tensors and an equal expansion.
        """
        ...

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels as loaded, orientation applied. Of audio: its rate and its samples."""
        ...

    @property
    def expansion(self) -> Expansion:
        """Replacement of the template's placeholder."""
        ...

    @property
    def grid(self) -> tuple[int, ...]:
        """Family-specific layout for display: `(t, h, w)` in patches, or `(tiles,)`."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes the item keeps alive."""
        ...

    def tensors(self, dtype: TensorDtype = "float32", *, framework: Framework = "numpy") -> dict[str, Any]:
        """Expand to the model's keyword arguments, such as `pixel_values` and `image_grid_thw`.

        Floating tensors are converted to `dtype`, integer tensors keep the dtype of the model's processor.
        Numpy lacks bfloat16, so with `framework="numpy"` its values are `uint16` bit patterns.
        """
        ...


class MediaSpan(NamedTuple):
    """One media item and its tokens `[start, stop)`.

    Attributes:
        modality: `"image"`, `"video"` or `"audio"`.
        position: Index among the items of its modality.
        range: Its placeholder range.
        item: The item.
    """

    modality: str
    position: int
    range: PlaceholderRange
    item: MediaItem

    @property
    def start(self) -> int:
        """Index of the first token."""
        return self.range.offset

    @property
    def stop(self) -> int:
        """Index after the last token."""
        return self.range.offset + self.range.length

    def is_track_of(self, other: "MediaSpan") -> bool:
        """Whether it is the sound track of a video: its features are other tokens of the same range."""
        return (
            (other.modality, self.modality) == ("video", "audio")
            and (other.start, other.stop) == (self.start, self.stop)
            and not (other.range.is_embed & self.range.is_embed).any()
        )

    @property
    def where(self) -> str:
        """Path of the range within its sidecar, for errors."""
        return f"mm_placeholders[{self.modality!r}][{self.position}]"


@dataclass(frozen=True, slots=True)
class MultiModalData:
    """The sidecar of a rendered prompt: hashes, placeholder ranges and items by modality, in prompt order.

    The three mappings have equal keys and lists of equal length. A video and its sound track, whose tokens
    are interleaved, are two items with one range. Instances are treated as immutable: `merged` and `shifted`
    return new instances that share the items.
    """

    mm_hashes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    mm_placeholders: Mapping[str, Sequence[PlaceholderRange]] = field(default_factory=dict)
    mm_items: Mapping[str, Sequence[MediaItem]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(self.mm_hashes.values())

    @classmethod
    def of(cls, entries: Iterable[tuple[PlaceholderRange, MediaItem]]) -> "MultiModalData":
        """Build the sidecar from `(range, item)` pairs in prompt order."""
        hashes: dict[str, list[str]] = {}
        ranges: dict[str, list[PlaceholderRange]] = {}
        items: dict[str, list[MediaItem]] = {}
        for placeholder, item in entries:
            hashes.setdefault(item.modality, []).append(item.identity)
            ranges.setdefault(item.modality, []).append(placeholder)
            items.setdefault(item.modality, []).append(item)
        return cls(hashes, ranges, items)

    def count(self, modality: Modality) -> int:
        """Return the number of items of a modality, without sound tracks of videos."""
        count = len(self.mm_hashes.get(modality, ()))
        return count - self.num_tracks if modality == "audio" else count

    @property
    def num_tracks(self) -> int:
        """The number of sound tracks of videos, which are items of audio."""
        videos = {place.offset for place in self.mm_placeholders.get("video", ())}
        return sum(place.offset in videos for place in self.mm_placeholders.get("audio", ()))

    def shifted(self, by: int) -> "MultiModalData":
        """Return the sidecar of the same items, `by` tokens later."""
        moved = {
            modality: [placeholder.shifted(by) for placeholder in ranges]
            for modality, ranges in self.mm_placeholders.items()
        }
        return MultiModalData(self.mm_hashes, moved, self.mm_items)

    def merged(self, later: "MultiModalData") -> "MultiModalData":
        """Return the sidecar of these items followed by the items of `later`, whose offsets are kept."""

        def joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, list[Any]]:
            return {name: [*first.get(name, ()), *second.get(name, ())] for name in {**first, **second}}

        return MultiModalData(
            joined(self.mm_hashes, later.mm_hashes),
            joined(self.mm_placeholders, later.mm_placeholders),
            joined(self.mm_items, later.mm_items),
        )

    def spans(self, length: int | None = None, *, where: str = "multi_modal_data") -> list[MediaSpan]:
        """Return every item with its range, in prompt order, checked against each other.

        A video comes before its sound track, which has the same range.

        Args:
            length: Number of tokens of the sequence; None leaves the end unchecked.
            where: Path of this sidecar in errors.

        Raises:
            PlaceholderError: Hashes, ranges and items differ in number, a hash is not its item's, ranges
                overlap, are out of order or leave the sequence, or a range is not as long as its item.
        """
        spans: list[MediaSpan] = []
        # A video comes before its sound track, since sorting keeps the order of equal offsets.
        for modality in sorted(
            {**self.mm_hashes, **self.mm_placeholders, **self.mm_items}, key="audio".__eq__
        ):
            hashes = self.mm_hashes.get(modality, ())
            ranges = self.mm_placeholders.get(modality, ())
            items = self.mm_items.get(modality, ())
            if not len(hashes) == len(ranges) == len(items):
                raise PlaceholderError(
                    "hashes, placeholders and items must be equally many",
                    where=f"{where}.{modality}",
                    got=f"{len(hashes)} hashes, {len(ranges)} placeholders, {len(items)} items",
                )
            for index, (digest, item) in enumerate(zip(hashes, items, strict=True)):
                if item.identity != digest:
                    raise PlaceholderError(
                        "the hash is not the item's",
                        where=f"{where}.mm_hashes[{modality!r}][{index}]",
                        expected=item.identity,
                        got=repr(digest),
                        remedy="Rebuild the sidecar from its items. A server could use other cached pixels",
                    )
                spans.append(MediaSpan(modality, index, ranges[index], item))
        spans.sort(key=attrgetter("range.offset"))
        stop, next_position = 0, dict.fromkeys(self.mm_items, 0)
        last: MediaSpan | None = None
        for span in spans:
            start = span.range.offset
            end = start + span.range.length
            if span.position != next_position[span.modality]:
                before = self.mm_placeholders[span.modality][span.position - 1]
                raise PlaceholderError(
                    "placeholder ranges are out of order",
                    where=f"{where}.{span.where}",
                    expected=f"an offset of {before.offset} or more",
                    got=str(start),
                )
            overlaps = start < stop and (last is None or not span.is_track_of(last))
            if overlaps or start >= end or (length is not None and end > length):
                bound = "the end" if length is None else length
                raise PlaceholderError(
                    "a placeholder range overlaps another or leaves the sequence",
                    where=f"{where}.{span.where}",
                    expected=f"one or more tokens within [{stop}, {bound})",
                    got=f"[{start}, {end})",
                    remedy="Cut or shift the sidecar together with the tokens",
                )
            _check_embeds(span, where)
            next_position[span.modality] += 1
            stop, last = end, span
        return spans

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct items."""
        return sum(
            {item.identity: item.nbytes for items in self.mm_items.values() for item in items}.values()
        )


def _check_embeds(span: MediaSpan, where: str) -> None:
    """Require that the runs of features lie in order inside the range and have the item's length."""
    last, count = 0, span.range.length if span.range.embed_spans is None else 0
    for start, stop in span.range.embed_spans or ():
        if not last <= start < stop <= span.range.length:
            raise PlaceholderError(
                "the runs of features within a range are out of order",
                where=f"{where}.{span.where}.embed_spans",
                expected=f"rising runs within [0, {span.range.length})",
                got=str(span.range.embed_spans),
            )
        last, count = stop, count + stop - start
    expected = feature_count(span.item.expansion)
    if count != expected:
        raise PlaceholderError(
            "a placeholder range is not as long as its item",
            where=f"{where}.{span.where}",
            expected=f"{expected} feature tokens",
            got=str(count),
            remedy="Renderer, sampler and trainer must process images with the same settings",
        )


TOKEN_TYPES: Final[Mapping[str, int]] = {"image": 1, "video": 2, "audio": 3}
"""Token types of Transformers 5 processors by modality. Text is 0."""


def mm_token_type_ids(spans: Iterable[MediaSpan], length: int) -> npt.NDArray[np.int64]:
    """Return the type of each token of a prompt, of shape `(length,)`: 0 text, 1 image, 2 video, 3 audio.

    A pad token that the model sampled is text, and so are the rows, columns and separators that a processor
    writes around an image's features.

    Args:
        spans: The prompt's media, from `MultiModalData.spans(length)`.
        length: Number of tokens.
    """
    types = np.zeros(length, np.int64)
    for modality, _, place, _ in spans:
        runs = ((0, place.length),) if place.embed_spans is None else place.embed_spans
        for start, stop in runs:
            types[place.offset + start : place.offset + stop] = TOKEN_TYPES[modality]
    return types


def collapse(
    prompt_ids: Sequence[int],
    data: MultiModalData,
    placeholder_ids: Mapping[str, int] | None = None,
    spans: Sequence[MediaSpan] | None = None,
) -> list[int]:
    """Return the prompt with each range as the single token that the template wrote there.

    Args:
        prompt_ids: The prompt, placeholders widened.
        data: Its sidecar.
        placeholder_ids: The template's token by modality. Without it, only ranges of one repeated token can
            be collapsed, to that token.
        spans: The sidecar's spans in this prompt, if they are known.

    Raises:
        PlaceholderError: An expansion begins or ends in text, which has joined its neighbours, or the
            template's token is not known.
    """
    collapsed: list[int] = []
    position = 0
    for span in data.spans(len(prompt_ids)) if spans is None else spans:
        if span.start < position:
            continue  # the sound track of the video before it
        expansion = span.item.expansion
        token = (placeholder_ids or {}).get(span.modality)
        if token is None and len(expansion) == 1 and span.range.num_embeds == span.range.length:
            token = int(prompt_ids[span.start])
        if not expansion or token is None or Text in {type(expansion[0]), type(expansion[-1])}:
            raise PlaceholderError(
                "the range cannot be put back to the template's placeholder",
                where=span.where,
                expected="an expansion of special tokens, and the token that the template writes",
                got=f"{len(expansion)} pieces",
                remedy="Use an engine that takes widened placeholders",
            )
        collapsed += prompt_ids[position : span.start]
        collapsed.append(token)
        position = span.stop
    return [*collapsed, *prompt_ids[position:]]


def common_prefix(first: npt.ArrayLike, second: npt.ArrayLike) -> int:
    """Return the number of leading entries that two one-dimensional sequences, or two texts, share."""
    if isinstance(first, str) and isinstance(second, str):
        pairs = enumerate(zip(first, second, strict=False))
        return next((index for index, (one, other) in pairs if one != other), min(len(first), len(second)))
    one, two = np.asarray(first), np.asarray(second)
    count = min(len(one), len(two))
    differs = one[:count] != two[:count]
    return int(differs.argmax()) if differs.any() else count
