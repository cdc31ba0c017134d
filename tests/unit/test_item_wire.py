"""Items over the codec: the same tensors come out, nothing is copied, and every damage is named."""

import copy

import numpy as np
import pytest

import mmcodecs
from item_cases import (
    ITEMS,
    PROCESSOR,
    encoded,
    patch_item,
    picture,
    processed_item,
    reference_item,
    same_tensors,
)
from mmrender.errors import MediaError
from mmrender.media.item import ReferenceItem, expand_into, tensor_specs
from mmrender.media.wire import item_from_wire, item_to_wire, items_from_wire, items_to_wire


def through_codec(value):
    return mmcodecs.decode(mmcodecs.encode(value))


@pytest.mark.parametrize("kind", ITEMS)
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("way", [through_codec, copy.deepcopy])
def test_items_survive_with_and_without_a_codec(kind, share, way):
    item = ITEMS[kind]()
    read = item_from_wire(way(item_to_wire(item, share=share)))
    assert type(read) is type(item)
    assert read == item  # identity, size, grid, expansion, modality
    assert read.nbytes == item.nbytes
    if kind == "reference":
        assert read.source == item.source
    else:
        assert same_tensors(read, item)


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


def test_the_head_of_an_item_is_small():
    one = len(mmcodecs.encode_frames(items_to_wire([patch_item(seed=0)]))[0])
    many = len(mmcodecs.encode_frames(items_to_wire([patch_item(seed=i) for i in range(65)]))[0])
    assert (many - one) / 64 < 600  # bytes of the head for another item


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


ITEM = "wire.items[0]"
PIXELS = f"{ITEM}.parts.pixel_values"


def change_in(*path, **fields):
    """A change of one field at a path below the first item."""

    def change(wire):
        value = wire["items"][0]
        for name in path:
            value = value[name]
        value.update(fields)

    return change


def form(**fields):
    return {"form": "repeat", "token": "<|image_pad|>", "count": 6, "embeds": True, **fields}


