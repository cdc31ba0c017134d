"""The tagged dict: against plain msgpack, as other libraries write and read it, and against hostile input."""

from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmcodecs
from codec_values import identical
from kit import error_of
from mmcodecs.tagged import decode_tensor_payload, to_tagged, walk_decode_tensors

TAG = "__torch_tensor__"


def peer_default(value: Any) -> Any:
    """What other libraries put on the wire for an array or a tensor."""
    array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
    return {TAG: True, "dtype": str(array.dtype), "shape": list(array.shape), "data": array.tobytes()}


def peer_hook(value: dict[Any, Any]) -> Any:
    if value.get(TAG):
        return np.frombuffer(value["data"], np.dtype(value["dtype"])).reshape(value["shape"])
    return value


def payload(**changes: Any) -> dict[str, Any]:
    return {TAG: True, "dtype": "int16", "shape": [2], "data": b"\x01\x00\x02\x00", **changes}


VALUE = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": [torch.arange(3), {"c": np.zeros((0, 4), np.uint8)}],
    "n": [1, "x", None, 2.5, b"raw"],
    "m": {TAG: "just a key"},
}


def test_plain_readers_and_writers_agree_with_ours() -> None:
    got = msgpack.unpackb(mmcodecs.encode_tagged({**VALUE, "m": 0}), object_hook=peer_hook)
    assert identical(VALUE["a"], got["a"])
    assert got["b"][0].tolist() == [0, 1, 2]
    assert (got["b"][1]["c"].shape, got["n"]) == ((0, 4), VALUE["n"])
    packed = msgpack.packb(VALUE, default=peer_default)
    got = mmcodecs.decode_tagged(packed)
    assert identical(VALUE["a"], got["a"])
    assert identical(VALUE["b"][0].numpy(), got["b"][0])
    assert got["m"] == VALUE["m"]
    assert torch.equal(mmcodecs.decode_tagged(packed, to_torch=True)["a"], torch.from_numpy(VALUE["a"]))


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary(),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text("abc"), inner, max_size=20),
)


@settings(max_examples=30, deadline=None)
@given(plain, st.sampled_from([1, 40, 2000]))
def test_every_form_of_msgpack(value: Any, times: int) -> None:
    value = {"many": [value] * times} if times > 1 else value
    assert mmcodecs.decode_tagged(msgpack.packb(value)) == value
    assert msgpack.unpackb(mmcodecs.encode_tagged(value), strict_map_key=False) == value


def test_every_dtype_of_torch_and_either_byte_order() -> None:
    for dtype in (torch.bfloat16, torch.float8_e5m2, torch.bool, torch.complex64, torch.uint16, torch.int64):
        tensor = torch.tensor([0, 1, 1]).to(dtype)
        got = mmcodecs.decode_tagged(mmcodecs.encode_tagged(tensor), to_torch=True)
        assert got.dtype == dtype
        assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))
    assert mmcodecs.decode_tagged(mmcodecs.encode_tagged(tensor.bfloat16())).dtype == "bfloat16"
    swapped = np.arange(5, dtype=">i4")[::2]
    written = to_tagged(swapped)
    assert written["dtype"] == "int32"
    assert decode_tensor_payload(written, to_torch=False).tolist() == [0, 2, 4]


def test_a_payload_is_decoded_and_anything_else_passes_unchanged() -> None:
    assert decode_tensor_payload(payload()).tolist() == [1, 2]
    assert decode_tensor_payload(payload(dtype="torch.int16"), to_torch=False).dtype == np.int16
    for other in (None, 5, [payload()], {"a": 1}):
        assert decode_tensor_payload(other) is other
    tree = {"a": [payload()], "t": (payload(),)}
    got = walk_decode_tensors(tree, to_torch=False)
    assert tree == {"a": [payload()], "t": (payload(),)}
    assert type(got["t"]) is tuple
    assert got["t"][0].tolist() == [1, 2]


@pytest.mark.parametrize("other", [
    {TAG: True}, {TAG: False, "dtype": "int16", "shape": [2], "data": b"1234"}, {**payload(), TAG: 1},
    {**payload(), "extra": 1}, {"dtype": "int16", "shape": [2], "data": b"1234"}, {TAG: "yes"},
])  # fmt: skip
def test_a_dict_that_merely_holds_the_tag_survives(other: dict[str, Any]) -> None:
    assert walk_decode_tensors({"x": [other]}) == {"x": [other]}
    assert mmcodecs.decode_tagged(mmcodecs.encode_tagged([other])) == [other]


