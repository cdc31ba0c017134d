"""Items over the codec: the same tensors come out, nothing is copied, and every damage is named."""

import copy

import numpy as np
import pytest

import mmcodecs
from item_cases import (
    ITEMS,
    PROCESSOR,
    patch_item,
    picture,
    processed_item,
    reference_item,
    same_tensors,
    video_item,
)
from mmrender.errors import MediaError
from mmrender.media.item import ReferenceItem, expand_into, tensor_specs
from mmrender.media.wire import (
    item_from_wire,
    item_to_wire,
    items_from_wire,
    items_to_wire,
    multi_modal_data_from_wire,
    multi_modal_data_to_wire,
)
from mmrender.spans import MultiModalData, PlaceholderRange


def through_codec(value):
    return mmcodecs.decode(mmcodecs.encode(value))


def plain(value):
    """A deep copy as dicts and lists that a test may damage."""
    return copy.deepcopy(through_codec(value))


@pytest.mark.parametrize("kind", ITEMS)
@pytest.mark.parametrize("share", [True, False])
def test_items_survive_the_codec(kind, share):
    item = ITEMS[kind]()
    read = item_from_wire(through_codec(item_to_wire(item, share=share)))
    assert type(read) is type(item)
    assert read == item  # identity, size, grid, expansion, modality
    assert read.nbytes == item.nbytes
    if kind == "reference":
        assert read.source == item.source
    else:
        assert same_tensors(read, item)


@pytest.mark.parametrize("kind", ["patches", "video", "processed"])
def test_items_survive_without_a_codec(kind):
    item = ITEMS[kind]()
    assert same_tensors(item_from_wire(item_to_wire(item)), item)


def test_pixels_are_read_only_views_of_the_message():
    message = mmcodecs.encode(item_to_wire(patch_item()))
    read = item_from_wire(mmcodecs.decode(message))
    assert np.shares_memory(read.frames, np.frombuffer(message, np.uint8))
    assert not read.frames.flags.writeable
    copied = item_from_wire(mmcodecs.decode(message, copy=True))
    assert not copied.frames.flags.writeable


def test_a_reference_may_be_a_url():
    item = reference_item(source="https://example.org/a.png")
    read = item_from_wire(through_codec(item_to_wire(item)))
    assert (read, read.source, read.expected_length) == (item, item.source, 6)


def test_what_items_have_in_common_is_written_once():
    one = len(mmcodecs.encode_frames(items_to_wire([patch_item(seed=0)]))[0])
    many = len(mmcodecs.encode_frames(items_to_wire([patch_item(seed=i) for i in range(65)]))[0])
    assert len(items_to_wire([patch_item(seed=i) for i in range(9)])["arithmetics"]) == 1
    assert (many - one) / 64 < 250  # bytes of the head for another item


def test_a_connection_carries_an_item_once():
    encoder, decoder = mmcodecs.Encoder(), mmcodecs.Decoder()
    items = [patch_item(seed=1), processed_item(seed=2)]
    first = encoder.encode(items_to_wire(items))
    second = encoder.encode(items_to_wire([items[1], patch_item(seed=1)]))
    decoder.decode(first)
    read = items_from_wire(decoder.decode(second))
    assert len(second) < 2500 < items[0].nbytes
    assert same_tensors(read[0], items[1])
    assert same_tensors(read[1], items[0])


def sidecar():
    item, other, video = patch_item(seed=1), processed_item(), video_item()
    return MultiModalData.of(
        [
            (PlaceholderRange(3, 6), item),
            (PlaceholderRange(12, 14, ((1, 9), (10, 14))), other),
            (PlaceholderRange(30, 6, ((0, 6),)), item),
            (PlaceholderRange(50, 4), video),
        ]
    )


