"""Rollouts: a model that is sampled over many turns, in an environment, many trajectories at once.

Names are imported from their modules at first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mmrender.rollout.environment import Action, Environment, Observation
    from mmrender.rollout.episode import run_episode
    from mmrender.rollout.find_cell import FindCell, FindCellSettings
    from mmrender.rollout.generator import VLMGenerator
    from mmrender.rollout.renderer_client import Completion, RendererClient
    from mmrender.rollout.types import (
        BatchMetadata,
        GeneratorInput,
        GeneratorInterface,
        GeneratorOutput,
        TrajectoryID,
    )

__all__ = [
    "Action",
    "BatchMetadata",
    "Completion",
    "Environment",
    "FindCell",
    "FindCellSettings",
    "GeneratorInput",
    "GeneratorInterface",
    "GeneratorOutput",
    "Observation",
    "RendererClient",
    "TrajectoryID",
    "VLMGenerator",
    "run_episode",
]

_HOMES: Final = {
    "Action": "mmrender.rollout.environment",
    "BatchMetadata": "mmrender.rollout.types",
    "Completion": "mmrender.rollout.renderer_client",
    "Environment": "mmrender.rollout.environment",
    "FindCell": "mmrender.rollout.find_cell",
    "FindCellSettings": "mmrender.rollout.find_cell",
    "GeneratorInput": "mmrender.rollout.types",
    "GeneratorInterface": "mmrender.rollout.types",
    "GeneratorOutput": "mmrender.rollout.types",
    "Observation": "mmrender.rollout.environment",
    "RendererClient": "mmrender.rollout.renderer_client",
    "TrajectoryID": "mmrender.rollout.types",
    "VLMGenerator": "mmrender.rollout.generator",
    "run_episode": "mmrender.rollout.episode",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