def test_what_the_dialect_lacks_becomes_lists_and_numbers_or_is_refused() -> None:
    problem = error_of(mmcodecs.UnsupportedTypeError, mmcodecs.encode_tagged, {"x": [payload()]})
    assert problem == "$.x[0]: this dict would be read as a tensor. Pass the array itself"
    value = {"t": (1, 2), "f": np.float32(0.5), 3: "int key"}
    assert mmcodecs.decode_tagged(mmcodecs.encode_tagged(value)) == {"t": [1, 2], "f": 0.5, 3: "int key"}
    for value in ({"s": {1}}, {"s": np.array(["2026"], "M8[D]")}, {"s": object()}):
        assert error_of(mmcodecs.UnsupportedTypeError, mmcodecs.encode_tagged, value).startswith("$.s: ")
    for value, message in ((2**70, "an integer beyond 64 bits"), ({object(): 1}, "has no form on the wire")):
        with pytest.raises(mmcodecs.UnsupportedTypeError, match=message):
            mmcodecs.encode_tagged(value)


MALFORMED = [
    (payload(dtype="datetime64"), "unknown dtype - expected a name of the dtype table, got 'datetime64'"),
    (payload(dtype=["int16"]), "unknown dtype - expected a name of the dtype table, got ['int16']"),
    (payload(shape=[-1, 4]), "a shape is a list of integers, none negative - got [-1, 4]"),
    (payload(shape=[True, 2]), "a shape is a list of integers, none negative - got [True, 2]"),
    (payload(shape="2"), "a shape is a list of integers, none negative - got '2'"),
    (payload(shape=[3]), "int16 of shape (3,) does not fill its bytes - expected 6 bytes, got 4"),
    (payload(shape=[2**62, 2**62, 0], data=b""), "array too large to exist"),
    (payload(shape=[1] * 9), "Limits.max_ndim exceeded - expected at most 8, got 9"),
    (payload(data="text"), "not contiguous bytes - got str"),
]


@pytest.mark.parametrize(("broken", "message"), MALFORMED, ids=[message[:40] for _, message in MALFORMED])
def test_malformed_payloads_are_errors_with_their_path(broken: dict[str, Any], message: str) -> None:
    assert error_of(mmcodecs.CodecError, decode_tensor_payload, broken).startswith(message)
    problem = error_of(mmcodecs.CodecError, walk_decode_tensors, {"steps": [0, {"p": broken}]})
    assert problem.startswith(f"$.steps[1].p: {message}")


def test_arrays_are_read_only_views_and_tensors_writable_copies() -> None:
    data = bytes(range(4))
    array = decode_tensor_payload(payload(data=data), to_torch=False)
    assert np.shares_memory(array, np.frombuffer(data, np.uint8))
    assert not array.flags.writeable
    decode_tensor_payload(payload(data=data)).zero_()
    assert data == bytes(range(4))
    assert decode_tensor_payload(payload(data=data), to_torch=False, copy=True).flags.writeable


def test_loops_and_deep_trees_end_in_one_error() -> None:
    loop: list[Any] = []
    loop.append(loop)
    for call in (walk_decode_tensors, to_tagged):
        assert "max_depth exceeded" in error_of(mmcodecs.LimitError, call, loop)
    for opener in (b"\x91", b"\x81\xa0"):
        with pytest.raises(mmcodecs.CodecError):
            mmcodecs.decode_tagged(opener * 30_000 + b"\xc0")


NO_BYTES = [
    "text",
    7,
    None,
    {},
    object(),
    memoryview(b"abcdefgh")[::2],
    np.arange(8, dtype="u1")[::-1],
    [1],
    [b"a"],
    b"\xc1",
]


@pytest.mark.parametrize("value", NO_BYTES, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("read", [mmcodecs.decode, mmcodecs.decode_tagged, mmcodecs.Decoder().decode])
def test_what_is_not_a_message_is_a_codec_error(read, value):
    with pytest.raises(mmcodecs.CodecError):
        read(value)
