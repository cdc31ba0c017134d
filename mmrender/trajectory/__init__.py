"""Trajectories of steps, and what both the worker that samples and the process that trains need of them."""

from mmrender.trajectory.branch import Branch, step_sample
from mmrender.trajectory.engine_data import RoutedExperts, WeightVersionSpan
from mmrender.trajectory.jsonl import find_unserializable, is_json_serializable, write_jsonl
from mmrender.trajectory.rendered_wire import rendered_from_wire, rendered_to_wire
from mmrender.trajectory.sample import TrainingSample
from mmrender.trajectory.saving import (
    TrajectoryReader,
    TrajectoryWriter,
    load_trajectories,
    save_trajectories,
)
from mmrender.trajectory.steps import step_multi_modal_data
from mmrender.trajectory.token_views import (
    ResponseTokens,
    TrajectoryStepTokens,
    response_tokens,
    trajectory_step_tokens,
)
from mmrender.trajectory.tree import Trajectory
from mmrender.trajectory.tree_step import Step
from mmrender.trajectory.tree_wire import (
    group_from_wire,
    group_to_wire,
    trajectory_from_wire,
    trajectory_to_wire,
)
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
    "TrajectoryReader",
    "TrajectoryStepTokens",
    "TrajectoryWriter",
    "WeightVersionSpan",
    "find_unserializable",
    "group_from_wire",
    "group_to_wire",
    "is_json_serializable",
    "load_trajectories",
    "pack_group",
    "pack_sidecars",
    "rendered_from_wire",
    "rendered_to_wire",
    "response_tokens",
    "save_trajectories",
    "step_multi_modal_data",
    "step_sample",
    "strip_intermediate_mm_data",
    "trajectory_from_wire",
    "trajectory_step_tokens",
    "trajectory_to_wire",
    "trim_ids",
    "trim_to_length",
    "unpack_group",
    "unpack_sidecars",
    "write_jsonl",
]
