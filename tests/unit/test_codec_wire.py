"""Broken and hostile messages: each refused by the right error, in the right words, at the right place."""

import copy
import pickle
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec.msgpack import Ext, encode

import mmcodecs
from codec_fuzz import lay
from kit import error_of
from mmcodecs.errors import BufferTooSmallError


def message(body: bytes, payloads: list[bytes] = [], *, single: bool = True) -> bytes:  # noqa: B006
    """A message with this body, its layout right; in single mode with its payloads, else the head alone."""
    laid = lay(body, payloads, single=single)
    return laid[0] if isinstance(laid, list) else laid


def record(
    dtype: int = 6, flags: int = 0, shape: tuple[int, ...] = (4,), unit: int = 0, rest: bytes = b""
) -> Ext:
    fields = struct.pack(f"<BBBBI{len(shape)}Q", dtype, flags, len(shape), unit, 0, *shape)
    return Ext(1, fields + rest)


INLINE, FRAME_0 = 1 << 3, struct.pack("<I", 0)


def refusal(data: Any, **options: Any) -> str:
    return error_of(mmcodecs.CodecError, mmcodecs.decode, data, **options)


BODIES: dict[str, bytes] = {
    "trailing byte": b"\x01\x02",
    "array bomb": b"\xdd\xff\xff\xff\xff",
    "nil key in a tuple": encode([Ext(3, b"\x91\x81\xc0\x01")]),
    "text not UTF-8": b"\x91\xa1\xff",
    "long text not UTF-8": encode(Ext(7, b"\x03\x01\xff")),
    "packed list of lists": encode([1, Ext(2, b"\x91\x90")]),
    "record too short": encode([Ext(3, b"\x90"), Ext(1, b"\x06")]),
    "missing key": encode(record(flags=3 << 3, rest=b"k")),
}
EXTENSIONS = {
    "unknown extension": Ext(17, b""),
    "tuple of a map": Ext(3, b"\x80"),
    "data kind": Ext(7, b"\x09\x01"),
    "dtype id": record(99),
    "flags": record(flags=0x20),
    "unit": record(unit=3),
    "dimensions cut": Ext(1, bytes((6, 8, 3, 0)) + bytes(4)),
    "many dimensions": record(shape=(1,) * 9),
    "inline too short": record(flags=INLINE, rest=b"abc"),
    "product overflows": record(shape=(1 << 32, 1 << 32, 0), flags=INLINE),
    "scalar with a shape": record(flags=INLINE | 1, rest=b"abcd"),
    "no such frame": record(rest=FRAME_0),
    "frame index": record(rest=b"\0"),
    "empty key": record(flags=3 << 3),
    "long key": record(flags=3 << 3, rest=b"k" * 65),
}
BODIES |= {name: encode([extension]) for name, extension in EXTENSIONS.items()}


@pytest.mark.parametrize("name", BODIES)
def test_a_broken_body(name: str, sentence: Any) -> None:
    # The words of msgspec and Python change with their releases.
    assert re.sub("(malformed body): .*", r"\1", refusal(message(BODIES[name]))) == sentence


def test_payloads_must_fit_their_records_and_frames_the_head() -> None:
    one = encode([record(rest=FRAME_0)])
    assert mmcodecs.decode(message(one, [b"abcd"]))[0].tolist() == [97, 98, 99, 100]
    assert "uint8 of shape (4,) does not fill its bytes" in refusal(message(one, [b"abc"]))
    assert refusal(message(one, [b"abcd", b"x"])) == "frame 1: no record names this frame"
    assert "a frame index is four bytes" in refusal(message(encode([record(rest=FRAME_0 + b"x")]), [b"abcd"]))
    frames = mmcodecs.encode_frames([np.arange(100), np.arange(200)])
    assert refusal(frames[:2]).startswith("the frames do not match the head - expected lengths [800, 1600]")
    assert refusal([frames[0], frames[2], frames[1]]).endswith("got [1600, 800]")
    assert refusal([]) == "no frames - expected a head and its payloads"
    assert refusal(frames[0]).startswith("the frames do not match the head")
    assert refusal([bytes(mmcodecs.encode(1))]) == (
        "a message in single mode is one buffer, not a list of frames"
    )
    assert refusal([frames[0], "text", frames[2]]) == "frame 1: not contiguous bytes - got str"


