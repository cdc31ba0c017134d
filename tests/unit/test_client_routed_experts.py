"""Router choices: three wire forms, and large texts taken out of a reply."""

import io
import json
from typing import Any

import numpy as np
import pybase64
import pytest
from mmrender.client.large_text import SMALLEST, cut_large_texts, decode_reply, decode_reply_whole

from mmrender.client.reply import experts_from_int32, experts_from_mapping, experts_from_npy
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


def test_vllm_sends_an_npy_file() -> None:
    array = CHOICES.astype(np.uint8)
    experts = experts_from_npy(npy(array))
    assert experts == RoutedExperts(array)
    assert experts.shape == (ROWS, LAYERS, TOP_K)
    assert (experts.dtype, experts.start, experts.stop) == (np.uint8, 0, PROMPT + COMPLETION - 1)
    assert not experts.data.flags.writeable
    assert experts_from_npy(npy(array), start=2).start == 2


def test_sglang_sends_int32_without_a_shape() -> None:
    text = base64(CHOICES.astype("<i4").tobytes())
    experts = experts_from_int32(text, rows=ROWS, layers=LAYERS, top_k=TOP_K)
    assert experts == RoutedExperts(CHOICES.astype(np.int32))
    start = 3
    tail = base64(CHOICES[start:].astype("<i4").tobytes())
    trimmed = experts_from_int32(
        tail, rows=PROMPT + COMPLETION - 1 - start, layers=LAYERS, top_k=TOP_K, start=start
    )
    assert trimmed == experts.from_position(start)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_dynamo_sends_shape_start_and_dtype(dtype: str) -> None:
    array = CHOICES.astype(dtype)
    value = {"data": base64(array.tobytes()), "shape": list(array.shape), "start": 0, "dtype": dtype}
    assert experts_from_mapping(value) == RoutedExperts(array)
    data = memoryview(value["data"].encode())
    assert experts_from_mapping({**value, "data": "", "start": 4}, data) == RoutedExperts(array, 4)


def test_the_last_token_has_no_row() -> None:
    experts = experts_from_npy(npy(CHOICES.astype(np.uint8)))
    assert len(experts.data) == PROMPT + COMPLETION - 1
    assert experts.stop == PROMPT + COMPLETION - 1


def test_prompt_rows_are_trimmed_only_when_asked() -> None:
    array = CHOICES.astype(np.uint8)
    experts = experts_from_npy(npy(array))
    assert len(experts.data) == ROWS
    trimmed = experts.from_position(PROMPT - 1)
    assert trimmed == RoutedExperts(array[PROMPT - 1 :], PROMPT - 1)
    assert np.shares_memory(trimmed.data, experts.data)


def malformed(where: str, expected: str, got: str) -> str:
    return f"{where}: the routed experts of the reply are malformed - expected {expected}, got {got}"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("!!", malformed("x", "base64 text", "Non-base64 digit found")),
        (3, malformed("x", "base64 text", "int")),
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
    ids=["no base64", "no text", "no magic", "version", "floats", "flat", "fortran", "pickle", "cut short"],
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
        (None, malformed("x", "an object with data, dtype, shape, start", "None")),
        ({"data": ""}, malformed("x", "an object with data, dtype, shape, start", "{'data': ''}")),
        ({**GOOD, "shape": [8, 3, -2]}, malformed("x.shape", "a list of sizes", "[8, 3, -2]")),
        (
            {**GOOD, "shape": [8, 6]},
            malformed("x", "integers of shape (rows, layers, top_k)", "uint8 [8, 6]"),
        ),
        ({**GOOD, "shape": [8, 3, 3]}, malformed("x", "72 bytes for uint8 [8, 3, 3]", "48 bytes")),
        ({**GOOD, "dtype": "float32"}, malformed("x.dtype", "the name of an integer type", "'float32'")),
        ({**GOOD, "dtype": "object"}, malformed("x.dtype", "the name of an integer type", "'object'")),
        ({**GOOD, "start": -1}, malformed("x.start", "a position", "-1")),
        ({**GOOD, "data": 3}, malformed("x.data", "base64 text", "int")),
    ],
    ids=["none", "missing", "negative", "flat", "too few", "float", "object", "start", "no text"],
)
def test_mappings_that_do_not_fit_are_refused(value: Any, message: str) -> None:
    with pytest.raises(EngineReplyError) as caught:
        experts_from_mapping(value, where="x")
    assert str(caught.value) == message


