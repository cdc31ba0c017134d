"""vLLM's multimodal items: recorded ones both ways, field layouts, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pybase64
import pytest
import torch

from mmcodecs import strict_base64
from mmcodecs.errors import CodecError, EncodeError, LimitError, UnsupportedTypeError
from mmcodecs.limits import Limits
from mmcodecs.tensors import RawTensor
from mmcodecs.vllm_batch import collate_items, join_items, split_items
from mmcodecs.vllm_fields import LAYOUTS, layout_of
from mmcodecs.vllm_items import (
    BatchedField,
    FieldElem,
    FlatField,
    decode_mm_kwargs_item,
    encode_mm_kwargs_item,
)
from vllm_cases import described_item

RECORDED = sorted((Path(__file__).parents[1] / "data" / "vllm_items").glob("*.json"))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_items_recorded_from_vllm_read_and_write_alike(path, framework):
    record = json.loads(path.read_text())
    for copy in (False, True):
        item = decode_mm_kwargs_item(record["text"], framework=framework, copy=copy)
        assert described_item(item) == record["item"]
        assert list(item) == list(record["item"])
        assert encode_mm_kwargs_item(item) == record["text"]


def test_there_are_recorded_items():
    assert len(RECORDED) >= 9


def test_views_are_read_only_and_copies_writable_and_aligned():
    text = encode_mm_kwargs_item({"x": FieldElem(np.arange(12.0), BatchedField())})
    view = decode_mm_kwargs_item(text)["x"].data
    assert not view.flags.writeable
    copy = decode_mm_kwargs_item(text, copy=True)["x"].data
    assert copy.flags.writeable
    assert copy.flags.aligned


@pytest.mark.parametrize(
    "array", [np.arange(6, dtype=">i4").reshape(2, 3), np.arange(24.0)[::-2].reshape(3, 4).T]
)
def test_other_byte_orders_and_strides_are_written_out(array):
    found = decode_mm_kwargs_item(encode_mm_kwargs_item({"x": FieldElem(array, BatchedField())}))["x"].data
    assert np.array_equal(found, array)
    assert found.dtype == array.dtype.newbyteorder("<")


def wire(value):
    return pybase64.b64encode_as_string(msgspec.msgpack.encode(value))


def wire_item(data, field=("batched", {"keep_on_cpu": False})):
    return wire({"x": {"data": data, "field": field}})


Ext = msgspec.msgpack.Ext


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            wire_item(["float32", [1], Ext(1, b"abcd")]),
            "$.x.data: a pickle is refused: reading one runs code - "
            "expected Ext(3, elements) in a tensor, got Ext code 1",
        ),
        (
            wire_item(Ext(2, b"abcd")),
            "$.x.data: a cloudpickle is refused: reading one runs code - "
            "expected Ext(3, elements) in a tensor, got Ext code 2",
        ),
        (
            wire_item(["float32", [1], 7]),
            "$.x.data: an index of a buffer outside the message stands in place of a tensor's elements - "
            "expected Ext(3, elements). Encode the item with all its tensors inside",
        ),
        (
            wire_item(["float32", [1], {"handle": 1}]),
            "$.x.data: a record of a tensor outside the message stands in place of a tensor's elements - "
            "expected Ext(3, elements). Encode the item with all its tensors inside",
        ),
        (
            wire_item(["float32", [2], Ext(3, b"abcd")]),
            "$.x.data: shape and length differ - expected 8 bytes for float32 [2], got 4",
        ),
        (
            wire_item(["float32", [-1], Ext(3, b"abcd")]),
            "$.x.data: a dimension is out of range - got [-1]",
        ),
        (
            wire_item(["__class__", [1], Ext(3, b"abcd")]),
            "$.x.data: unknown dtype - expected a name of the dtype table, got '__class__'",
        ),
        (
            wire_item(["float32", [0, 2**62], Ext(3, b"")]),
            "$.x.data: no array can have this shape - got [0, 4611686018427387904]",
        ),
        (
            wire_item("text"),
            "$.x.data: another type of value is needed - "
            "expected a tensor, a number or an array of these, got str",
        ),
        (
            wire_item(1, ("scattered", {})),
            "$.x.field: an unknown kind of field - expected batched, flat, shared, got 'scattered'",
        ),
        (wire_item(1, ("flat", {"dim": 0})), "$.x.field: a key is missing - expected slices"),
        (
            wire_item(1, ("batched", {"extra": 0})),
            "$.x.field: an unknown key - expected keep_on_cpu, got 'extra'",
        ),
        (
            wire_item(1, ("batched", {"keep_on_cpu": 1})),
            "$.x.field.keep_on_cpu: another type of value is needed - expected bool, got int",
        ),
        (
            wire_item(1, ("flat", {"slices": [[1, 2]]})),
            "$.x.field.slices: a slice has three bounds - expected start, stop, step, got 2",
        ),
        (wire([1]), "$: another type of value is needed - expected map, got array"),
        (wire({"x": {"data": 1}}), "$.x: a key is missing - expected field"),
        (
            pybase64.b64encode_as_string(
                b"\x82" + 2 * (b"\xa1x" + msgspec.msgpack.encode({"data": 1, "field": ["batched", {}]}))
            ),
            "$: a key stands twice - got 'x'",
        ),
        (
            pybase64.b64encode_as_string(
                b"\x81\xa1x\x83" + 2 * b"\xa4data\x01" + b"\xa5field\x92\xa7batched\x80"
            ),
            "$.x: a key stands twice - expected data, field, got 'data'",
        ),
        (
            pybase64.b64encode_as_string(msgspec.msgpack.encode({}) + b"\x00"),
            "bytes are left after the message - got 1 bytes",
        ),
        (b"", "$: the message ends where a value should be"),
        (7, "an item is base64 text - expected str or bytes, got int"),
    ],
)
def test_what_is_no_item_is_refused_by_name(text, message):
    with pytest.raises(CodecError) as caught:
        decode_mm_kwargs_item(text)
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["gA=", "gA", "gA==\n", " gA==", "gB==", "g-_=", "g\u00e9==", "gA==gA=="])
def test_base64_is_strict(text):
    with pytest.raises(CodecError) as caught:
        decode_mm_kwargs_item(text)
    assert str(caught.value) == (
        "this is not strict base64 - expected the standard alphabet, padded to fours, "
        "no bits after the last byte, and nothing else"
    )


@pytest.mark.parametrize("extra", [0, 1, 2, 3, 196_608 * 4])
@pytest.mark.parametrize("convert", [bytes, bytearray, memoryview, lambda text: str(text, "ascii")])
def test_long_base64_is_read_in_pieces_and_as_strictly(extra, convert, monkeypatch):
    monkeypatch.setattr(strict_base64, "_WHOLE", 1 << 20)
    raw = np.random.default_rng(0).integers(0, 256, 1_000_000 + extra, dtype=np.uint8).tobytes()
    text = pybase64.b64encode(raw)
    assert strict_base64.decode_base64(convert(text)) == raw
    piece = 1 << 18
    padded = text[: piece - 4] + b"AA==" + text[piece:]
    for broken in (
        padded,
        text[:-1],
        text + b"A",
        text[:-4] + b"\n" + text[-4:],
        b"-" + text[1:],
        text[:-2] + b"B=",
    ):
        with pytest.raises(CodecError):
            strict_base64.decode_base64(convert(broken))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(max_bytes=10), "the item is too large - expected at most max_bytes=10"),
        (Limits(max_values=5), "$.x.data[0]: too many values - expected at most max_values=5"),
        (Limits(max_ndim=1), "$.x.data[0]: too many dimensions - expected at most max_ndim=1"),
        (Limits(max_depth=0), "$.x.data: too many arrays inside each other - expected at most 0"),
    ],
)
def test_limits_hold_while_reading(limits, message):
    text = wire_item([["uint8", [1, 2], Ext(3, b"ab")]])
    with pytest.raises(LimitError) as caught:
        decode_mm_kwargs_item(text, limits=limits)
    assert str(caught.value) == message


@pytest.mark.parametrize("filler", [b"\x90", b"\x80", b"\x91", b"\x81\xa0"])
def test_ten_megabytes_of_containers_cost_next_to_nothing(filler):
    import tracemalloc

    head = b"\x81\xa1x\x82\xa4data\xdd\x00\x98\x96\x80"
    text = pybase64.b64encode(head + filler * (10_000_000 // len(filler)))
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            decode_mm_kwargs_item(text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(text)


NO_VALUE = "{}: vLLM's items do not hold such values - expected a tensor, a number or a list of these, got {}"


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"x": FieldElem({1}, BatchedField())}, NO_VALUE.format("$.x", "set")),
        ({"x": FieldElem([None], BatchedField())}, NO_VALUE.format("$.x[0]", "NoneType")),
        ({"x": FieldElem(2**64, BatchedField())}, "$.x: an integer needs more than 64 bits"),
        ({"x": FieldElem(np.array(["2020"], "M8[Y]"), BatchedField())}, "$.x: torch has no dtype datetime64"),
        (
            {"x": FieldElem(1, FlatField((slice(0, 1.5),)))},
            "$.x.field: an integer of 64 bits is needed - got 1.5",
        ),
        ({"x": FieldElem(1, None)}, "$.x.field: this is no field - got NoneType"),
        ({"\ud800": FieldElem(1, BatchedField())}, r"$: a key cannot be written as UTF-8 - got '\ud800'"),
        ({"x": 1}, "$: an item maps text to FieldElem - got 'x': int"),
    ],
)
def test_what_the_format_lacks_is_refused(item, message):
    with pytest.raises(UnsupportedTypeError) as caught:
        encode_mm_kwargs_item(item)
    assert str(caught.value) == message


QWEN = {
    "pixel_values": np.arange(28 * 12, dtype=np.uint8).reshape(28, 12),
    "image_grid_thw": np.array([[1, 4, 4], [1, 2, 6]]),
}


def test_a_batch_is_cut_into_items_and_joined_again():
    items = split_items(layout_of("Qwen2VLForConditionalGeneration"), QWEN)["image"]
    assert items[1]["pixel_values"].field == FlatField(((slice(0, 16),), (slice(16, 28),)))
    assert items[0]["image_grid_thw"].field == BatchedField(keep_on_cpu=True)
    assert items[0]["image_grid_thw"].data.tolist() == [1, 4, 4]
    joined = join_items([decode_mm_kwargs_item(encode_mm_kwargs_item(item)) for item in items])
    assert joined.keys() == QWEN.keys()
    assert all(np.array_equal(joined[key], QWEN[key]) for key in QWEN)


def test_items_made_one_image_at_a_time_equal_those_of_the_batch():
    layout = layout_of("Qwen2VLForConditionalGeneration")
    rows = ((0, 16), (16, 28))
    outputs = [
        {"pixel_values": QWEN["pixel_values"][a:b], "image_grid_thw": QWEN["image_grid_thw"][[index]]}
        for index, (a, b) in enumerate(rows)
    ]
    whole = split_items(layout, QWEN)["image"]
    assert [encode_mm_kwargs_item(item) for item in collate_items(layout, outputs)] == [
        encode_mm_kwargs_item(item) for item in whole
    ]


def test_torch_and_raw_tensors_are_joined_too():
    bits = RawTensor("bfloat16", np.arange(10, dtype=np.uint16).reshape(5, 2))
    layout = layout_of("Gemma3ForConditionalGeneration")
    items = split_items(layout, {"pixel_values": bits, "num_patches": np.array([2, 3])})["image"]
    assert join_items(items)["pixel_values"] == bits
    texts = [encode_mm_kwargs_item(item) for item in items]
    joined = join_items([decode_mm_kwargs_item(text, framework="torch") for text in texts])
    assert torch.equal(
        joined["pixel_values"].view(torch.int16), torch.arange(10, dtype=torch.int16).view(5, 2)
    )


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {**QWEN, "image_sizes": np.zeros((2, 2), np.int64)},
            "$.image_sizes: the layout qwen2_vl has no such field, and vLLM would drop it - "
            "expected some of "
            "pixel_values, image_embeds, image_grid_thw, pixel_values_videos, video_embeds, "
            "video_grid_thw, timestamps",
        ),
        (
            {"pixel_values": QWEN["pixel_values"][:20], "image_grid_thw": QWEN["image_grid_thw"]},
            "$.pixel_values: image_grid_thw does not add up to the rows - expected 28 rows, got 20",
        ),
        (
            {"pixel_values": QWEN["pixel_values"]},
            "$: pixel_values cannot be cut without image_grid_thw - expected image_grid_thw, got "
            "pixel_values",
        ),
        (
            {"image_embeds": np.zeros((7, 2)), "image_grid_thw": QWEN["image_grid_thw"]},
            "$.image_embeds: image_embeds needs the model's spatial_merge_size",
        ),
    ],
)
def test_a_batch_that_does_not_fit_its_layout_is_refused(inputs, message):
    with pytest.raises(EncodeError) as caught:
        split_items(layout_of("Qwen2VLForConditionalGeneration"), inputs)
    assert str(caught.value) == message


def test_unknown_architectures_are_refused():
    with pytest.raises(EncodeError, match="no field layout for 'Nobody'"):
        layout_of("Nobody")
    names = [name for layout in LAYOUTS for name in layout.architectures]
    assert len(names) == len(set(names))


def test_reading_items_imports_neither_vllm_nor_torch():
    code = (
        "import sys, mmcodecs.vllm_items, mmcodecs.vllm_batch\n"
        "print([m for m in ('torch', 'vllm') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
