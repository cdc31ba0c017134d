"""Where a receiver listens: `unix:///path`, `tcp://host:port`, `zmq+tcp://host:port`, `zmq+ipc:///path`, `shm://name`."""

import ipaddress
import re
from dataclasses import dataclass, replace
from typing import Literal, Self
from urllib.parse import urlsplit

from mmrender.errors import ShippingError

Scheme = Literal["unix", "tcp", "zmq+tcp", "zmq+ipc", "shm", "memory"]

_FORMS: dict[str, str] = {
    "unix": "unix:///path/to/socket",
    "tcp": "tcp://host:port",
    "zmq+tcp": "zmq+tcp://host:port",
    "zmq+ipc": "zmq+ipc:///path/to/socket",
    "shm": "shm://name",
    "memory": "memory://name",
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_PATH_BYTES = 107
"""What `sockaddr_un` holds on Linux, less the closing zero."""


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL.

    Attributes:
        scheme: How bytes travel.
        path: Of a socket file; for `shm` and `memory` the name.
        host: As written, without brackets; `*` stands for every interface.
        port: 0 asks the system for a free one when bound.
    """

    scheme: Scheme
    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, url: "str | Address") -> "Address":
        """Read a URL.

        Raises:
            ShippingError: It is none of the forms above.
        """
        if isinstance(url, Address):
            return url
        try:
            parts = urlsplit(url)
            scheme, host, port = parts.scheme, parts.hostname, parts.port
        except (ValueError, AttributeError, TypeError) as error:
            raise _malformed(url, " or ".join(_FORMS.values())) from error
        if scheme not in _FORMS:
            raise _malformed(url, ", ".join(form for key, form in _FORMS.items() if key != "memory"))
        if parts.query or parts.fragment or parts.username is not None:
            raise _malformed(url, _FORMS[scheme])
        if scheme in ("tcp", "zmq+tcp"):
            if not host or port is None or parts.path not in ("", "/"):
                raise _malformed(url, _FORMS[scheme])
            return cls(scheme, host=host, port=port)  # type: ignore[arg-type]
        if scheme in ("unix", "zmq+ipc"):
            if parts.netloc or len(parts.path) < 2 or len(parts.path.encode()) > _MAX_PATH_BYTES:
                raise _malformed(url, f"{_FORMS[scheme]} of at most {_MAX_PATH_BYTES} bytes")
            return cls(scheme, path=parts.path)  # type: ignore[arg-type]
        if parts.path not in ("", "/") or not _NAME.fullmatch(parts.netloc):
            raise _malformed(url, f"{_FORMS[scheme]} of letters, digits, '.', '_' and '-'")
        return cls(scheme, path=parts.netloc)  # type: ignore[arg-type]

    @property
    def is_network(self) -> bool:
        """Whether another machine could be at the other end."""
        return self.scheme in ("tcp", "zmq+tcp")

    @property
    def is_zmq(self) -> bool:
        """Whether ZeroMQ carries it."""
        return self.scheme.startswith("zmq")

    def with_port(self, port: int) -> Self:
        """The same address with the port that the system chose."""
        return replace(self, port=port)

    def __str__(self) -> str:
        if self.is_network:
            host = f"[{self.host}]" if ":" in self.host else self.host
            return f"{self.scheme}://{host}:{self.port}"
        return f"{self.scheme}://{self.path}"


def is_loopback(host: str) -> bool:
    """Whether a numeric address, or the name `localhost`, cannot be reached from another machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _malformed(url: object, form: str) -> ShippingError:
    return ShippingError("not an address", where="url", expected=form, got=repr(url)[:200])
