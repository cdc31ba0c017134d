"""Files of messages: what a crash leaves behind, what an index saves, and what a reader holds on to."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mmcodecs
from codec_values import identical

VALUES: list[Any] = [
    {"step": 0, "pixels": np.arange(1000, dtype=np.float32)},
    ["text", (1, 2)],
    {"step": 2, "pixels": np.arange(33, dtype=np.int16)},
    np.arange(1, 2501, dtype=">f8").reshape(50, 50),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.mmc"


def fill(path: Path, values: list[Any] = VALUES, *, close: bool = True) -> bytes:
    """Write values, and leave the file as a process that died would, unless it is closed."""
    writer = mmcodecs.open(path, "w")
    assert [writer.append(value) for value in values] == list(range(len(values)))
    if close:
        writer.close()
    else:
        writer._file.close()
    return path.read_bytes()


@pytest.mark.parametrize("close", [True, False])
def test_records_come_back_by_number_and_in_order(path: Path, close: bool) -> None:
    fill(path, close=close)
    reader = mmcodecs.open(path)
    assert len(reader) == 4
    assert reader.torn_bytes == 0
    assert identical(VALUES, list(reader))
    assert identical(VALUES[2], reader[2])
    assert identical(VALUES[-1], reader[-1])
    with pytest.raises(IndexError):
        reader[4]


def test_arrays_are_aligned_views_of_the_map_and_outlive_the_reader(path: Path) -> None:
    fill(path)
    array = mmcodecs.open(path)[0]["pixels"]
    path.unlink()
    assert array.ctypes.data % 64 == 0
    assert not array.flags.writeable
    assert array.flags.owndata is False
    assert identical(VALUES[0]["pixels"], array)


def test_options_of_the_reader(path: Path) -> None:
    fill(path)
    assert isinstance(mmcodecs.RecordReader(path, framework="torch")[0]["pixels"], torch.Tensor)
    assert mmcodecs.RecordReader(path, copy=True)[0]["pixels"].flags.writeable
    assert mmcodecs.RecordReader(path).read(1, type=tuple[str, tuple[int, int]]) == ("text", (1, 2))
    with pytest.raises(mmcodecs.LimitError):
        mmcodecs.RecordReader(path, limits=mmcodecs.Limits(max_bytes=100))[0]


def test_a_torn_tail_is_detected_wherever_it_tears(path: Path) -> None:
    whole = fill(path, close=False)
    before_last = len(fill(path, VALUES[:3], close=False))
    for length in range(before_last, len(whole), 7):
        path.write_bytes(whole[:length])
        reader = mmcodecs.open(path)
        assert identical(VALUES[:3], list(reader))
        assert reader.torn_bytes == length - before_last
    for start in range(before_last, len(whole), 64):
        # A header may reach the disk before its content: pages of zeros, at full length.
        path.write_bytes(whole[:start] + bytes(len(whole) - start))
        reader = mmcodecs.open(path)
        assert len(reader) == (3 if any(whole[start:]) else 4)


@pytest.mark.parametrize("cut", [0, 1, 500, 5000])
def test_the_next_writer_cuts_the_tail_and_goes_on(path: Path, cut: int) -> None:
    whole = fill(path, close=False)
    path.write_bytes(whole[: len(whole) - cut])
    kept = len(mmcodecs.open(path))
    with mmcodecs.open(path, "a") as writer:
        assert len(writer) == kept
        writer.append("next")
    reader = mmcodecs.open(path)
    assert identical([*VALUES[:kept], "next"], list(reader))
    assert reader.torn_bytes == 0


def test_closed_files_are_reopened_and_index_and_walk_agree(path: Path) -> None:
    fill(path, VALUES[:2])
    with mmcodecs.open(path, "a") as writer:
        assert writer.append(VALUES[2]) == 2
        assert writer.append(VALUES[3]) == 3
    assert path.read_bytes() == fill(path)
    data = path.read_bytes()
    path.write_bytes(data[:-64])
    assert identical(VALUES, list(mmcodecs.open(path)))


def test_a_damaged_record_is_found_when_it_is_read_and_the_others_stay(path: Path) -> None:
    data = bytearray(fill(path))
    data[200] ^= 1
    path.write_bytes(data)
    reader = mmcodecs.open(path)
    with pytest.raises(mmcodecs.ChecksumError, match=r"byte 0: checksum mismatch in a block"):
        reader[0]
    assert identical(VALUES[1:], [reader[1], reader[2], reader[3]])


def test_every_changed_byte_of_a_small_file_is_noticed(path: Path) -> None:
    good = fill(path, ["a", [1]])
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
        try:
            got = list(mmcodecs.open(path))
        except mmcodecs.CodecError:
            continue
        assert got in (["a", [1]], ["a"], []), at


def test_what_is_no_record_file(path: Path) -> None:
    path.write_bytes(b"not a record file" * 10)
    for mode in ("r", "a"):
        with pytest.raises(mmcodecs.DecodeError, match="byte 0: not a record file"):
            mmcodecs.open(path, mode)  # type: ignore[call-overload]
    with pytest.raises(
        mmcodecs.EncodeError, match='mode: unknown mode - expected "r", "a" or "w", got \'x\''
    ):
        mmcodecs.open(path, "x")  # type: ignore[call-overload]
    with pytest.raises(FileNotFoundError):
        mmcodecs.open(path.with_name("missing"))


@pytest.mark.parametrize("content", [b"", b"\x89mm"])
def test_an_empty_or_barely_started_file_holds_nothing(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert len(mmcodecs.open(path)) == 0
    with mmcodecs.open(path, "a") as writer:
        writer.append(1)
    assert list(mmcodecs.open(path)) == [1]


def test_one_writer_at_a_time(path: Path) -> None:
    with (
        mmcodecs.open(path, "a"),
        pytest.raises(mmcodecs.EncodeError, match="another writer has the file open"),
    ):
        mmcodecs.open(path, "a")
    mmcodecs.open(path, "a").close()


def test_a_value_that_cannot_be_kept_leaves_the_file_alone(path: Path) -> None:
    with mmcodecs.open(path, "w") as writer:
        writer.append(1)
        with pytest.raises(mmcodecs.UnsupportedTypeError):
            writer.append(object())
        writer.append(2)
    assert list(mmcodecs.open(path)) == [1, 2]


def test_a_full_disk_leaves_the_file_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = mmcodecs.RecordWriter(path, sync=True)
    writer.append(1)
    real = os.fsync

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        writer.append(np.zeros(1000))
    monkeypatch.setattr(os, "fsync", real)
    writer.append(2)
    writer.close()
    assert list(mmcodecs.open(path)) == [1, 2]


def test_a_reader_sees_what_was_there_when_it_opened(path: Path) -> None:
    writer = mmcodecs.open(path, "w")
    writer.append(1)
    early = mmcodecs.open(path)
    writer.append(2)
    assert list(early) == [1]
    assert list(mmcodecs.open(path)) == [1, 2]
    writer.close()
