"""Trajectories without repetition: what each step repeats of earlier ones is left out, and can be put back.

Every step of a multi-turn rollout carries all the images and all the tokens so far, so what a rollout ships
grows with the square of its turns. `pack_sidecars` and `pack_group` store each distinct item once and each
token once per branch; unpacking gives back equal steps. `strip_intermediate_mm_data` serves consumers that
expect plain steps and take the images of a run of turns from its last one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mmrender.errors import TrajectoryError
from mmrender.trajectory.packing import Packer
from mmrender.trajectory.strip import strip_intermediate_mm_data
from mmrender.trajectory.unpacking import Unpacker

__all__ = ["pack_group", "pack_sidecars", "strip_intermediate_mm_data", "unpack_group", "unpack_sidecars"]


def pack_sidecars(trajectory: Sequence[Any]) -> dict[str, Any]:
    """Return a trajectory as plain data in which each distinct media item stands once.

    A step is a mapping or an object; it may name the step that it continues by a field `parent` (an index, or
    `None`), else it follows the one before. Its token blocks, at `tokens` and `response.message.tokens`,
    may hold `prompt_ids`, `completion_ids`, masks and a sidecar (`multi_modal_data`); all of these are
    reduced to what they add to an earlier step. Everything else is carried as it is, and objects that are
    not touched are shared with the input, which is never changed. The layout is described in
    `mmrender.trajectory.packed`.

    Raises:
        TrajectoryError: Token ids or a sidecar are malformed, a parent comes after its child, or one hash
            stands for two different items.
    """
    return Packer().pack([trajectory], lambda _, step: f"steps[{step}]")


def pack_group(rollouts: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return several trajectories as one packed form: they share items and the tokens of their prompts.

    Raises:
        TrajectoryError: As `pack_sidecars`.
    """
    return Packer().pack(rollouts, lambda rollout, step: f"rollouts[{rollout}][{step}]")


def unpack_sidecars(packed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the steps of a trajectory that `pack_sidecars` packed.

    Steps, and whatever lies on the way to their token blocks, come back as dicts; mappings equal those
    packed, and objects become the mapping of their fields. A sidecar comes back as a `MultiModalData`, or
    as a dict if it was a mapping. Media items are shared between the steps.

    Raises:
        TrajectoryError: This is no packed form, it is damaged, or it holds several trajectories.
    """
    rollouts = unpack_group(packed)
    if len(rollouts) != 1:
        raise TrajectoryError(
            "the packed form holds a group",
            where="packed.lengths",
            expected="one trajectory",
            got=f"{len(rollouts)}",
            remedy="Use unpack_group",
        )
    return rollouts[0]


def unpack_group(packed: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the trajectories of a packed form, each a list of steps as `unpack_sidecars` gives them.

    Raises:
        TrajectoryError: This is no packed form, or it is damaged.
    """
    return Unpacker(packed).trajectories()
