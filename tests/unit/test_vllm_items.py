"""vLLM's multimodal items: recorded ones both ways, field layouts, and what is refused."""

import json
from itertools import count
from pathlib import Path

import msgspec
import numpy as np
import pybase64
import pytest
import torch

from kit import error_of
from mmcodecs.arrays import RawTensor
from mmcodecs.errors import CodecError, EncodeError, LimitError, UnsupportedTypeError
from mmcodecs.values import Limits
from mmrender.client.vllm_fields import LAYOUTS, collate_items, layout_of
from mmrender.media.vllm_items import (
    BatchedField,
    FieldElem,
    FlatField,
    decode_mm_kwargs_item,
    encode_mm_kwargs_item,
    join_items,
)
from vllm_cases import described_item

RECORDED = sorted((Path(__file__).parents[1] / "data" / "vllm_items").glob("*.json"))
assert len(RECORDED) >= 9


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_items_recorded_from_vllm_read_and_write_alike(path, framework):
    record = json.loads(path.read_text())
    for copy in (False, True):
        item = decode_mm_kwargs_item(record["text"], framework=framework, copy=copy)
        assert described_item(item) == record["item"]
        assert list(item) == list(record["item"])
        assert encode_mm_kwargs_item(item) == record["text"]
        for elem in item.values():
            if isinstance(elem.data, np.ndarray) and elem.data.size:
                assert elem.data.flags.writeable is copy


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


FLOATS = Ext(3, b"abcd")


@pytest.mark.parametrize(
    "text",
    [
        *(wire_item(["float32", [1], part]) for part in (Ext(1, b"a"), 7, {"handle": 1})),
        wire_item(["float32", [2], FLOATS]),
        wire_item(["float32", [-1], FLOATS]),
        wire_item(["__class__", [1], FLOATS]),
        wire_item(["float32", [0, 2**62], Ext(3, b"")]),
        wire_item(["float32", [1]]),
        wire_item("text"),
        wire_item([None]),
        wire_item(1, ("scattered", {})),
        wire_item(1, ("flat", {"dim": 0})),
        wire_item(1, ("batched", {"extra": 0})),
        wire_item(1, ("flat", {"slices": [[1, 2]]})),
        wire([1]),
        b"",
    ],
    ids=count(),
)
def test_what_is_not_an_item_is_refused_by_name(text, sentence):
    assert error_of(CodecError, decode_mm_kwargs_item, text) == sentence


@pytest.mark.parametrize("text", ["gA=", "gA", "gA==\n", " gA==", "g-_=", "g\u00e9==", "gA==gA=="])
def test_base64_is_strict(text):
    assert "not standard padded base64" in error_of(CodecError, decode_mm_kwargs_item, text)


@pytest.mark.parametrize(
    "limits",
    [
        Limits(max_bytes=10),
        Limits(max_values=5),
        Limits(max_ndim=1),
        Limits(max_depth=0),
        Limits(max_head_bytes=5),
    ],
)
def test_limits_hold_while_reading(limits, sentence):
    text = wire_item([["uint8", [1, 2], Ext(3, b"ab")]])
    assert error_of(LimitError, decode_mm_kwargs_item, text, limits=limits) == sentence


@pytest.mark.parametrize("filler", [b"\x90", b"\x80", b"\x91", b"\x81\xa0"])
def test_ten_megabytes_of_containers_cost_next_to_nothing(filler):
    import tracemalloc

    head = b"\x81\xa1x\x82\xa4data\xdd\x00\x98\x96\x80"
    field = b"\xa5field" + msgspec.msgpack.encode(("batched", {}))
    text = pybase64.b64encode(head + filler * 10_000_000 + field)
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            decode_mm_kwargs_item(text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(text)


@pytest.mark.parametrize(
    "elem",
    [
        FieldElem([{1}], BatchedField()),
        FieldElem(2**64, BatchedField()),
        FieldElem(np.array(["2020"], "M8[Y]"), BatchedField()),
        FieldElem(1, None),
        1,
    ],
)
def test_what_the_format_lacks_is_refused(elem, sentence):
    assert error_of(UnsupportedTypeError, encode_mm_kwargs_item, {"x": elem}) == sentence


QWEN = {
    "pixel_values": np.arange(28 * 12, dtype=np.uint8).reshape(28, 12),
    "image_grid_thw": np.array([[1, 4, 4], [1, 2, 6]]),
}


ROWS = ((0, 16), (16, 28))
OUTPUTS = [
    {"pixel_values": QWEN["pixel_values"][a:b], "image_grid_thw": QWEN["image_grid_thw"][[index]]}
    for index, (a, b) in enumerate(ROWS)
]


def test_outputs_become_items_that_join_to_the_batch():
    items = collate_items(layout_of("Qwen2VLForConditionalGeneration"), OUTPUTS)
    assert items[1]["pixel_values"].field == FlatField(((slice(0, 16),), (slice(16, 28),)))
    assert items[0]["image_grid_thw"].field == BatchedField(keep_on_cpu=True)
    assert items[0]["image_grid_thw"].data.tolist() == [1, 4, 4]
    assert np.shares_memory(items[1]["pixel_values"].data, QWEN["pixel_values"])
    joined = join_items([decode_mm_kwargs_item(encode_mm_kwargs_item(item)) for item in items])
    assert joined.keys() == QWEN.keys()
    assert all(np.array_equal(joined[key], QWEN[key]) for key in QWEN)


def test_torch_and_raw_tensors_are_joined_too():
    bits = [np.arange(4, dtype=np.uint16).reshape(2, 2), np.arange(4, 10, dtype=np.uint16).reshape(3, 2)]
    outputs = [
        {"pixel_values": RawTensor("bfloat16", part), "num_patches": np.array([len(part)])} for part in bits
    ]
    items = collate_items(layout_of("Gemma3ForConditionalGeneration"), outputs)
    assert join_items(items)["pixel_values"] == RawTensor("bfloat16", np.concatenate(bits))
    texts = [encode_mm_kwargs_item(item) for item in items]
    joined = join_items([decode_mm_kwargs_item(text, framework="torch") for text in texts])
    assert torch.equal(
        joined["pixel_values"].view(torch.int16), torch.arange(10, dtype=torch.int16).view(5, 2)
    )


@pytest.mark.parametrize(
    "outputs",
    [
        [{**OUTPUTS[0], "image_sizes": np.zeros((1, 2), np.int64)}],
        [{**OUTPUTS[0], "pixel_values": QWEN["pixel_values"][:20]}],
        [{"pixel_values": QWEN["pixel_values"]}],
        [{"image_embeds": np.zeros((7, 2)), "image_grid_thw": QWEN["image_grid_thw"][:1]}],
        [QWEN],
        [OUTPUTS[0], {"image_grid_thw": QWEN["image_grid_thw"][:1]}],
    ],
)  # fmt: skip
def test_outputs_that_do_not_fit_their_layout_are_refused(outputs, sentence):
    problem = error_of(EncodeError, collate_items, layout_of("Qwen2VLForConditionalGeneration"), outputs)
    assert problem == sentence


def test_unknown_architectures_are_refused():
    assert "no field layout for 'Nobody'" in error_of(EncodeError, layout_of, "Nobody")
    names = [name for layout in LAYOUTS for name in layout.architectures]
    assert len(names) == len(set(names))