FRAMES = (1, 3, 64, 96)
PATCH_DAMAGE = {
    "version": (lambda w: w.update(version=1), "wire.version: an item is malformed - expected `int` >= 2. Write and read with the same release of mmrender"),
    "kind": (change_in(kind="x"), f"{ITEM}.kind: an item is malformed (Invalid value 'x')"),
    "no item": (lambda w: w.update(items=[]), "wire.items: this is not one item - expected 1 item, got 0"),
    "no mapping": (lambda w: w.update(items=[3]), f"{ITEM}: an item is malformed - expected `object`, got `int`"),
    "identity": (change_in(identity="abc"), f"{ITEM}.identity: an item is malformed - expected `str` matching regex '^[0-9a-f]{{64}}$'"),
    "size": (change_in(size=[1, -1]), f"{ITEM}.size[1]: an item is malformed - expected `int` >= 0"),
    "grid": (change_in(grid=[1, 4, 4]), f"{ITEM}.frames: frames do not fit their grid - expected uint8 [1, 3, 64, 64], got uint8 [1, 3, 64, 96]"),
    "time": (change_in(grid=[2, 4, 6]), f"{ITEM}.grid: a grid is malformed - expected sides that are multiples of 2, and one time step for an image, got [2, 4, 6]"),
    "merge": (change_in("layout", merge=4), f"{ITEM}.grid: a grid is malformed - expected sides that are multiples of 4, and one time step for an image, got [1, 4, 6]"),
    "patch": (change_in("layout", patch=0), f"{ITEM}.layout.patch: an item is malformed - expected `int` >= 1"),
    "count": (change_in(expansion=[form(count=5)]), f"{ITEM}.expansion: an expansion does not fit its grid - expected 6 tokens, got 5"),
    "negative": (change_in(expansion=[form(count=-1)]), f"{ITEM}.expansion[0].count: an item is malformed - expected `int` >= 0"),
    "expansion": (change_in(expansion=[form(form="row")]), f"{ITEM}.expansion[0].form: an item is malformed (Invalid value 'row')"),
    "dtype": (change_in(frames=np.zeros(FRAMES, np.uint16)), f"{ITEM}.frames: an item is malformed - expected an array of uint8, got uint16 [1, 3, 64, 96]"),
    "strides": (change_in(frames=np.zeros((1, 64, 96, 3), np.uint8).transpose(0, 3, 1, 2)), f"{ITEM}.frames: an item is malformed - expected a C-contiguous array of native numbers, got uint8 [1, 3, 64, 96]"),
    "std": (change_in("arithmetic", std=[1.0, 0.0, 1.0]), f"{ITEM}.arithmetic: an arithmetic is malformed - expected finite numbers, std and rescale other than 0, got [0.5, 0.4, 0.3, 1.0, 0.0, 1.0, 0.00392156862745098]"),
    "mean": (change_in("arithmetic", mean=[1.0, float("nan"), 1.0]), f"{ITEM}.arithmetic: an arithmetic is malformed - expected finite numbers, std and rescale other than 0, got [1.0, nan, 1.0, 0.5, 0.2, 0.1, 0.00392156862745098]"),
}  # fmt: skip
PART_DAMAGE = {
    "held": (change_in("parts", "pixel_values", held=[0, 0]), f"{PIXELS}.held: tiles are misnumbered - expected rising numbers below 3, got [0, 0]"),
    "beyond": (change_in("parts", "pixel_values", held=[0, 3]), f"{PIXELS}.held: tiles are misnumbered - expected rising numbers below 3, got [0, 3]"),
    "fewer": (change_in("parts", "pixel_values", held=[0]), f"{PIXELS}.values: values do not fit their form - expected uint8 [1, 3, 6, 5] of three channels, got uint8 [2, 3, 6, 5]"),
    "flat": (change_in("parts", "pixel_values", shape=[]), f"{PIXELS}.held: tiles are misnumbered - expected rising numbers below 1, got [0, 2]"),
    "huge": (change_in("parts", "pixel_values", shape=[2**30, 2**30, 3, 6, 5]), f"{PIXELS}.shape: a shape is too large - expected at most 268435456 values, got [1073741824, 1073741824, 3, 6, 5]"),
    "broadcast": (change_in("parts", "image_sizes", shape=[1, 3]), f"{ITEM}.parts.image_sizes.values: values do not fit their form - expected integers that broadcast to [1, 3], got uint16 [1, 2]"),
    "no integers": (change_in("parts", "image_sizes", values=np.zeros((1, 2))), f"{ITEM}.parts.image_sizes.values: values do not fit their form - expected integers that broadcast to [1, 2], got float64 [1, 2]"),
    "object": (change_in("parts", "image_sizes", dtype="object"), f"{ITEM}.parts[...].dtype: an item is malformed - expected a dtype of integers, got 'object'"),
}  # fmt: skip
NO_SOURCE = f"{ITEM}.source: a source is malformed - expected a URL or uint8 [n], got int"
DAMAGES = {patch_item: PATCH_DAMAGE, processed_item: PART_DAMAGE}
DAMAGES[reference_item] = {"source": (change_in(source=3), NO_SOURCE)}


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [pytest.param(make, *case, id=name) for make, cases in DAMAGES.items() for name, case in cases.items()],
)
def test_damage_is_named(make, change, message):
    wire = copy.deepcopy(through_codec(item_to_wire(make())))
    change(wire)
    with pytest.raises(MediaError) as error:
        item_from_wire(wire)
    assert str(error.value) == message


def test_an_item_of_an_unknown_class_is_refused():
    with pytest.raises(MediaError) as error:
        items_to_wire([patch_item(), object()])
    assert str(error.value) == (
        "items[1]: items of this class have no form on the wire - expected PatchItem, ProcessedItem, "
        "ReferenceItem, got object"
    )


def test_a_reference_is_processed_again_and_has_no_tensors():
    item = PROCESSOR.process(picture(seed=3))
    resolved = ReferenceItem.of(item, encoded(picture(seed=3).image), 6).resolve(PROCESSOR)
    assert resolved == item
    assert same_tensors(resolved, item)
    with pytest.raises(MediaError, match="processing again gives another identity"):
        ReferenceItem.of(item, encoded(picture(seed=4).image), 6).resolve(PROCESSOR)
    with pytest.raises(MediaError) as error:
        reference_item().tensors()
    assert str(error.value) == (
        f"item {reference_item().identity[:12]}: an item by reference has no tensors - expected numpy tensors of "
        "float32, got 400 encoded bytes. Process it first: item.resolve(processor)"
    )


@pytest.mark.parametrize("kind", ["patches", "video", "processed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
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
