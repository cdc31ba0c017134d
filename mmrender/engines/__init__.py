"""One client over many inference servers: routing, retries exact in tokens, pauses, an HTTP endpoint.

Names are imported from their modules at first use; importing this package starts nothing and loads no web
framework.
"""

from typing import TYPE_CHECKING, Final

from mmrender._lazy import at_first_use

if TYPE_CHECKING:
    from mmrender.engines.client import InferenceEngineClient
    from mmrender.engines.fleet_backend import FleetBackend
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
    "FleetBackend",
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
    "ClientPolicy": "policy",
    "EngineServer": "server",
    "FleetBackend": "fleet_backend",
    "HTTPEngine": "http_engine",
    "InferenceEngineClient": "client",
    "InferenceEngineInput": "interface",
    "InferenceEngineInterface": "interface",
    "InferenceEngineOutput": "interface",
    "LocalEngine": "local_engine",
    "NamedWeightsUpdate": "interface",
    "PauseMode": "interface",
    "ServerSettings": "server",
}

__getattr__, __dir__ = at_first_use(__name__, _HOMES)
