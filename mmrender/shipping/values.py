"""What a value is turned into before the codec writes it, and back: trajectories travel as such."""

from typing import Any

from mmrender.errors import ShippingProtocolError
from mmrender.trajectory.tree import Trajectory, trajectories_from_wire, trajectories_to_wire

PLAIN, TRAJECTORY, GROUP = "", "trajectory", "group"


def to_wire(value: Any) -> tuple[str, Any]:
    """Give the kind of a value, and the form in which the codec writes it.

    Raises:
        TrajectoryError: A trajectory holds a message that has no plain form.
        MediaError: It holds a media item that has none.
    """
    if isinstance(value, Trajectory):
        return TRAJECTORY, trajectories_to_wire([value])
    if type(value) is list and value and all(isinstance(each, Trajectory) for each in value):
        return GROUP, trajectories_to_wire(value)
    return PLAIN, value


def from_wire(kind: str, value: Any) -> Any:
    """Undo `to_wire`.

    Raises:
        ShippingProtocolError: The kind is unknown.
        TrajectoryError: The trajectory does not hold together.
        MediaError: One of its media items does not.
    """
    if kind == PLAIN:
        return value
    if kind == TRAJECTORY:
        return trajectories_from_wire(value)[0]
    if kind == GROUP:
        return trajectories_from_wire(value)
    raise ShippingProtocolError(
        "an unknown kind of value", expected=f"{TRAJECTORY!r} or {GROUP!r}", got=repr(kind)
    )


def id_of(value: Any) -> str | None:
    """Give the id that a value has of its own; an empty one is none."""
    return value.trajectory_id or None if isinstance(value, Trajectory) else None
