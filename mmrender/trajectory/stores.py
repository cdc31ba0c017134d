"""Files of trajectories on disk and in object stores: which files there are, and their bytes by range.

A path with `://` belongs to an object store, and is read with fsspec, of the extra `store`. Any other path is
a local file, which is read by memory map.
"""

import glob
import os
import re
from typing import Any, Final

from mmcodecs.files import MappedFile, Source
from mmrender.errors import importing

INDEX_SUFFIX: Final = ".index"
"""What the name of an index has after the name of its file."""


def is_stored(path: str) -> bool:
    """Return whether a path belongs to an object store."""
    return "://" in path


def source_of(path: str, *, whole: bool = False) -> Source:
    """Return the bytes of a file.

    Args:
        path: A local path, or a URL of fsspec.
        whole: Whether most of the file will be read. An object is then fetched at once, and later its growth.

    Raises:
        MissingDependencyError: The path belongs to an object store, and fsspec is not installed.
    """
    if not is_stored(path):
        return MappedFile(path, sparse=not whole)
    return _FetchedObject(path) if whole else _StoredObject(path)


def find_files(path: str) -> list[tuple[str, str]]:
    """Return the files that a path names now, each with its name below the path, in order of the names.

    A directory names each of its files, and a pattern (`*`, `?`, `[...]`, `**`) all files that match it.
    Files that end in `.index` or begin with a dot are left out. Any other path names itself, with an empty
    name.

    Raises:
        MissingDependencyError: The path belongs to an object store, and fsspec is not installed.
    """
    if is_stored(path):
        files, place = _file_system(path)
        files.invalidate_cache()
        exists, is_directory, url_of = files.exists, files.isdir, files.unstrip_protocol
    else:
        files, place = None, path
        exists, is_directory, url_of = os.path.exists, os.path.isdir, str
    mark = None if exists(place) else re.search(r"[*?[]", place)
    if mark is not None:
        root = os.path.dirname(place[: mark.start()])
        matches = files.glob(place) if files else glob.glob(place, recursive=True)
    elif is_directory(place):
        root = place
        matches = files.ls(place, detail=False) if files else [entry.path for entry in os.scandir(place)]
    else:
        return [("", path)]
    names = {os.path.relpath(match, root or "."): match for match in matches if not is_directory(match)}
    return sorted((name, url_of(match)) for name, match in names.items() if _is_trajectories(name))


def _is_trajectories(name: str) -> bool:
    return not name.endswith(INDEX_SUFFIX) and not os.path.basename(name).startswith(".")


def _file_system(url: str) -> tuple[Any, str]:
    with importing("fsspec", "store", "a file in an object store"):
        import fsspec
    files, path = fsspec.core.url_to_fs(url)
    return files, path


class _StoredObject:
    """An object that is read by ranged requests."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._files, self._path = _file_system(url)

    def __str__(self) -> str:
        return self._url

    def refresh(self) -> int:
        """Ask for the length in bytes."""
        self._files.invalidate_cache()
        return int(self._files.info(self._path)["size"])

    def read(self, start: int, stop: int, *, ahead: int = 0) -> memoryview:
        """Fetch a range."""
        return memoryview(self._files.cat_file(self._path, start, stop) if stop > start else b"")


class _FetchedObject(_StoredObject):
    """An object that is fetched whole, and later as far as it grew."""

    _data = b""

    def refresh(self) -> int:
        """Fetch what is new. An object that became shorter is fetched again."""
        size = super().refresh()
        known = self._data if len(self._data) <= size else b""
        self._data = known + bytes(super().read(len(known), size))
        return len(self._data)

    def read(self, start: int, stop: int, *, ahead: int = 0) -> memoryview:
        """View what was fetched."""
        return memoryview(self._data)[start:stop]
