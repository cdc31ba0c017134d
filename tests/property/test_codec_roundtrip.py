"""`decode(encode(x))` is `x`: every dtype, stride, byte order and container, in every form and framework."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmcodecs
from codec_values import arrays, as_seen, identical, leaves, tensors, texts, values

# torch says so once whenever a complex32 tensor is made, here by the test itself.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

FORMS = {
    "single": mmcodecs.encode,
    "frames": mmcodecs.encode_frames,
    "parts": lambda value, **options: bytearray().join(mmcodecs.encode_parts(value, **options)),
    "bytes": lambda value, **options: bytes(mmcodecs.encode(value, **options)),
}
forms = st.sampled_from(sorted(FORMS))
frameworks = st.sampled_from(["numpy", "torch"])


@settings(max_examples=300)
@given(values, forms, frameworks, st.booleans())
def test_a_value_comes_back(value: Any, form: str, framework: Any, copy: bool) -> None:
    got = mmcodecs.decode(FORMS[form](value), framework=framework, copy=copy)
    assert identical(as_seen(value, framework), got)


@settings(max_examples=150)
@given(arrays(), forms)
def test_an_array_comes_back_in_its_byte_order(array: np.ndarray[Any, Any], form: str) -> None:
    got = mmcodecs.decode(FORMS[form]([array] * 2))
    assert identical(array, got[0])
    assert identical(array, got[1])
    assert array.nbytes <= 256 or got[1] is got[0]


@settings(max_examples=100)
@given(tensors(), forms)
def test_a_tensor_comes_back_with_its_dtype(tensor: Any, form: str) -> None:
    got = mmcodecs.decode(FORMS[form](tensor), framework="torch")
    assert identical(tensor, got)
    assert got.stride() == torch.empty(tensor.shape).stride()


@settings(max_examples=100)
@given(st.dictionaries(texts, leaves, max_size=4))
def test_all_forms_say_the_same_bytes(value: dict[str, Any]) -> None:
    single = bytes(mmcodecs.encode(value))
    assert single == b"".join(mmcodecs.encode_parts(value))
    assert single == bytes(mmcodecs.encode(value, buffer=mmcodecs.BufferPool()))
    body = single[64 + 24 * int.from_bytes(single[12:16], "little") :]
    assert body.startswith(
        bytes(mmcodecs.encode_frames(value)[0])[64 + 24 * int.from_bytes(single[12:16], "little") :]
    )


@settings(max_examples=100)
@given(values)
def test_encoding_what_was_decoded_changes_nothing(value: Any) -> None:
    # Tensors become arrays or raw bits, of another kind on the wire, but the same from then on.
    once = bytes(mmcodecs.encode(mmcodecs.decode(mmcodecs.encode(value))))
    assert bytes(mmcodecs.encode(mmcodecs.decode(once))) == once


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_the_strategies_reach_every_leaf(kind: str) -> None:
    # A strategy that never drew a tensor would make the laws above say nothing about tensors.
    seen = set()

    @settings(max_examples=300)
    @given(leaves)
    def collect(value: Any) -> None:
        seen.add(type(as_seen(value, kind)).__name__)

    collect()
    assert {
        "ndarray" if kind == "numpy" else "Tensor",
        "memoryview",
        "bytearray",
        "list",
        "RawTensor" if kind == "numpy" else "str",
    } <= seen
