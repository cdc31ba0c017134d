"""What is refused before it is sent, because an engine would die of it or answer wrongly without a word.

`check_prompt` and `check_sidecar` hold for every engine. What only some take is checked in
`mmrender.client.item_checks` and `mmrender.client.collapse`. Each error names the offending value.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from mmrender.errors import EngineUnsupportedError, InputError, PlaceholderError
from mmrender.spans import MediaItem, MultiModalData, PlaceholderRange, Repeat

Ids: TypeAlias = npt.NDArray[np.integer[Any]]


class Placed(NamedTuple):
    """One media item in its place; `where` is its range in errors."""

    where: str
    modality: str
    range: PlaceholderRange
    item: MediaItem

    @property
    def start(self) -> int:
        """The first token."""
        return self.range.offset

    @property
    def stop(self) -> int:
        """The token after the last."""
        return self.range.offset + self.range.length


def check_prompt(prompt_ids: Sequence[int], vocab_size: int | None, *, where: str = "prompt_ids") -> Ids:
    """Return the prompt as an integer array of shape `(n,)`.

    Raises:
        InputError: It is empty, holds something else than integers, or an id outside the vocabulary.
    """
    try:
        ids = np.asarray(prompt_ids)
    except (ValueError, OverflowError):
        ids = np.zeros((), object)
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise InputError(
            "a prompt is a list of token ids",
            where=where,
            expected="one or more integers",
            got=f"{type(prompt_ids).__name__} {list(ids.shape)} of {ids.dtype}" if ids.size else "nothing",
        )
    outside = ids < 0
    if vocab_size is not None:
        outside |= ids >= vocab_size
    if outside.any():
        index = int(outside.argmax())
        raise InputError(
            "a token id is outside the vocabulary",
            where=f"{where}[{index}]",
            expected=f"0 to {vocab_size - 1}" if vocab_size is not None else "0 or more",
            got=str(ids[index]),
        )
    return ids


def check_sidecar(
    ids: Ids,
    data: MultiModalData,
    *,
    token_ids: Mapping[str, int] | None = None,
    takes_sparse: bool = True,
) -> list[Placed]:
    """Hold items, ranges and tokens against each other, and return the items in prompt order.

    Args:
        ids: The prompt, placeholders widened; of shape `(n,)`.
        data: The sidecar.
        token_ids: Ids of the tokens that expansions are made of, by their text. Without them a pad token is
            what stands first in a range, and a range of a single token can be anywhere.
        takes_sparse: Whether the engine keeps which tokens of a range stand for features, where not all do.

    Raises:
        PlaceholderError: Counts differ; ranges overlap, are out of order or out of the prompt; or a range is
            not just the run of pad tokens that its item stands for.
        EngineUnsupportedError: A range is sparse, and the engine does not take these.
    """
    placed = placed_items(data)
    for before, after in pairwise(placed):
        if after.start < before.stop:
            raise PlaceholderError(
                "placeholder ranges overlap",
                where=after.where,
                expected=f"an offset of {before.stop} or more, behind {before.where}",
                got=str(after.start),
            )
    pads: dict[str, int] = {}
    for entry in placed:
        check_range(entry, len(ids))
        if not takes_sparse and entry.range.num_embeds != entry.range.length:
            raise EngineUnsupportedError(
                "the engine loses which tokens of this range stand for the image",
                where=entry.where,
                expected="a range in which every token does",
                got=f"{entry.range.num_embeds} of {entry.range.length}",
                remedy="Send the encoded image, or use another engine for this model",
            )
        _check_pads(entry, ids, pads)
        _check_expansion(entry, ids, token_ids or {})
    _check_edges(placed, ids, pads)
    return placed


def placed_items(data: MultiModalData) -> list[Placed]:
    """The items of a sidecar in prompt order.

    Raises:
        PlaceholderError: Hashes, ranges and items differ in number, ranges are out of order, or a hash is not
            its item's.
    """
    return sorted(_placed(data), key=lambda entry: entry.start)


def _placed(data: MultiModalData) -> Iterator[Placed]:
    for modality in dict.fromkeys([*data.mm_hashes, *data.mm_placeholders, *data.mm_items]):
        hashes = data.mm_hashes.get(modality, ())
        ranges = data.mm_placeholders.get(modality, ())
        items = data.mm_items.get(modality, ())
        if not len(hashes) == len(ranges) == len(items):
            raise PlaceholderError(
                "hashes, placeholders and items must be equally many",
                where=f"multi_modal_data.{modality}",
                got=f"{len(hashes)} hashes, {len(ranges)} placeholders, {len(items)} items",
            )
        last = -1
        for index, (digest, placeholder, item) in enumerate(zip(hashes, ranges, items, strict=True)):
            entry = Placed(f"mm_placeholders[{modality!r}][{index}]", modality, placeholder, item)
            if placeholder.offset < last:
                raise PlaceholderError(
                    "placeholder ranges are out of order",
                    where=entry.where,
                    expected=f"an offset of {last} or more",
                    got=str(placeholder.offset),
                )
            last = placeholder.offset
            if item.identity != digest:
                raise PlaceholderError(
                    "the hash is not the item's",
                    where=f"mm_hashes[{modality!r}][{index}]",
                    expected=item.identity,
                    got=repr(digest),
                    remedy="A server that knows the hash would take its own pixels in place of these",
                )
            yield entry


def check_range(entry: Placed, length: int) -> None:
    """Hold one range against its item and the length of the prompt.

    Raises:
        PlaceholderError: It does not lie inside the prompt, or is not as long as its item.
    """
    placeholder = entry.range
    if not (placeholder.offset >= 0 and placeholder.length > 0 and entry.stop <= length):
        raise PlaceholderError(
            "a placeholder range does not lie inside the prompt",
            where=entry.where,
            expected=f"one or more tokens within [0, {length})",
            got=f"[{entry.start}, {entry.stop})",
        )
    last = 0
    for start, stop in placeholder.embed_spans or ():
        if not last <= start < stop <= placeholder.length:
            raise PlaceholderError(
                "the runs of features within a range are out of order",
                where=f"{entry.where}.embed_spans",
                expected=f"rising runs within [0, {placeholder.length})",
                got=str(placeholder.embed_spans),
            )
        last = stop
    stands_for = sum(
        piece.count for piece in entry.item.expansion if isinstance(piece, Repeat) and piece.embeds
    )
    if placeholder.num_embeds != stands_for:
        raise PlaceholderError(
            "a placeholder range is not as long as its item",
            where=entry.where,
            expected=f"{stands_for} tokens that stand for features",
            got=str(placeholder.num_embeds),
        )


def _check_pads(entry: Placed, ids: Ids, pads: dict[str, int]) -> None:
    """Require one and the same token wherever features of a modality go."""
    spans = entry.range.embed_spans or ((0, entry.range.length),)
    pad = pads.setdefault(entry.modality, int(ids[entry.start + spans[0][0]]))
    for start, stop in spans:
        run = ids[entry.start + start : entry.start + stop]
        if (run != pad).any():
            index = entry.start + start + int((run != pad).argmax())
            raise PlaceholderError(
                "a placeholder range is not a run of pad tokens",
                where=entry.where,
                expected=f"the token {pad} from {entry.start + start} to {entry.start + stop - 1}",
                got=f"the token {ids[index]} at {index}",
            )


def _check_expansion(entry: Placed, ids: Ids, token_ids: Mapping[str, int]) -> None:
    """Require exactly the tokens of the expansion, where it holds no text and its tokens are known."""
    pieces = [
        piece for piece in entry.item.expansion if isinstance(piece, Repeat) and piece.token in token_ids
    ]
    if len(pieces) != len(entry.item.expansion):
        return
    expected = np.repeat([token_ids[piece.token] for piece in pieces], [piece.count for piece in pieces])
    found = ids[entry.start : entry.stop]
    if len(found) != len(expected):
        raise PlaceholderError(
            "a placeholder range is not as long as its item",
            where=entry.where,
            expected=f"{len(expected)} tokens",
            got=str(len(found)),
        )
    if (found != expected).any():
        index = int((found != expected).argmax())
        raise PlaceholderError(
            "a placeholder range does not hold the tokens of its item",
            where=entry.where,
            expected=f"the token {expected[index]} at {entry.start + index}",
            got=f"the token {found[index]}",
        )


def _check_edges(placed: Sequence[Placed], ids: Ids, pads: Mapping[str, int]) -> None:
    """Require that runs of pads end where their ranges do, and that no image lacks a range."""
    starts, stops = {entry.start for entry in placed}, {entry.stop for entry in placed}
    for entry in placed:
        pad = pads[entry.modality]
        before = entry.start not in stops and entry.start > 0 and ids[entry.start - 1] == pad
        after = entry.stop not in starts and entry.stop < len(ids) and ids[entry.stop] == pad
        if before or after:
            raise PlaceholderError(
                "a placeholder range ends within a run of pad tokens",
                where=entry.where,
                expected=f"no token {pad} next to it",
                got=f"one at {entry.start - 1 if before else entry.stop}",
            )
    for modality, pad in pads.items():
        _check_strays([entry for entry in placed if entry.modality == modality], ids, pad)


def _check_strays(placed: Sequence[Placed], ids: Ids, pad: int) -> None:
    """Find a run of pads outside of all ranges that stands between the tokens that images stand between.

    A model may sample a pad token, and it stays; one that looks like an image is one that the sidecar lacks.
    """
    frames = {(_at(ids, entry.start - 1), _at(ids, entry.stop)) for entry in placed}
    if len(frames) != 1:
        return
    ((opening, closing),) = frames
    stray = ids == pad
    for entry in placed:
        stray[entry.start : entry.stop] = False
    if not stray.any() or opening is None or closing is None:
        return
    edges = np.flatnonzero(np.diff(np.concatenate(([False], stray, [False]))))
    for start, stop in edges.reshape(-1, 2).tolist():
        if _at(ids, start - 1) == opening and _at(ids, stop) == closing:
            raise PlaceholderError(
                "an image of the prompt has no placeholder range",
                where=f"prompt_ids[{start}:{stop}]",
                expected="a range and an item for each image",
                got=f"a run of the token {pad} between {opening} and {closing}, as images have it",
                remedy="Pass the sidecar of the whole prompt as multi_modal_data",
            )


def _at(ids: Ids, index: int) -> int | None:
    return int(ids[index]) if 0 <= index < len(ids) else None
