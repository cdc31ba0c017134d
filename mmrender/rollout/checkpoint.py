"""`RolloutCheckpoint`: finished rollouts of a batch in a file, to resume an interrupted batch."""

import dataclasses
import os
import pickle
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import numpy as np
from blake3 import blake3
from PIL import Image

from mmrender.errors import TrajectoryError
from mmrender.trajectory.files import TrajectoryReader, TrajectoryWriter
from mmrender.trajectory.tree import Trajectory

REQUEST_KEY: Final = "rollout_request"
"""Key of a trajectory's `extra`: digest of everything that decides the rollout."""


class RolloutCheckpoint:
    """Finished rollouts, by the digest of their request. Safe to use from many threads.

    Args:
        path: The file; made with its folder if it does not exist.

    Raises:
        TrajectoryError: It is not a file of trajectories, is damaged, or another writer has it open.
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._saved: dict[str, Trajectory] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        # The writer first: opening it cuts off a record that a crash has torn.
        self._file = TrajectoryWriter(path)
        if len(self._file):
            for record in TrajectoryReader(path):
                self._saved.update({each.extra.get(REQUEST_KEY, ""): each for each in record})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A thread may still be writing a rollout of a batch that was cancelled.
        with self._lock:
            self._closed = True
            self._file.close()

    def get(self, request: str) -> Trajectory | None:
        """Return the rollout saved last for that digest; None if there is none, or it had failed."""
        found = self._saved.get(request)
        return found if found is not None and found.error is None else None

    def put(self, trajectory: Trajectory, request: str) -> None:
        """Save a rollout that has ended or failed.

        Raises:
            TrajectoryError: Its `extra` holds something that cannot be stored, or the checkpoint is closed.
            OSError: Writing failed.
        """
        trajectory.extra[REQUEST_KEY] = request
        with self._lock:
            if self._closed:
                raise TrajectoryError(
                    "the rollout's batch has ended, and its checkpoint is closed",
                    where=trajectory.trajectory_id,
                )
            self._file.append(trajectory)


def digest_of(*values: Any) -> str:
    """Return a digest of nested values, the same in every process.

    The order of mappings does not count; images count by their pixels, arrays by dtype, shape and values. A
    value that is neither plain data nor can be pickled, such as a lambda, equals nothing, itself included.
    """
    return blake3(msgspec.msgpack.encode(_plain(values))).hexdigest(length=16)


def _plain(value: Any) -> list[Any]:
    """A value as lists of text and bytes that differ where values do."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if value is None or isinstance(value, bool | int | float | str):
        return [kind, repr(value)]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value)]
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return ["array", value.dtype.str, value.shape, value.tobytes()]
    if isinstance(value, Image.Image):
        palette = value.getpalette() if value.mode == "P" else None
        return ["image", value.mode, value.size, palette, value.tobytes()]
    if isinstance(value, Mapping):
        return ["mapping", sorted([digest_of(key), digest_of(item)] for key, item in value.items())]
    if isinstance(value, list | tuple):
        return ["list", list(map(_plain, value))]
    if isinstance(value, partial):
        return [kind, _plain([value.func, value.args, value.keywords])]
    if isinstance(value, msgspec.Struct):
        return [kind, _plain(msgspec.structs.asdict(value))]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [kind, _plain({each.name: getattr(value, each.name) for each in dataclasses.fields(value)})]
    try:
        return [kind, pickle.dumps(value, protocol=5)]
    except Exception:  # noqa: BLE001 - whatever a class of the caller raises
        return [kind, os.urandom(16)]
