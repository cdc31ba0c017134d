"""A socket for `http.client` whose every wait is bounded by a deadline of the caller's."""

import io
import socket
from collections.abc import Callable
from typing import Any

_BUFFER = 64 * 1024


class DeadlineSocket:
    """A socket whose every read waits no longer than `timeout()` says at that moment.

    A plain socket timeout bounds one read, so a server that sends a byte now and then would never be late.
    """

    def __init__(self, sock: socket.socket, timeout: Callable[[], float]) -> None:
        self._sock = sock
        self._timeout = timeout

    def sendall(self, data: Any) -> None:
        """Send all of a bytes-like object."""
        self._sock.settimeout(self._timeout())
        self._sock.sendall(data)

    def makefile(self, mode: str, *_: object, **__: object) -> io.BufferedReader:
        """Return a buffered reader; `http.client` asks for no other mode."""
        return io.BufferedReader(_DeadlineReader(self._sock, self._timeout), _BUFFER)

    def close(self) -> None:
        """Do nothing: the connection closes its socket before the body is read."""

    def release(self) -> None:
        """Close the socket in truth."""
        self._sock.close()


class _DeadlineReader(io.RawIOBase):
    def __init__(self, sock: socket.socket, timeout: Callable[[], float]) -> None:
        self._sock = sock
        self._timeout = timeout

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(self._timeout())
        return self._sock.recv_into(buffer)