def test_int32_of_another_size_is_refused() -> None:
    with pytest.raises(EngineReplyError) as caught:
        experts_from_int32(base64(bytes(44)), rows=4, layers=3, top_k=1, where="x")
    assert str(caught.value) == malformed("x", "48 bytes for int32 [4, 3, 1]", "44 bytes")


# --- large texts ---

BIG = base64(bytes(SMALLEST))


def views(value: Any) -> list[memoryview]:
    if isinstance(value, memoryview):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [view for member in inner for view in views(member)]


def whole(value: Any) -> Any:
    if isinstance(value, memoryview):
        return bytes(value).decode()
    if isinstance(value, dict):
        return {name: whole(member) for name, member in value.items()}
    return [whole(member) for member in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("reply", "taken"),
    [
        ({"choices": [{"routed_experts": BIG, "token_ids": [1, 2]}]}, 1),
        ({"nvext": {"routed_experts": {"data": BIG, "shape": [1, 2, 3], "start": 0, "dtype": "uint8"}}}, 1),
        ({"routed_experts": {"shape": [1, 2], "start": 0, "dtype": "uint8", "data": BIG}}, 1),
        ({"a": {"routed_experts": BIG}, "b": {"routed_experts": {"data": BIG}}}, 2),
        ({"routed_experts": None, "other": BIG}, 0),
        ({"data": BIG}, 0),
        ({"routed_experts": "short"}, 0),
        ({"routed_experts": [BIG]}, 0),
        ({"routed_experts": {"nested": {"data": BIG}}}, 0),
        ({"routed_experts": {"shape": [[1], [2]], "data": BIG}}, 0),
        ({"text": f'"routed_experts":"{BIG}"'}, 0),
        ({"text": 'said "routed_experts', "routed_experts": BIG}, 1),
        ({f'key "routed_experts": "{BIG}': 1, "routed_experts": BIG}, 1),
        ({"text": "\\", "routed_experts": BIG}, 1),
        ({"routed_experts": BIG + '"' + BIG}, 0),
        ({"routed_experts": BIG + "\\"}, 0),
        (["routed_experts", BIG], 0),
        ([1, {"routed_experts": BIG}], 1),
    ],
)
def test_large_texts_are_views_and_the_rest_is_the_same(reply: Any, taken: int) -> None:
    for body in (json.dumps(reply).encode(), json.dumps(reply, separators=(",", ":")).encode()):
        decoded = decode_reply(body)
        assert len(views(decoded)) == taken
        assert whole(decoded) == decode_reply_whole(body) == reply
        for view in views(decoded):
            assert view.obj is body


@pytest.mark.parametrize(
    "make", [bytes, bytearray, memoryview, lambda body: memoryview(bytearray(b"  " + body))[2:]]
)
def test_replies_come_in_any_buffer(make: Any) -> None:
    body = json.dumps({"routed_experts": BIG}).encode()
    assert whole(decode_reply(make(body))) == {"routed_experts": BIG}


def test_texts_are_found_from_the_cut_body() -> None:
    cut = cut_large_texts(json.dumps({"id": "a", "routed_experts": BIG}).encode())
    assert len(cut.body) < 120
    decoded = decode_reply_whole(cut.body)
    assert bytes(cut.text(decoded["routed_experts"])).decode() == BIG
    assert cut.text(decoded["id"]) == "a"
    assert cut.text(None) is None


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"routed_experts":"', b'{"routed_experts"', b'{"routed_experts":{"data":', b"\xff"]
)
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(EngineReplyError, match="the server's reply is not JSON"):
        decode_reply(body)
