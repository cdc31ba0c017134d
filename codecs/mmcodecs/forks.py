"""Renew the locks of objects in a forked child.

A fork copies only the thread that calls it. A lock that another thread holds stays locked in the child, and a
value that another thread computes never comes. So every object with a lock, a thread or a computation that
others wait for is watched here, and its `renew_after_fork` runs in the child before anything else does.

A module that another thread imports can never be imported in the child. So a fork first waits for imports.
"""

import os
import threading
import time
import weakref
from importlib import _bootstrap
from typing import Any, Final, Protocol

MAX_IMPORT_SECONDS: Final = 60.0
"""Seconds that a fork waits at most for the imports of other threads."""


class Renewable(Protocol):
    """An object that a child of a fork can use again."""

    def renew_after_fork(self) -> None:
        """Replace all locks and threads, and bring the state that they guard in order.

        Runs in the child, on its only thread. Other threads of the parent may have stopped between any two
        bytecodes of the object's methods.
        """


_watched: "weakref.WeakSet[Renewable]" = weakref.WeakSet()


def watch_forks(renewable: Renewable) -> None:
    """Call `renew_after_fork` of an object in every child of a fork, as long as the object lives."""
    _watched.add(renewable)


def _renew_all() -> None:
    for renewable in list(_watched):
        renewable.renew_after_fork()


def _await_imports() -> None:
    """Wait until no other thread imports a module."""
    me, deadline = threading.get_ident(), time.monotonic() + MAX_IMPORT_SECONDS
    # Private to Python: a release without this dictionary, or with other locks in it, is not waited for.
    references: dict[str, Any] = getattr(_bootstrap, "_module_locks", {})
    while time.monotonic() < deadline:
        locks = [reference() for reference in list(references.values())]
        if all(getattr(lock, "owner", None) in (None, me) for lock in locks):
            return
        time.sleep(0.001)


if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
    os.register_at_fork(before=_await_imports, after_in_child=_renew_all)
