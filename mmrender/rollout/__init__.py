"""Rollouts: a model that is sampled over many turns, in an environment, many trajectories at once.

Names are imported from their modules at first use.
"""

from typing import TYPE_CHECKING, Final

from mmrender._lazy import at_first_use

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
    "Action": "environment",
    "BatchMetadata": "types",
    "Completion": "renderer_client",
    "Environment": "environment",
    "FindCell": "find_cell",
    "FindCellSettings": "find_cell",
    "GeneratorInput": "types",
    "GeneratorInterface": "types",
    "GeneratorOutput": "types",
    "Observation": "environment",
    "RendererClient": "renderer_client",
    "TrajectoryID": "types",
    "VLMGenerator": "generator",
    "run_episode": "episode",
}

__getattr__, __dir__ = at_first_use(__name__, _HOMES)
