"""Check a prompt and its sidecar before sending: a mistake kills an engine, or gives wrong answers silently.

`MultiModalData.spans` checks the sidecar against itself. What is checked here is engine specific: ids within
the vocabulary, ranges that are exactly the runs of pad tokens that their items stand for, no image without a
range. `collapse` gives the prompt as the template wrote it, for engines that widen placeholders themselves.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from mmrender.client.types import EngineRequest
from mmrender.errors import EngineMismatchError, EngineUnsupportedError, InputError, PlaceholderError
from mmrender.spans import MediaSpan, MultiModalData, Repeat, Text, common_prefix

Ids: TypeAlias = npt.NDArray[np.integer[Any]]


def check_prompt(prompt_ids: Sequence[int], vocab_size: int | None, *, where: str = "prompt_ids") -> Ids:
    """Return the prompt as an integer array of shape `(n,)`."""
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


def check_placeholders(
    ids: Ids, request: EngineRequest, *, only_images: bool = True, takes_sparse: bool = True
) -> list[MediaSpan]:
    """Check items, ranges and tokens of a request against each other; return the spans in prompt order.

    Args:
        ids: The prompt, placeholders widened; of shape `(n,)`.
        request: Its sidecar, and what is known of the model's tokens. Without `media_token_ids` the first
            token of a range counts as the pad token.
        only_images: Whether the engine takes images only.
        takes_sparse: Whether the engine keeps which tokens of a range stand for features, where not all do.
    """
    if not request.multi_modal_data:
        return []
    spans = request.multi_modal_data.spans(len(ids))
    pads: dict[str, int] = {}
    for span in spans:
        if only_images and span.modality != "image":
            raise EngineUnsupportedError(
                "only images can be sent to this engine", where=span.where, got=span.modality
            )
        if not takes_sparse and span.range.num_embeds != span.range.length:
            raise EngineUnsupportedError(
                "the engine loses which tokens of this range stand for the image",
                where=span.where,
                expected="a range in which every token does",
                got=f"{span.range.num_embeds} of {span.range.length}",
                remedy="Send the encoded image, or use another engine for this model",
            )
        runs = span.range.embed_spans or ((0, span.range.length),)
        pad = pads.setdefault(span.modality, int(ids[span.start + runs[0][0]]))
        for start, stop in runs:
            run = ids[span.start + start : span.start + stop]
            if (run != pad).any():
                index = span.start + start + int((run != pad).argmax())
                raise PlaceholderError(
                    "a placeholder range is not a run of pad tokens",
                    where=span.where,
                    expected=f"the token {pad} from {span.start + start} to {span.start + stop - 1}",
                    got=f"the token {ids[index]} at {index}",
                )
        _check_expansion(span, ids, request.media_token_ids)
    _check_edges(spans, ids, pads)
    return spans


def _check_expansion(span: MediaSpan, ids: Ids, token_ids: Mapping[str, int]) -> None:
    """Require exactly the tokens of the expansion, where it holds no text and its tokens are known."""
    pieces = [
        piece for piece in span.item.expansion if isinstance(piece, Repeat) and piece.token in token_ids
    ]
    if len(pieces) != len(span.item.expansion):
        return
    expected = np.repeat([token_ids[piece.token] for piece in pieces], [piece.count for piece in pieces])
    found = ids[span.start : span.stop]
    if not np.array_equal(found, expected):
        same = common_prefix(found, expected)
        raise PlaceholderError(
            "a placeholder range does not hold the tokens of its item",
            where=span.where,
            expected=f"{token_at(expected, same)}, {len(expected)} tokens in all",
            got=f"{token_at(found, same)} at {span.start + same}, {len(found)} in all",
        )


def _check_edges(spans: Sequence[MediaSpan], ids: Ids, pads: Mapping[str, int]) -> None:
    """Require that runs of pads end where their ranges do, and that no image lacks a range.

    A model may sample a pad token, and it stays one. Pads between the same two tokens that every image of the
    prompt lies between are an image that the sidecar lacks.
    """
    padded = np.concatenate(([-1], ids, [-1]))  # so that the token before the first has an index
    starts, stops = {span.start for span in spans}, {span.stop for span in spans}
    frames: dict[str, set[tuple[int, int]]] = {}
    for span in spans:
        before, after = int(padded[span.start]), int(padded[span.stop + 1])
        frames.setdefault(span.modality, set()).add((before, after))
        pad = pads[span.modality]
        outside = [
            span.start - 1 if before == pad and span.start not in stops else None,
            span.stop if after == pad and span.stop not in starts else None,
        ]
        if found := [index for index in outside if index is not None]:
            raise PlaceholderError(
                "a placeholder range ends within a run of pad tokens",
                where=span.where,
                expected=f"no token {pad} next to it",
                got=f"one at {found[0]}",
            )
    for modality, pad in pads.items():
        if len(frames[modality]) != 1 or -1 in (frame := next(iter(frames[modality]))):
            continue
        stray = padded == pad
        for span in spans:
            if span.modality == modality:
                stray[span.start + 1 : span.stop + 1] = False
        edges = np.flatnonzero(np.diff(stray)).reshape(-1, 2).tolist() if stray.any() else []
        for start, stop in edges:
            if (int(padded[start]), int(padded[stop + 1])) == frame:
                raise PlaceholderError(
                    "an image of the prompt has no placeholder range",
                    where=f"prompt_ids[{start}:{stop}]",
                    expected="a range and an item for each image",
                    got=f"a run of the token {pad} between {frame[0]} and {frame[1]}, as images have it",
                    remedy="Pass the sidecar of the whole prompt as multi_modal_data",
                )


def collapse(
    prompt_ids: Sequence[int], data: MultiModalData, placeholder_ids: Mapping[str, int] | None = None
) -> list[int]:
    """Return the prompt with each range as the one token that the template wrote there.

    Args:
        prompt_ids: The prompt, placeholders widened.
        data: Its sidecar.
        placeholder_ids: By modality the token that the template writes. Without it, only ranges of one
            repeated token can be collapsed, to that token.
    """
    collapsed: list[int] = []
    position = 0
    for span in data.spans(len(prompt_ids)):
        expansion = span.item.expansion
        written = (placeholder_ids or {}).get(span.modality)
        if written is None and len(expansion) == 1 and span.range.num_embeds == span.range.length:
            written = int(prompt_ids[span.start])
        if not expansion or written is None or Text in {type(expansion[0]), type(expansion[-1])}:
            raise PlaceholderError(
                "the range cannot be put back to the template's placeholder",
                where=span.where,
                expected="an expansion of special tokens, and the token that the template writes",
                got=f"{len(expansion)} pieces",
                remedy="Use an engine that takes widened placeholders",
            )
        collapsed += prompt_ids[position : span.start]
        collapsed.append(written)
        position = span.stop
    return [*collapsed, *prompt_ids[position:]]


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
    written = media.processor.placeholder if media is not None and tokenizer is not None and data else {}
    texts = (
        set()
        if tokenizer is None
        else {
            piece.token
            for items in data.mm_items.values()
            for item in items
            for piece in item.expansion
            if isinstance(piece, Repeat)
        }
    )
    ids = {text: tokenizer.token_id(text) for text in {*written.values(), *texts}}
    return {
        "vocab_size": getattr(renderer, "vocab_size", None),
        "placeholder_ids": {kind: ids[text] for kind, text in written.items() if ids[text] is not None},
        "media_token_ids": {text: ids[text] for text in texts if ids[text] is not None},
        "eos_token_ids": None if stops is None else stops(),
    }
