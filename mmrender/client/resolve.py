"""`as_transport`: what a caller names a server by, as a transport."""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final, TypeGuard

from mmrender.client.config import TransportConfig
from mmrender.client.transport import Transport
from mmrender.errors import InputError

_MOST: Final = 256
_SDK_HEADERS: Final = (
    "accept",
    "accept-encoding",
    "authorization",
    "content-type",
    "user-agent",
    "x-stainless-",
)

_shared: OrderedDict[tuple[object, ...], Transport] = OrderedDict()
_lock = threading.Lock()


def as_transport(client: Any) -> Transport:
    """The transport to a server; equal servers share one and its connections.

    Args:
        client: A transport; a `TransportConfig`; a base URL; or an object with `base_url` and `api_key`, such
            as `openai.AsyncOpenAI`, whose `default_headers` are sent too. A trailing `/v1` of the URL is left
            out, since engines serve their own routes beside it. Timeouts and retries are those of
            `TransportConfig`, not the object's.

    Raises:
        InputError: It is none of these, or its URL cannot be used.
        MissingDependencyError: The HTTP client is not installed.
    """
    if isinstance(client, TransportConfig):
        return _shared_transport(client)
    if isinstance(client, str):
        return _shared_transport(TransportConfig(server_root(client)))
    if _is_transport(client):
        return client
    base_url = getattr(client, "base_url", None)
    if base_url is None:
        raise InputError(
            "this is no client",
            where="client",
            expected="a base URL, a transport, or an object with base_url and api_key",
            got=type(client).__name__,
        )
    key = getattr(client, "api_key", None)
    return _shared_transport(
        TransportConfig(
            server_root(str(base_url)),
            api_key=key if isinstance(key, str) and key else None,
            headers=_own_headers(client),
        )
    )


def _is_transport(client: Any) -> TypeGuard[Transport]:
    # `isinstance` of a protocol costs as much as the rest of a call's checks.
    return all(hasattr(client, name) for name in ("request", "stream", "aclose", "base_url"))


def server_root(url: str) -> str:
    """A base URL without its trailing slash and `/v1`."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _own_headers(client: Any) -> dict[str, str]:
    """Headers that were set on a client, without those that its library always sends."""
    headers = getattr(client, "default_headers", None)
    if not isinstance(headers, Mapping):
        return {}
    return {
        name: value
        for name, value in headers.items()
        if isinstance(value, str) and not name.lower().startswith(_SDK_HEADERS)
    }


def _shared_transport(config: TransportConfig) -> Transport:
    from mmrender.client.http import HTTPTransport

    with _lock:
        transport = _shared.get(config.key)
        if transport is None:
            transport = _shared[config.key] = HTTPTransport(config)
        _shared.move_to_end(config.key)
        while len(_shared) > _MOST:
            # Its connections close when nobody uses it any more.
            _shared.popitem(last=False)
    return transport
