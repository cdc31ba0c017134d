"""Shared memory without names: anonymous files that one process makes, and another maps.

A segment has no name in `/dev/shm` or anywhere else; the sender passes its file descriptor over the socket.
So there is nothing to clean up, and nothing for `multiprocessing`'s resource tracker to guess about: the
system frees a segment when the last process that maps it is gone, however it went.

The sender owns its segments and reuses them; the receiver maps them for reading only, and says when the last
view into one is gone. On Linux they are sealed, so that a sender cannot cut off memory that a receiver reads.
Where the system has no `memfd_create`, they are unlinked temporary files.
"""

import contextlib
import fcntl
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from mmrender.errors import ShippingProtocolError

MIN_SEGMENT_BYTES = 1 << 20
MAX_SEGMENTS = 256
_SEALS = "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL"
_SEALED = all(hasattr(fcntl, name) for name in (*_SEALS, "F_ADD_SEALS")) and hasattr(os, "memfd_create")


class Segment:
    """Memory of the sender: `data` is a uint8 array of shape `(num_bytes,)`."""

    def __init__(self, number: int, num_bytes: int) -> None:
        self.number = number
        self.num_bytes = num_bytes
        self.fd = _anonymous_file(num_bytes)
        try:
            self.data: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(self.fd, num_bytes), np.uint8)
        except BaseException:
            os.close(self.fd)
            raise

    def close_fd(self) -> None:
        """Close the descriptor; the mapping goes with the last array over it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class SegmentPool:
    """The sender's segments of one connection.

    Args:
        max_bytes: Most that all of them may have together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._segments: dict[int, Segment] = {}
        self._idle: set[int] = set()
        self._next = 0

    @property
    def num_bytes(self) -> int:
        """Memory of all segments."""
        return sum(segment.num_bytes for segment in self._segments.values())

    def acquire(self, num_bytes: int) -> tuple[Segment | None, bool, list[int]]:
        """Find or make a segment that holds so many bytes.

        Returns:
            The segment, or None where the bounds allow none; whether it is a new one, which the receiver does
            not know; and numbers of idle ones that had to go.
        """
        fits = [
            segment
            for segment in (self._segments[number] for number in self._idle)
            if num_bytes <= segment.num_bytes <= max(8 * num_bytes, MIN_SEGMENT_BYTES)
        ]
        if fits:
            best = min(fits, key=lambda segment: segment.num_bytes)
            self._idle.discard(best.number)
            return best, False, []
        # Sizes of powers of two, so that the next message of about this size finds it; what is not written to
        # takes no memory.
        size = max(MIN_SEGMENT_BYTES, 1 << (num_bytes - 1).bit_length())
        gone = self._make_room(size)
        if self.num_bytes + size > self.max_bytes or len(self._segments) >= MAX_SEGMENTS:
            return None, False, gone
        self._next += 1
        try:
            segment = Segment(self._next, size)
        except OSError:
            return None, False, gone
        self._segments[segment.number] = segment
        return segment, True, gone

    def give_back(self, number: int) -> None:
        """Note that the receiver has no view of a segment any more."""
        if number in self._segments:
            self._idle.add(number)

    def close(self) -> None:
        """Drop them all; what the receiver has mapped stays until it lets go."""
        for segment in self._segments.values():
            segment.close_fd()
        self._segments.clear()
        self._idle.clear()

    def _make_room(self, size: int) -> list[int]:
        gone: list[int] = []
        while self._idle and (self.num_bytes + size > self.max_bytes or len(self._segments) >= MAX_SEGMENTS):
            number = min(self._idle, key=lambda number: self._segments[number].num_bytes)
            self._idle.discard(number)
            self._segments.pop(number).close_fd()
            gone.append(number)
        return gone


class MappedSegments:
    """The receiver's side: segments mapped for reading, leased one message at a time.

    Args:
        peer: Who is there, for messages.
        max_bytes: Most that may be mapped at once.
        released: Called with the number of a segment when the last view of its message is gone, from whatever
            thread that happens on.
    """

    def __init__(self, peer: str, max_bytes: int, released: Callable[[int], None]) -> None:
        self.peer = peer
        self.max_bytes = max_bytes
        self.released = released
        self._maps: dict[int, npt.NDArray[np.uint8]] = {}
        self._leased: set[int] = set()

    def add(self, number: int, num_bytes: int, fd: int) -> None:
        """Map a segment; the descriptor is the caller's to close.

        Raises:
            ShippingProtocolError: It is not what was announced, could be cut off, or is too much.
        """
        total = sum(data.nbytes for data in self._maps.values()) + num_bytes
        if number in self._maps or len(self._maps) >= MAX_SEGMENTS or total > self.max_bytes:
            raise self._wrong("a segment too many", f"at most {self.max_bytes} bytes", f"{total} bytes")
        if os.fstat(fd).st_size != num_bytes or num_bytes < 1:
            raise self._wrong("a segment of another size", f"{num_bytes} bytes", f"{os.fstat(fd).st_size}")
        if _SEALED and not _is_sealed(fd):
            raise self._wrong("a segment that its sender could cut off", "sealed memory", "no seal")
        try:
            mapped = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise self._wrong("a segment that cannot be mapped", "shared memory", str(error)) from error
        self._maps[number] = np.frombuffer(mapped, np.uint8)

    def remove(self, number: int) -> None:
        """Forget a segment that the sender has dropped."""
        self._maps.pop(number, None)
        self._leased.discard(number)

    def lease(self, number: int, num_bytes: int) -> memoryview:
        """Give a read-only view of the start of a segment; it is released when the last view of it is gone.

        Raises:
            ShippingProtocolError: There is no such segment, it is too short, or still looked at.
        """
        data = self._maps.get(number)
        if data is None or number in self._leased or num_bytes > data.nbytes:
            raise self._wrong(
                "a segment that cannot hold a message now", "one that was released", str(number)
            )
        self._leased.add(number)
        lease = data[:num_bytes]
        weakref.finalize(lease, self.released, number).atexit = False
        return lease.data

    def give_back(self, number: int) -> None:
        """Note, on the event loop, that a lease is over."""
        self._leased.discard(number)

    def close(self) -> None:
        """Unmap what nobody looks at; the rest goes with its last view."""
        self._maps.clear()

    def _wrong(self, problem: str, expected: str, got: str) -> ShippingProtocolError:
        return ShippingProtocolError(problem, where=self.peer, expected=expected, got=got)


def _anonymous_file(num_bytes: int) -> int:
    if not _SEALED:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
        os.ftruncate(fd, num_bytes)
        return fd
    fd = os.memfd_create("mmrender", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, sum(getattr(fcntl, name) for name in _SEALS))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _is_sealed(fd: int) -> bool:
    with contextlib.suppress(OSError):
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    return False
