"""Which engine gets a prompt."""

import itertools
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Protocol

from mmrender.engines.policy import ClientPolicy
from mmrender.engines.ring import HashRing


class Loaded(Protocol):
    """What routing wants to know of an engine."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def load(self) -> int:
        """Requests that run there or wait for a place."""
        ...


class ImageMemory:
    """Which engine was last given an image; bounded, the oldest forgotten first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._engines: OrderedDict[str, str] = OrderedDict()

    def note(self, images: Sequence[str], name: str) -> None:
        """Remember that an engine has these images."""
        for image in images:
            self._engines[image] = name
            self._engines.move_to_end(image)
        while len(self._engines) > self._size:
            self._engines.popitem(last=False)

    def best(self, images: Sequence[str]) -> str | None:
        """The engine that has most of these images; of several, that of the latest one."""
        counts: dict[str, int] = {}
        for image in reversed(images):
            name = self._engines.get(image)
            if name is not None:
                counts[name] = counts.get(name, 0) + 1
        return max(counts, key=counts.__getitem__) if counts else None


class Router:
    """Chooses engines. Safe to use from many threads.

    Args:
        names: Names of the engines.
        policy: Routing, and the sizes that go with it.
    """

    def __init__(self, names: Iterable[str], policy: ClientPolicy) -> None:
        self._policy = policy
        self._ring = HashRing(names, policy.virtual_nodes)
        self._images = ImageMemory(policy.image_memory)
        self._turns = itertools.count()
        self._lock = threading.Lock()

    def choose(
        self,
        engines: Mapping[str, Loaded],
        *,
        session: Hashable | None = None,
        images: Sequence[str] = (),
        preferred: str | None = None,
    ) -> str:
        """Choose one of `engines`, of which there is at least one.

        Args:
            engines: Those that may be chosen, by name.
            session: Its engine is chosen, whatever the load.
            images: Identities of the prompt's images.
            preferred: An engine to be taken unless it has much more to do than others.
        """
        with self._lock:
            name = self._chosen(engines, session, images, preferred)
            if images:
                self._images.note(images, name)
            return name

    def _chosen(
        self,
        engines: Mapping[str, Loaded],
        session: Hashable | None,
        images: Sequence[str],
        preferred: str | None,
    ) -> str:
        if self._policy.routing == "round_robin":
            names = sorted(engines)
            return names[next(self._turns) % len(names)]
        if session is not None:
            owner = self._ring.owner(session, engines)
            if owner is not None:
                return owner
        least = min(engine.load for engine in engines.values())
        for name in (preferred, self._images.best(images) if images else None):
            if (
                name is not None
                and name in engines
                and engines[name].load <= least + self._policy.image_slack
            ):
                return name
        # Equal loads take turns, so that a burst of short prompts does not fall on the first engine.
        idle = sorted(name for name, engine in engines.items() if engine.load == least)
        return idle[next(self._turns) % len(idle)]
