"""Broken and hostile messages: each refused by the right error, in the right words, at the right place."""

import copy
import pickle
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.msgpack import Ext, encode

import mmcodecs
from mmcodecs.frame import fill_head, head_room


def message(body: bytes, payloads: list[bytes] = [], *, single: bool = True) -> bytes:  # noqa: B006
    """A message with this body, its layout right; in single mode with its payloads, else the head alone."""
    head = bytearray(head_room(len(payloads))) + body
    offsets, total = fill_head(head, [len(p) for p in payloads], single=single, checksums=None, table_bytes=0)
    if not single:
        return bytes(head)
    out = bytearray(total)
    out[: len(head)] = head
    for offset, payload in zip(offsets, payloads, strict=True):
        out[offset : offset + len(payload)] = payload
    return bytes(out)


def record(
    dtype: int = 6,
    flags: int = 0,
    shape: tuple[int, ...] = (4,),
    unit: int = 0,
    width: int = 0,
    rest: bytes = b"",
) -> Ext:
    fields = struct.pack(f"<BBBBI{len(shape)}Q", dtype, flags, len(shape), unit, width, *shape)
    return Ext(1, fields + rest)


INLINE, FRAME_0 = 1 << 3, struct.pack("<I", 0)


def refusal(data: Any, **options: Any) -> str:
    with pytest.raises(mmcodecs.CodecError) as caught:
        mmcodecs.decode(data, **options)
    return str(caught.value)


