"""What a value is turned into before the codec writes it, and back: trajectories travel as such."""

from typing import Any

from mmrender.errors import ShippingProtocolError
from mmrender.trajectory.tree import Trajectory

PLAIN, TRAJECTORY = "", "trajectory"


def to_wire(value: Any) -> tuple[str, Any]:
    """Give the kind of a value, and the form in which the codec writes it."""
    if isinstance(value, Trajectory):
        from mmrender.trajectory.tree_wire import trajectory_to_wire

        return TRAJECTORY, trajectory_to_wire(value)
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
        from mmrender.trajectory.tree_wire import trajectory_from_wire

        return trajectory_from_wire(value)
    raise ShippingProtocolError("an unknown kind of value", expected="a trajectory", got=repr(kind))


def id_of(value: Any) -> str | None:
    """Give the id that a value has of its own."""
    return value.trajectory_id if isinstance(value, Trajectory) else None
