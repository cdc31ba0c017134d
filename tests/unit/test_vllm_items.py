"""vLLM's multimodal items: recorded ones both ways, field layouts, and what is refused."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pybase64
import pytest
import torch

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
    ("text", "message"),
    [
        *(
            (
                wire_item(["float32", [1], elements]),
                "$.x.data: not a tensor's elements; pickles and references to memory outside the message are "
                f"refused - expected Ext(3, elements), got {got}. "
                "Encode the item with all its tensors inside",
            )
            for elements, got in [(Ext(1, b"a"), "Ext code 1"), (7, "int"), ({"handle": 1}, "dict")]
        ),
        (wire_item(["float32", [2], FLOATS]), "$.x.data: float32 of shape (2,) does not fill its bytes"),
        (wire_item(["float32", [-1], FLOATS]), "$.x.data: malformed item: Expected `int` >= 0"),
        (wire_item(["__class__", [1], FLOATS]), "$.x.data: unknown dtype - expected a name of the dtype"),
        (wire_item(["float32", [0, 2**62], Ext(3, b"")]), "$.x.data: array too large to exist"),
        (wire_item(["float32", [1]]), "$.x.data: a tensor has three parts"),
        (wire_item("text"), "$.x.data: malformed item: Expected `bool | int | float | null`, got `str`"),
        (wire_item([None]), "$.x.data[0]: nil can only be a whole item"),
        (wire_item(1, ("scattered", {})), "$.x.field: an unknown kind of field - expected batched, flat, sh"),
        (wire_item(1, ("flat", {"dim": 0})), "$.x.field: malformed item: Object missing required field"),
        (wire_item(1, ("batched", {"extra": 0})), "$.x.field: malformed item: Object contains unknown field"),
        (wire_item(1, ("flat", {"slices": [[1, 2]]})), "$.x.field: not a slice"),
        (wire([1]), "$: malformed item: Expected `object`, got `array`"),
        (b"", "$: malformed item: Input data was truncated"),
    ],
)
def test_what_is_not_an_item_is_refused_by_name(text, message):
    with pytest.raises(CodecError) as caught:
        decode_mm_kwargs_item(text)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("text", ["gA=", "gA", "gA==\n", " gA==", "g-_=", "g\u00e9==", "gA==gA=="])
def test_base64_is_strict(text):
    with pytest.raises(CodecError, match="not standard padded base64"):
        decode_mm_kwargs_item(text)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(max_bytes=10), "Limits.max_bytes exceeded - expected at most 10, got 54"),
        (Limits(max_values=5), "$.x.data[0]: Limits.max_values exceeded - expected at most 5"),
        (Limits(max_ndim=1), "$.x.data[0]: Limits.max_ndim exceeded - expected at most 1, got 2"),
        (Limits(max_depth=0), "$.x.data: Limits.max_depth exceeded - expected at most 0"),
        (Limits(max_head_bytes=5), "$.x.field: Limits.max_head_bytes exceeded - expected at most 5, got 14"),
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
    ("elem", "message"),
    [
        (FieldElem([{1}], BatchedField()), "$.x[0]: builtins.set has no form on the wire"),
        (FieldElem(2**64, BatchedField()), "$.x.data: an integer beyond 64 bits"),
        (FieldElem(np.array(["2020"], "M8[Y]"), BatchedField()), "$.x: dtype datetime64[Y] has no form"),
        (FieldElem(1, None), "$.x.field: builtins.NoneType has no form"),
        (1, "$: an item maps text to FieldElem - got 'x': int"),
    ],
)
def test_what_the_format_lacks_is_refused(elem, message):
    with pytest.raises(UnsupportedTypeError) as caught:
        encode_mm_kwargs_item({"x": elem})
    assert str(caught.value).startswith(message)


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
    ("outputs", "message"),
    [
        ([{**OUTPUTS[0], "image_sizes": np.zeros((1, 2), np.int64)}], "$[0].image_sizes: the layout qwen2_vl "
         "has no such field, and vLLM would drop it"),
        ([{**OUTPUTS[0], "pixel_values": QWEN["pixel_values"][:20]}], "$[0].pixel_values: image_grid_thw "
         "does not add up to the rows - expected 16 rows, got 20"),
        ([{"pixel_values": QWEN["pixel_values"]}], "$[0]: pixel_values needs image_grid_thw - expected "
         "image_grid_thw, got pixel_values"),
        ([{"image_embeds": np.zeros((7, 2)), "image_grid_thw": QWEN["image_grid_thw"][:1]}],
         "$[0].image_embeds: image_embeds needs the model's spatial_merge_size"),
        ([QWEN], "$[0].pixel_values: each output must hold one item - got 2 image"),
        ([OUTPUTS[0], {"image_grid_thw": QWEN["image_grid_thw"][:1]}],
         "$[1]: each output must have the fields of the first - expected pixel_values, image_grid_thw, got "
         "image_grid_thw"),
    ],
)  # fmt: skip
def test_outputs_that_do_not_fit_their_layout_are_refused(outputs, message):
    with pytest.raises(EncodeError) as caught:
        collate_items(layout_of("Qwen2VLForConditionalGeneration"), outputs)
    assert str(caught.value).startswith(message)


def test_unknown_architectures_are_refused():
    with pytest.raises(EncodeError, match="no field layout for 'Nobody'"):
        layout_of("Nobody")
    names = [name for layout in LAYOUTS for name in layout.architectures]
    assert len(names) == len(set(names))
