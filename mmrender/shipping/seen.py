"""Ids of acknowledged messages: what a receiver must not deliver again, also after it was restarted."""

import contextlib
import fcntl
import logging
import os
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from mmrender.errors import ShippingError

WINDOW = 1 << 20
_NAME = "acknowledged.ids"
_log = logging.getLogger("mmrender.shipping")


class SeenIds:
    """The last ids that were acknowledged, in memory and, given a folder, in a file.

    The file holds a line for each, in order. A line that a crash has torn is cut off when the file is opened;
    a message of which it told will then be delivered again. When twice as many lines as ids to remember have
    come together, the file is written anew and put in place of the old one; if that fails, such as on a full
    disk, the old one stays in use, a warning is logged, and it is tried again some notes later. One receiver
    at a time uses a folder, which a lock sees to.

    Args:
        folder: Made if it is not there; None keeps the ids in memory only.
        window: Most ids to remember; at about 100 bytes each.
        known: Ids that the consumer has from elsewhere, such as from its own files.
        sync: Whether each note waits for the disk, to outlive the machine and not only the process.

    Raises:
        ShippingError: Another receiver uses the folder.
        OSError: The folder cannot be used.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        window: int = WINDOW,
        known: Iterable[str] = (),
        sync: bool = False,
    ) -> None:
        self._window = window
        self._sync = sync
        self._ids: OrderedDict[str, None] = OrderedDict()
        self._fd = -1
        self._lines = 0
        self._compact_at = 2 * window
        self._entry_synced = not sync
        self._path: Path | None = None
        if folder is not None:
            self._path = Path(folder) / _NAME
            _make(self._path.parent, sync)
            self._open(self._path)
        self._remember(known)

    def __contains__(self, id: str) -> bool:
        return id in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, id: str) -> None:
        """Note an id; it is in the file when this returns.

        Raises:
            OSError: It could not be written; it then does not count as noted.
        """
        if self._fd >= 0:
            end = os.lseek(self._fd, 0, os.SEEK_END)
            try:
                _write(self._fd, f"{id}\n".encode())
                if self._sync:
                    os.fsync(self._fd)
                self._sync_entry()
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, end)
                raise
            self._lines += 1
        self._remember([id])
        if self._lines > self._compact_at:
            self._try_to_compact()

    def close(self) -> None:
        """Close the file, which frees the folder."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _remember(self, ids: Iterable[str]) -> None:
        for id in ids:
            self._ids[id] = None
            self._ids.move_to_end(id)
        while len(self._ids) > self._window:
            self._ids.popitem(last=False)

    def _open(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _lock(fd, path)
            text = path.read_bytes()
            whole = text.rfind(b"\n") + 1
            if whole < len(text):
                os.ftruncate(fd, whole)
            self._sync_entry()
        except BaseException:
            os.close(fd)
            raise
        lines = text[:whole].decode("utf-8", "replace").split("\n")[:-1]
        self._fd, self._lines = fd, len(lines)
        self._remember(lines)

    def _try_to_compact(self) -> None:
        """Write the file anew; the note that led to it counts whether or not that works."""
        try:
            self._compact()
        except (OSError, ShippingError) as error:
            self._compact_at = self._lines + self._window // 16  # a rewrite is too long to try at every note
            _log.warning("the file of acknowledged ids stays long, it cannot be written anew: %s", error)
        else:
            self._compact_at = 2 * self._window

    def _compact(self) -> None:
        """Write the ids that count into a file of their own, lock it, and put it in place."""
        path = self._path
        if path is None:
            return
        draft = path.with_suffix(".new")
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _lock(fd, draft)
            _write(fd, "".join(f"{id}\n" for id in self._ids).encode())
            os.fsync(fd)
            os.replace(draft, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)  # what others may need the room for
            os.close(fd)
            raise
        old, self._fd, self._lines = self._fd, fd, len(self._ids)
        os.close(old)
        # Both files hold all ids up to here, so the folder must be synced only before the next note counts.
        self._entry_synced = not self._sync

    def _sync_entry(self) -> None:
        """Have the name of the file outlive the machine; until it does, no note in the file can."""
        if not self._entry_synced and self._path is not None:
            _sync_folder(self._path.parent)
            self._entry_synced = True


def _make(folder: Path, sync: bool) -> None:
    """Make a folder and those above it, their names safe on the disk if that is asked for."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing if sync else ():
        _sync_folder(each.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ShippingError("another receiver uses this folder", where=str(path.parent)) from error
    if os.fstat(fd).st_ino != os.stat(path).st_ino:
        raise ShippingError("another receiver has just rewritten its file", where=str(path.parent))


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
