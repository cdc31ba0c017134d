"""`Fleet`: workers, receivers and trainer ranks as processes that are started again when they die.

One description runs on this machine (`LocalFleet`) or on a Ray cluster (`ray_fleet.RayFleet`). It says which
functions run in how many processes. Sampling and training are theirs.

A process that dies is started again, and goes on from the files of the folder: whatever a function needs to
know after its death must be there. An exception is no death: it ends the fleet, and names the process.
"""

import asyncio
import inspect
import multiprocessing
import os
import shutil
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from ssl import SSLContext
from typing import Any, Final, Literal, Protocol, Self, TypeAlias

from mmcodecs.errors import EncodeError
from mmrender.errors import FleetError, InputError, TrajectoryError, check_count
from mmrender.shipping import Recorder

RECEIVER: Final = "receiver"
"""The role whose addresses `Process.receivers` returns, and whose files `Process.dataset` reads."""
_RESTART_SECONDS: Final = 1.0
"""Seconds from a start of a process to the next one, at least."""
CLOSE_SECONDS: Final = 10.0
"""Seconds that processes have to end in good order."""
POLL_SECONDS: Final = 0.5
"""Seconds between two looks at processes."""
_TAKE_OVER_SECONDS: Final = 60.0
"""Seconds that a process on a lost machine may outlive its replacement's start."""

Placement: TypeAlias = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
Name: TypeAlias = tuple[str, int]
"""A process: its role, and its number there."""


class AddressBook(Protocol):
    """The addresses at which processes of a fleet listen."""

    def publish(self, role: str, number: int, url: str) -> None:
        """Note the address of a process, in place of its earlier one."""

    def addresses(self, role: str) -> list[str]:
        """Return the addresses of a role, in order of the processes' numbers."""


