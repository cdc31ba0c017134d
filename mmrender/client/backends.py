"""Backends by name."""

from functools import lru_cache
from importlib import import_module
from typing import Any, Final, Literal, TypeAlias, cast

from mmrender.client.backend import RendererBackend
from mmrender.client.resolve import as_transport
from mmrender.client.transport import Transport
from mmrender.errors import InputError

BackendName: TypeAlias = Literal["vllm", "sglang", "dynamo", "local"]
RendererTransport: TypeAlias = Literal["vllm_generate", "sglang_generate", "dynamo_chat"]
"""What a backend is called by its route, as another spelling of `backend`."""

_CLASSES: Final[dict[str, tuple[str, str]]] = {
    "vllm": ("mmrender.client.vllm", "VLLMBackend"),
    "sglang": ("mmrender.client.sglang", "SGLangBackend"),
    "dynamo": ("mmrender.client.dynamo", "DynamoBackend"),
    "local": ("mmrender.client.local", "LocalBackend"),
}
_ROUTES: Final[dict[str, str]] = {
    "vllm_generate": "vllm",
    "sglang_generate": "sglang",
    "dynamo_chat": "dynamo",
}


def resolve_backend(
    backend: RendererBackend | BackendName | None, route: RendererTransport | None, model: str
) -> RendererBackend:
    """The backend that a call names, by itself, by its name or by its route; vLLM's where it names none.

    Args:
        backend: The backend, or its name.
        route: Its route, as another spelling.
        model: The model, which for `"local"` is its directory.

    Raises:
        InputError: There is none of that name, or name and route contradict each other.
    """
    if route is not None and route not in _ROUTES:
        raise InputError(
            "there is no such transport", where="transport", expected=", ".join(_ROUTES), got=repr(route)
        )
    name = backend if isinstance(backend, str) or backend is None else backend.name
    if route is not None and name is not None and name != _ROUTES[route]:
        raise InputError(
            "backend and transport name different engines",
            where="transport",
            expected=f"{name}'s route, or no transport",
            got=repr(route),
        )
    if backend is not None and not isinstance(backend, str):
        return backend
    chosen = name or (_ROUTES[route] if route is not None else "vllm")
    if chosen not in _CLASSES:
        raise InputError(
            "there is no such backend",
            where="backend",
            expected=f"{', '.join(_CLASSES)}, or an object such as VLLMBackend()",
            got=repr(chosen),
        )
    return _made(chosen, model if chosen == "local" else None)


@lru_cache(maxsize=16)
def _made(name: str, model: str | None) -> RendererBackend:
    module, attribute = _CLASSES[name]
    made = getattr(import_module(module), attribute)
    return cast(RendererBackend, made() if model is None else made(model))


def resolve_transport(client: Any, backend: RendererBackend) -> Transport:
    """The way to the server that `client` names; without one, what a backend in this process has instead.

    Raises:
        InputError: The backend needs a server, and none is named.
    """
    if client is not None:
        return as_transport(client)
    own = getattr(backend, "transport", None)
    if own is None:
        raise InputError(
            "there is no server to ask",
            where="client",
            expected="a base URL, a transport, or an object with base_url and api_key",
            got="None",
        )
    return cast(Transport, own)
