"""Arrays sent once: within a message, and over a connection whose two tables must agree."""

from typing import Any

import numpy as np
import pytest
import torch

import mmcodecs
from codec_values import identical
from mmcodecs import Shared

PIXELS = np.arange(1000, dtype=np.float32)
OTHER = np.arange(2000, dtype=np.float32)
KEY = b"pixels"


def pair(**options: Any) -> tuple[mmcodecs.Encoder, mmcodecs.Decoder]:
    return mmcodecs.Encoder(**options), mmcodecs.Decoder()


def test_one_object_is_one_payload_in_a_message() -> None:
    frames = mmcodecs.encode_frames({"a": PIXELS, "b": [PIXELS, PIXELS.copy()]})
    assert len(frames) == 3
    got = mmcodecs.decode(frames)
    assert got["a"] is got["b"][0]
    assert got["a"] is not got["b"][1]


def test_views_of_one_array_are_told_apart() -> None:
    value = [PIXELS, PIXELS[:500], PIXELS.reshape(10, 100), PIXELS.view("i4")]
    for got, sent in zip(mmcodecs.decode(mmcodecs.encode_frames(value)), value, strict=True):
        assert identical(sent, got)


def test_one_key_is_one_payload_in_a_message() -> None:
    frames = mmcodecs.encode_frames([Shared(PIXELS, KEY), Shared(PIXELS.copy(), KEY), PIXELS])
    assert len(frames) == 2
    got = mmcodecs.decode(frames)
    assert got[0] is got[1]
    assert all(identical(PIXELS, array) for array in got)


def test_a_key_for_two_shapes_is_refused() -> None:
    with pytest.raises(mmcodecs.EncodeError) as caught:
        mmcodecs.encode({"x": [Shared(PIXELS, KEY), Shared(OTHER, KEY)]})
    assert str(caught.value) == (
        "$.x[1]: two arrays of different dtype or shape under one key - got 706978656c73"
    )


@pytest.mark.parametrize("key", [b"", b"x" * 65, "text", None])
def test_what_is_no_key(key: Any) -> None:
    with pytest.raises(mmcodecs.EncodeError, match="not a key - expected 1 to 64 bytes"):
        Shared(PIXELS, key)


@pytest.mark.parametrize("form", ["encode", "encode_frames"])
def test_the_second_message_names_what_the_first_brought(form: str) -> None:
    encoder, decoder = pair()
    value = {"step": 1, "pixels": Shared(PIXELS, KEY)}
    first, second = getattr(encoder, form)(value), getattr(encoder, form)(value)
    got = [decoder.decode(first)["pixels"], decoder.decode(second)["pixels"]]
    assert all(identical(PIXELS, array) for array in got)
    size = sum(map(len, second)) if form == "encode_frames" else len(second)
    assert size < 200


def test_arrays_are_hashed_on_request() -> None:
    encoder, decoder = pair(share_from=1000)
    value = {"a": PIXELS, "t": torch.from_numpy(PIXELS), "small": PIXELS[:100]}
    first = encoder.encode_frames(value)
    second = encoder.encode_frames({**value, "a": PIXELS.copy()})
    # The tensor shares the array's payload, since what to build is the receiver's choice.
    assert [len(first), len(second)] == [3, 2]
    for message in (first, second):
        got = decoder.decode(message)
        assert identical(PIXELS, got["a"])
        assert identical(PIXELS, got["t"])


def test_the_table_outlives_and_does_not_hold_the_message() -> None:
    encoder, decoder = pair()
    pool = mmcodecs.BufferPool()
    decoder.decode(encoder.encode([Shared(PIXELS, KEY), OTHER], buffer=pool))
    assert pool.idle_bytes > 0
    again = decoder.decode(encoder.encode([Shared(PIXELS, KEY)]))[0]
    assert identical(PIXELS, again)
    assert not again.flags.writeable


