"""`TransportConfig`: everything about the way to a server, as one picklable value."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from mmrender.errors import InputError


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """The way to one server.

    Attributes:
        base_url: Root of the server; `http` or `https`, perhaps with a path.
        api_key: Sent as `Authorization: Bearer ...`; never printed.
        headers: Sent with every request.
        timeout: Seconds for a whole call, its retries included; None waits for ever.
        connect_timeout: Seconds for making one connection.
        attempts: How often a call is tried at most, the first time included; 1 turns retries off.
        wait_initial: Seconds before the first retry; doubled for each further one.
        wait_jitter: Up to so many random seconds are added to each wait.
        wait_max: The longest wait, also where the server names one by `Retry-After`.
        max_connections: Open connections of one event loop; 0 for no bound. Calls beyond it wait.
        keepalive: Seconds that an idle connection is kept. Uvicorn, under vLLM and SGLang, closes one after
            5, and a request that meets the closing is lost; so it should be less than the server's.
        max_reply_bytes: A longer reply is an error, and is not read to its end.
        encode_inline_bytes: JSON bodies of about this size and more are encoded on a thread.

    Raises:
        InputError: A value is out of range, or the URL is none.
    """

    base_url: str
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout: float | None = 3600.0
    connect_timeout: float = 10.0
    attempts: int = 4
    wait_initial: float = 0.1
    wait_jitter: float = 0.5
    wait_max: float = 5.0
    max_connections: int = 1024
    keepalive: float = 4.0
    max_reply_bytes: int = 1 << 30
    encode_inline_bytes: int = 256 << 10

    def __post_init__(self) -> None:
        object.__setattr__(self, "base_url", _checked_url(self.base_url))
        object.__setattr__(self, "headers", _checked_headers(self.headers))
        if self.api_key is not None:
            _checked_headers({"Authorization": self.api_key})
        _in_range("timeout", self.timeout, above=0.0)
        _in_range("connect_timeout", self.connect_timeout, above=0.0)
        _in_range("attempts", self.attempts, above=0)
        _in_range("max_reply_bytes", self.max_reply_bytes, above=0)
        for name in (
            "wait_initial",
            "wait_jitter",
            "wait_max",
            "max_connections",
            "keepalive",
            "encode_inline_bytes",
        ):
            _in_range(name, getattr(self, name), above=-1, least=0)

    @property
    def all_headers(self) -> dict[str, str]:
        """Headers of every request, the key among them."""
        bearer = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {**bearer, **self.headers}

    @property
    def key(self) -> tuple[object, ...]:
        """What two configurations that may share connections have in common: everything."""
        values = (getattr(self, name) for name in self.__slots__ if name != "headers")
        return (*values, tuple(sorted(self.headers.items())))


def _checked_url(url: str) -> str:
    parts = urlsplit(url)
    usable = parts.scheme in ("http", "https") and parts.hostname and not parts.query and not parts.fragment
    if not usable:
        raise InputError(
            "the address of the server is not usable",
            where="base_url",
            expected="http://HOST[:PORT][/PATH] or https://...",
            got=repr(url),
        )
    return url.rstrip("/")


def _checked_headers(headers: Mapping[Any, Any]) -> dict[str, str]:
    for name, value in headers.items():
        texts = isinstance(name, str) and isinstance(value, str)
        if not texts or any(character in "\r\n\0" for character in name + value):
            raise InputError(
                "a header is not usable",
                where=f"headers[{name!r}]",
                expected="text without line breaks",
                got=type(value).__name__,
            )
    return dict(headers)


def _in_range(name: str, value: Any, *, above: float, least: float | None = None) -> None:
    if value is None and name == "timeout":
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= above:
        bound = f"more than {above:g}" if least is None else f"{least:g} or more"
        raise InputError("a setting is out of range", where=name, expected=bound, got=repr(value))
