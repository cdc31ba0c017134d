"""`RayFleet`: a `Fleet` as actors of Ray, on any machines of a cluster.

Ray starts an actor again if its process or its machine dies, and calls its function again. An actor has the
addresses of all processes, and keeps them in files of the folder, so that they survive it.
"""

import os
import uuid
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mmrender.errors import FleetError
from mmrender.integrations.fleet import (
    CLOSE_SECONDS,
    POLL_SECONDS,
    AddressBook,
    AddressFiles,
    Fleet,
    Name,
    RunningFleet,
    call,
    failure_of,
)

_PLACE_SECONDS: Final = 300.0
"""Seconds that a placement group may take."""


class _AddressActor:
    """Asks the actor of addresses. It is known by name: a handle among an actor's arguments may be lost."""

    def __init__(self, name: str) -> None:
        self._name = name

    @cached_property
    def _actor(self) -> Any:
        return ray.get_actor(self._name)

    def publish(self, role: str, number: int, url: str) -> None:
        """Note the address of a process, in place of its earlier one."""
        ray.get(self._actor.publish.remote(role, number, url))

    def addresses(self, role: str) -> list[str]:
        """Return the addresses of a role, in order of the processes' numbers."""
        known: list[str] = ray.get(self._actor.addresses.remote(role))
        return known


class _Actor:
    """One process of a fleet."""

    def __init__(self, fleet: Fleet, name: Name, book: AddressBook) -> None:
        self._role = fleet.roles[name[0]]
        self._process = fleet.process(name, book)

    def run(self) -> None:
        """Run to its end."""
        call(self._role, self._process)

    def end(self) -> None:
        """Let it end, if it serves."""
        self._process.ended.set()

    def pid(self) -> int:
        """Return the process that runs it now."""
        return os.getpid()


class RayFleet(RunningFleet):
    """Runs a fleet as actors of the cluster that `ray.init` has joined.

    The actors end with this process, however it ends.

    Args:
        fleet: The fleet. Its folder is on a file system that all machines share.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.actors: dict[Name, Any] = {}
        self._groups: list[Any] = []
        self._runs: dict[Any, Name] = {}
        self._book: Any = None

    def start(self) -> None:
        """Start all actors.

        Raises:
            FleetError: The cluster has no room for a placement group.
        """
        AddressFiles(self.fleet.folder).clear()
        name = f"mmrender-addresses-{uuid.uuid4().hex}"
        book: Any = ray.remote(AddressFiles).options(
            name=name, num_cpus=0, max_restarts=-1, max_task_retries=-1
        )
        self._book = book.remote(self.fleet.folder)
        for role in self.fleet.roles:
            self._start(role, _AddressActor(name))

    def _start(self, name: str, book: AddressBook) -> None:
        role = self.fleet.roles[name]
        restarts = -1 if role.max_restarts is None else role.max_restarts
        options: dict[str, Any] = {
            "num_cpus": 1,
            **role.options,
            "max_restarts": restarts,
            "max_task_retries": restarts,
            "max_concurrency": 3,  # `pid` and `end` while it runs
        }
        group = None
        if role.placement is not None:
            group = placement_group([_bundle_of(options)] * role.count, strategy=role.placement)
            self._groups.append(group)
            if not group.wait(_PLACE_SECONDS):
                raise FleetError(
                    "the cluster has no room for a role",
                    where=name,
                    expected=f"{role.count} times {_bundle_of(options)}, {role.placement}",
                    got=str(ray.available_resources()),
                )
        for number in range(role.count):
            if group is not None:
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=number
                )
            actor: Any = ray.remote(_Actor).options(**options)
            one = Fleet(self.fleet.folder, {name: role})
            self.actors[name, number] = actor.remote(one, (name, number), book)
            self._runs[self.actors[name, number].run.remote()] = name, number

    def pids(self) -> dict[Name, int]:
        """Return the ids of the processes that run, each on its own machine.

        An actor that is being started again is waited for.
        """
        asked = {name: self.actors[name].pid.remote() for name in self._runs.values()}
        return dict(zip(asked, ray.get([*asked.values()]), strict=True))

    def poll(self, timeout: float = POLL_SECONDS) -> bool:
        """Return whether an actor that does not serve still runs.

        Args:
            timeout: Seconds to wait for an actor to end.

        Raises:
            FleetError: A process raised an error, died too often, or served and ended before the others.
        """
        ended, _ = ray.wait([*self._runs], num_returns=1, timeout=timeout) if self._runs else ([], [])
        for run in ended:
            name = self._runs.pop(run)
            try:
                ray.get(run)
            except RayTaskError as error:
                raise failure_of(name, f"{type(error.cause).__name__}: {error.cause}") from error
            except RayError as error:
                raise failure_of(name, str(error)) from error
            if self.fleet.roles[name[0]].serves:
                raise failure_of(name, "it returned")
        return any(not self.fleet.roles[role].serves for role, _ in self._runs.values())

    def close(self) -> None:
        """End all actors: those that serve in good order, the others at once. Idempotent."""
        serving = []
        for run, (role, number) in self._runs.items():
            if self.fleet.roles[role].serves:
                self.actors[role, number].end.remote()
                serving.append(run)
        if serving:
            ray.wait(serving, num_returns=len(serving), timeout=CLOSE_SECONDS)
        for actor in (*self.actors.values(), self._book):
            if actor is not None:
                ray.kill(actor)
        for group in self._groups:
            remove_placement_group(group)
        self._runs, self.actors, self._groups, self._book = {}, {}, [], None


def _bundle_of(options: Mapping[str, Any]) -> dict[str, float]:
    """Return the resources of an actor, as a bundle of a placement group."""
    named = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0), **options.get("resources", {})}
    return {name: amount for name, amount in named.items() if amount}
