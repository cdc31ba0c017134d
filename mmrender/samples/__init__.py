"""Training samples and trajectory steps from conversations that exist as messages."""

from mmrender.samples.build import (
    IGNORE_INDEX,
    TrainingSample,
    TrajectoryStep,
    build_training_sample,
    build_trajectory_step,
)
from mmrender.samples.supervision import OnRewritten, Select

__all__ = [
    "IGNORE_INDEX",
    "OnRewritten",
    "Select",
    "TrainingSample",
    "TrajectoryStep",
    "build_training_sample",
    "build_trajectory_step",
]
