"""What probing found out, kept on disk, so that no process probes what another one has.

An entry is named by a digest of all that it depends on: the template, the special and added tokens that it is
used with, its arguments and limits, and this library's own code for templates and bridges. So entries never
go stale, and none needs to be deleted. A file that cannot be read counts as missing and is written again.
"""

import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from blake3 import blake3

from mmrender._version import __version__
from mmrender.model.tokenizer import Tokenizer
from mmrender.template.chat import ChatTemplate

_log = logging.getLogger("mmrender.probing.store")

Value = TypeVar("Value")

ENVIRONMENT = "MMRENDER_CACHE"
_OFF = ("", "0", "off", "no", "none")
_CODE = ("template/*.py", "bridge/*.py", "probing/*.py", "tokens/*.py", "model/tokenizer.py")


class ProfileCache:
    """A folder of small JSON files. Safe to use from many threads and processes.

    Args:
        folder: Where they are; made when the first one is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def default(cls) -> "ProfileCache | None":
        """The folder that `MMRENDER_CACHE` names, or `mmrender` in the user's cache folder.

        None where `MMRENDER_CACHE` is `off`, or where there is no home to keep it in.
        """
        given = os.environ.get(ENVIRONMENT)
        if given is not None:
            return None if given.strip().lower() in _OFF else cls(Path(given).expanduser() / "profiles")
        base = os.environ.get("XDG_CACHE_HOME")
        try:
            home = Path(base) if base else Path.home() / ".cache"
        except RuntimeError:
            return None
        # The specification of XDG_CACHE_HOME tells to ignore relative paths.
        return cls(home / "mmrender" / "profiles") if home.is_absolute() else None

    def get(self, name: str, kind: type[Value]) -> Value | None:
        """Read an entry; None where there is none, or none that can be read."""
        try:
            return msgspec.json.decode((self.folder / f"{name}.json").read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            _log.debug("ignored cache entry %s: %s", name, error)
            return None

    def put(self, name: str, value: Any) -> None:
        """Write an entry in one step; a folder that cannot be written to is let be."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, path = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(msgspec.json.encode(value))
                Path(path).replace(self.folder / f"{name}.json")
            except BaseException:
                Path(path).unlink(missing_ok=True)
                raise
        except OSError as error:
            _log.debug("cannot keep cache entry %s: %s", name, error)


class Shelf:
    """The entries of one template with one set of arguments.

    Args:
        cache: Where they are kept.
        digest: Of all that they depend on.
    """

    def __init__(self, cache: ProfileCache, digest: str) -> None:
        self._cache = cache
        self._digest = digest

    def get(self, about: str, kind: type[Value]) -> Value | None:
        """Read what is known about something; None where nothing is."""
        return self._cache.get(self._name(about), kind)

    def put(self, about: str, value: Any) -> None:
        """Keep what is known about something."""
        self._cache.put(self._name(about), value)

    def _name(self, about: str) -> str:
        return f"{self._digest}-{blake3(about.encode('utf-8', 'surrogatepass')).hexdigest(length=8)}"


def open_shelf(
    cache: ProfileCache | None, template: ChatTemplate, tokenizer: Tokenizer, arguments: Mapping[str, Any]
) -> Shelf | None:
    """The shelf of a template, or None where what is found out about it cannot be kept.

    That is so where nothing is cached, where the template reads the clock, and where an argument is not JSON.
    """
    if cache is None or template.reads_clock:
        return None
    facts = {
        "code": _code_digest(),
        "source": template.source,
        "special_tokens": template.special_tokens,
        "limits": asdict(template.limits),
        "added_tokens": tokenizer.added_ids,
        "special_ids": sorted(tokenizer.special_ids),
        "vocabulary": tokenizer.vocab_size,
        "arguments": dict(arguments),
    }
    try:
        text = json.dumps(facts, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
    return Shelf(cache, blake3(text.encode()).hexdigest(length=16))


@cache
def _code_digest() -> str:
    """Digest of the code that finds out, since a version number alone does not move with every change."""
    digest = blake3(__version__.encode())
    root = Path(__file__).parents[1]
    for pattern in _CODE:
        for file in sorted(root.glob(pattern)):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest(length=16)