def test_torch_gets_copies_of_what_the_table_holds() -> None:
    encoder, decoder = mmcodecs.Encoder(), mmcodecs.Decoder(framework="torch")
    value = [Shared(PIXELS, KEY)]
    decoder.decode(encoder.encode(value))
    decoder.decode(encoder.encode(value))[0].zero_()
    assert torch.equal(decoder.decode(encoder.encode(value))[0], torch.from_numpy(PIXELS))


def test_a_missing_key_is_answered_and_sent_again() -> None:
    encoder, decoder = pair()
    encoder.encode([Shared(PIXELS, KEY)])  # lost on the way
    message = encoder.encode([Shared(PIXELS, KEY), Shared(OTHER, b"other")])
    with pytest.raises(mmcodecs.MissingKeyError) as caught:
        decoder.decode(message)
    assert caught.value.keys == (KEY,)
    encoder.forget(caught.value.keys)
    retry = encoder.encode_frames([Shared(PIXELS, KEY), Shared(OTHER, b"other")])
    assert len(retry) == 2  # `other` had come through, and is only named
    got = decoder.decode(retry)
    assert identical([PIXELS, OTHER], got)


def test_a_message_without_a_table_needs_none() -> None:
    decoder = mmcodecs.Decoder()
    encoder = mmcodecs.Encoder()
    decoder.decode(encoder.encode(Shared(PIXELS, KEY)))
    assert decoder.decode(mmcodecs.encode([Shared(OTHER, KEY)]))[0].shape == (2000,)
    assert identical(PIXELS, decoder.decode(encoder.encode(Shared(PIXELS, KEY))))
    with pytest.raises(mmcodecs.MissingKeyError):
        mmcodecs.decode(encoder.encode(Shared(PIXELS, KEY)))


def test_a_key_must_still_mean_what_it_meant() -> None:
    encoder, decoder = pair()
    decoder.decode(encoder.encode(Shared(PIXELS, KEY)))
    with pytest.raises(mmcodecs.DecodeError) as caught:
        decoder.decode(encoder.encode({"a": Shared(OTHER, KEY)}))
    assert str(caught.value) == (
        "$.a: a shared array is not what its reference says - expected float32 of shape (2000,), "
        "got float32 of shape (1000,)"
    )


def test_a_larger_table_than_allowed_is_refused() -> None:
    with pytest.raises(mmcodecs.DecodeError) as caught:
        mmcodecs.Decoder(table_bytes=10).decode(mmcodecs.Encoder(table_bytes=11).encode(1))
    assert str(caught.value) == (
        "head: the writer's table is larger than this reader allows - expected at most 10 bytes, got 11"
    )


def test_what_is_longer_than_the_table_is_not_entered() -> None:
    encoder, decoder = pair(table_bytes=5000)
    for _ in range(2):
        frames = encoder.encode_frames([Shared(PIXELS, KEY), Shared(OTHER, b"other")])
        assert identical([PIXELS, OTHER], decoder.decode(frames))
    assert len(frames) == 2


def test_an_error_leaves_the_table_as_it_was() -> None:
    encoder, decoder = pair()
    broken = bytearray(encoder.encode([Shared(PIXELS, KEY), OTHER]))
    broken[8] = 9
    with pytest.raises(mmcodecs.VersionError):
        decoder.decode(broken)
    with pytest.raises(mmcodecs.EncodeError):
        encoder.encode([Shared(OTHER, b"other"), object()])
    assert len(encoder.encode_frames([Shared(OTHER, b"other")])) == 2


def test_reset_forgets_everything() -> None:
    encoder, decoder = pair()
    decoder.decode(encoder.encode(Shared(PIXELS, KEY)))
    encoder.reset()
    assert identical(PIXELS, mmcodecs.Decoder().decode(encoder.encode(Shared(PIXELS, KEY))))
    decoder.reset()
    with pytest.raises(mmcodecs.MissingKeyError):
        decoder.decode(encoder.encode(Shared(PIXELS, KEY)))