class AddressFiles:
    """Addresses in files, which outlive every process.

    Args:
        folder: The folder of the fleet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "addresses"

    def publish(self, role: str, number: int, url: str) -> None:
        """Note the address of a process, in place of its earlier one."""
        self._folder.mkdir(parents=True, exist_ok=True)
        new = self._folder / f".{role}-{number}.{os.getpid()}"
        new.write_text(url, "utf-8")
        new.replace(self._folder / f"{role}-{number}")

    def addresses(self, role: str) -> list[str]:
        """Return the addresses of a role, in order of the processes' numbers."""
        paths = {path.name.rpartition("-"): path for path in self._folder.glob(f"{role}-*")}
        numbered = sorted((int(number), path) for (name, _, number), path in paths.items() if name == role)
        return [path.read_text("utf-8") for _, path in numbered]

    def clear(self) -> None:
        """Forget the addresses of an earlier run."""
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass(frozen=True)
class Process:
    """One process of a fleet, as its function sees it.

    Attributes:
        role: Name of its role.
        number: Its number in the role: a trainer's rank.
        count: Number of processes of the role: the trainers' world size.
        folder: The folder of the fleet.
        book: Addresses of processes.
        ended: Set when the fleet ends.
    """

    role: str
    number: int
    count: int
    folder: Path
    book: AddressBook = field(repr=False)
    ended: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def file(self) -> Path:
        """The file of trajectories that this process alone writes."""
        return self.folder / f"{self.role}-{self.number}.mmr"

    def publish(self, url: str) -> None:
        """Let other processes find this one at a URL."""
        self.book.publish(self.role, self.number, url)

    def addresses(self, role: str) -> list[str]:
        """Return the URLs that processes of a role have published, in order of their numbers."""
        return self.book.addresses(role)

    def receivers(self) -> list[str]:
        """Return the addresses of the receivers: `Sender(process.receivers)` follows them when they move."""
        return self.book.addresses(RECEIVER)

    def dataset(self, roles: Sequence[str] = (RECEIVER,), **options: Any) -> Any:
        """Return the `TrajectoryDataset` of this rank over the files of all processes of these roles.

        Args:
            roles: Roles that write files of trajectories, such as receivers and gateways.
            **options: Options of `TrajectoryDataset`. `rank` and `world` are the process's.
        """
        from mmrender.training import TrajectoryDataset

        files = [str(self.folder / f"{role}-*.mmr") for role in roles]
        return TrajectoryDataset(files, **{"rank": self.number, "world": self.count, **options})

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the fleet ends, and return whether it has. Processes that serve others end then.

        Args:
            timeout: Seconds; None waits without limit.
        """
        return self.ended.wait(timeout)


Run: TypeAlias = Callable[[Process], Any]
"""The function of a process, plain or `async`, which is pickled: of a module, or a `partial` of one."""


@dataclass(frozen=True)
class Role:
    """Equal processes of a fleet.

    Attributes:
        run: Called in each process. A process that was started again calls it again.
        count: Number of processes.
        serves: Whether it runs until the others have ended, see `Process.wait`.
        max_restarts: Number of times that each process is started again. None for no limit.
        options: Ray's options of each actor, such as `{"num_cpus": 2, "num_gpus": 1}`.
        placement: Ray's strategy for placing the processes of the role, as one placement group. None places
            each by itself.
    """

    run: Run
    count: int = 1
    serves: bool = False
    max_restarts: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    placement: Placement | None = None


@dataclass(frozen=True)
class Fleet:
    """The roles of a fleet, and the folder that its processes share.

    Attributes:
        folder: Folder of files and addresses, on a file system that all machines share.
        roles: Roles by name.

    Raises:
        InputError: A role has no processes, or a name that cannot be a part of a file's name.
    """

    folder: Path
    roles: Mapping[str, Role]

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder).resolve())
        for name, role in self.roles.items():
            if not name.isidentifier():
                raise InputError("not a name of a role", where="roles", expected="letters", got=repr(name))
            check_count(f"roles[{name!r}].count", role.count)

    def names(self) -> list[Name]:
        """Return all processes."""
        return [(name, number) for name, role in self.roles.items() for number in range(role.count)]

    def process(self, name: Name, book: AddressBook) -> Process:
        """Return a process as its function sees it."""
        role, number = name
        return Process(role, number, self.roles[role].count, self.folder, book)


def record(
    process: Process,
    url: str = "tcp://127.0.0.1:0",
    *,
    ssl: Callable[[], SSLContext] | None = None,
    **options: Any,
) -> None:
    """Write the trajectories that senders ship to the process's file, until the fleet ends.

    Args:
        process: The process.
        url: Address to listen at. Port 0 asks for a free one.
        ssl: Makes the TLS context, which is needed beyond loopback, see `Receiver`.
        **options: Options of `Recorder`.

    Raises:
        OSError: Writing failed.
        ShippingError: As `Recorder`.
    """
    until = time.monotonic() + _TAKE_OVER_SECONDS
    while (recorder := _open(process, url, ssl and ssl(), options, until)) is None:
        process.wait(POLL_SECONDS)
    with recorder:
        process.publish(recorder.url)
        while recorder.is_recording and not process.wait(POLL_SECONDS):
            pass


def _open(
    process: Process, url: str, ssl: SSLContext | None, options: Mapping[str, Any], until: float
) -> Recorder | None:
    """Open the file of a receiver. None if its predecessor still has it open, and may have it until then."""
    try:
        return Recorder(url, process.file, ssl=ssl, **options)
    except TrajectoryError as error:
        if not isinstance(error.__cause__, EncodeError) or time.monotonic() > until:
            raise
        return None


def receivers(count: int = 1, *, role: Mapping[str, Any] | None = None, **options: Any) -> Role:
    """Return the role of receivers, each with a file of its own.

    Args:
        count: Number of receivers.
        role: Further fields of the `Role`.
        **options: Options of `record`.
    """
    return Role(partial(record, **options), count, serves=True, **(role or {}))


def call(role: Role, process: Process) -> None:
    """Run a process to its end."""
    result = role.run(process)
    if inspect.iscoroutine(result):
        asyncio.run(result)


class RunningFleet(ABC):
    """The processes of a fleet, which run in a `with` block."""

    fleet: Fleet

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def start(self) -> None:
        """Start all processes."""

    @abstractmethod
    def pids(self) -> dict[Name, int]:
        """Return the ids of the processes that run."""

    @abstractmethod
    def poll(self, timeout: float = POLL_SECONDS) -> bool:
        """Return whether a process that does not serve still runs.

        Args:
            timeout: Seconds to wait for a process to end.

        Raises:
            FleetError: A process raised an error, died too often, or served and ended before the others.
        """

    def run(self) -> None:
        """Run until all processes that do not serve have returned. Raises as `poll`."""
        while self.poll():
            pass

    @abstractmethod
    def close(self) -> None:
        """End all processes: those that serve in good order, the others at once. Idempotent."""


# --- on this machine ---


@dataclass
class _Child:
    """A running process, the parent's end of its pipe, and its starts."""

    process: Any
    pipe: Connection
    started: float
    restarts: int


