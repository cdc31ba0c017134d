"""Laws of vLLM's items: what is written is read again, and whatever is read raises nothing but CodecError."""

import contextlib

import msgspec
import numpy as np
import pybase64
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcodecs.arrays import BY_ID, RawTensor
from mmcodecs.errors import CodecError
from mmrender.client.vllm_fields import LAYOUTS, collate_items
from mmrender.media.vllm_items import (
    BatchedField,
    FieldElem,
    FlatField,
    SharedField,
    decode_mm_kwargs_item,
    encode_mm_kwargs_item,
    join_items,
)
from vllm_cases import batch_of, described, described_item, outputs_of

# torch says so once whenever a complex32 tensor is made.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
ROWS = list(BY_ID.values())


@st.composite
def tensors(draw):
    row = draw(st.sampled_from(ROWS))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    count = int(np.prod(shape, dtype=int))
    raw = draw(st.binary(min_size=count * row.itemsize, max_size=count * row.itemsize))
    if row.name == "bool":
        raw = bytes(byte & 1 for byte in raw)
    array = np.frombuffer(raw, f"<{row.carrier}").reshape(shape)
    if not row.in_numpy:
        return RawTensor(row.name, array)
    change = draw(
        st.sampled_from([lambda a: a, lambda a: a.T, lambda a: a.astype(a.dtype.newbyteorder(">"))])
    )
    return change(array)


values = st.recursive(
    st.one_of(tensors(), st.integers(-(2**63), 2**64 - 1), st.booleans(), st.floats(allow_nan=False)),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
bounds = st.none() | st.integers(-(2**31), 2**31)
slices = st.recursive(
    st.builds(slice, bounds, bounds, bounds), lambda inner: st.lists(inner, max_size=3).map(tuple)
)
fields = st.one_of(
    st.builds(BatchedField, st.booleans()),
    st.builds(FlatField, slices, st.integers(-3, 3), st.booleans()),
    st.builds(SharedField, st.integers(0, 99), st.booleans()),
)
items = st.dictionaries(st.text(max_size=8), st.builds(FieldElem, st.none() | values, fields), max_size=4)


def little(data):
    """A value as the wire holds it: little-endian."""
    if isinstance(data, list):
        return [little(entry) for entry in data]
    return data.astype(data.dtype.newbyteorder("<")) if isinstance(data, np.ndarray) else data


@given(items, st.booleans(), st.sampled_from(["numpy", "torch"]))
@settings(max_examples=100)
def test_reading_undoes_writing(item, copy, framework):
    text = encode_mm_kwargs_item(item)
    expected = {key: FieldElem(little(elem.data), elem.field) for key, elem in item.items()}
    found = decode_mm_kwargs_item(text, copy=copy, framework=framework)
    assert described_item(found) == described_item(expected)
    assert encode_mm_kwargs_item(found) == text
    assert pybase64.b64decode(text, validate=True)[:1] == bytes([0x80 + len(item)])


@given(items)
@settings(max_examples=100)
def test_a_general_msgpack_reader_finds_the_documented_form(item):
    raw = pybase64.b64decode(encode_mm_kwargs_item(item), validate=True)
    plain = msgspec.msgpack.decode(raw)
    assert list(plain) == list(item)
    for key, elem in item.items():
        assert plain[key].keys() == {"data", "field"}
        assert plain[key]["field"][0] == type(elem.field).__name__.removesuffix("Field").lower()


@given(items, st.data())
@settings(max_examples=150)
def test_damaged_messages_raise_only_codec_errors(item, data):
    raw = bytearray(pybase64.b64decode(encode_mm_kwargs_item(item)))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(raw)))
        stop = data.draw(st.integers(start, min(len(raw), start + 4)))
        raw[start:stop] = data.draw(st.binary(max_size=4))
    for framework in ("numpy", "torch"):
        with contextlib.suppress(CodecError):
            encode_mm_kwargs_item(decode_mm_kwargs_item(pybase64.b64encode(raw), framework=framework))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_items_made_one_by_one_join_to_the_batch(layout):
    for modality in {spec.modality for spec in layout.fields.values()}:
        items = collate_items(layout, outputs_of(layout, modality), spatial_merge_size=2)
        batch = batch_of(layout, modality)
        joined = join_items(items)
        assert {key: described(value) for key, value in joined.items()} == {
            key: described(value) for key, value in batch.items()
        }
        for elems in zip(*(item.values() for item in items), strict=True):
            field = elems[0].field
            if isinstance(field, FlatField):
                first, second = (elem.data.shape[field.dim] for elem in elems)
                before = (slice(None),) * field.dim
                ends = (slice(0, first), slice(first, first + second))
                assert field.slices == tuple((*before, end) for end in ends)
