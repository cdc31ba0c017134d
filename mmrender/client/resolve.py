"""Backends and servers by their names."""

import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Final, Literal, TypeAlias, cast, get_args
from weakref import WeakValueDictionary

from mmrender.caching import LRUCache
from mmrender.client.transport import Server, Transport, TransportConfig
from mmrender.client.types import RendererBackend
from mmrender.errors import InputError

BackendName: TypeAlias = Literal["vllm", "sglang", "dynamo", "local"]

_BACKENDS: Final = get_args(BackendName)


def resolve_backend(backend: RendererBackend | BackendName | None, model: str) -> RendererBackend:
    """Return a backend by itself or by its name, vLLM's by default.

    A local model's directory is the name of the model. All that name one directory share a model. It is freed
    when none of them holds it and another is named.

    Raises:
        InputError: The backend is unknown.
    """
    if backend is not None and not isinstance(backend, str):
        return backend
    name = backend or "vllm"
    if name not in _BACKENDS:
        raise InputError(
            "unknown backend",
            where="backend",
            expected=f"{', '.join(_BACKENDS)}, or an object such as VLLMBackend()",
            got=repr(name),
        )
    if name != "local":
        return _server_backend(name)
    key = os.getpid(), model  # a child process cannot use the model of its parent
    _newest[0] = local = _models.get(key) or _models.setdefault(key, _class_of(name)(model))
    return local


def _class_of(name: BackendName) -> Callable[..., RendererBackend]:
    """Return the backend class of an engine, whose module is imported when it is named."""
    match name:
        case "vllm":
            from mmrender.client.vllm import VLLMBackend

            return VLLMBackend
        case "sglang":
            from mmrender.client.sglang import SGLangBackend

            return SGLangBackend
        case "dynamo":
            from mmrender.client.dynamo import DynamoBackend

            return DynamoBackend
        case "local":
            from mmrender.client.local import LocalBackend

            return LocalBackend


@cache
def _server_backend(name: BackendName) -> RendererBackend:
    return _class_of(name)()


_models: WeakValueDictionary[tuple[int, str], RendererBackend] = WeakValueDictionary()
_newest: list[RendererBackend | None] = [None]
"""The model in this process that was named last. Others are freed with the last client that holds them."""


_transports: LRUCache[tuple[object, ...], Transport] = LRUCache(256)
_SDK_HEADERS: Final = ("accept", "authorization", "content-type", "user-agent", "x-stainless-")
"""Headers that an SDK always sends, besides the headers of its user."""


def as_transport(client: Server | None) -> Transport:
    """Return the transport to a server. Equal configurations share one and its connections.

    Args:
        client: A transport, a `TransportConfig`, a base URL, or an object with `base_url` and `api_key`, such
            as `openai.AsyncOpenAI`, whose `default_headers` are sent too. A trailing `/v1` of the URL is left
            out, since engines serve further routes at the root. The object's timeouts and retries are not
            taken.

    Raises:
        InputError: `client` is something else, or its URL cannot be used.
        MissingDependencyError: The HTTP client is not installed.
    """
    # `isinstance` of a protocol costs as much as the rest of a call's checks.
    if all(hasattr(client, name) for name in ("request", "stream", "aclose", "base_url")):
        return cast(Transport, client)
    url = client if isinstance(client, str) else getattr(client, "base_url", None)
    if url is None:
        raise InputError(
            "cannot build a transport from this",
            where="client",
            expected="a base URL, a transport, or an object with base_url and api_key",
            got=type(client).__name__,
        )
    config = client if isinstance(client, TransportConfig) else None
    if config is None:
        key, headers = getattr(client, "api_key", None), getattr(client, "default_headers", None)
        config = TransportConfig(
            server_root(str(url)),
            api_key=key if isinstance(key, str) and key else None,
            headers={
                name: value
                for name, value in (headers if isinstance(headers, Mapping) else {}).items()
                if isinstance(value, str) and not name.lower().startswith(_SDK_HEADERS)
            },
        )
    from mmrender.client.http import HTTPTransport

    return _transports.get_or_compute(config.key, lambda: HTTPTransport(config))


def server_root(url: str) -> str:
    """Strip a trailing slash and `/v1` from a base URL."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
