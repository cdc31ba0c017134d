"""Trajectories of steps, and what both the worker that samples and the process that trains need of them."""

from mmrender.trajectory.branch import Branch, step_sample
from mmrender.trajectory.engine_data import RoutedExperts, WeightVersionSpan
from mmrender.trajectory.sample import TrainingSample
from mmrender.trajectory.steps import step_multi_modal_data
from mmrender.trajectory.token_views import (
    ResponseTokens,
    TrajectoryStepTokens,
    response_tokens,
    trajectory_step_tokens,
)
from mmrender.trajectory.tree import Trajectory
from mmrender.trajectory.tree_step import Step
from mmrender.trajectory.trim import (
    pack_group,
    pack_sidecars,
    strip_intermediate_mm_data,
    unpack_group,
    unpack_sidecars,
)
from mmrender.trajectory.trimming import trim_ids, trim_to_length

__all__ = [
    "Branch",
    "ResponseTokens",
    "RoutedExperts",
    "Step",
    "TrainingSample",
    "Trajectory",
    "TrajectoryStepTokens",
    "WeightVersionSpan",
    "pack_group",
    "pack_sidecars",
    "response_tokens",
    "step_multi_modal_data",
    "step_sample",
    "strip_intermediate_mm_data",
    "trajectory_step_tokens",
    "trim_ids",
    "trim_to_length",
    "unpack_group",
    "unpack_sidecars",
]