WHOLE = bytes(mmcodecs.encode([np.arange(100), np.arange(77, dtype="i4")]))


def patched(at: int, new: bytes) -> bytes:
    return WHOLE[:at] + new + WHOLE[at + len(new) :]


HEADS: dict[str, bytes] = {
    "empty": b"",
    "magic": patched(0, b"X"),
    "version": patched(8, b"\x02"),
    "flags": patched(10, b"\x09"),
    "reserved": patched(50, b"\x01"),
    "frame count": patched(12, b"\xff" * 4),
    "body length": patched(16, b"\xff" * 8),
    "total": patched(24, b"\xff" * 8),
    "cut": WHOLE[:-1],
    "more": WHOLE + b"\0",
    "offset": patched(64, b"\x01"),
    "length": patched(72, b"\xff\xff"),
    "reserved field of a frame": patched(80, b"\x01"),
    "gap": patched(WHOLE[64] - 1, b"\x01"),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_broken_head(name: str, sentence: Any) -> None:
    assert refusal(HEADS[name]) == sentence


def test_nesting_is_refused_before_python_runs_out_of_stack() -> None:
    for opener in (b"\x91", b"\x81\xa0"):
        assert refusal(message(opener * 500_000 + b"\xc0")).startswith(
            "body: malformed body: maximum recursion"
        )
        assert (
            refusal(message(opener * 65 + b"\xc0")) == "body: Limits.max_depth exceeded - expected at most 64"
        )
    for depth in (65, 1000, 20_000):
        nested = b"\x90"
        for _ in range(depth):
            nested = encode(Ext(3, b"\x91" + nested))
        assert refusal(message(nested)).startswith("body: ")
    assert mmcodecs.decode(message(b"\x91" * 64 + b"\xc0"))


def test_ten_megabytes_of_nothing() -> None:
    for byte in (b"\x90", b"\x80"):
        body = b"\xdd" + struct.pack(">I", 10 << 20) + byte * (10 << 20)
        assert "Limits.max_head_bytes exceeded" in refusal(message(body))
        body = b"\xdd" + struct.pack(">I", 3 << 20) + byte * (3 << 20)
        assert refusal(message(body)) == "body: Limits.max_values exceeded - expected at most 65536"


def test_limits_can_be_set_and_unknown_frameworks_are_refused() -> None:
    for value, limits in (
        ([[[1]]], mmcodecs.Limits(max_depth=2)),
        ([[]] * 10, mmcodecs.Limits(max_values=10)),
        (np.zeros((2, 2)), mmcodecs.Limits(max_ndim=1)),
        ([np.zeros(100), np.ones(100)], mmcodecs.Limits(max_frames=1)),
        ("x" * 100, mmcodecs.Limits(max_head_bytes=100)),
        (np.zeros(1000), mmcodecs.Limits(max_bytes=8000)),
    ):
        data = mmcodecs.encode(value)
        assert mmcodecs.decode(data) is not None
        with pytest.raises(mmcodecs.LimitError):
            mmcodecs.decode(data, limits=limits)
        with pytest.raises(mmcodecs.LimitError):
            mmcodecs.encode(value, limits=limits)
    assert refusal(WHOLE, framework="jax") == ('unknown framework - expected "numpy" or "torch", got \'jax\'')


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_errors_travel_between_processes(clone: Callable[[Any], Any]) -> None:
    for error in (mmcodecs.MissingKeyError([b"a"]), BufferTooSmallError(5, 3)):
        got = clone(error)
        assert type(got) is type(error)
        assert str(got) == str(error)
        assert got.__dict__ == error.__dict__
    assert issubclass(mmcodecs.CodecError, ValueError)


def test_a_foreign_writer_may_spell_msgpack_its_own_way() -> None:
    # Lengths and integers in longer forms than needed are msgpack all the same.
    assert mmcodecs.decode(message(b"\xdd\x00\x00\x00\x01\xd3" + bytes(7) + b"\x05")) == [5]
    assert mmcodecs.decode(message(b"\xca\x3f\x80\x00\x00")) == 1.0
    for count in (0, 1, 15, 16, 31, 32, 255, 256, 65_535, 65_536):
        short = count % 60_000
        for value in ("x" * count, b"x" * count, [1.5, *range(short)], {"k": [{}] * short}):
            assert mmcodecs.decode(message(encode(value))) == value
