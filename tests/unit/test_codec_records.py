"""Files of messages: what a crash leaves behind, and what a reader holds on to."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

import mmcodecs
from codec_values import identical
from kit import error_of
from mmcodecs import RecordReader, RecordWriter
from mmcodecs.errors import DecodeError, EncodeError

VALUES: list[Any] = [
    {"step": 0, "pixels": np.arange(1000, dtype=np.float32)},
    ["text", (1, 2)],
    {"step": 2, "pixels": np.arange(33, dtype=np.int16)},
    np.arange(1, 2501, dtype=">f8").reshape(50, 50),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.mmc"


def fill(path: Path, values: list[Any] = VALUES) -> bytes:
    path.unlink(missing_ok=True)
    with RecordWriter(path) as writer:
        assert [writer.append(value) for value in values] == list(range(len(values)))
    return path.read_bytes()


def test_records_come_back_as_aligned_views_that_outlive_the_reader(path):
    fill(path)
    reader = RecordReader(path)
    assert len(reader) == 4
    assert reader.torn_bytes == 0
    assert identical(VALUES, list(reader))
    assert identical(VALUES[2], reader[2])
    assert identical(VALUES[-1], reader[-1])
    with pytest.raises(IndexError):
        reader[4]
    array = reader[0]["pixels"]
    del reader
    path.unlink()
    assert array.ctypes.data % 64 == 0
    assert not array.flags.writeable
    assert array.flags.owndata is False
    assert identical(VALUES[0]["pixels"], array)


def test_options_of_the_reader(path):
    fill(path)
    assert isinstance(RecordReader(path, framework="torch")[0]["pixels"], torch.Tensor)
    assert RecordReader(path, copy=True)[0]["pixels"].flags.writeable
    assert RecordReader(path).read(1, type=tuple[str, tuple[int, int]]) == ("text", (1, 2))
    with pytest.raises(mmcodecs.LimitError):
        RecordReader(path, limits=mmcodecs.Limits(max_bytes=100))[0]


def test_a_torn_tail_is_detected_wherever_it_tears(path):
    whole = fill(path)
    before_last = len(fill(path, VALUES[:3]))
    for length in range(before_last, len(whole), 7):
        path.write_bytes(whole[:length])
        reader = RecordReader(path)
        assert identical(VALUES[:3], list(reader))
        assert reader.torn_bytes == length - before_last
    for start in range(before_last, len(whole), 64):
        # A header may reach the disk before its content: pages of zeros, at full length.
        path.write_bytes(whole[:start] + bytes(len(whole) - start))
        reader = RecordReader(path)
        assert len(reader) == (3 if any(whole[start:]) else 4)


@pytest.mark.parametrize("cut", [0, 1, 500, 5000])
def test_the_next_writer_cuts_the_tail_and_goes_on(path, cut):
    whole = fill(path)
    path.write_bytes(whole[: len(whole) - cut])
    kept = len(RecordReader(path))
    with RecordWriter(path) as writer:
        assert len(writer) == kept
        writer.append("next")
    reader = RecordReader(path)
    assert identical([*VALUES[:kept], "next"], list(reader))
    assert reader.torn_bytes == 0


def test_a_damaged_record_is_found_when_it_is_read_and_the_others_stay(path):
    data = bytearray(fill(path))
    data[200] ^= 1
    path.write_bytes(data)
    reader = RecordReader(path)
    with pytest.raises(DecodeError, match=r"byte 64: checksum mismatch in a message"):
        reader[0]
    assert identical(VALUES[1:], [reader[1], reader[2], reader[3]])


def test_every_changed_byte_of_a_small_file_is_noticed(path):
    good = fill(path, ["a", [1]])
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        try:
            got = list(RecordReader(path))
        except mmcodecs.CodecError:
            continue
        assert got in (["a", [1]], ["a"], []), at


@pytest.mark.parametrize("content", [b"", b"\x89mm"])
def test_an_empty_or_barely_started_file_holds_nothing(path, content):
    path.write_bytes(content)
    assert len(RecordReader(path)) == 0
    with RecordWriter(path) as writer:
        writer.append(1)
    assert list(RecordReader(path)) == [1]


def test_one_writer_at_a_time_and_what_is_no_record_file(path):
    with RecordWriter(path), pytest.raises(EncodeError, match="another writer has the file open"):
        RecordWriter(path)
    RecordWriter(path).close()
    path.write_bytes(b"not a record file" * 10)
    for kind in (RecordReader, RecordWriter):
        assert "byte 0: not a record file" in error_of(DecodeError, kind, path)
    with pytest.raises(FileNotFoundError):
        RecordReader(path.with_name("missing"))


def test_a_value_that_cannot_be_kept_and_a_full_disk_leave_the_file_alone(path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with RecordWriter(path, sync=True) as writer:
        writer.append(1)
        with pytest.raises(mmcodecs.UnsupportedTypeError):
            writer.append(object())
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            assert "No space left" in error_of(OSError, writer.append, np.zeros(1000))
        writer.append(2)
    assert list(RecordReader(path)) == [1, 2]


@pytest.mark.parametrize("hit", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
def test_a_damaged_header_costs_its_own_record_wherever_it_is_hit(path, hit):
    starts = [0, *(len(fill(path, VALUES[: 1 + number])) for number in range(3))]
    good = fill(path)
    left = [number for number in range(4) if number not in hit]
    for offset in range(64):
        data = bytearray(good)
        for number in hit:
            data[starts[number] + offset] ^= 0x10
        path.write_bytes(data)
        reader = RecordReader(path)
        assert (len(reader), reader.torn_bytes) == (4, 0)
        for number in hit:
            first = next(one for one in hit if all(between in hit for between in range(one, number)))
            with pytest.raises(
                DecodeError, match=f"byte {starts[first]}: the header of a message is damaged"
            ):
                reader[number]
        assert identical([VALUES[number] for number in left], [reader[number] for number in left])
    # The next writer loses nothing, and gives no number twice.
    with RecordWriter(path) as writer:
        assert writer.append("next") == 4
    assert identical(
        [*(VALUES[number] for number in left), "next"], [RecordReader(path)[n] for n in (*left, 4)]
    )


def test_a_newer_version_is_named_and_not_cut_off(path):
    data = bytearray(fill(path, VALUES[:2]))
    second = len(fill(path, VALUES[:1]))
    data[second + 8] = 2
    data[second + 56 : second + 64] = xxhash.xxh3_64_intdigest(bytes(data[second : second + 56])).to_bytes(
        8, "little"
    )
    path.write_bytes(data)
    for kind in (RecordReader, RecordWriter):
        with pytest.raises(DecodeError, match=f"byte {second}: unknown version - expected 1, got 2"):
            kind(path)
    assert path.read_bytes() == data


def test_a_reader_follows_a_file_that_grows(path):
    with RecordWriter(path) as writer:
        reader = RecordReader(path)
        for count, value in enumerate(VALUES, 1):
            writer.append(value)
            assert reader.refresh() == count
            assert identical(VALUES[:count], list(reader))
    whole = path.read_bytes()
    for length in range(len(fill(path, VALUES[:2])), len(whole), 999):
        path.write_bytes(whole[:length])
        reader = RecordReader(path)
        path.write_bytes(whole)
        assert reader.refresh() == 4
        assert identical(VALUES, list(reader))
