"""Check a prompt and its sidecar before sending: a mistake kills an engine, or gives wrong answers silently.

`MultiModalData.spans` checks the sidecar against itself. What is checked here is engine specific: ids within
the vocabulary, ranges that hold exactly the tokens of their items, no image without a range.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from mmrender.client.types import EngineRequest
from mmrender.errors import EngineMismatchError, EngineUnsupportedError, InputError, PlaceholderError
from mmrender.sidecar import (
    MediaSpan,
    MultiModalData,
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
