"""Router choices: three wire forms."""

import io
from typing import Any

import numpy as np
import pybase64
import pytest

from mmrender.client.reply import (
    ReportedExperts,
    convert,
    experts_from_int32,
    experts_from_mapping,
    experts_from_npy,
)
from mmrender.errors import EngineReplyError
from mmrender.trajectory.engine_data import RoutedExperts

PROMPT, COMPLETION, LAYERS, TOP_K = 5, 4, 3, 2
ROWS = PROMPT + COMPLETION - 1
CHOICES = np.random.default_rng(0).integers(0, 128, (ROWS, LAYERS, TOP_K))


def base64(raw: bytes) -> str:
    return pybase64.b64encode(raw).decode()


def npy(array: Any, **options: Any) -> str:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return base64(stream.getvalue())


def of_mapping(value: Any) -> RoutedExperts:
    return experts_from_mapping(convert(value, ReportedExperts, where="x"), where="x")


def test_vllm_sends_an_npy_file() -> None:
    array = CHOICES.astype(np.uint8)
    experts = experts_from_npy(npy(array), where="x")
    assert experts == RoutedExperts(array)
    assert experts.shape == (ROWS, LAYERS, TOP_K)
    assert (experts.dtype, experts.start, experts.stop) == (np.uint8, 0, PROMPT + COMPLETION - 1)
    assert not experts.data.flags.writeable
    assert experts_from_npy(npy(array), start=2, where="x").start == 2


def test_sglang_sends_int32_without_a_shape() -> None:
    text = base64(CHOICES.astype("<i4").tobytes())
    experts = experts_from_int32(text, rows=ROWS, layers=LAYERS, top_k=TOP_K, where="x")
    assert experts == RoutedExperts(CHOICES.astype(np.int32))
    start = 3
    tail = base64(CHOICES[start:].astype("<i4").tobytes())
    trimmed = experts_from_int32(
        tail, rows=PROMPT + COMPLETION - 1 - start, layers=LAYERS, top_k=TOP_K, start=start, where="x"
    )
    assert trimmed == experts.from_position(start)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_dynamo_sends_shape_start_and_dtype(dtype: str) -> None:
    array = CHOICES.astype(dtype)
    value = {"data": base64(array.tobytes()), "shape": list(array.shape), "dtype": dtype}
    assert of_mapping(value) == RoutedExperts(array)
    assert of_mapping({**value, "start": 4}) == RoutedExperts(array, 4)


def malformed(where: str, expected: str, got: str) -> str:
    return f"{where}: the routed experts of the reply are malformed - expected {expected}, got {got}"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("!!", malformed("x", "base64 text", "Non-base64 digit found")),
        (base64(b"nothing"), None),
        (base64(b"\x93NUMPY\x09\x00"), malformed("x", "base64 of an .npy file", "(9, 0)")),
        (
            npy(CHOICES.astype(np.float32)),
            malformed("x", "integers of shape (rows, layers, top_k)", "float32 [8, 3, 2]"),
        ),
        (
            npy(CHOICES.astype(np.uint8)[0]),
            malformed("x", "integers of shape (rows, layers, top_k)", "uint8 [3, 2]"),
        ),
        (
            npy(np.asfortranarray(CHOICES.astype(np.uint8))),
            malformed("x", "an array in C order", "Fortran order"),
        ),
        (
            npy(np.array([[[{}]]], object), allow_pickle=True),
            malformed("x", "integers of shape (rows, layers, top_k)", "object [1, 1, 1]"),
        ),
        (
            base64(pybase64.b64decode(npy(CHOICES.astype(np.uint8)))[:-1]),
            malformed("x", "48 bytes for uint8 [8, 3, 2]", "47 bytes"),
        ),
    ],
    ids=["no base64", "no magic", "version", "floats", "flat", "fortran", "pickle", "cut short"],
)
def test_npy_files_that_are_none_are_refused(data: Any, message: str | None) -> None:
    with pytest.raises(EngineReplyError) as caught:
        experts_from_npy(data, where="x")
    if message is not None:
        assert str(caught.value) == message


GOOD = {"data": base64(bytes(48)), "shape": [8, 3, 2], "start": 0, "dtype": "uint8"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"data": ""}, "x: the server's reply is malformed - got Object missing required field shape"),
        ({**GOOD, "shape": [8, 3, -2]}, "x: the routed experts of the reply are malformed"),
        ({**GOOD, "shape": [8, 3, 3]}, malformed("x", "72 bytes for uint8 [8, 3, 3]", "48 bytes")),
        ({**GOOD, "shape": [2**40, 2**40, 2**40]}, "x: the routed experts of the reply are malformed"),
        ({**GOOD, "dtype": "float32"}, malformed("x.dtype", "the name of an integer type", "'float32'")),
        ({**GOOD, "start": -1}, "x: the routed experts of the reply are malformed"),
    ],
)
def test_mappings_that_do_not_fit_are_refused(value: Any, message: str) -> None:
    with pytest.raises(EngineReplyError) as caught:
        of_mapping(value)
    assert str(caught.value).startswith(message)


def test_int32_of_another_size_is_refused() -> None:
    with pytest.raises(EngineReplyError) as caught:
        experts_from_int32(base64(bytes(44)), rows=4, layers=3, top_k=1, where="x")
    assert str(caught.value) == malformed("x", "48 bytes for int32 [4, 3, 1]", "44 bytes")
