"""One client for inference servers: render, check, call, parse.

`generate` itself is `mmrender.generate`. Names are imported from their modules at first use, so that none of
what the HTTP client needs is imported before it is used.
"""

from typing import TYPE_CHECKING, Final

from mmrender._lazy import at_first_use

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
    "ClientHooks": "hooks",
    "DynamoBackend": "dynamo",
    "EngineRequest": "backend",
    "EngineResponse": "backend",
    "FinishReason": "backend",
    "Generation": "generation",
    "HTTPTransport": "http",
    "LocalBackend": "local",
    "MemoryTransport": "memory",
    "RendererBackend": "backend",
    "RendererTransport": "backends",
    "Reply": "transport",
    "RequestEvent": "hooks",
    "SGLangBackend": "sglang",
    "Transport": "transport",
    "TransportConfig": "config",
    "Usage": "backend",
    "VLLMBackend": "vllm",
    "as_transport": "resolve",
}

__getattr__, __dir__ = at_first_use(__name__, _HOMES)
