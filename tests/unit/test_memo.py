"""The memo of renderings: equal input is found again, anything else is not."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmrender.content.messages import read_request
from mmrender.media.resolve import MediaCache, part_fingerprint
from mmrender.renderer import Renderer
from mmrender.rendering import Memo
from mmrender.sidecar import MultiModalData
from mmrender.tokens.rendered import RenderedTokens, TokenSpan

DATA_URL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0.0, -0.0, 1.0, 2.5])
    | st.text("ab:/", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=6,
)


def key_of(messages, variable=None, *, images=None):
    return Memo(1, None).key(
        read_request(
            messages, images=images, variables={"x": variable}, fingerprint=part_fingerprint, allow_empty=True
        )
    )


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


def picture(level=7):
    return Image.new("RGB", (4, 4), (level, 0, 0))


def same(left, right):
    """Equal as printed: types, signs of zero and the order of keys included."""
    return repr(left) == repr(right)


@given(JSON, JSON)
def test_keys_are_equal_exactly_where_options_are(left, right):
    assert (key_of([], left) == key_of([], right)) == same(left, right)


@given(JSON, JSON)
def test_messages_with_different_arguments_have_different_keys(left, right):
    calls = [
        [{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": value}}]}]
        for value in (left, right)
    ]
    assert (key_of(calls[0]) == key_of(calls[1])) == same(left, right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("text", ["text"]),
        ("text", [{"type": "text", "text": "text"}]),
        (None, ""),
        ([], None),
        (["a", "b"], ["ab"]),
    ],
)
def test_shapes_of_content_are_told_apart(left, right):
    keys = [key_of([{"role": "user", "content": content}]) for content in (left, right)]
    assert None not in keys
    assert keys[0] != keys[1]


@pytest.mark.parametrize("source", ["https://example.org/a.png", "photo.jpg", "file:///tmp/photo.jpg"])
def test_what_may_change_under_its_name_has_no_key(source):
    assert key_of(user({"type": "image_url", "image_url": {"url": source}})) is None
    assert key_of(user({"type": "image"}), images=[source]) is None
    # In a tool's arguments and definition it is text.
    call = {"name": "open", "arguments": {"url": source}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert key_of(messages, [{"name": "open", "parameters": {"image": source}}]) is not None


@pytest.mark.parametrize(
    "source",
    [
        picture,
        lambda level: np.full((4, 4, 3), level, np.uint8),
        lambda level: bytes([level]) * 9,
        lambda level: {"bytes": bytes([level]), "path": "name.png"},
        lambda level: DATA_URL + f"{level:02d}==",
    ],
)
def test_media_are_keyed_by_content(source):
    keys = [key_of(user({"type": "image", "image": source(level)})) for level in (1, 1, 2)]
    assert None not in keys
    assert keys[0] == keys[1] != keys[2]


def test_a_picture_painted_over_has_another_key_and_long_media_a_short_one():
    image = picture()
    messages = user({"type": "image", "image": image})
    before = key_of(messages)
    image.putpixel((1, 1), (0, 0, 9))
    assert key_of(messages) != before
    part = {"type": "image", "image": "data:image/png;base64," + "A" * 5000}
    assert "A" * 100 not in repr(key_of(user(part)))


def test_what_cannot_be_keyed_is_none():
    deep: list[object] = []
    for _ in range(100):
        deep = [deep]
    for option in (object(), {1, 2}, deep, len):
        assert key_of([], option) is None
    assert key_of([], {1: "a"}) != key_of([], {True: "a"})
    assert key_of([], math.nan) == key_of([], float("nan"))


def rendering(count, text="x"):
    spans = (TokenSpan(0, count, 0, "content", False),)
    return RenderedTokens(list(range(count)), spans, ("user",), (None,), MultiModalData(), text)


def test_one_that_is_too_large_is_not_kept():
    memo = Memo(100, None)
    memo.put("a", rendering(10))
    assert memo.get("a") is None
    memo.put("b", rendering(1))
    assert memo.get("b") is not None


def test_a_known_conversation_renders_as_one_that_is_not_known(renderer, tiny_model):
    messages = user({"type": "image", "image": picture()}, {"type": "text", "text": "What?"})
    forgetful = Renderer.from_pretrained(tiny_model, image_backend="pil", memo_bytes=0)
    first, again = renderer.render(messages), renderer.render(messages)
    fresh = forgetful.render(messages)
    assert first.token_ids == again.token_ids == fresh.token_ids
    assert first.spans == again.spans == fresh.spans
    assert again.decode(0, 3) == fresh.decode(0, 3)
    hashes = [rendered.multi_modal_data.mm_hashes for rendered in (first, again, fresh)]
    assert hashes[0] == hashes[1] == hashes[2]


@pytest.mark.parametrize("max_bytes", [1 << 30, 0])
def test_an_item_counts_against_the_bound_of_the_media_cache_alone(tiny_model, max_bytes):
    cache = MediaCache(max_bytes)
    renderer = Renderer.from_pretrained(tiny_model, image_backend="pil", media_cache=cache)
    messages = user({"type": "image", "image": picture().resize((400, 300))})
    first = renderer.render(messages)
    nbytes = first.multi_modal_data.nbytes
    assert cache.stats.size == (nbytes if max_bytes else 0)
    assert renderer._memo._entries.stats.size < nbytes
    again = renderer.render(messages)
    assert again == first
    (item,), (known,) = (rendered.multi_modal_data.mm_items["image"] for rendered in (again, first))
    assert (item is known) == bool(max_bytes)


def test_an_item_that_was_dropped_is_made_again(tiny_model):
    renderer = Renderer.from_pretrained(tiny_model, image_backend="pil")
    messages = user({"type": "image", "image": picture()}, {"type": "image", "image": picture(9)})
    first = renderer.render(messages)
    renderer.media.cache._items.pop(first.multi_modal_data.mm_hashes["image"][1])
    assert renderer.render(messages) == first
    assert len(renderer.media.cache._items) == 2


def test_how_a_prompt_ends_is_in_the_key(renderer):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    options = [{}, {"add_generation_prompt": True}, {"continue_final_message": True}]
    shown = [renderer.render(messages, **each) for each in options]
    assert len({rendered.text for rendered in shown}) == len(options)
    assert [renderer.render(messages, **each) for each in options] == shown


def test_results_share_nothing_that_can_be_changed(renderer):
    messages = user({"type": "image", "image": picture()})
    expected = renderer.render(messages).token_ids.copy()
    for _ in range(2):
        rendered = renderer.render(messages)
        assert rendered.token_ids == expected
        assert len(rendered.multi_modal_data.spans(len(expected))) == 1
        rendered.token_ids.clear()
        for mapping in (rendered.multi_modal_data.mm_items, rendered.multi_modal_data.mm_hashes):
            mapping["image"].clear()
            mapping.clear()


def test_a_file_that_changes_is_read_again(renderer, tmp_path: Path):
    file = tmp_path / "picture.png"
    messages = user({"type": "image", "image": file})
    hashes = []
    for level in (1, 2):
        Image.new("RGB", (40, 40), (level, 0, 0)).save(file)
        hashes += renderer.render(messages).multi_modal_data.mm_hashes["image"]
    assert hashes[0] != hashes[1]
