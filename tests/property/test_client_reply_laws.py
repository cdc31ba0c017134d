"""Prompts against their collapsed form, and sidecars that were changed, on generated input."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client_prompts import CLOSE, IMAGE, OPEN, PAD, TOKENS, FakeItem, PromptMaker, qwen_item, tiled_item
from mmrender.client.placeholders import adopt_prompt, check_request
from mmrender.client.types import EngineRequest
from mmrender.errors import EngineMismatchError, PlaceholderError
from mmrender.media.item import ReferenceItem
from mmrender.spans import Expansion, MultiModalData, collapse


def check_sidecar(ids: Any, data: MultiModalData, token_ids: Any) -> None:
    request = EngineRequest("m", ids, {}, "r", data, media_token_ids=token_ids)
    check_request(request)


ITEMS = st.one_of(
    st.integers(1, 5).map(qwen_item), st.builds(tiled_item, st.integers(1, 2), st.integers(1, 3))
)
PIECES = st.lists(
    st.one_of(ITEMS, st.lists(st.integers(0, 80), min_size=1, max_size=4)), min_size=1, max_size=6
)


def made(pieces: list[Any]) -> PromptMaker:
    maker = PromptMaker().text([1])
    for piece in pieces:
        if isinstance(piece, FakeItem):
            maker.framed(piece, IMAGE)
        else:
            maker.text(piece)
    return maker


@settings(max_examples=100)
@given(PIECES)
def test_collapsed_prompts_are_what_the_template_wrote(pieces: list[Any]) -> None:
    maker = made(pieces)
    check_sidecar(np.array(maker.ids), maker.sidecar, token_ids=TOKENS)
    collapsed = collapse(maker.ids, maker.sidecar, {"image": IMAGE})
    assert collapsed == maker.collapsed
    widened: list[int] = []
    placed = iter(maker.placed)
    for token in collapsed:
        if token != IMAGE:
            widened.append(token)
            continue
        found, _ = next(placed)
        assert found.offset == len(widened)
        widened += maker.ids[found.offset : found.offset + found.length]
    assert widened == maker.ids


@settings(max_examples=150)
@given(PIECES, st.data())
def test_any_range_that_moves_or_grows_is_refused(pieces: list[Any], data: st.DataObject) -> None:
    maker = made(pieces)
    if not maker.placed:
        return
    index = data.draw(st.integers(0, len(maker.placed) - 1))
    found, item = maker.placed[index]
    by = data.draw(st.sampled_from([-2, -1, 1, 2]))
    if found.embed_spans is not None or data.draw(st.booleans()):
        other = found.shifted(by)
    else:
        other = type(found)(found.offset, found.length + by)
    maker.placed[index] = (other, item)
    with pytest.raises(PlaceholderError):
        check_sidecar(np.array(maker.ids), MultiModalData.of(maker.placed), token_ids=TOKENS)


@settings(max_examples=100)
@given(PIECES, st.data())
def test_a_prompt_that_lost_a_pad_is_refused(pieces: list[Any], data: st.DataObject) -> None:
    maker = made(pieces)
    pads = [index for index, token in enumerate(maker.ids) if token == PAD]
    if not pads:
        return
    position = data.draw(st.sampled_from(pads))
    ids = [token for index, token in enumerate(maker.ids) if index != position]
    with pytest.raises(PlaceholderError):
        check_sidecar(np.array(ids), maker.sidecar, token_ids=TOKENS)


# --- a server's own widening as the truth ---


def reference(expansion: Expansion) -> Any:
    """An item whose encoded image is at hand."""
    fields: dict[str, Any] = {"identity": "ab" * 32, "size": (32, 32), "grid": (1, 2, 2)}
    return ReferenceItem(expansion=expansion, expected_length=1, source=b"image", **fields)


TWICE = st.one_of(
    st.tuples(st.integers(1, 5), st.integers(1, 5)).map(lambda both: [qwen_item(n) for n in both]),
    st.builds(
        lambda a, b: [tiled_item(*a), tiled_item(*b)], *[st.tuples(st.integers(1, 2), st.integers(1, 3))] * 2
    ),
)
# No text holds a pad, so that images are found where a server does not say where they are.
BOTH = st.lists(TWICE | st.lists(st.integers(0, 80), min_size=1, max_size=4), min_size=1, max_size=5)


def both_of(pieces: list[Any]) -> tuple[EngineRequest, PromptMaker]:
    """The prompt as it was rendered, and as a server widens it."""
    makers = PromptMaker().text([1]), PromptMaker().text([1])
    for piece in pieces:
        for maker, side in zip(makers, (0, 1), strict=True):
            if isinstance(piece[0], FakeItem):
                maker.text([OPEN]).item(reference(piece[side].expansion), IMAGE).text([CLOSE])
            else:
                maker.text(piece)
    ours, theirs = makers
    return EngineRequest("m", ours.ids, {}, "r", ours.sidecar, media_token_ids=TOKENS), theirs


def ranges_of(maker: PromptMaker) -> list[tuple[int, int]]:
    return [(found.offset, found.length) for found, _ in maker.placed]


@settings(max_examples=100)
@given(BOTH, st.booleans())
def test_a_servers_prompt_is_taken_with_its_ranges(pieces: list[Any], told: bool) -> None:
    request, theirs = both_of(pieces)
    ranges = ranges_of(theirs) if told else None
    adopted = adopt_prompt(theirs.ids, request, ranges, where="reply")
    assert adopted.prompt_ids == theirs.ids
    placed = [(span.range, span.item.expansion) for span in adopted.multi_modal_data.spans(len(theirs.ids))]
    assert placed == [(found, item.expansion) for found, item in theirs.placed]
    check_request(adopted)  # it can be sent again, as the start of the next turn
    assert collapse(theirs.ids, adopted.multi_modal_data, {"image": IMAGE}) == theirs.collapsed
    assert adopt_prompt(theirs.ids, adopted, ranges, where="reply") is adopted


@settings(max_examples=150)
@given(BOTH, st.data())
def test_a_servers_prompt_with_anything_else_is_refused(pieces: list[Any], data: st.DataObject) -> None:
    request, theirs = both_of(pieces)
    ids, ranges = list(theirs.ids), ranges_of(theirs)
    inside = {at for start, length in ranges for at in range(start, start + length)}
    at = data.draw(st.sampled_from([at for at in range(len(ids)) if at not in inside]))
    change = data.draw(st.sampled_from(["token", "missing", "more", "ranges", "foreign"]))
    if change == "token":
        ids[at] += 1
    elif change == "missing":
        del ids[at]
    elif change == "more":
        ids.insert(at, 200)
    elif not ranges:
        return
    elif change == "ranges":
        index, by = (
            data.draw(st.integers(0, len(ranges) - 1)),
            data.draw(st.sampled_from([-1, 1, 10**9, -(10**9)])),
        )
        start, length = ranges[index]
        kinds = [(start + by, length), (start, length + by), None]
        ranges[index : index + 1] = [kind for kind in [data.draw(st.sampled_from(kinds))] if kind]
    else:
        ids[data.draw(st.sampled_from(sorted(inside)))] = 80
    if ids == list(request.prompt_ids):
        return
    with pytest.raises(EngineMismatchError, match="the server's prompt has other"):
        adopt_prompt(ids, request, ranges, where="reply")
