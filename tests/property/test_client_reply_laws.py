"""Prompts against their collapsed form, and sidecars that were changed, on generated input."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from client_prompts import IMAGE, PAD, TOKENS, FakeItem, PromptMaker, qwen_item, tiled_item
from mmrender.client.exchange import check_request
from mmrender.client.types import EngineRequest
from mmrender.errors import PlaceholderError
from mmrender.sidecar import MultiModalData, collapse


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
