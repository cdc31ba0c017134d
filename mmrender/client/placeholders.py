"""Checks of a prompt and its sidecar before sending: a mistake kills an engine, or gets a wrong answer.

`MultiModalData.spans` checks the sidecar against itself. The checks here are of engines: ids within the
vocabulary, ranges that hold exactly the tokens of their items, no image without a range.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mmrender.caching import cached_property
from mmrender.client.types import EngineRequest
from mmrender.errors import EngineMismatchError, EngineUnsupportedError, InputError, PlaceholderError
from mmrender.sidecar import MediaSpan, MultiModalData, Repeat, common_prefix

Ids: TypeAlias = npt.NDArray[np.integer[Any]]


def check_request(
    request: EngineRequest, *, takes_videos: bool = False, takes_sparse: bool = True
) -> tuple[Ids, list[MediaSpan]]:
    """Return the prompt as an array of shape `(n,)` and its media in order, checked against each other.

    Args:
        request: The prompt, its sidecar, and the model's tokens. Without `media_token_ids` the first token of
            a range counts as the pad token.
        takes_videos: Whether the engine takes videos, each run of features by itself if text lies between.
        takes_sparse: Whether the engine keeps which tokens of a range hold features, if some do not.

    Raises:
        InputError: The prompt is empty, or has an element outside the vocabulary.
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
            problem = "only images can be sent to this engine"
            raise EngineUnsupportedError(problem, where=span.where, got=span.modality)
        if not takes_sparse and span.modality != "video":
            require_dense(span)
        expected = _expected_tokens(span, ids, request.media_token_ids, pads)
        actual = ids[span.start : span.stop]
        if not np.array_equal(actual, expected):
            same = common_prefix(actual, expected)
            raise PlaceholderError(
                "a placeholder range does not hold the tokens of its item",
                where=span.where,
                expected=f"{token_at(expected, same)}, {len(expected)} tokens in all",
                got=f"{token_at(actual, same)} at {span.start + same}, {len(actual)} in all",
            )
    for modality, pad in pads.items():
        _check_edges([span for span in spans if span.modality == modality], spans, ids, pad)
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
    outside = ids < 0 if vocab_size is None else (ids < 0) | (ids >= vocab_size)
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
    """Return the tokens that a range must hold: its expansion's, or its runs of pads if unknown."""
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


def _check_edges(own: Sequence[MediaSpan], spans: Sequence[MediaSpan], ids: Ids, pad: int) -> None:
    """Require that runs of a modality's pads end with its ranges `own`, and that no image lacks a range.

    A model may sample a pad token, and it stays one. Pads between the same two tokens that every image of the
    prompt lies between are an image that the sidecar lacks.
    """
    padded = np.concatenate(([-1], ids, [-1]))  # so that the token before the first has an index
    stray = padded == pad
    for span in spans:
        stray[span.start + 1 : span.stop + 1] = False
    if not stray.any():
        return
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
                "an image of the prompt lacks a placeholder range",
                where=f"prompt_ids[{start}:{stop}]",
                expected="a range and an item for each image",
                got=f"a run of the token {pad} between {before} and {after}, as images have it",
                remedy="Pass the sidecar of the whole prompt as multi_modal_data",
            )


def check_prompt_seen(seen: Sequence[int], request: EngineRequest, *, where: str) -> None:
    """Require that the prompt that a server widened is the request's. `where` is the field in errors."""
    theirs, ours = np.asarray(seen), np.asarray(request.prompt_ids)
    if np.array_equal(theirs, ours):
        return
    first = common_prefix(theirs, ours)
    items = (
        f" ({modality} {number})"
        for modality, ranges in request.multi_modal_data.mm_placeholders.items()
        for number, place in enumerate(ranges)
        if place.offset <= first <= place.offset + place.length
    )
    raise EngineMismatchError(
        "the server saw another prompt than the renderer's",
        where=f"{where}[{first}]{next(items, '')}",
        expected=f"{token_at(ours, first)} of {len(ours)}",
        got=f"{token_at(theirs, first)} of {len(theirs)}",
        remedy="Render with the files and processor settings of the model that the server runs",
    )


def token_at(ids: Any, index: int) -> str:
    """Describe one token of a sequence in an error."""
    return f"the token {ids[index]}" if index < len(ids) else "the end"


class ModelTokens:
    """The model's tokens, as far as a renderer, or None, knows them. Each is looked up once."""

    def __init__(self, renderer: Any) -> None:
        media: Any = getattr(renderer, "media", None)
        self._renderer = renderer
        self._tokenizer: Any = getattr(renderer, "tokenizer", None)
        self._processor: Any = None if media is None or self._tokenizer is None else media.processor
        self._ids: dict[str, int | None] = {}

    @cached_property
    def stop_ids(self) -> list[int] | None:
        """Tokens on which the model itself ends a completion."""
        stop_ids = getattr(self._renderer, "get_stop_token_ids", None)
        return None if stop_ids is None else stop_ids()

    @cached_property
    def media_ids(self) -> frozenset[int]:
        """Tokens of media."""
        return frozenset(self._known(self._processor.placeholder_tokens if self._processor else ()).values())

    @cached_property
    def placeholder_ids(self) -> dict[str, int]:
        """Token that the template writes for an item, by modality."""
        texts = self._processor.placeholder if self._processor else {}
        known = self._known(texts.values())
        return {modality: known[text] for modality, text in texts.items() if text in known}

    def fields(self, data: MultiModalData) -> dict[str, Any]:
        """Return the fields of a request with these items."""
        items = (
            [] if self._tokenizer is None else [each for items in data.mm_items.values() for each in items]
        )
        texts = {piece.token for item in items for piece in item.expansion if isinstance(piece, Repeat)}
        return {
            "vocab_size": getattr(self._renderer, "vocab_size", None),
            "placeholder_ids": self.placeholder_ids if data else {},
            "media_token_ids": self._known(texts),
            "eos_token_ids": self.stop_ids,
        }

    def _known(self, texts: Iterable[str]) -> dict[str, int]:
        """Return the ids of the texts that the tokenizer has as tokens."""
        known: dict[str, int] = {}
        for text in texts:
            if text not in self._ids:
                self._ids[text] = None if self._tokenizer is None else self._tokenizer.token_id(text)
            if (token_id := self._ids[text]) is not None:
                known[text] = token_id
        return known
