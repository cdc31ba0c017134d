"""Rollouts of a batch as they end, in one file, so that a batch that was broken off can be taken up again."""

import threading
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from mmrender.errors import TrajectoryError
from mmrender.rollout.types import BatchMetadata
from mmrender.trajectory.saving import TrajectoryReader, TrajectoryWriter
from mmrender.trajectory.tree import Trajectory

ASKED: Final = "asked"
"""Key of a trajectory's `extra`: digest of what it was asked with."""


class TrajectoryShelf:
    """What was saved of a batch, and where more is saved. Safe to use from many threads.

    Args:
        path: The file; made with its folder if it is not there.

    Raises:
        TrajectoryError: It is no file of trajectories, is damaged, or another writer has it open.
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._saved: dict[tuple[str, str | None], Trajectory] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        # Opened first: that cuts off a record which a crash has torn.
        self._file = TrajectoryWriter(path)
        if len(self._file):
            for record in TrajectoryReader(path):
                self._saved.update({(each.trajectory_id, each.extra.get(ASKED)): each for each in record})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A thread may still be writing a rollout whose batch has been broken off.
        with self._lock:
            self._closed = True
            self._file.close()

    def get(self, trajectory_id: str, asked: str) -> Trajectory | None:
        """The rollout of that name and digest as saved last; None if it is not there, or had failed."""
        found = self._saved.get((trajectory_id, asked))
        return found if found is not None and found.error is None else None

    def put(self, trajectory: Trajectory) -> None:
        """Save a rollout that has ended, or failed.

        Raises:
            TrajectoryError: Its `extra` holds something that cannot be stored, or the batch has ended.
            OSError: Writing failed.
        """
        with self._lock:
            if self._closed:
                raise TrajectoryError(
                    "the batch that the rollout belongs to has ended", where=trajectory.trajectory_id
                )
            self._file.append(trajectory)


def batch_file(folder: Path, metadata: BatchMetadata | None) -> Path:
    """The file of a batch: batches of different steps and phases do not share rollouts."""
    chosen = metadata or BatchMetadata()
    return folder / f"{chosen.training_phase}-{chosen.global_step}.mmc"
