"""Large texts as views against the parser, and prompts against their collapsed form, on generated input."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mmrender.client.large_text import decode_reply, decode_reply_whole

from client_prompts import IMAGE, PAD, TOKENS, FakeItem, PromptMaker, qwen_item, tiled_item
from mmrender.client.placeholders import check_sidecar, collapse
from mmrender.errors import PlaceholderError
from mmrender.spans import MultiModalData

# Keys and texts that look like what is searched for, in all its parts.
CHARACTERS = st.sampled_from(
    ['"', "\\", ":", "{", "}", "[", " ", ",", "data", "routed_experts", "A", "=", "é", "\n"]
)
TEXTS = st.one_of(st.lists(CHARACTERS, max_size=8).map("".join), st.text("AB+/=", min_size=8, max_size=30))
KEYS = st.one_of(st.sampled_from(["routed_experts", "data", "shape"]), TEXTS)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(-2, 2), TEXTS)
REPLIES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=20,
)


def whole(value: Any) -> Any:
    if isinstance(value, memoryview):
        return bytes(value).decode()
    if isinstance(value, dict):
        return {name: whole(member) for name, member in value.items()}
    return [whole(member) for member in value] if isinstance(value, list) else value


@settings(max_examples=250)
@given(
    reply=REPLIES,
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
    buffer=st.sampled_from([bytes, bytearray]),
)
def test_a_reply_with_views_equals_the_parsed_one(
    reply: Any, indent: int | None, ascii_only: bool, buffer: Any
) -> None:
    body = buffer(json.dumps(reply, indent=indent, ensure_ascii=ascii_only).encode())
    assert whole(decode_reply(body, smallest=6)) == decode_reply_whole(body) == reply


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