BODIES: dict[str, tuple[bytes, str]] = {
    "trailing byte": (b"\x01\x02", "body: bytes follow the value - got 1 bytes"),
    "empty": (b"", "$: the body ends inside a value - expected at least 0 bytes, got 0"),
    "0xc1": (b"\x91\xc1", "$[0]: no msgpack value starts with 0xc1"),
    "string cut": (b"\xa5ab", "$: the body ends inside a value - expected at least 6 bytes, got 3"),
    "long string cut": (
        b"\xdb\xff\xff\xff\xffab",
        "$: the body ends inside a value - expected at least 4294967300 bytes, got 7",
    ),
    "length field cut": (b"\xdd\x00", "$: the body ends inside a value - expected at least 5 bytes, got 2"),
    "array bomb": (
        b"\xdd\xff\xff\xff\xff",
        "$: the body ends inside a value - expected at least 4294967300 bytes, got 5",
    ),
    "map bomb": (
        b"\xdf\x7f\xff\xff\xff",
        "$: the body ends inside a value - expected at least 4294967299 bytes, got 5",
    ),
    "int key": (b"\x81\x01\x02", "$.: a key is a string - got first byte 0x01"),
    "binary key": (b"\x81\xc4\x01a\x02", "$.: a key is a string - got first byte 0xc4"),
    "duplicate key": (b"\x82\xa1a\x01\xa1a\x02", "$.a: duplicate key - got b'a'"),
    "duplicate key, two spellings": (b"\x82\xa1a\x01\xd9\x01a\x02", "$.a: duplicate key - got b'a'"),
    "text not UTF-8": (
        b"\x91\xa1\xff",
        "body: malformed body: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
    ),
    "timestamp": (b"\xd6\xff\x00\x00\x00\x00", "$: unknown extension type - expected 1 to 16, got 255"),
    "unknown extension": (
        encode({"x": Ext(17, b"")}),
        "$.x: unknown extension type - expected 1 to 16, got 17",
    ),
    "tuple of a map": (
        encode(Ext(3, b"\x80")),
        "$: a tuple, set or map extension holds an array - got type 3",
    ),
    "tuple with more": (
        encode(Ext(3, b"\x90\x01")),
        "$: the value in an extension does not fill it - got -1 bytes",
    ),
    "tuple past its end": (
        encode([Ext(3, b"\x92\x01"), 1]),
        "$[0]: the array in an extension does not fit it - got 2 elements",
    ),
    "tuple that runs over": (
        encode([Ext(3, b"\x91\xcd"), 1, 1]),
        "$[0]: the value in an extension does not fill it - got +2 bytes",
    ),
    "odd map": (
        encode(Ext(6, b"\x93\x01\x02\x03")),
        "$: the array in an extension does not fit it - got 3 elements",
    ),
    "set of a list": (encode(Ext(4, b"\x91\x90")), "body: malformed body: unhashable type: 'list'"),
    "set with a double": (encode(Ext(4, b"\x92\x01\x01")), "body: an element or key stands twice"),
    "map with a double": (encode(Ext(6, b"\x94\x01\x00\x01\x00")), "body: an element or key stands twice"),
    "packed list of lists": (
        encode(Ext(2, b"\x91\x90")),
        "$: malformed list of scalars: Expected `bool | int | float | str | null`, got `array` - at `$[0]`",
    ),
    "packed bomb": (
        encode(Ext(2, b"\xdd\xff\xff\xff\xff")),
        "$: a list announces more than it holds - expected 4294967295 elements",
    ),
    "packed with more": (
        encode(Ext(2, b"\x91\x01\x01")),
        "$: malformed list of scalars: MessagePack data is malformed: trailing characters (byte 2)",
    ),
    "packed map": (encode(Ext(2, b"\x80")), "$: a list of scalars is an array - got first byte 0x80"),
    "big integer that fits": (
        encode(Ext(8, b"\x01")),
        "$: an integer that fits msgpack, or is longer than it need be",
    ),
    "date of other form": (encode(Ext(11, b"20260102")), "$: malformed date - got b'20260102'"),
    "decimal that is none": (encode(Ext(15, b"1.5.5")), "$: malformed decimal - got b'1.5.5'"),
    "short UUID": (encode(Ext(14, b"1234")), "$: malformed UUID - got b'1234'"),
    "duration not normal": (
        encode(Ext(13, struct.pack("<iii", 0, 86400, 0))),
        "$: malformed duration - got b'\\x00\\x00\\x00\\x00\\x80Q\\x01\\x00\\x00\\x00\\x00\\x00'",
    ),
    "fold of 2": (encode(Ext(12, b"\x0201:02:03")), "$: malformed time - got b'\\x0201:02:03'"),
    "path flavour": (encode(Ext(16, b"\x07a")), "$: malformed path - got b'\\x07a'"),
    "data kind": (encode(Ext(7, b"\x09\x01")), "$: malformed byte string - got b'\\t\\x01'"),
    "record too short": (
        encode([Ext(1, b"\x06")]),
        "$[0]: array record too short - expected at least 8 bytes, got 1",
    ),
    "dtype id": (
        encode({"a": record(99)}),
        "$.a: unknown dtype id - expected an id of the dtype table, got 99",
    ),
    "reserved bits": (encode(record(flags=0x20)), "$: reserved bits of an array record are set - got 0x20"),
    "dimensions cut": (
        encode(Ext(1, bytes((6, 8, 3, 0)) + bytes(4))),
        "$: array record too short for its dimensions - got 8 bytes for 3",
    ),
    "many dimensions": (
        encode(record(shape=(1,) * 9)),
        "$: Limits.max_ndim is passed - expected at most 8, got 9",
    ),
    "inline too short": (
        encode(record(flags=INLINE, rest=b"abc")),
        "$: uint8 of shape (4,) does not fill its bytes - expected 4 bytes, got 3",
    ),
    "product overflows": (
        encode(record(shape=(1 << 32, 1 << 32, 0), flags=INLINE)),
        "$: array too large to exist - got shape (4294967296, 4294967296, 0)",
    ),
    "dimension of -1": (
        encode(record(shape=((1 << 64) - 1,), flags=INLINE, rest=b"a")),
        "$: uint8 of shape (18446744073709551615,) does not fill its bytes - "
        "expected 18446744073709551615 bytes, got 1",
    ),
    "scalar with a shape": (
        encode(record(flags=INLINE | 1, rest=b"abcd")),
        "$: a scalar has no dimensions and lies inline - got 1 dimensions, storage 1",
    ),
    "unit of a float": (
        encode(record(11, INLINE, unit=3, rest=bytes(16))),
        "$: float32 takes neither unit nor width - got 3, 0",
    ),
    "unknown unit": (
        encode(record(32, INLINE, unit=99, width=1, rest=bytes(32))),
        "$: datetime64 has no unit 1 x 99",
    ),
    "width of 0": (encode(record(34, INLINE, rest=b"")), "$: bytes needs a width of at least 1 - got 0"),
    "code point": (
        encode(record(35, INLINE, shape=(1,), width=1, rest=b"\xff" * 4)),
        "$: a code point beyond Unicode - got 0xffffffff",
    ),
    "no such frame": (encode(record(rest=FRAME_0)), "$: no such frame - expected below 0, got 0"),
    "frame of -1": (encode(record(rest=b"\xff" * 4)), "$: no such frame - expected below 0, got 4294967295"),
    "short frame index": (encode(record(rest=b"\0")), "$: a frame index is four bytes - got 1 bytes"),
    "missing key": (
        encode(record(flags=3 << 3, rest=b"k")),
        "1 shared array(s) are not in the table - got 6b. "
        "Answer the sender with the keys; it calls Encoder.forget(keys) and encodes again",
    ),
    "empty key": (
        encode(record(flags=3 << 3)),
        "$: Limits.max_key_bytes is passed - expected 1 to 64, got 0",
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_broken_body(name: str) -> None:
    body, expected = BODIES[name]
    assert refusal(message(body)) == expected


def test_payloads_must_fit_their_records() -> None:
    one = encode([record(rest=FRAME_0)])
    assert mmcodecs.decode(message(one, [b"abcd"]))[0].tolist() == [97, 98, 99, 100]
    assert refusal(message(one, [b"abc"])).startswith("$[0]: uint8 of shape (4,) does not fill its bytes")
    assert refusal(message(one, [b"abcd", b"x"])) == "frame 1: no record names this frame"
    assert refusal(message(encode([record(rest=FRAME_0 + b"x")]), [b"abcd"])) == (
        "$[0]: bytes follow a frame index - got 5 bytes"
    )


def test_frames_must_be_those_of_the_head() -> None:
    frames = mmcodecs.encode_frames([np.arange(100), np.arange(200)])
    assert refusal(frames[:2]).startswith(
        "the frames are not those of the head - expected lengths [800, 1600]"
    )
    assert refusal([frames[0], frames[2], frames[1]]).endswith("got [1600, 800]")
    assert refusal([]) == "no frames - expected a head and its payloads"
    assert refusal(frames[0]).startswith("the frames are not those of the head")
    assert refusal([bytes(mmcodecs.encode(1))]) == (
        "a message in single mode is one buffer, not a list of frames"
    )
    assert refusal([frames[0], "text", frames[2]]) == "frame 1: not contiguous bytes - got str"


WHOLE = bytes(mmcodecs.encode([np.arange(100), np.arange(77, dtype="i4")]))


def patched(at: int, new: bytes) -> bytes:
    return WHOLE[:at] + new + WHOLE[at + len(new) :]


HEADS: dict[str, tuple[bytes, type[Exception], str]] = {
    "empty": (b"", mmcodecs.TruncatedError, "head: no room for a preamble - expected 64 bytes, got 0"),
    "magic": (
        patched(0, b"X"),
        mmcodecs.DecodeError,
        "head: not a message - expected b'\\x89mmcodec', got b'Xmmcodec'",
    ),
    "version": (patched(8, b"\x02"), mmcodecs.VersionError, "head: unknown version - expected 1, got 2"),
    "flags": (
        patched(10, b"\x09"),
        mmcodecs.DecodeError,
        "head: reserved bits of the preamble are set - got flags 0x0009",
    ),
    "reserved": (
        patched(50, b"\x01"),
        mmcodecs.DecodeError,
        "head: reserved bits of the preamble are set - got flags 0x0001",
    ),
    "frame count": (
        patched(12, b"\xff\xff\xff\xff"),
        mmcodecs.LimitError,
        "head: Limits.max_frames is passed - expected at most 4096, got 4294967295",
    ),
    "body length": (
        patched(16, b"\xff" * 8),
        mmcodecs.LimitError,
        "head: Limits.max_head_bytes is passed - expected at most 4194304, got 18446744073709551727",
    ),
    "total": (
        patched(24, b"\xff" * 8),
        mmcodecs.LimitError,
        "head: Limits.max_bytes is passed - expected at most 17179869184, got 18446744073709551615",
    ),
    "cut": (
        WHOLE[:-1],
        mmcodecs.TruncatedError,
        f"head: the message ends early - expected {len(WHOLE)} bytes, got {len(WHOLE) - 1}",
    ),
    "more": (
        WHOLE + b"\0",
        mmcodecs.DecodeError,
        f"head: bytes follow the message - got {len(WHOLE) + 1} bytes",
    ),
    "offset": (
        patched(64, b"\x01"),
        mmcodecs.DecodeError,
        "frame 0: offset or checksum out of place - got offset 1",
    ),
    "length": (
        patched(72, b"\xff\xff"),
        mmcodecs.DecodeError,
        "frame 0: the frame ends beyond the message - got length 65535",
    ),
    "checksum without flag": (
        patched(80, b"\x01"),
        mmcodecs.DecodeError,
        f"frame 0: offset or checksum out of place - got offset {WHOLE[64]}",
    ),
    "gap": (
        patched(WHOLE[64] - 1, b"\x01"),
        mmcodecs.DecodeError,
        "frame 0: the gap before a frame is not zero",
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_broken_head(name: str) -> None:
    data, kind, expected = HEADS[name]
    with pytest.raises(mmcodecs.CodecError) as caught:
        mmcodecs.decode(data)
    assert type(caught.value) is kind
    assert str(caught.value) == expected


def test_checksums_find_every_changed_byte() -> None:
    good = bytes(mmcodecs.encode([np.arange(40), np.arange(300, dtype="u1")], checksums=True))
    assert mmcodecs.decode(good)[0].tolist() == list(range(40))
    for at in range(len(good)):
        with pytest.raises(mmcodecs.CodecError):
            mmcodecs.decode(good[:at] + bytes([good[at] ^ 0x40]) + good[at + 1 :])
    broken = good[:-1] + bytes([good[-1] ^ 1])
    assert refusal(broken).startswith("frame 1: checksum mismatch - expected 0x")


def test_nesting_is_refused_before_python_runs_out_of_stack() -> None:
    for opener in (b"\x91", b"\x81\xa0"):
        expected = "Limits.max_depth is passed - expected at most 64"
        assert refusal(message(opener * 500_000 + b"\xc0")).endswith(expected)
    nested = b"\x90"
    for _ in range(100):
        nested = encode(Ext(3, b"\x91" + nested))
    assert refusal(message(nested)).endswith("Limits.max_depth is passed - expected at most 64")
    assert mmcodecs.decode(message(b"\x91" * 64 + b"\xc0"))


def test_ten_megabytes_of_nothing() -> None:
    for byte in (b"\x90", b"\x80", b"\xc0", b"\xa0"):
        body = b"\xdd" + struct.pack(">I", 10 << 20) + byte * (10 << 20)
        assert "Limits.max_head_bytes is passed" in refusal(message(body))
        roomy = mmcodecs.Limits(max_head_bytes=1 << 30)
        assert "$[65534]: Limits.max_values is passed" in refusal(message(body), limits=roomy)


def test_limits_can_be_set() -> None:
    for value, limits in (
        ([[[1]]], mmcodecs.Limits(max_depth=2)),
        ([1] * 10, mmcodecs.Limits(max_values=10)),
        (np.zeros((2, 2)), mmcodecs.Limits(max_ndim=1)),
        ([np.zeros(100), np.ones(100)], mmcodecs.Limits(max_frames=1)),
        ("x" * 100, mmcodecs.Limits(max_head_bytes=100)),
        (np.zeros(1000), mmcodecs.Limits(max_bytes=8000)),
    ):
        data = mmcodecs.encode(value)
        assert mmcodecs.decode(data) is not None
        with pytest.raises(mmcodecs.LimitError):
            mmcodecs.decode(data, limits=limits)


def test_the_length_can_be_read_ahead() -> None:
    assert mmcodecs.message_length(WHOLE[:64]) == len(WHOLE)
    with pytest.raises(mmcodecs.TruncatedError):
        mmcodecs.message_length(WHOLE[:63])
    with pytest.raises(mmcodecs.LimitError):
        mmcodecs.message_length(WHOLE[:64], mmcodecs.Limits(max_bytes=100))


def test_unknown_frameworks_are_refused() -> None:
    assert refusal(WHOLE, framework="jax") == (
        'unknown framework - expected "numpy", "torch" or "source", got \'jax\''
    )


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_errors_travel_between_processes(clone: Callable[[Any], Any]) -> None:
    for error in (mmcodecs.MissingKeyError([b"a"]), mmcodecs.BufferTooSmallError(5, 3)):
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
        for value in (
            "x" * count,
            b"x" * count,
            list(range(min(count, 60_000))),
            {"k": [{}] * (count % 60_000)},
        ):
            assert mmcodecs.decode(message(encode(value))) == value
    assert mmcodecs.decode(message(msgspec.msgpack.encode({"a": [1.5, None]}))) == {"a": [1.5, None]}
