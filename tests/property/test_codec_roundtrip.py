"""`decode(encode(x))` is `x`: every dtype, stride, byte order and container, in every form and framework."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmcodecs
from codec_values import as_seen, identical, leaves, texts, values

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


@settings(max_examples=100)
@given(values, forms, frameworks, st.booleans())
def test_a_value_comes_back(value: Any, form: str, framework: Any, copy: bool) -> None:
    got = mmcodecs.decode(FORMS[form](value), framework=framework, copy=copy)
    assert identical(as_seen(value, framework), got)
    if isinstance(value, torch.Tensor) and framework == "torch":
        assert got.stride() == torch.empty(value.shape).stride()


@settings(max_examples=60)
@given(st.dictionaries(texts, leaves, max_size=4))
def test_all_forms_say_the_same_bytes(value: dict[str, Any]) -> None:
    single = bytes(mmcodecs.encode(value))
    assert single == b"".join(mmcodecs.encode_parts(value))
    assert single == bytes(mmcodecs.encode(value, buffer=mmcodecs.BufferPool()))


@settings(max_examples=60)
@given(values)
def test_encoding_what_was_decoded_changes_nothing(value: Any) -> None:
    # Tensors become arrays or raw bits, of another kind on the wire, but the same from then on.
    once = bytes(mmcodecs.encode(mmcodecs.decode(mmcodecs.encode(value))))
    assert bytes(mmcodecs.encode(mmcodecs.decode(once))) == once


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_the_strategies_reach_every_leaf(kind: str) -> None:
    # A strategy that never drew a tensor would make the laws above say nothing about tensors.
    seen = set()

    @settings(max_examples=150)
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
