"""Shared memory without names: who owns it, what is mapped, and what a hostile sender cannot do."""

import fcntl
import gc
import os
import weakref

import numpy as np
import pytest

from mmrender.errors import ShippingProtocolError
from mmrender.shipping.shared_memory import MappedSegments, OwnSegment, SegmentPool

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's memfd_create")
MB = 1 << 20


def test_segments_are_used_again_and_bounded():
    pool = SegmentPool(4 * MB)
    first, is_new, gone = pool.acquire(600_000)
    assert is_new
    assert gone == []
    assert first.num_bytes == MB
    second, _, _ = pool.acquire(1_500_000)
    assert second.num_bytes == 2 * MB
    assert pool.acquire(1_500_000) == (None, False, [])  # beyond four megabytes
    pool.give_back(first.number)
    assert pool.acquire(900_000) == (first, False, [])
    pool.give_back(first.number)
    pool.give_back(second.number)
    third, is_new, gone = pool.acquire(3 * MB)
    assert is_new
    assert gone == [first.number, second.number]
    assert third.num_bytes == 4 * MB
    pool.give_back(99)
    pool.close()
    assert pool.num_bytes == 0


class Released:
    """What was released, as a connection would hear of it."""

    def __init__(self):
        self.numbers = []

    def note(self, number):
        self.numbers.append(number)


def test_a_lease_is_released_when_its_last_view_dies():
    segment, released = OwnSegment(7, MB), Released()
    maps = MappedSegments("peer", 8 * MB, released.note)
    maps.add(7, MB, segment.fd)
    segment.data[:4] = [1, 2, 3, 4]
    view = maps.lease(7, 4)
    array = np.frombuffer(view[1:3], np.uint8)
    assert array.tolist() == [2, 3]
    assert view.readonly
    with pytest.raises(ShippingProtocolError, match="cannot hold a message now"):
        maps.lease(7, 4)  # while it is looked at
    del view
    gc.collect()
    assert released.numbers == []
    del array
    assert released.numbers == [7]
    maps.give_back(7)
    assert bytes(maps.lease(7, 2)) == b"\x01\x02"
    os.close(segment.fd)
    maps.close()


def test_a_view_keeps_nothing_alive_of_the_connection_that_waits_for_its_end():
    segment, released = OwnSegment(1, MB), Released()
    maps = MappedSegments("peer", 8 * MB, released.note)
    maps.add(1, MB, segment.fd)
    view = maps.lease(1, 4)
    gone = weakref.ref(released)
    del released
    gc.collect()
    assert gone() is None
    del view  # with nobody to tell
    os.close(segment.fd)
    maps.close()


def test_what_a_receiver_must_not_map_is_refused():
    released = Released()
    maps = MappedSegments("peer", 4 * MB, released.note)
    sound = OwnSegment(1, MB)
    plain = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    os.ftruncate(plain, MB)
    try:
        with pytest.raises(ShippingProtocolError) as caught:
            maps.add(1, MB, plain)
        assert str(caught.value) == (
            f"peer: a segment that cannot be used - expected {MB} bytes of sealed memory, got {MB} bytes, not sealed"
        )
        for number, num_bytes, problem in (
            (1, 2 * MB, "cannot be used"),
            (1, 5 * MB, "too many"),
        ):
            with pytest.raises(ShippingProtocolError, match=problem):
                maps.add(number, num_bytes, sound.fd)
        maps.add(1, MB, sound.fd)
        with pytest.raises(ShippingProtocolError, match="too many"):
            maps.add(1, MB, sound.fd)
        for number, num_bytes in ((2, 1), (1, MB + 1)):
            with pytest.raises(ShippingProtocolError, match="cannot hold a message now"):
                maps.lease(number, num_bytes)
    finally:
        os.close(plain)
        os.close(sound.fd)


def test_a_sender_cannot_cut_off_what_it_has_shared():
    segment = OwnSegment(1, MB)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 10)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(segment.fd)


def test_nothing_appears_in_dev_shm():
    before = {name for name in os.listdir("/dev/shm") if "mmrender" in name}
    segment = OwnSegment(1, MB)
    assert {name for name in os.listdir("/dev/shm") if "mmrender" in name} == before
    assert "memfd:mmrender" in os.readlink(f"/proc/self/fd/{segment.fd}")
    os.close(segment.fd)
