"""Items over the codec: the same tensors come out, nothing is copied, and every damage is named."""

import copy

import msgspec
import numpy as np
import pytest

import mmcodecs
from item_cases import ITEMS, PROCESSOR, patch_item, picture, processed_item, reference_item, same_tensors
from kit import encoded, error_of, raised
from mmrender.errors import MediaError, ProcessorError
from mmrender.media.encoded import ReferenceItem
from mmrender.media.item import expand_into, tensor_specs
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


def test_an_item_has_a_small_head_and_a_connection_carries_it_once():
    one = len(mmcodecs.encode_frames(items_to_wire([patch_item(seed=0)]))[0])
    many = len(mmcodecs.encode_frames(items_to_wire([patch_item(seed=i) for i in range(65)]))[0])
    assert (many - one) / 64 < 600  # bytes of the head for another item
    encoder, decoder = mmcodecs.Encoder(), mmcodecs.Decoder()
    items = [patch_item(seed=1), processed_item(seed=2)]
    first = encoder.encode(items_to_wire(items))
    second = encoder.encode(items_to_wire([items[1], patch_item(seed=1)]))
    decoder.decode(first)
    read = items_from_wire(decoder.decode(second))
    assert len(second) < 2500 < items[0].nbytes
    assert same_tensors(read[0], items[1])
    assert same_tensors(read[1], items[0])


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
    "version": lambda w: w.update(version=1),
    "kind": change_in(kind="x"),
    "no item": lambda w: w.update(items=[]),
    "no mapping": lambda w: w.update(items=[3]),
    "identity": change_in(identity="abc"),
    "size": change_in(size=[1, -1]),
    "grid": change_in(grid=[1, 4, 4]),
    "time": change_in(grid=[2, 4, 6]),
    "merge": change_in("layout", merge=4),
    "patch": change_in("layout", patch=0),
    "count": change_in(expansion=[form(count=5)]),
    "negative": change_in(expansion=[form(count=-1)]),
    "expansion": change_in(expansion=[form(form="row")]),
    "dtype": change_in(frames=np.zeros(FRAMES, np.uint16)),
    "strides": change_in(frames=np.zeros((1, 64, 96, 3), np.uint8).transpose(0, 3, 1, 2)),
    "std": change_in("arithmetic", std=[1.0, 0.0, 1.0]),
    "mean": change_in("arithmetic", mean=[1.0, float("nan"), 1.0]),
}  # fmt: skip
PART_DAMAGE = {
    "held": change_in("parts", "pixel_values", held=[0, 0]),
    "beyond": change_in("parts", "pixel_values", held=[0, 3]),
    "fewer": change_in("parts", "pixel_values", held=[0]),
    "flat": change_in("parts", "pixel_values", shape=[]),
    "huge": change_in("parts", "pixel_values", shape=[2**30, 2**30, 3, 6, 5]),
    "broadcast": change_in("parts", "image_sizes", shape=[1, 3]),
    "no integers": change_in("parts", "image_sizes", values=np.zeros((1, 2))),
    "object": change_in("parts", "image_sizes", dtype="object"),
}  # fmt: skip
DAMAGES = {
    patch_item: PATCH_DAMAGE,
    processed_item: PART_DAMAGE,
    reference_item: {"source": change_in(source=3)},
}


@pytest.mark.parametrize(
    ("make", "change"),
    [pytest.param(make, case, id=name) for make, cases in DAMAGES.items() for name, case in cases.items()],
)
def test_damage_is_named(make, change, sentence):
    wire = copy.deepcopy(through_codec(item_to_wire(make())))
    change(wire)
    assert error_of(MediaError, item_from_wire, wire) == sentence


def test_an_item_of_an_unknown_class_is_refused(sentence):
    assert error_of(MediaError, items_to_wire, [patch_item(), object()]) == sentence


def test_a_reference_is_processed_again_and_has_no_tensors(sentence):
    item = PROCESSOR.process(picture(seed=3))
    resolved = ReferenceItem.of(item, encoded(picture(seed=3).image), 6).resolve(PROCESSOR)
    assert resolved == item
    assert same_tensors(resolved, item)
    with pytest.raises(MediaError, match="processing again gives another identity"):
        ReferenceItem.of(item, encoded(picture(seed=4).image), 6).resolve(PROCESSOR)
    assert error_of(MediaError, reference_item().tensors) == sentence


@pytest.mark.parametrize("modality", ["video", "audio"])
def test_a_reference_to_a_medium_that_the_model_does_not_take_is_refused_as_such_a_part_is(modality):
    reference = msgspec.structs.replace(reference_item(), modality=modality)
    error = raised(ProcessorError, reference.resolve, PROCESSOR)
    assert str(error) == str(raised(ProcessorError, PROCESSOR.of, modality, error.where))


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
