"""Router choices: three wire forms."""

import io
from typing import Any

import numpy as np
import pybase64
import pytest

from kit import error_of
from mmrender.client.reply import ReportedExperts, routed_experts
from mmrender.client.types import EngineRequest
from mmrender.errors import EngineReplyError, EngineUnsupportedError
from mmrender.trajectory.engine_data import RoutedExperts

PROMPT, COMPLETION, LAYERS, TOP_K = 5, 4, 3, 2
ROWS = PROMPT + COMPLETION - 1
CHOICES = np.random.default_rng(0).integers(0, 128, (ROWS, LAYERS, TOP_K))
BYTES = CHOICES.astype(np.uint8)


def base64(raw: bytes) -> str:
    return pybase64.b64encode(raw).decode()


def npy(array: Any, **options: Any) -> str:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return base64(stream.getvalue())


def mapping(array: Any, **changes: Any) -> ReportedExperts:
    fields = {"data": base64(array.tobytes()), "shape": array.shape, "dtype": array.dtype.name}
    return ReportedExperts(**{**fields, **changes})


def read(data: Any, start: int | None = None, shape: tuple[int, int] | None = None) -> RoutedExperts:
    request = EngineRequest("m", [1] * PROMPT, {}, "r", routed_experts_prompt_start=start)
    experts = routed_experts(data, request, COMPLETION, shape=shape, where="x")
    assert experts is not None
    return experts


@pytest.mark.parametrize("start", [None, 0, 3, ROWS])
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "dynamo"])
def test_rows_begin_where_the_caller_asked(engine: str, start: int | None, first: int) -> None:
    if first not in (0, start):
        first = 0
    if engine == "vllm":
        kept, experts = BYTES, read(npy(BYTES[first:]), start)
    elif engine == "sglang":
        kept = CHOICES.astype("<i4")
        experts = read(base64(kept[first:].tobytes()), start, (LAYERS, TOP_K))
    else:
        kept, experts = BYTES, read(mapping(BYTES[first:], start=first), start)
    assert experts == RoutedExperts(kept[start or 0 :], start or 0)
    assert not experts.data.flags.writeable


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", ">i4"])
def test_integers_of_any_size_and_order(dtype: str) -> None:
    np.testing.assert_array_equal(read(npy(CHOICES.astype(dtype))).data, CHOICES)


@pytest.mark.parametrize(
    ("data", "got"),
    [
        ("!!", "Non-base64 digit found"),
        (base64(b"nothing"), "expected 8 bytes got 7"),
        (base64(b"\x93NUMPY\x09\x00"), "read_array_header_9_0"),
        (npy(CHOICES.astype(np.float32)), "float32 [8, 3, 2]"),
        (npy(BYTES[0]), "uint8 [3, 2]"),
        (npy(np.asfortranarray(BYTES)), "Fortran order"),
        (npy(np.array([[[{}]]], object), allow_pickle=True), "object [1, 1, 1]"),
        (base64(pybase64.b64decode(npy(BYTES))[:-1]), "47 bytes for 48 of uint8 [8, 3, 2]"),
        (mapping(BYTES, shape=(8, 3, -2)), "uint8 [8, 3, -2]"),
        (mapping(BYTES, shape=(8, 3, 3)), "48 bytes for 72 of uint8 [8, 3, 3]"),
        (mapping(BYTES, shape=(2**40,) * 3), "48 bytes for "),
        (mapping(BYTES, dtype="float32"), "float32 [8, 3, 2]"),
        (mapping(BYTES, dtype="no such"), "data type 'no such' not understood"),
        (mapping(BYTES, start=-1), "start -1"),
    ],
)
def test_arrays_that_cannot_be_read(data: Any, got: str, sentence: Any) -> None:
    problem = error_of(EngineReplyError, read, data)
    assert problem.partition(", got ")[0] == sentence
    assert got in problem


def test_int32_of_another_size_is_refused() -> None:
    with pytest.raises(EngineReplyError, match=r"44 bytes for 36 of int32 \[3, 3, 1\]"):
        read(base64(bytes(44)), shape=(3, 1))


def test_rows_of_another_number_or_none_at_all(sentence: Any) -> None:
    with pytest.raises(EngineReplyError, match="another number of routed rows - expected 8, got 7"):
        read(npy(BYTES[1:]), 2)
    assert error_of(EngineUnsupportedError, read, None) == sentence
    request = EngineRequest("m", [1] * PROMPT, {}, "r")
    assert routed_experts(None, request, 0, where="x") is None
