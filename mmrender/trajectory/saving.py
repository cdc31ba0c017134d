"""Files of trajectories: the codec's record container, which survives a crash and reads by memory map.

```python
with TrajectoryWriter("run.mmc") as file:
    file.append(trajectory)        # one record
    file.append(group)             # one record; what its trajectories share is written once

load_trajectories("run.mmc")       # all of them
TrajectoryReader("run.mmc")[5]     # the trajectories of one record; nothing else is read
```
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import mmcodecs
from mmrender.errors import TrajectoryError
from mmrender.trajectory.message_wire import MediaSources
from mmrender.trajectory.tree import Trajectory
from mmrender.trajectory.tree_wire import group_from_wire, group_to_wire


class TrajectoryWriter:
    """Appends trajectories to a file, which is made if it is not there.

    What `append` has returned for survives the process, and with `sync` the machine. A record that was torn
    by a crash is cut off when the file is next opened for writing. One writer at a time.

    Args:
        path: The file.
        media_sources: As for `group_to_wire`.
        sync: Whether each append waits for the disk.

    Raises:
        TrajectoryError: It is no such file, or another writer has it open.
        OSError: It cannot be opened.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, media_sources: MediaSources = "drop", sync: bool = False
    ) -> None:
        self._path = os.fspath(path)
        self._media_sources = media_sources
        try:
            self._file = mmcodecs.RecordWriter(path, sync=sync)
        except mmcodecs.CodecError as error:
            raise _unusable(self._path, error) from error

    def __len__(self) -> int:
        return len(self._file)

    def append(self, trajectories: Trajectory | Sequence[Trajectory]) -> int:
        """Write one trajectory, or a group as one record, and return the number of the record.

        Raises:
            TrajectoryError: A message or `extra` holds something that cannot be stored; nothing is written.
            MediaError: An item's class has no stored form.
            OSError: Writing failed; what was written of the record is cut off.
        """
        group = [trajectories] if isinstance(trajectories, Trajectory) else list(trajectories)
        try:
            return self._file.append(group_to_wire(group, media_sources=self._media_sources, share=False))
        except mmcodecs.CodecError as error:
            raise TrajectoryError(
                "a trajectory cannot be stored",
                where=f"{self._path}[{len(self)}]",
                got=str(error),
                remedy="Keep plain data and arrays in `extra` and messages",
            ) from error

    def close(self) -> None:
        """Write the index and close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class TrajectoryReader:
    """The records that a file held when it was opened, by number; each is a list of trajectories.

    Pixels and router choices are read-only views of the memory map, which stays as long as any of them does.

    Args:
        path: The file.

    Attributes:
        torn_bytes: Length of a record at the end that a crash has torn, 0 in a sound file.

    Raises:
        TrajectoryError: It is no such file.
        OSError: It cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        try:
            self._file = mmcodecs.RecordReader(path)
        except mmcodecs.CodecError as error:
            raise _unusable(self._path, error) from error
        self.torn_bytes = self._file.torn_bytes

    def __len__(self) -> int:
        return len(self._file)

    def __getitem__(self, number: int) -> list[Trajectory]:
        """Read one record; negative numbers count from the end.

        Raises:
            IndexError: There is no such record.
            TrajectoryError: It is damaged, or holds something else.
            MediaError: An item is damaged.
        """
        try:
            value: Any = self._file.read(number)
        except mmcodecs.CodecError as error:
            raise _unusable(f"{self._path}[{number}]", error) from error
        return group_from_wire(value)

    def __iter__(self) -> Iterator[list[Trajectory]]:
        return (self[number] for number in range(len(self)))


def save_trajectories(
    path: str | os.PathLike[str],
    trajectories: Iterable[Trajectory | Sequence[Trajectory]],
    *,
    media_sources: MediaSources = "drop",
) -> int:
    """Append trajectories to a file and return how many records were written.

    Each element is one record: a trajectory, or a group whose members share what they have in common.

    Raises:
        TrajectoryError: As `TrajectoryWriter`; records before the one that failed stay in the file.
        MediaError: As `TrajectoryWriter.append`.
        OSError: As `TrajectoryWriter`.
    """
    with TrajectoryWriter(path, media_sources=media_sources) as file:
        return sum(1 for _ in map(file.append, trajectories))


def load_trajectories(path: str | os.PathLike[str]) -> list[Trajectory]:
    """Return all trajectories of a file, those of a group one after another.

    Raises:
        TrajectoryError: As `TrajectoryReader`.
        MediaError: As `TrajectoryReader`.
        OSError: As `TrajectoryReader`.
    """
    return [trajectory for record in TrajectoryReader(path) for trajectory in record]


def _unusable(where: str, error: mmcodecs.CodecError) -> TrajectoryError:
    return TrajectoryError("this file of trajectories cannot be used", where=where, got=str(error))
