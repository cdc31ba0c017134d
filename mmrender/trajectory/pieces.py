"""`TrajectoryPieces`: a trajectory that is written in pieces while it grows, and read back from them.

```python
from mmrender.trajectory.pieces import TrajectoryPieces

pieces, file = TrajectoryPieces(trajectory), []
file.append(pieces.next())                        # the steps since the piece before
pieces = TrajectoryPieces.restored("name", file)  # after a restart. `next` goes on from there
```
"""

from collections.abc import Iterable
from typing import Any, Self

from mmrender.trajectory.tree import Trajectory
from mmrender.trajectory.wire import PIECE_FORMAT, Reader, TrajectoryRow, Writer


class TrajectoryPieces:
    """Writes one trajectory in pieces. Each token, message and item is in one piece.

    Rewards and `extra` of steps are written as they are when the step is. Reward, error and `extra` of the
    trajectory are not in the pieces.

    Args:
        trajectory: The trajectory, of which nothing is written yet.

    Attributes:
        trajectory: The trajectory.
        written: Number of its steps that are in pieces.
    """

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory = trajectory
        self.written = 0
        self._writer = Writer("drop")

    @classmethod
    def restored(cls, trajectory_id: str, pieces: Iterable[Any]) -> Self:
        """Return the trajectory of all its pieces, in order. Its pixels are read-only views of them.

        Raises:
            TrajectoryError: A piece is something else, of another version, or damaged.
            MediaError: A media item is damaged.
            PlaceholderError: Placeholder ranges do not fit the tokens.
        """
        trajectory, reader = Trajectory(trajectory_id), Reader()
        for piece in pieces:
            for row in [step for each in reader.take(piece, PIECE_FORMAT) for step in each.steps]:
                reader.step(row)
            reader.check_used()
        for step in reader.steps:
            trajectory._add(step)
        restored = cls(trajectory)
        for step in reader.steps:
            restored._writer.enter(step)
        restored._writer = restored._writer.next_piece()
        restored.written = len(trajectory)
        return restored

    def next(self) -> dict[str, Any]:
        """Return the steps since the piece before as plain data for the codec, which holds views of pixels.

        Raises:
            TrajectoryError: A message holds something that cannot be encoded.
            MediaError: The class of a media item cannot travel.
        """
        writer, steps = self._writer, self.trajectory.steps[self.written :]
        rows = list(map(writer.step, steps))
        piece = writer.form(PIECE_FORMAT, [TrajectoryRow("", rows)], share=False)
        self._writer = writer.next_piece()
        self.written += len(steps)
        return piece