class LocalFleet(RunningFleet):
    """Runs a fleet as processes of this machine.

    The processes end with this one, however it ends. Their output is appended to files in `logs`.

    Args:
        fleet: The fleet.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        methods = multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        # The server imports the modules of the functions, so that its forks need not.
        functions = [getattr(role.run, "func", role.run) for role in fleet.roles.values()]
        self._context.set_forkserver_preload(["__main__", *{function.__module__ for function in functions}])
        self._children: dict[Name, _Child] = {}

    def start(self) -> None:
        """Start all processes."""
        (self.fleet.folder / "logs").mkdir(parents=True, exist_ok=True)
        AddressFiles(self.fleet.folder).clear()
        for name in self.fleet.names():
            self._start(name, 0)

    def pids(self) -> dict[Name, int]:
        """Return the ids of the processes that run."""
        return {name: child.process.pid for name, child in self._children.items() if child.process.is_alive()}

    def poll(self, timeout: float = POLL_SECONDS) -> bool:
        """Start again the processes that have died, and return whether one that does not serve still runs.

        Args:
            timeout: Seconds to wait for a process to end.

        Raises:
            FleetError: A process raised an error, died too often, or served and ended before the others.
        """
        running = [child.process.sentinel for child in self._children.values() if child.process.is_alive()]
        # A process that has died is started again a while after its last start.
        wait(running, timeout if len(running) == len(self._children) else min(timeout, _RESTART_SECONDS / 10))
        for name, child in [*self._children.items()]:
            code = child.process.exitcode
            if code is None or time.monotonic() < child.started + _RESTART_SECONDS:
                continue
            role = self.fleet.roles[name[0]]
            if code == 0 and not role.serves:
                self._forget(name)
            elif code >= 0 or child.restarts == role.max_restarts:
                raise self._failure(name, child)
            else:
                self._forget(name)
                self._start(name, child.restarts + 1)
        return any(not self.fleet.roles[role].serves for role, _ in self._children)

    def close(self) -> None:
        """End all processes: those that serve in good order, the others at once. Idempotent."""
        for (role, _), child in self._children.items():
            if self.fleet.roles[role].serves:
                with suppress(OSError):
                    child.pipe.send(None)
            else:
                child.process.kill()
        until = time.monotonic() + CLOSE_SECONDS
        for name, child in [*self._children.items()]:
            child.process.join(max(0.0, until - time.monotonic()))
            child.process.kill()
            child.process.join()
            self._forget(name)

    def _start(self, name: Name, restarts: int) -> None:
        ours, theirs = self._context.Pipe()
        log = self._log(name)
        process = self._context.Process(
            target=_main, args=(self.fleet, name, theirs, log), name="-".join(map(str, name))
        )
        process.start()
        theirs.close()
        self._children[name] = _Child(process, ours, time.monotonic(), restarts)

    def _forget(self, name: Name) -> None:
        child = self._children.pop(name)
        child.pipe.close()
        child.process.close()

    def _failure(self, name: Name, child: _Child) -> FleetError:
        got: str | None = None
        with suppress(EOFError, OSError):
            got = child.pipe.recv() if child.pipe.poll() else None
        code = child.process.exitcode
        if got is None:
            got = "it returned" if code == 0 else f"exit status {code} after {child.restarts} restarts"
        return failure_of(name, got, f"See {self._log(name)}")

    def _log(self, name: Name) -> Path:
        return self.fleet.folder / "logs" / f"{name[0]}-{name[1]}.log"


def failure_of(name: Name, got: str, remedy: str | None = None) -> FleetError:
    """Build the error of a fleet one of whose processes has failed."""
    return FleetError("a process has failed", where=f"{name[0]} {name[1]}", got=got, remedy=remedy)


def _main(fleet: Fleet, name: Name, pipe: Connection, log: Path) -> None:
    """Run a process in a child."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    os.dup2(output, 1)
    os.dup2(output, 2)
    process = fleet.process(name, AddressFiles(fleet.folder))

    def wait_for_end() -> None:
        try:
            pipe.recv()
        except (EOFError, OSError):
            os._exit(1)  # the parent has died
        process.ended.set()

    threading.Thread(target=wait_for_end, name="mmrender-fleet", daemon=True).start()
    try:
        call(fleet.roles[name[0]], process)
    except BaseException as error:
        traceback.print_exc()
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return
        pipe.send(f"{type(error).__name__}: {error}"[:2000])
        raise SystemExit(1) from error
