"""Facts about a server, kept between calls: its prompt limit, the pixels it takes, the images it has.

Each is asked once and kept with the transport. A server may come back with other flags at the same URL, so
facts are dropped when it may be lost (see `is_lost`), and after a minute without a call. Facts that would be
silently wrong at another server are kept for one process, which the server's metrics identify.
"""

import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, Self
from weakref import WeakKeyDictionary

import msgspec

from mmrender.caching import AsyncSingleFlight, LRUCache
from mmrender.client.reply import decode_as
from mmrender.client.transport import Transport, is_lost
from mmrender.errors import EngineError, EngineMismatchError, EngineStatusError

_IDLE: Final = 60.0
"""Seconds without a call after which facts are dropped."""
_PROCESS_PATH: Final = "/metrics/?name[]=process_start_time_seconds"
"""One metric alone, as Prometheus' own application takes the question, with the slash that vLLM needs."""
_MAX_TRIES: Final = 4
"""Bounds the repetitions of a question while the answering process changes."""


@dataclass(slots=True, eq=False)
class ServerFacts:
    """Answers of one server, or of one process of it.

    Attributes:
        name: The process's name. Empty for the whole server.
        answers: Answers by question.
        asking: Questions in flight.
        hashes: Hashes of the images whose data the server has been sent.
        limits_failed_at: When the look-up of a prompt limit failed, by backend and model.
        used_at: Time of the last question.
        processes: Facts of the last 16 processes that have answered at this address.
        is_silent: Whether the server does not say which process answers.
        latest: Name of the process that answered last.
        alternates: Whether processes answer in turn, rather than one after another.
        sampler: Facts that travel with the samples, such as the dtype in which the server computes.
    """

    name: str = ""
    answers: dict[Hashable, Any] = field(default_factory=dict)
    asking: AsyncSingleFlight[Hashable, Any] = field(default_factory=AsyncSingleFlight)
    hashes: LRUCache[str, bool] = field(default_factory=lambda: LRUCache(1 << 16))
    limits_failed_at: dict[Hashable, float] = field(default_factory=dict)
    used_at: float = 0.0
    processes: LRUCache[str, "ServerFacts"] = field(default_factory=lambda: LRUCache(16))
    is_silent: bool = False
    latest: str = ""
    alternates: bool = False
    sampler: dict[str, str] = field(default_factory=dict)


_facts: WeakKeyDictionary[Transport, ServerFacts] = WeakKeyDictionary()


def facts_of(transport: Transport) -> ServerFacts:
    """Return the facts about the server of a transport."""
    now = time.monotonic()
    facts = _facts.get(transport)
    if facts is None or now - facts.used_at > _IDLE:
        facts = _facts[transport] = ServerFacts()
    facts.used_at = now
    return facts


def forget(transport: Transport) -> None:
    """Drop the facts about a server."""
    _facts.pop(transport, None)


async def _shared(transport: Transport, key: Hashable, ask: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await facts_of(transport).asking.run(key, ask)
    except EngineError as error:
        if is_lost(error):
            forget(transport)
        raise


class Process(NamedTuple):
    """A server process: how to reach it, and the facts about it."""

    transport: Transport
    facts: ServerFacts

    @classmethod
    def unknown(cls, transport: Transport) -> Self:
        """Return whichever process answers."""
        return cls(transport, facts_of(transport))

    @classmethod
    async def answering(cls, transport: Transport) -> Self:
        """Return the process that answers now, if the server says which it is."""
        facts = facts_of(transport)
        if facts.is_silent:
            return cls(transport, facts)

        async def ask() -> str:
            try:
                reply = await transport.request("GET", _PROCESS_PATH)
            except EngineStatusError as error:
                if is_lost(error):
                    raise
                return ""
            lines = reply.body.decode("utf-8", "replace").splitlines()
            return "\n".join(line for line in lines if line.startswith("process_start_time"))

        name: str = await _shared(transport, "process", ask)
        facts.is_silent = not name
        facts.alternates |= name != facts.latest and name in facts.processes
        facts.latest = name
        return cls(
            transport, facts.processes.get_or_compute(name, lambda: ServerFacts(name)) if name else facts
        )

    async def ask_once(self, key: Hashable, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Return the answer to a question. Concurrent callers share one request. Errors are not kept.

        Raises:
            EngineMismatchError: Processes that answer at this address do not agree.
        """
        answers = self.facts.answers
        if key not in answers:
            if self.facts.name:
                return await _shared(self.transport, ("process", key), partial(self._settle, key, ask))
            answers[key] = await _shared(self.transport, key, ask)
        return answers[key]

    async def _settle(self, key: Hashable, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Repeat a question until one process, or several that agree, answered."""
        answers: list[Any] = []
        seen: list[ServerFacts] = []
        for _ in range(_MAX_TRIES):
            seen.append((await self.answering(self.transport)).facts)
            answers.append(await ask())
            if answers[-1] != answers[0]:
                raise EngineMismatchError(
                    "servers with different settings answer at one address",
                    where=self.transport.base_url,
                    expected=str(answers[0])[:300],
                    got=str(answers[-1])[:300],
                    remedy="Start them with the same settings. If one has just replaced another, ask again",
                )
            # Three times, so that servers that answer in turn do not come round to the same questions.
            after = [(await self.answering(self.transport)).facts for _ in range(3)]
            if all(each is seen[-1] for each in after):
                seen = after
                break
        for facts in seen:
            facts.answers[key] = answers[0]
        return answers[0]


class ModelCard(msgspec.Struct):
    """One entry of `/v1/models`. `max_model_len` is vLLM's, `context_window` Dynamo's."""

    id: str
    parent: str | None = None
    max_model_len: int | None = None
    context_window: int | None = None

    @property
    def length(self) -> int | None:
        """Tokens that the model's context holds."""
        return self.max_model_len or self.context_window


class _ModelCards(msgspec.Struct):
    data: list[ModelCard]


async def model_cards(transport: Transport) -> dict[str, ModelCard]:
    """Return a server's models by name."""
    reply = await transport.request("GET", "/v1/models")
    cards = decode_as(reply.body, _ModelCards, where=f"{transport.base_url}/v1/models")
    return {card.id: card for card in cards.data}
