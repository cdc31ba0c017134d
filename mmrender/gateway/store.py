"""`SessionStore`: a folder with one record file for each open session, and the file that sessions leave for.

A session's file begins with its settings. A record follows for each event: a call that begins, turns with
their answers, a delivery, a reward, the end. A torn record at the end is cut off, so a process that is killed
leaves a prefix of the events. When a session leaves, its trajectory is appended to the file of
finished trajectories under the session's name, and the session's file is removed. If the process is killed in
between, the name in the file shows that the trajectory has left.
"""

import asyncio
import contextlib
import logging
import os
import tempfile
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
from blake3 import blake3

import mmcodecs
from mmrender.errors import TrajectoryError
from mmrender.gateway.call import Answer
from mmrender.trajectory.files import TrajectoryWriter, received_ids
from mmrender.trajectory.tree import Trajectory

_log = logging.getLogger("mmrender.gateway")

Result = TypeVar("Result")

_VERSION: Final = 1
_MIN_OPEN_FILES: Final = 128
_MAX_OPEN_FILES: Final = 4096
"""Bounds of the number of session files that are open for writing at a time."""
_SUFFIX: Final = ".session"

ClosedState: TypeAlias = Literal["finished", "abandoned"]


class Opened(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A session is opened. See `Gateway.open_session` for the fields."""

    name: str
    api_key: str
    created: float
    group: str | None = None
    metadata: dict[str, Any] = {}
    sampling_params: dict[str, Any] = {}
    template_arguments: dict[str, Any] = {}
    max_turns: int | None = None
    max_tokens: int | None = None
    owner: str = ""
    version: int = _VERSION


class Begun(msgspec.Struct, frozen=True, tag=True):
    """A call begins. It is lost unless `Answered` or `Refused` follows."""

    call: bytes


class Answered(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Turns of a call. The piece of the trajectory in the same record holds their steps.

    The tokens and log-probabilities of answers are in the steps, and left out here.
    """

    call: bytes
    answers: list[Answer]
    idempotency_key: str | None = None


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A call has an error for an answer. If it is `lost`, the agent may have seen a part of an answer."""

    call: bytes
    lost: str | None


class Delivered(msgspec.Struct, frozen=True, tag=True):
    """A caller has received answers in full."""

    answers: list[str]


class Rewarded(msgspec.Struct, frozen=True, tag=True):
    """A reward of a step, or of the session if `step` is None."""

    value: float | list[float] | None
    step: int | None


class Closed(msgspec.Struct, frozen=True, tag=True):
    """The session has ended. Nothing follows."""

    state: ClosedState
    reason: str | None


Event: TypeAlias = Opened | Begun | Answered | Refused | Delivered | Rewarded | Closed
_DECODER: Final = msgspec.msgpack.Decoder(Event)


class Entry(NamedTuple):
    """One record: an event, and for `Answered` a piece of the trajectory."""

    event: Event
    piece: dict[str, Any] | None = None


class SessionFile:
    """The record file of one session."""

    def __init__(self, store: "SessionStore", path: Path) -> None:
        self._store = store
        self.path = path
        self._waiting: deque[Entry] = deque()
        self._is_closed = False

    def put(self, event: Event, piece: dict[str, Any] | None = None) -> None:
        """Add a record, which the next `flush` writes. Arrays of the piece must not change until then.

        `Closed` is the last one. Deliveries that are reported later are left out.
        """
        if not self._is_closed:
            self._waiting.append(Entry(event, piece))
            self._is_closed = isinstance(event, Closed)

    async def flush(self) -> None:
        """Return when all records so far are written. A caller that is cancelled leaves the write going on.

        Raises:
            OSError: Writing failed. The next `flush` writes the remaining records.
        """
        if self._waiting:  # records are waiting until they are written
            await asyncio.shield(self._store.write(self))

    def flush_soon(self) -> None:
        """Begin to write all records so far. If that fails, the next `flush` writes them or raises."""
        if self._waiting:
            self._store.write(self)

    async def read(self) -> list[Entry]:
        """Return all records. Arrays are read-only views of the file.

        Raises:
            TrajectoryError: The file is damaged.
            OSError: It cannot be read.
        """
        await self.flush()
        return await asyncio.to_thread(lambda: list(read_entries(self.path)))

    async def close(self) -> None:
        """Close the file until the next write."""
        await self._store.run(lambda: self._store.close_file(self.path))

    def write_now(self) -> None:
        """Write all records so far. Called on the store's thread."""
        if self._waiting:
            writer = self._store.writer(self.path)
            while self._waiting:
                event, piece = self._waiting[0]
                record: dict[str, Any] = {"event": msgspec.msgpack.encode(event)}
                writer.append(record if piece is None else {**record, "piece": piece})
                self._waiting.popleft()

    def remove_now(self) -> None:
        """Remove the file. Called on the store's thread."""
        self._store.close_file(self.path)
        self.path.unlink(missing_ok=True)


class SessionStore:
    """The files of a gateway's sessions. One thread writes them, and another one the file of trajectories.

    Args:
        out: The file of finished trajectories. Open sessions are in the folder of the same name with `.open`
            appended. None keeps open sessions in a temporary folder, which `close` removes.
        sync: Whether each record waits for the disk.

    Raises:
        TrajectoryError: `out` is a file of another kind, or another gateway writes it.
        OSError: A file cannot be opened.
    """

    def __init__(self, out: str | os.PathLike[str] | None, *, sync: bool = False) -> None:
        self._sync = sync
        self._writers: OrderedDict[Path, mmcodecs.RecordWriter] = OrderedDict()
        self._out = None if out is None else TrajectoryWriter(out, sync=sync)
        self.left: set[str] = set() if out is None else set(received_ids(out))
        """Names of the sessions that have left."""
        self._temporary = tempfile.TemporaryDirectory(prefix="mmrender-") if out is None else None
        self.folder = Path(f"{os.fspath(out)}.open" if out is not None else self._temporary.name)  # type: ignore[union-attr]
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._unwritten: dict[SessionFile, asyncio.Future[None]] = {}
        self._is_writing = False
        self._max_open_files = _max_open_files()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mmrender-store")
        self._out_thread = ThreadPoolExecutor(1, thread_name_prefix="mmrender-out")

    def file(self, name: str) -> SessionFile:
        """Return the file of a session, which its first record makes. Names need not be file names."""
        return SessionFile(self, self.folder / f"{blake3(name.encode()).hexdigest(16)}{_SUFFIX}")

    def opened(self) -> Iterator[tuple[Opened, Closed | None]]:
        """Yield the sessions on disk: how each was opened and, if it was, closed.

        Files without a whole record are removed. So are the files of sessions that have left. A damaged file
        stays, and is logged.
        """
        for path in sorted(self.folder.glob(f"*{_SUFFIX}")):
            try:
                reader = mmcodecs.RecordReader(path)
                first, last = (
                    (_entry(reader, number).event for number in (0, -1)) if len(reader) else (None, None)
                )
            except (TrajectoryError, mmcodecs.CodecError) as error:
                _log.error("a session is left out: %s", error)
                continue
            if isinstance(first, Opened) and first.name not in self.left:
                yield first, last if isinstance(last, Closed) else None
            else:
                path.unlink()

    async def leave(self, file: SessionFile, name: str, trajectory: Trajectory | None) -> None:
        """Append a finished trajectory to the file under its name, then remove the session's file.

        It is appended once, however often this is repeated. None appends nothing.

        Raises:
            TrajectoryError: It cannot be stored.
            OSError: Writing failed. The session's file stays.
        """
        loop = asyncio.get_running_loop()
        if trajectory is not None:
            await asyncio.shield(loop.run_in_executor(self._out_thread, self._append, name, trajectory))
        self.left.add(name)
        await asyncio.shield(loop.run_in_executor(self._thread, file.remove_now))

    def _append(self, name: str, trajectory: Trajectory) -> None:
        if self._out is not None and name not in self.left:
            self._out.append(trajectory, id=name)
            self.left.add(name)

    def write(self, file: SessionFile) -> "asyncio.Future[None]":
        """Write the records of a file. Files that come while others are written, are written together."""
        future = self._unwritten.get(file)
        if future is None:
            future = self._unwritten[file] = asyncio.get_running_loop().create_future()
            if not self._is_writing:
                self._write_all()
        return future

    def _write_all(self) -> None:
        files, self._unwritten = self._unwritten, {}

        def end(job: asyncio.Future[list[Exception | None]]) -> None:
            self._is_writing = False
            for future, error in zip(files.values(), job.result(), strict=True):
                if error is None and not future.done():
                    future.set_result(None)
                elif error is not None and not future.done():
                    future.set_exception(error)
                    _log.warning("a session could not be written: %s", future.exception())
            if self._unwritten:
                self._write_all()

        self.run(partial(_write_files, list(files))).add_done_callback(end)
        self._is_writing = True

    def run(self, work: Callable[[], Result]) -> "asyncio.Future[Result]":
        """Run work on the thread that writes the files of sessions."""
        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    def writer(self, path: Path) -> mmcodecs.RecordWriter:
        """Return the open writer of a file. Called on the store's thread."""
        writer = self._writers.pop(path, None) or mmcodecs.RecordWriter(path, sync=self._sync)
        self._writers[path] = writer
        if len(self._writers) > self._max_open_files:
            self._writers.popitem(last=False)[1].close()
        return writer

    def close_file(self, path: Path) -> None:
        """Close a file if it is open. Called on the store's thread."""
        if writer := self._writers.pop(path, None):
            writer.close()

    def close(self) -> None:
        """Write what is waiting, and close all files."""
        self._out_thread.shutdown()
        self._thread.shutdown()
        for writer in self._writers.values():
            writer.close()
        if self._out is not None:
            self._out.close()
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                self._temporary.cleanup()


def _write_files(files: Sequence[SessionFile]) -> list[Exception | None]:
    """Write the records of files. Return the error of each, or None."""
    errors: list[Exception | None] = []
    for file in files:
        try:
            file.write_now()
        except Exception as error:  # noqa: BLE001 - the callers of `flush` get it
            errors.append(error)
        else:
            errors.append(None)
    return errors


def _max_open_files() -> int:
    """Return a quarter of the files that the process may open, within bounds."""
    try:
        import resource
    except ImportError:
        return _MIN_OPEN_FILES
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(max(_MIN_OPEN_FILES, allowed // 4), _MAX_OPEN_FILES)


def read_entries(path: Path) -> Iterator[Entry]:
    """Yield the records of a session's file, whose arrays are read-only views of it.

    Raises:
        TrajectoryError: A record is damaged.
        OSError: The file cannot be read.
    """
    reader = mmcodecs.RecordReader(path)
    return (_entry(reader, number) for number in range(len(reader)))


def _entry(reader: mmcodecs.RecordReader, number: int) -> Entry:
    try:
        record = reader.read(number)
        return Entry(_DECODER.decode(record["event"]), record.get("piece"))
    except (mmcodecs.CodecError, msgspec.MsgspecError, TypeError, KeyError, AttributeError) as error:
        raise TrajectoryError(
            "a record of a session is damaged",
            where=f"{reader._path}[{number}]",
            got=str(error),
            remedy="Remove the file to give the session up",
        ) from error