def test_sidecars_survive_with_each_item_once():
    wire = multi_modal_data_to_wire(sidecar())
    assert len(wire["table"]["items"]) == 3
    read = multi_modal_data_from_wire(through_codec(wire))
    assert read.mm_placeholders == sidecar().mm_placeholders
    assert read.mm_hashes == sidecar().mm_hashes
    assert read.mm_items == sidecar().mm_items
    assert read.mm_items["image"][0] is read.mm_items["image"][2]
    assert not multi_modal_data_from_wire(through_codec(multi_modal_data_to_wire(MultiModalData())))


H = "wire.items[0]"
DAMAGE = {
    "version": (lambda w: w.update(version=2), "wire.version: items of this version cannot be read - expected 1, got 2. Write and read with the same release of mmrender"),
    "extra": (lambda w: w.update(more=1), "wire: an item is malformed (Object contains unknown field `more`)"),
    "kind": (lambda w: w["items"][0].update(kind="x"), f"{H}.kind: an item is malformed (Invalid value 'x')"),
    "no item": (lambda w: w.update(items=[]), "wire.items: this is not one item - expected 1 item, got 0"),
    "no mapping": (lambda w: w.update(items=[3]), f"{H}: an item is malformed - expected `object`, got `int`"),
    "identity": (lambda w: w["items"][0].update(identity=b"abc"), f"{H}.identity: an item is malformed - expected `bytes` of length >= 32"),
    "modality": (lambda w: w["items"][0].update(modality="audio"), f"{H}.modality: an item is malformed (Invalid enum value 'audio')"),
    "size": (lambda w: w["items"][0].update(size=[1, -1]), f"{H}.size[1]: an item is malformed - expected `int` >= 0"),
    "short size": (lambda w: w["items"][0].update(size=[1]), f"{H}.size: an item is malformed - expected `array` of length 2, got 1"),
    "grid": (lambda w: w["items"][0].update(grid=[1, 4, 5]), f"{H}.frames: frames do not fit their grid - expected uint8 [1, 3, 64, 80], got uint8 [1, 3, 64, 96]"),
    "time": (lambda w: w["items"][0].update(grid=[2, 4, 6]), f"{H}.grid: a grid is malformed - expected sides that are multiples of 2, and one time step for an image, got [2, 4, 6]"),
    "merge": (lambda w: w["items"][0].update(layout=[16, 4, 2]), f"{H}.grid: a grid is malformed - expected sides that are multiples of 4, and one time step for an image, got [1, 4, 6]"),
    "patch": (lambda w: w["items"][0].update(layout=[0, 2, 2]), f"{H}.layout[0]: an item is malformed - expected `int` >= 1"),
    "temporal": (lambda w: w["items"][0].update(layout=[16, 2, 65]), f"{H}.layout[2]: an item is malformed - expected `int` <= 64"),
    "count": (lambda w: w["items"][0].update(expansion=["<|image_pad|>", 5, True]), f"{H}.expansion: an expansion does not fit its grid - expected 6 tokens, got 5"),
    "expansion": (lambda w: w["items"][0].update(expansion=["<|image_pad|>", 5]), f"{H}.expansion[0]: an expansion is malformed - expected text, count, embeds, got ['<|image_pad|>', 5]"),
    "embeds": (lambda w: w["items"][0].update(expansion=["a", 5, 1]), f"{H}.expansion[0]: an expansion is malformed - expected text, count, embeds, got ['a', 5, 1]"),
    "dtype": (lambda w: w["items"][0].update(frames=np.zeros((1, 3, 64, 96), np.uint16)), f"{H}.frames: frames do not fit their grid - expected uint8 [1, 3, 64, 96], got uint16 [1, 3, 64, 96]"),
    "floats": (lambda w: w["items"][0].update(frames=np.zeros((1, 3, 64, 96), np.float32)), f"{H}.frames: an array of an item is malformed - expected a C-contiguous array of kind 'u' and 4 dimensions, got float32 [1, 3, 64, 96]"),
    "strides": (lambda w: w["items"][0].update(frames=np.zeros((1, 64, 96, 3), np.uint8).transpose(0, 3, 1, 2)), f"{H}.frames: an array of an item is malformed - expected a C-contiguous array of kind 'u' and 4 dimensions, got uint8 [1, 3, 64, 96]"),
    "row": (lambda w: w["items"][0].update(arithmetic=1), f"{H}.arithmetic: an arithmetic is missing - expected a row below 1, got 1"),
    "std": (lambda w: w["arithmetics"][0].update(std=[1.0, 0.0, 1.0]), "wire.arithmetics[0]: an arithmetic is malformed - expected finite numbers, std and rescale other than 0, got [0.5, 0.4, 0.3, 1.0, 0.0, 1.0, 0.00392156862745098]"),
    "mean": (lambda w: w["arithmetics"][0].update(mean=[1.0, float("nan"), 1.0]), "wire.arithmetics[0]: an arithmetic is malformed - expected finite numbers, std and rescale other than 0, got [1.0, nan, 1.0, 0.5, 0.2, 0.1, 0.00392156862745098]"),
    "backend": (lambda w: w["arithmetics"][0].update(backend="jax"), "wire.arithmetics[0].backend: an item is malformed (Invalid enum value 'jax')"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(damage):
    wire = plain(item_to_wire(patch_item()))
    change, message = DAMAGE[damage]
    change(wire)
    with pytest.raises(MediaError) as error:
        item_from_wire(wire)
    assert str(error.value) == message


PARTS = "wire.items[0].parts"
PART_DAMAGE = {
    "held": (("pixel_values", {"held": [0, 0]}), f"{PARTS}.pixel_values.held: tiles are misnumbered - expected rising numbers below 3, got [0, 0]"),
    "beyond": (("pixel_values", {"held": [0, 3]}), f"{PARTS}.pixel_values.held: tiles are misnumbered - expected rising numbers below 3, got [0, 3]"),
    "fewer": (("pixel_values", {"held": [0]}), f"{PARTS}.pixel_values.levels: levels do not fit their shape - expected uint8 [1, 3, 6, 5] of three channels, got uint8 [2, 3, 6, 5]"),
    "shape": (("pixel_values", {"shape": [1, 3, 3, 5, 6]}), f"{PARTS}.pixel_values.levels: levels do not fit their shape - expected uint8 [2, 3, 5, 6] of three channels, got uint8 [2, 3, 6, 5]"),
    "huge": (("pixel_values", {"shape": [2**30, 2**30, 3, 6, 5]}), f"{PARTS}.pixel_values.shape: a shape is too large - expected at most 268435456 values, got [1073741824, 1073741824, 3, 6, 5]"),
    "broadcast": (("image_sizes", {"shape": [1, 3]}), f"{PARTS}.image_sizes: integers do not fit their shape - expected an array that broadcasts to [1, 3], got uint16 [1, 2]"),
    "object": (("image_sizes", {"dtype": "object"}), f"{PARTS}.image_sizes.dtype: an item is malformed (Invalid enum value 'object')"),
    "unknown": (("features", {"pickle": b""}), f"{PARTS}.features: an item is malformed (Object contains unknown field `pickle`)"),
}  # fmt: skip


@pytest.mark.parametrize("damage", PART_DAMAGE)
def test_damage_of_parts_is_named(damage):
    wire = plain(item_to_wire(processed_item()))
    (name, change), message = PART_DAMAGE[damage]
    wire["items"][0]["parts"][name].update(change)
    with pytest.raises(MediaError) as error:
        item_from_wire(wire)
    assert str(error.value) == message


SIDECAR_DAMAGE = {
    "row": (lambda w: w["ranges"].__setitem__((1, 0), 3), "multi_modal_data.ranges[1]: a placeholder range is malformed - expected an item below 3, an offset and a length, got [3, 12, 14, 2]"),
    "offset": (lambda w: w["ranges"].__setitem__((0, 1), -1), "multi_modal_data.ranges[0]: a placeholder range is malformed - expected an item below 3, an offset and a length, got [0, -1, 6, -1]"),
    "span": (lambda w: w["spans"].__setitem__((1, 1), 15), "multi_modal_data.ranges[1]: embed spans are malformed - expected 2 spans within 14 tokens, got [(1, 9), (10, 15)]"),
    "left over": (lambda w: w.update(spans=np.zeros((4, 2), np.int32)), "multi_modal_data.ranges: embed spans are left over - expected 3, got 4"),
    "counts": (lambda w: w.update(counts={"image": 3}), "multi_modal_data.counts: counts do not add up - expected the sum 4, got 3"),
    "modality": (lambda w: w.update(counts={"image": 4}), "multi_modal_data.counts: an item is of another modality - expected image, got 'video'"),
    "columns": (lambda w: w.update(ranges=w["ranges"][:, :3].copy()), "multi_modal_data.ranges: an array of a sidecar is malformed - expected int32 [n, 4], got int32 [4, 3]"),
}  # fmt: skip


@pytest.mark.parametrize("damage", SIDECAR_DAMAGE)
def test_damage_of_sidecars_is_named(damage):
    wire = plain(multi_modal_data_to_wire(sidecar()))
    wire["ranges"], wire["spans"] = wire["ranges"].copy(), wire["spans"].copy()
    change, message = SIDECAR_DAMAGE[damage]
    change(wire)
    with pytest.raises(MediaError) as error:
        multi_modal_data_from_wire(wire)
    assert str(error.value) == message


class Foreign:
    """An item of a class that nobody described."""

    identity = "ab" * 32


def test_an_item_of_an_unknown_class_is_refused():
    with pytest.raises(MediaError) as error:
        items_to_wire([patch_item(), Foreign()])
    assert str(error.value) == (
        "items[1]: items of this class have no form on the wire - expected PatchItem, ProcessedItem, "
        "ReferenceItem, got Foreign"
    )


def test_an_identity_that_is_no_digest_is_refused():
    item = patch_item()
    short = type(item)(**{**{f: getattr(item, f) for f in item.__slots__}, "identity": "picture-1"})
    with pytest.raises(MediaError) as error:
        item_to_wire(short)
    assert str(error.value) == (
        "items[0].identity: an identity is malformed - expected 64 lower-case hex digits, got 'picture-1'"
    )


def test_a_reference_has_no_tensors():
    with pytest.raises(MediaError) as error:
        reference_item().tensors()
    identity = reference_item().identity
    assert str(error.value) == (
        f"item {identity[:12]}: an item by reference has no tensors - expected numpy tensors of float32, "
        "got 400 encoded bytes. Process it first: item.resolve(processor)"
    )


def png(seed):
    import io

    out = io.BytesIO()
    picture(seed=seed).image.save(out, "PNG")
    return out.getvalue()


def test_a_reference_is_processed_again():
    item = PROCESSOR.process(picture(seed=3))
    resolved = ReferenceItem.of(item, png(3), 6).resolve(PROCESSOR)
    assert resolved == item
    assert same_tensors(resolved, item)
    with pytest.raises(MediaError, match="processing again gives another identity"):
        ReferenceItem.of(item, png(4), 6).resolve(PROCESSOR)


DTYPES = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("kind", ["patches", "video", "processed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_expanding_into_buffers(kind, dtype):
    item = ITEMS[kind]()
    specs = tensor_specs(item, dtype)
    whole = item.tensors(dtype)
    assert {n: (s.shape, s.dtype) for n, s in specs.items()} == {
        n: (v.shape, v.dtype) for n, v in whole.items()
    }
    out = {name: np.full(spec.shape, 3, spec.dtype) for name, spec in specs.items()}
    expand_into(item, out, dtype)
    for name, values in whole.items():
        assert out[name].tobytes() == values.tobytes(), name
