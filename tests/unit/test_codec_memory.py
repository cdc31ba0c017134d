"""Who owns decoded memory: views, copies, writability, alignment, and when a pool gets its buffer back."""

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch

import mmcodecs
from kit import raised
from mmcodecs.buffers import aligned_empty
from mmcodecs.errors import BufferTooSmallError, EncodeError

PIXELS = np.arange(4096, dtype=np.float32).reshape(64, 64)
TENSOR = torch.arange(4096, dtype=torch.bfloat16)


def overlaps(array: np.ndarray[Any, Any], buffer: Any) -> bool:
    return np.shares_memory(array, np.frombuffer(buffer, np.uint8))


def address(array: np.ndarray[Any, Any]) -> int:
    return array.ctypes.data


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_numpy_arrays_are_read_only_views(kind: Any) -> None:
    message = kind(mmcodecs.encode([PIXELS, TENSOR]))
    array, raw = mmcodecs.decode(message)
    assert overlaps(array, message)
    assert overlaps(raw.bits, message)
    for view in (array, raw.bits):
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
            view.flags.writeable = True


def test_copies_are_their_own_and_made_of_what_is_misaligned() -> None:
    message = mmcodecs.encode([PIXELS, np.arange(3), memoryview(b"x" * 5000)])
    array, small, data = mmcodecs.decode(message, copy=True)
    for copied in (array, small):
        copied[0] = 7
        assert not overlaps(copied, message)
    assert not overlaps(np.frombuffer(data, np.uint8), message)
    message = mmcodecs.encode([PIXELS, PIXELS.astype(">f4")])
    room = aligned_empty(message.nbytes + 1)
    room[1:] = np.frombuffer(message, np.uint8)
    plain, swapped = mmcodecs.decode(room[1:], framework="torch")
    assert not overlaps(plain.numpy(), room)
    assert torch.equal(plain, torch.from_numpy(PIXELS))
    assert torch.equal(swapped, torch.from_numpy(PIXELS))


@pytest.mark.parametrize("kind", [bytes, bytearray])
@pytest.mark.parametrize("copy", [False, True])
def test_torch_tensors_are_views_of_writable_memory_only(kind: Any, copy: bool) -> None:
    message = kind(mmcodecs.encode([PIXELS, TENSOR]))
    for tensor in mmcodecs.decode(message, framework="torch", copy=copy):
        assert overlaps(tensor.view(torch.uint8).numpy(), message) is (kind is bytearray and not copy)
        tensor.zero_()


def test_frames_hold_no_copy_of_the_sender_or_the_receiver() -> None:
    frames = mmcodecs.encode_frames({"a": PIXELS, "t": TENSOR, "b": PIXELS.T})
    assert np.shares_memory(np.frombuffer(frames[1], np.uint8), PIXELS)
    assert np.shares_memory(np.frombuffer(frames[2], np.uint8), TENSOR.view(torch.uint8).numpy())
    assert not np.shares_memory(np.frombuffer(frames[3], np.uint8), PIXELS)
    assert all(frame.readonly for frame in frames[1:])
    assert np.shares_memory(mmcodecs.decode(frames)["a"], PIXELS)


def test_payloads_are_aligned() -> None:
    pool = mmcodecs.BufferPool()
    value = [np.arange(count, dtype=np.uint8) for count in (300, 301, 999, 4097)]
    for buffer in (None, pool, aligned_empty(100_000)):
        for array in mmcodecs.decode(mmcodecs.encode(value, buffer=buffer)):
            assert address(array) % 64 == 0


def test_a_buffer_too_short_says_what_it_takes() -> None:
    needed = len(mmcodecs.encode(PIXELS))
    caught = raised(BufferTooSmallError, mmcodecs.encode, PIXELS, buffer=bytearray(10))
    assert caught.needed == needed
    assert str(caught) == (
        f"buffer: the buffer cannot hold the message - expected at least {needed:,} bytes, got 10"
    )
    with pytest.raises(EncodeError, match="buffer: the buffer is read-only"):
        mmcodecs.encode(PIXELS, buffer=memoryview(b"x" * 100_000))
    with pytest.raises(EncodeError, match="buffer: not contiguous bytes"):
        mmcodecs.encode(PIXELS, buffer=np.zeros((10, 10))[:, ::2])


def test_no_old_byte_of_a_buffer_leaves_in_a_gap() -> None:
    room = bytearray(b"\xaa" * 100_000)
    value = [np.zeros(301, np.uint8), np.zeros(77, np.float32), b"\0" * 5001]
    message = mmcodecs.encode(value, buffer=room)
    assert message.obj is room
    assert bytes(message) == bytes(mmcodecs.encode(value))


def test_a_pooled_buffer_stays_out_until_the_last_view_is_gone() -> None:
    pool = mmcodecs.BufferPool()
    message = mmcodecs.encode({"a": PIXELS, "t": TENSOR}, buffer=pool)
    decoded = mmcodecs.decode(message)
    tensor = mmcodecs.decode(message, framework="torch")["t"]
    slice_of_a_slice = decoded["a"][3:5].T[1]
    views: list[Any] = [slice_of_a_slice, tensor[4:8], memoryview(decoded["a"]), message[100:]]
    del message, decoded, tensor, slice_of_a_slice
    while views:
        assert pool.idle_bytes == 0
        other = pool.acquire(20_000)
        assert not any(
            overlaps(np.asarray(view), other) for view in views if not isinstance(view, torch.Tensor)
        )
        del other
        idle = pool.idle_bytes
        pool.acquire(20_000).release()
        assert pool.idle_bytes == idle
        pool._idle.clear()
        views.pop()
    assert pool.idle_bytes >= 20_000


def test_a_pool_keeps_what_it_may_and_gives_it_again_but_no_huge_buffer_for_a_small_message() -> None:
    pool = mmcodecs.BufferPool()
    first = address(np.frombuffer(mmcodecs.encode(PIXELS, buffer=pool), np.uint8))
    second = address(np.frombuffer(mmcodecs.encode(PIXELS, buffer=pool), np.uint8))
    assert first == second
    pool = mmcodecs.BufferPool(max_idle_bytes=1_500_000)
    held = [pool.acquire(1_000_000) for _ in range(3)]
    assert pool.idle_bytes == 0
    held.clear()
    idle = pool.idle_bytes
    assert 1_000_000 <= idle <= 1_500_000
    with pool.acquire(1000):
        assert pool.idle_bytes == idle


def test_views_in_cycles_come_back_with_the_collector() -> None:
    pool = mmcodecs.BufferPool()
    gc.disable()
    try:
        cycle: list[Any] = [mmcodecs.decode(mmcodecs.encode(PIXELS, buffer=pool))]
        cycle.append(cycle)
        del cycle
        assert pool.idle_bytes == 0
        gc.collect()
        assert pool.idle_bytes > 0
    finally:
        gc.enable()


def test_threads_never_see_each_others_buffers() -> None:
    pool = mmcodecs.BufferPool()
    wrong: list[int] = []

    def work(number: int) -> None:
        held = []
        for step in range(60):
            marked = np.full(2000 + 100 * (step % 7), number * 1000 + step, np.int32)
            held.append((number * 1000 + step, mmcodecs.decode(mmcodecs.encode(marked, buffer=pool))))
            if len(held) > 5:
                mark, array = held.pop(step % 5)
                if not (array == mark).all():
                    wrong.append(mark)
            if step % 20 == 0:
                gc.collect()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert pool.idle_bytes > 0
