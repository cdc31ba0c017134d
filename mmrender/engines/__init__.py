"""One client over many inference servers: routing, retries exact in tokens, pauses, an HTTP endpoint.

Names are imported from their modules at first use; importing this package starts nothing and loads no web
framework.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mmrender.engines.client import InferenceEngineClient
    from mmrender.engines.http_engine import HTTPEngine
    from mmrender.engines.interface import (
        InferenceEngineInput,
        InferenceEngineInterface,
        InferenceEngineOutput,
        NamedWeightsUpdate,
        PauseMode,
    )
    from mmrender.engines.local_engine import LocalEngine
    from mmrender.engines.policy import ClientPolicy
    from mmrender.engines.server import EngineServer, ServerSettings

__all__ = [
    "ClientPolicy",
    "EngineServer",
    "HTTPEngine",
    "InferenceEngineClient",
    "InferenceEngineInput",
    "InferenceEngineInterface",
    "InferenceEngineOutput",
    "LocalEngine",
    "NamedWeightsUpdate",
    "PauseMode",
    "ServerSettings",
]

_HOMES: Final = {
    "ClientPolicy": "mmrender.engines.policy",
    "EngineServer": "mmrender.engines.server",
    "HTTPEngine": "mmrender.engines.http_engine",
    "InferenceEngineClient": "mmrender.engines.client",
    "InferenceEngineInput": "mmrender.engines.interface",
    "InferenceEngineInterface": "mmrender.engines.interface",
    "InferenceEngineOutput": "mmrender.engines.interface",
    "LocalEngine": "mmrender.engines.local_engine",
    "NamedWeightsUpdate": "mmrender.engines.interface",
    "PauseMode": "mmrender.engines.interface",
    "ServerSettings": "mmrender.engines.server",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
