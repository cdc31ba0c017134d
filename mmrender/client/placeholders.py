"""Check a prompt and its sidecar before sending: a mistake kills an engine, or gives wrong answers silently.

`MultiModalData.spans` checks the sidecar against itself. What is checked here is engine specific: ids within
the vocabulary, ranges that hold exactly the tokens of their items, no image without a range.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from mmrender.client.types import EngineRequest
from mmrender.errors import EngineMismatchError, EngineUnsupportedError, InputError, PlaceholderError
from mmrender.media.item import ReferenceItem
from mmrender.spans import (
    MediaItem,
    MediaSpan,
    MultiModalData,
    PlaceholderRange,
    Repeat,
    common_prefix,
)

Ids: TypeAlias = npt.NDArray[np.integer[Any]]


def check_request(
    request: EngineRequest, *, takes_videos: bool = False, takes_sparse: bool = True
) -> tuple[Ids, list[MediaSpan]]:
    """Return the prompt as an array of shape `(n,)` and its media in order, checked against each other.

    Args:
        request: The prompt, its sidecar, and what is known of the model's tokens. Without `media_token_ids`
            the first token of a range counts as the pad token.
        takes_videos: Whether the engine takes videos, each run of features by itself where text lies between.
        takes_sparse: Whether the engine keeps which tokens of a range hold features, where not all do.

    Raises:
        InputError: The prompt is empty, or holds something else than ids of the vocabulary.
        EngineUnsupportedError: A video, or a range that the engine cannot keep.
        PlaceholderError: Tokens, ranges and items do not fit together.
    """
    ids = _check_ids(request.prompt_ids, request.vocab_size)
    if not request.multi_modal_data:
        return ids, []
    spans = request.multi_modal_data.spans(len(ids))
    pads: dict[str, int] = {}
    for span in spans:
        if span.modality != "image" and not takes_videos:
            raise EngineUnsupportedError(
                "only images can be sent to this engine", where=span.where, got=span.modality
            )
        if not takes_sparse and span.modality != "video":
            require_dense(span)
        expected = _expected_tokens(span, ids, request.media_token_ids, pads)
        found = ids[span.start : span.stop]
        if not np.array_equal(found, expected):
            same = common_prefix(found, expected)
            raise PlaceholderError(
                "a placeholder range does not hold the tokens of its item",
                where=span.where,
                expected=f"{token_at(expected, same)}, {len(expected)} tokens in all",
                got=f"{token_at(found, same)} at {span.start + same}, {len(found)} in all",
            )
    for modality, pad in pads.items():
        _check_edges(spans, ids, modality, pad)
    return ids, spans


def require_dense(span: MediaSpan) -> None:
    """Require that every token of a range holds features, for engines that do not keep which do."""
    if span.range.num_embeds != span.range.length:
        raise EngineUnsupportedError(
            "the engine loses which tokens of this range hold features",
            where=span.where,
            expected="a range in which every token does",
            got=f"{span.range.num_embeds} of {span.range.length}",
            remedy="Send the encoded image, or use another engine for this model",
        )


def _check_ids(prompt_ids: Sequence[int], vocab_size: int | None) -> Ids:
    try:
        ids = np.asarray(prompt_ids)
    except (ValueError, OverflowError):
        ids = np.zeros((), object)
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise InputError(
            "a prompt is a list of token ids",
            where="prompt_ids",
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
            where=f"prompt_ids[{index}]",
            expected=f"0 to {vocab_size - 1}" if vocab_size is not None else "0 or more",
            got=str(ids[index]),
        )
    return ids


def _expected_tokens(
    span: MediaSpan, ids: Ids, token_ids: Mapping[str, int], pads: dict[str, int]
) -> npt.NDArray[Any]:
    """Return the tokens that a range must hold: those of its expansion, or its runs of pads if unknown."""
    runs = span.range.embed_spans or ((0, span.range.length),)
    pad = pads.setdefault(span.modality, int(ids[span.start + runs[0][0]]))
    pieces = span.item.expansion
    known = [piece for piece in pieces if isinstance(piece, Repeat) and piece.token in token_ids]
    if len(known) == len(pieces):
        return np.repeat([token_ids[piece.token] for piece in known], [piece.count for piece in known])
    expected = ids[span.start : span.stop].copy()
    for start, stop in runs:
        expected[start:stop] = pad
    return expected


def _check_edges(spans: Sequence[MediaSpan], ids: Ids, modality: str, pad: int) -> None:
    """Require that runs of pads end where their ranges do, and that no image lacks a range.

    A model may sample a pad token, and it stays one. Pads between the same two tokens that every image of the
    prompt lies between are an image that the sidecar lacks.
    """
    padded = np.concatenate(([-1], ids, [-1]))  # so that the token before the first has an index
    stray = padded == pad
    for span in spans:
        stray[span.start + 1 : span.stop + 1] = False
    if not stray.any():
        return
    own = [span for span in spans if span.modality == modality]
    for span in own:
        for index in (span.start - 1, span.stop):
            if stray[index + 1]:
                raise PlaceholderError(
                    "a placeholder range ends within a run of pad tokens",
                    where=span.where,
                    expected=f"no token {pad} next to it",
                    got=f"one at {index}",
                )
    frames = {(int(padded[span.start]), int(padded[span.stop + 1])) for span in own}
    for start, stop in np.flatnonzero(np.diff(stray)).reshape(-1, 2).tolist():
        before, after = frame = int(padded[start]), int(padded[stop + 1])
        if frames == {frame}:
            raise PlaceholderError(
                "an image of the prompt has no placeholder range",
                where=f"prompt_ids[{start}:{stop}]",
                expected="a range and an item for each image",
                got=f"a run of the token {pad} between {before} and {after}, as images have it",
                remedy="Pass the sidecar of the whole prompt as multi_modal_data",
            )


def check_prompt_seen(seen: Sequence[int], request: EngineRequest, *, where: str) -> None:
    """Require that the prompt that a server widened, and used, is ours.

    Args:
        seen: The server's prompt.
        request: The request; its `prompt_ids` are widened.
        where: The field in errors.
    """
    theirs, ours = np.asarray(seen), np.asarray(request.prompt_ids)
    if np.array_equal(theirs, ours):
        return
    first = common_prefix(theirs, ours)
    at = next(
        (
            f" ({modality} {number})"
            for modality, ranges in request.multi_modal_data.mm_placeholders.items()
            for number, place in enumerate(ranges)
            if place.offset <= first <= place.offset + place.length
        ),
        "",
    )
    raise EngineMismatchError(
        "the server saw another prompt than the renderer's",
        where=f"{where}[{first}]{at}",
        expected=f"{token_at(ours, first)} of {len(ours)}",
        got=f"{token_at(theirs, first)} of {len(theirs)}",
        remedy="Render with the files and processor settings of the model that the server runs",
    )


def adopt_prompt(
    seen: list[int], request: EngineRequest, ranges: Sequence[tuple[int, int]] | None = None, *, where: str
) -> EngineRequest:
    """Return the request with the prompt that a server made of the images; all other tokens must be ours.

    An image that the server widens as the renderer does keeps its item. Another becomes a reference to what
    was sent, as long as the server made it.

    Args:
        seen: The server's prompt.
        request: What was sent; its `prompt_ids` are widened.
        ranges: Offset and length of each image in `seen`, in order. Without it they are the runs of media
            tokens where the images are.
        where: The field in errors.

    Raises:
        EngineMismatchError: The server has other text, other media tokens, or other images.
    """
    ours = list(request.prompt_ids)
    if seen == ours:
        return request
    spans = request.multi_modal_data.spans(len(ours))
    if ranges is not None and len(ranges) != len(spans):
        raise _other_prompt("images", where, str(len(spans)), str(len(ranges)))
    entries: list[tuple[PlaceholderRange, MediaItem]] = []
    position = served = 0  # the ends of the image before, here and there
    for index, span in enumerate(spans):
        pieces = _pieces_by_token(span, ours)
        start = served + span.start - position
        stop = next((at for at in range(start, len(seen)) if seen[at] not in pieces), len(seen))
        if ranges is not None:
            start, stop = ranges[index][0], sum(ranges[index])
        if not served <= start < stop <= len(seen) or seen[served:start] != ours[position : span.start]:
            expected = f"the tokens of [{position}, {span.start}), then the image"
            raise _other_prompt(
                "tokens before an image", f"{where} {span.where}", expected, f"[{start}, {stop})"
            )
        shown = seen[start:stop]
        if set(shown) - pieces.keys() or not any(pieces[token].embeds for token in shown):
            expected, got = ", ".join(map(str, pieces)), ", ".join(map(str, sorted(set(shown))[:8]))
            raise _other_prompt("tokens of an image", f"{where} {span.where}", expected, got)
        if shown == ours[span.start : span.stop]:
            entries.append((span.range.shifted(start - span.start), span.item))
        else:
            runs = [(pieces[token], len(list(run))) for token, run in groupby(shown)]
            expansion = tuple(Repeat(piece.token, count, piece.embeds) for piece, count in runs)
            item = ReferenceItem.of_server(span.item, expansion)
            entries.append((_range_of([pieces[token].embeds for token in shown], start), item))
        position, served = span.stop, stop
    if seen[served:] != ours[position:]:
        expected, got = f"{len(ours) - position} tokens, as sent", f"{len(seen) - served}"
        raise _other_prompt("tokens after the images", where, expected, got)
    return replace(request, prompt_ids=list(seen), multi_modal_data=MultiModalData.of(entries))


def _pieces_by_token(span: MediaSpan, ids: Sequence[int]) -> dict[int, Repeat]:
    """Return by token the pieces of an expansion, which tokens alone must make."""
    pieces, at = {}, span.start
    for piece in span.item.expansion:
        if not isinstance(piece, Repeat):
            raise EngineUnsupportedError(
                "an expansion with text cannot be taken from the server", where=span.where, got=repr(piece)
            )
        pieces[ids[at]] = piece
        at += piece.count
    return pieces


def _range_of(embeds: Sequence[bool], offset: int) -> PlaceholderRange:
    """Return the range of an image, by which of its tokens hold features."""
    edges = [(a, b) for a, b in np.flatnonzero(np.diff([False, *embeds, False])).reshape(-1, 2).tolist()]
    whole = edges == [(0, len(embeds))]
    return PlaceholderRange(offset, len(embeds), None if whole else tuple(edges))


def _other_prompt(what: str, where: str, expected: str, got: str) -> EngineMismatchError:
    return EngineMismatchError(
        f"the server's prompt has other {what} than were sent",
        where=where,
        expected=expected,
        got=got,
        remedy="Only what stands for an image may differ; see that the server runs the same model",
    )


def token_at(ids: Any, index: int) -> str:
    """Describe one token of a sequence in an error."""
    return f"the token {ids[index]}" if index < len(ids) else "the end"


class KnownTokens(TypedDict):
    """Fields of an `EngineRequest` that a renderer knows."""

    vocab_size: int | None
    placeholder_ids: dict[str, int]
    media_token_ids: dict[str, int]
    eos_token_ids: Sequence[int] | None


def known_tokens(renderer: Any, data: MultiModalData) -> KnownTokens:
    """Return what a renderer, or None, knows of the model's tokens, for the items of a prompt."""
    media: Any = getattr(renderer, "media", None)
    tokenizer: Any = getattr(renderer, "tokenizer", None)
    stops = getattr(renderer, "get_stop_token_ids", None)
    placeholders: dict[str, int] = {}
    tokens: dict[str, int] = {}
    if tokenizer is not None and data:
        written = media.processor.placeholder if media is not None else {}
        items = (item for items in data.mm_items.values() for item in items)
        texts = {piece.token for item in items for piece in item.expansion if isinstance(piece, Repeat)}
        ids = {text: tokenizer.token_id(text) for text in {*written.values(), *texts}}
        placeholders = {kind: ids[text] for kind, text in written.items() if ids[text] is not None}
        tokens = {text: ids[text] for text in texts if ids[text] is not None}
    return {
        "vocab_size": getattr(renderer, "vocab_size", None),
        "placeholder_ids": placeholders,
        "media_token_ids": tokens,
        "eos_token_ids": None if stops is None else stops(),
    }


def media_token_ids(renderer: Any) -> set[int]:
    """Return the ids of all tokens that stand for media, as far as a renderer knows them."""
    media: Any = getattr(renderer, "media", None)
    tokenizer: Any = getattr(renderer, "tokenizer", None)
    if media is None or tokenizer is None:
        return set()
    return {tokenizer.token_id(text) for text in media.processor.placeholder_tokens} - {None}
