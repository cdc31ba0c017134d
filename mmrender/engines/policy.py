"""What an engine client does about load, failures and time. Plain data."""

import dataclasses
import random
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mmrender.errors import (
    EngineConnectionError,
    EngineReplyError,
    EngineStatusError,
    EngineTimeoutError,
    EngineUnavailableError,
    InputError,
)

Routing: TypeAlias = Literal["affinity", "round_robin"]
"""`affinity`: by session, else by images, else by least load. `round_robin`: each prompt to the next one."""

TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which the same request may succeed, there or elsewhere."""


@dataclass(frozen=True, slots=True)
class ClientPolicy:
    """Settings of an `InferenceEngineClient`.

    Attributes:
        routing: How an engine is chosen.
        concurrency: Requests under way on one engine at a time; further ones wait, in order. None: no limit.
        attempts: How often one piece of work is tried in all, over all engines, before its error is raised.
        backoff_initial: Seconds before the second attempt, at most; doubled for each further one.
        backoff_max: The most it grows to. The actual pause is random below it.
        attempt_timeout: Seconds for one request, not counting time in which it is paused; None: no limit.
        deadline: Seconds for a whole completion, with waiting, retries and pauses; None: no limit.
        max_idle_aborts: How many aborts in a row that bring no progress, outside pauses, are borne with.
        eject_after: Failures in a row after which an engine is asked for its health, and ejected if ill.
        health_interval: Seconds between checks of each engine while work is under way or an engine is
            ejected; None: only after failures and on need.
        health_timeout: Seconds for one check.
        pause_timeout: Seconds for engines to obey a pause. After that, requests that still run are cancelled
            and asked again later.
        virtual_nodes: Places of each engine on the hash ring; more balance sessions better.
        image_slack: How many more requests than the least loaded engine an engine may have and still be
            preferred because it holds a prompt's images.
        image_memory: Images whose engine is remembered.

    Raises:
        InputError: A number is out of range.
    """

    routing: Routing = "affinity"
    concurrency: int | None = None
    attempts: int = 5
    backoff_initial: float = 0.1
    backoff_max: float = 5.0
    attempt_timeout: float | None = None
    deadline: float | None = None
    max_idle_aborts: int = 32
    eject_after: int = 2
    health_interval: float | None = 5.0
    health_timeout: float = 5.0
    pause_timeout: float = 60.0
    virtual_nodes: int = 512
    image_slack: int = 8
    image_memory: int = 65_536

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise InputError(
                    "a setting is out of range",
                    where=f"policy.{name}",
                    expected=f"at least {least}",
                    got=repr(value),
                )
        if self.routing not in ("affinity", "round_robin"):
            raise InputError(
                "there is no such routing",
                where="policy.routing",
                expected="'affinity' or 'round_robin'",
                got=repr(self.routing),
            )

    def replace(self, **changes: object) -> "ClientPolicy":
        """The same policy with other values."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def backoff(self, failures: int) -> float:
        """Seconds to wait after that many failures: random, so that clients do not come back in step."""
        longest = min(self.backoff_max, self.backoff_initial * 2.0 ** min(failures - 1, 30))
        return longest * random.random()  # noqa: S311 - no secret


_LEAST = {
    "concurrency": 1,
    "attempts": 1,
    "backoff_initial": 0.0,
    "backoff_max": 0.0,
    "attempt_timeout": 1e-9,
    "deadline": 1e-9,
    "max_idle_aborts": 1,
    "eject_after": 1,
    "health_interval": 1e-9,
    "health_timeout": 1e-9,
    "pause_timeout": 0.0,
    "virtual_nodes": 1,
    "image_slack": 0,
    "image_memory": 0,
}


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed at another time or place."""
    if isinstance(error, EngineStatusError):
        return error.status in TRANSIENT_STATUSES
    return isinstance(
        error, EngineConnectionError | EngineTimeoutError | EngineReplyError | EngineUnavailableError
    )
