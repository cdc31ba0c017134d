"""One client for inference servers: render, check, call, parse.

`generate` itself is `mmrender.generate`. Names are imported from their modules at first use, so that none of
what the HTTP client needs is imported before it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mmrender.client.backend import EngineRequest, EngineResponse, FinishReason, RendererBackend, Usage
    from mmrender.client.backends import RendererTransport
    from mmrender.client.config import TransportConfig
    from mmrender.client.dynamo import DynamoBackend
    from mmrender.client.generation import Generation
    from mmrender.client.hooks import ClientHooks, RequestEvent
    from mmrender.client.http import HTTPTransport
    from mmrender.client.local import LocalBackend
    from mmrender.client.memory import MemoryTransport
    from mmrender.client.resolve import as_transport
    from mmrender.client.sglang import SGLangBackend
    from mmrender.client.transport import Reply, Transport
    from mmrender.client.vllm import VLLMBackend

__all__ = [
    "ClientHooks",
    "DynamoBackend",
    "EngineRequest",
    "EngineResponse",
    "FinishReason",
    "Generation",
    "HTTPTransport",
    "LocalBackend",
    "MemoryTransport",
    "RendererBackend",
    "RendererTransport",
    "Reply",
    "RequestEvent",
    "SGLangBackend",
    "Transport",
    "TransportConfig",
    "Usage",
    "VLLMBackend",
    "as_transport",
]

_HOMES: Final = {
    "ClientHooks": "mmrender.client.hooks",
    "DynamoBackend": "mmrender.client.dynamo",
    "EngineRequest": "mmrender.client.backend",
    "EngineResponse": "mmrender.client.backend",
    "FinishReason": "mmrender.client.backend",
    "Generation": "mmrender.client.generation",
    "HTTPTransport": "mmrender.client.http",
    "LocalBackend": "mmrender.client.local",
    "MemoryTransport": "mmrender.client.memory",
    "RendererBackend": "mmrender.client.backend",
    "RendererTransport": "mmrender.client.backends",
    "Reply": "mmrender.client.transport",
    "RequestEvent": "mmrender.client.hooks",
    "SGLangBackend": "mmrender.client.sglang",
    "Transport": "mmrender.client.transport",
    "TransportConfig": "mmrender.client.config",
    "Usage": "mmrender.client.backend",
    "VLLMBackend": "mmrender.client.vllm",
    "as_transport": "mmrender.client.resolve",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
