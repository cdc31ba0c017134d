"""Arrays sent once: within a message, and over a connection whose two tables must agree."""

from typing import Any

import numpy as np
import pytest
import torch

import mmcodecs
from codec_values import identical
from kit import error_of
from mmcodecs.errors import DecodeError, EncodeError
from mmcodecs.shared import Shared
from mmcodecs.wire import encode_keyed_frames

PIXELS = np.arange(1000, dtype=np.float32)
OTHER = np.arange(2000, dtype=np.float32)
KEY = b"pixels"


def pair(**options: Any) -> tuple[mmcodecs.Encoder, mmcodecs.Decoder]:
    return mmcodecs.Encoder(**options), mmcodecs.Decoder()


def test_one_object_and_one_key_are_one_payload_in_a_message() -> None:
    frames = mmcodecs.encode_frames({"a": PIXELS, "b": [PIXELS, PIXELS.copy()]})
    assert len(frames) == 3
    got = mmcodecs.decode(frames)
    assert got["a"] is got["b"][0]
    assert got["a"] is not got["b"][1]
    frames = mmcodecs.encode_frames([Shared(PIXELS, KEY), Shared(PIXELS.copy(), KEY), PIXELS])
    assert len(frames) == 2
    got = mmcodecs.decode(frames)
    assert got[0] is got[1]
    assert all(identical(PIXELS, array) for array in got)


def test_a_key_means_one_array(sentence: Any) -> None:
    arrays = {"x": [Shared(PIXELS, KEY), Shared(OTHER, KEY)]}
    assert error_of(EncodeError, mmcodecs.encode, arrays) == sentence
    encoder, decoder = pair()
    decoder.decode(encoder.encode(Shared(PIXELS, KEY)))
    other = encoder.encode({"a": Shared(OTHER, KEY)})
    assert error_of(mmcodecs.CodecError, decoder.decode, other) == sentence


@pytest.mark.parametrize("key", [b"", b"x" * 65, "text", None])
def test_what_is_no_key(key: Any) -> None:
    assert "not a key - expected 1 to 64 bytes" in error_of(EncodeError, Shared, PIXELS, key)


@pytest.mark.parametrize("form", ["encode", "encode_frames"])
def test_the_second_message_names_what_the_first_brought(form: str) -> None:
    encoder, decoder = pair()
    value = {"step": 1, "pixels": Shared(PIXELS, KEY)}
    first, second = getattr(encoder, form)(value), getattr(encoder, form)(value)
    got = [decoder.decode(first)["pixels"], decoder.decode(second)["pixels"]]
    assert all(identical(PIXELS, array) for array in got)
    size = sum(map(len, second)) if form == "encode_frames" else len(second)
    assert size < 200


@pytest.mark.parametrize("keep_views", [False, True])
def test_the_table_holds_a_message_only_where_it_may_and_most_of_it_is_shared(keep_views: bool) -> None:
    encoder, decoder = mmcodecs.Encoder(), mmcodecs.Decoder(keep_views=keep_views)
    pool = mmcodecs.BufferPool()
    decoder.decode(encoder.encode([Shared(PIXELS, KEY), OTHER], buffer=pool))
    assert pool.idle_bytes > 0  # half of the message and more is not in the table
    decoder.decode(encoder.encode([Shared(OTHER, b"other"), PIXELS], buffer=pool))
    assert (pool.idle_bytes == 0) is keep_views
    first, second = decoder.decode(encoder.encode([Shared(PIXELS, KEY), Shared(OTHER, b"other")]))
    assert identical([PIXELS, OTHER], [first, second])
    assert not first.flags.writeable
    assert not second.flags.writeable


@pytest.mark.parametrize("keep_views", [False, True])
def test_torch_gets_copies_of_what_the_table_holds(keep_views: bool) -> None:
    encoder = mmcodecs.Encoder()
    decoder = mmcodecs.Decoder(framework="torch", keep_views=keep_views)
    value = [Shared(PIXELS, KEY)]
    decoder.decode(encoder.encode(value))[0].zero_()
    decoder.decode(encoder.encode(value))[0].zero_()
    assert torch.equal(decoder.decode(encoder.encode(value))[0], torch.from_numpy(PIXELS))


def test_a_lost_message_shows_as_a_missing_key_until_both_ends_reset() -> None:
    encoder, decoder = pair()
    encoder.encode([Shared(PIXELS, KEY)])  # lost on the way
    with pytest.raises(mmcodecs.MissingKeyError) as caught:
        decoder.decode(encoder.encode([Shared(PIXELS, KEY), Shared(OTHER, b"other")]))
    assert caught.value.keys == (KEY,)
    encoder.reset()
    decoder.reset()
    value = [Shared(PIXELS, KEY), Shared(OTHER, b"other")]
    assert identical([PIXELS, OTHER], decoder.decode(encoder.encode_frames(value)))
    with pytest.raises(mmcodecs.MissingKeyError):
        mmcodecs.Decoder().decode(encoder.encode(value))


def test_the_size_of_a_table_is_bounded(sentence: Any) -> None:
    message = mmcodecs.Encoder(table_bytes=11).encode(1)
    assert error_of(DecodeError, mmcodecs.Decoder(table_bytes=10).decode, message) == sentence
    encoder, decoder = pair(table_bytes=5000)
    for _ in range(2):
        frames = encoder.encode_frames([Shared(PIXELS, KEY), Shared(OTHER, b"other")])
        assert identical([PIXELS, OTHER], decoder.decode(frames))
    assert len(frames) == 2


def test_an_error_leaves_the_table_as_it_was() -> None:
    encoder, decoder = pair()
    broken = bytearray(encoder.encode([Shared(PIXELS, KEY), OTHER]))
    broken[8] = 9
    with pytest.raises(DecodeError):
        decoder.decode(broken)
    with pytest.raises(EncodeError):
        encoder.encode([Shared(OTHER, b"other"), object()])
    assert len(encoder.encode_frames([Shared(OTHER, b"other")])) == 2


def test_frames_are_written_with_the_keys_of_their_arrays() -> None:
    one, two, short = np.ones(1000, np.uint8), np.zeros(2000, np.float32), np.zeros(3, np.uint8)
    value: Any = {"plain": one.copy(), "one": Shared(one, b"1"), "again": Shared(one.copy(), b"1")}
    value |= {"two": [Shared(two, b"2")], "short": Shared(short, b"3"), "text": "x" * 5000}
    frames, keys = encode_keyed_frames(value)
    assert frames == mmcodecs.encode_frames(value)
    assert [len(frame) for frame in frames[1:]] == [1000, 1000, 8000, 5000]
    assert keys == [b"", b"", b"1", b"2", b""]
    assert encode_keyed_frames(1)[1] == [b""]
