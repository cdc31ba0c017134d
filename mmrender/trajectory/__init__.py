"""Trajectories of steps, and what both the worker that samples and the process that trains need of them."""

from mmrender.trajectory.steps import step_multi_modal_data
from mmrender.trajectory.trim import (
    pack_group,
    pack_sidecars,
    strip_intermediate_mm_data,
    unpack_group,
    unpack_sidecars,
)

__all__ = [
    "pack_group",
    "pack_sidecars",
    "step_multi_modal_data",
    "strip_intermediate_mm_data",
    "unpack_group",
    "unpack_sidecars",
]
