"""Pools by model, one of each in a process, and what becomes of pools after a fork.

A forked child has none of its parent's threads, and may have inherited locks that one of them held. So in a
child every pool drops what it had, and makes it anew at its first use.
"""

import os
import threading
import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING

from mmrender.pool.recipe import Recipe
from mmrender.pool.sizes import PoolSizes
from mmrender.renderer import Renderer

if TYPE_CHECKING:
    from mmrender.pool.pool import RendererPool


class Registry:
    """Renderers and pools of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._renderers: weakref.WeakValueDictionary[Hashable, Renderer] = weakref.WeakValueDictionary()
        self._pools: dict[Hashable, RendererPool] = {}
        self._all: weakref.WeakSet[RendererPool] = weakref.WeakSet()

    def renderer(self, recipe: Recipe) -> Renderer:
        """The renderer of a recipe, loaded once; pools of several sizes share it."""
        key = recipe.key
        with self._lock:
            renderer = self._renderers.get(key)
            if renderer is None:
                renderer = self._renderers[key] = recipe.build()
            return renderer

    def pool(self, recipe: Recipe, sizes: PoolSizes, build: "type[RendererPool]") -> "RendererPool":
        """The pool of a recipe and sizes, made once."""
        key = (build, recipe.key, sizes)
        with self._lock:
            pool = self._pools.get(key)
            if pool is None:
                pool = self._pools[key] = build._made(recipe, sizes)
            return pool

    def watch(self, pool: "RendererPool") -> None:
        """Let a pool know when this process is forked."""
        with self._lock:
            self._all.add(pool)

    def forget(self, pool: "RendererPool") -> None:
        """Let the next call of `pool` make another one."""
        with self._lock:
            for key in [key for key, known in self._pools.items() if known is pool]:
                del self._pools[key]

    def after_fork(self) -> None:
        """In a child: drop every lock, thread and table that came from the parent."""
        self._lock = threading.RLock()
        self._renderers = weakref.WeakValueDictionary()
        for pool in list(self._all):
            pool._after_fork()


REGISTRY = Registry()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=REGISTRY.after_fork)
