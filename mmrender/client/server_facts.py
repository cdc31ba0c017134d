"""Facts about a server, kept between calls: its prompt limit, the pixels it takes, the images it has.

Each is asked once and kept with the transport. A server may come back with other flags at the same URL, so
facts are dropped when it may be lost (see `is_lost`), and after a minute without a call or a connection that
stays open. Facts that would be silently wrong at another server are kept for one process, which the server's
metrics identify. Which process answers is asked again when a connection has been made or none is open, and
after a minute.
"""

import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, Self
from weakref import WeakKeyDictionary

import msgspec

from mmrender.caching import AsyncSingleFlight, LRUCache
from mmrender.client.reply import decode_as
from mmrender.client.transport import Connections, Transport, is_lost
from mmrender.errors import EngineError, EngineMismatchError, EngineStatusError

_IDLE: Final = 60.0
"""Seconds without a call after which facts are dropped."""
_NAMED: Final = 60.0
"""Seconds after which it is asked again which process answers."""
_PROCESS_PATH: Final = "/metrics/?name[]=process_start_time_seconds"
"""One metric alone, as Prometheus' own application takes the question, with the slash that vLLM needs."""
_MAX_TRIES: Final = 4
"""Bounds the repetitions of a question while the answering process changes."""


_REST: Final = 60.0
"""Seconds for which images go with their data to a server that has dropped them again and again."""
_MAX_MISSES: Final = 3
"""Misses in a row after which a server counts as one that keeps no images."""


@dataclass(slots=True, eq=False)
class Recall:
    """How well a server recalls images that it processed itself.

    Attributes:
        refusal: Why it takes no encoded images. Empty if it does, as far as is known.
        misses: References in a row that it did not know.
        rests_until: Until when no references are sent.
    """

    refusal: str = ""
    misses: int = 0
    rests_until: float = 0.0

    @property
    def is_usable(self) -> bool:
        """Whether the server is expected to know an image again."""
        return not self.refusal and time.monotonic() >= self.rests_until

    def note(self, *, knew: bool) -> None:
        """Note whether the server knew the images of a request."""
        self.misses = 0 if knew else self.misses + 1
        if self.misses >= _MAX_MISSES:
            self.misses, self.rests_until = 0, time.monotonic() + _REST


@dataclass(slots=True, eq=False)
class ServerFacts:
    """Answers of one server, or of one process of it.

    Attributes:
        name: The process's name. Empty for the whole server.
        answers: Answers by question.
        asking: Questions in flight.
        hashes: Hashes of the images whose data the server has been sent.
        recall: How well it recalls images that it processed itself.
        limits_failed_at: When the look-up of a prompt limit failed, by backend and model.
        used_at: Time of the last question.
        connections: Connections to the server at that time. None if the transport does not know them.
        processes: Facts of the last 16 processes that have answered at this address.
        is_silent: Whether the server does not say which process answers.
        latest: Name of the process that answered last.
        named_at: Time of the last answer to which process it is.
        answered_over: Pools of connections as they were when that process answered over them.
        alternates: Whether processes answer in turn, rather than one after another.
        agreed: By question, what all processes answered that were asked.
        is_unlike: Whether two processes have answered differently.
        sampler: Facts that travel with the samples, such as the dtype in which the server computes.
    """

    name: str = ""
    answers: dict[Hashable, Any] = field(default_factory=dict)
    asking: AsyncSingleFlight[Hashable, Any] = field(default_factory=AsyncSingleFlight)
    hashes: LRUCache[str, bool] = field(default_factory=lambda: LRUCache(1 << 16))
    recall: Recall = field(default_factory=Recall)
    limits_failed_at: dict[Hashable, float] = field(default_factory=dict)
    used_at: float = 0.0
    connections: Connections | None = None
    processes: LRUCache[str, "ServerFacts"] = field(default_factory=lambda: LRUCache(16))
    is_silent: bool = False
    latest: str = ""
    named_at: float = 0.0
    answered_over: LRUCache[Connections, bool] = field(default_factory=lambda: LRUCache(16))
    alternates: bool = False
    agreed: dict[Hashable, Any] = field(default_factory=dict)
    is_unlike: bool = False
    sampler: dict[str, str] = field(default_factory=dict)

    @property
    def knows_process(self) -> bool:
        """Whether the latest process still answers, or one of several equal ones, without asking again."""
        if self.connections is None or not self.connections.is_open or not self.latest:
            return False
        if self.used_at - self.named_at > _NAMED:
            return False
        is_balanced = self.alternates and not self.is_unlike
        return is_balanced or self.answered_over.get(self.connections) is not None

    def note_sampler(self, engine: str, settings: msgspec.Struct) -> None:
        """Note the settings that samples carry: all members of a server's answer that are texts."""
        known = msgspec.structs.asdict(settings).items()
        texts = {name: text.removeprefix("torch.") for name, text in known if isinstance(text, str)}
        self.sampler = {"engine": engine, **texts}

    def process(self, name: str) -> "ServerFacts":
        """Return the facts about one process."""
        return self.processes.get_or_compute(name, lambda: ServerFacts(name))


_facts: WeakKeyDictionary[Transport, ServerFacts] = WeakKeyDictionary()


def facts_of(transport: Transport, *, has_answered: bool = False) -> ServerFacts:
    """Return the facts about the server of a transport.

    If it `has_answered` just now, it was in use meanwhile, however long the answer took.
    """
    now, facts = time.monotonic(), _facts.get(transport)
    connections: Connections | None = getattr(transport, "connections", None)
    stays = facts is not None and connections is not None and connections.is_open
    is_old = facts is not None and now - facts.used_at > _IDLE and not has_answered
    if facts is None or (is_old and not (stays and connections == facts.connections)):
        facts = _facts[transport] = ServerFacts()
    facts.used_at, facts.connections = now, connections
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
    async def answering(cls, transport: Transport, *, anew: bool = False) -> Self:
        """Return the process that answers now, if the server says which it is.

        It is asked if it may have changed, or `anew`.
        """
        facts = facts_of(transport)
        if facts.is_silent:
            return cls(transport, facts)
        if not anew and facts.knows_process:
            return cls(transport, facts.process(facts.latest))
        name: str = await _shared(transport, "process", partial(_ask_process, transport, facts))
        return cls(transport, facts.process(name) if name else facts)

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
        server = facts_of(self.transport)
        if server.alternates and not server.is_unlike and key in server.agreed:
            answers, seen = [server.agreed[key], await ask()], [self.facts]
            self._require_equal(answers)
        else:
            answers, seen = await self._ask_around(ask)
        for facts in seen:
            facts.answers[key] = answers[0]
        server.is_unlike |= server.agreed.setdefault(key, answers[0]) != answers[0]
        return answers[0]

    async def _ask_around(self, ask: Callable[[], Awaitable[Any]]) -> tuple[list[Any], list[ServerFacts]]:
        """Return the answers to a question, and the processes that gave them."""
        answers: list[Any] = []
        seen: list[ServerFacts] = []
        for _ in range(_MAX_TRIES):
            seen.append((await self.answering(self.transport, anew=True)).facts)
            answers.append(await ask())
            self._require_equal(answers)
            # Three times, so that servers that answer in turn do not come round to the same questions.
            after = [(await self.answering(self.transport, anew=True)).facts for _ in range(3)]
            if all(each is seen[-1] for each in after):
                return answers, after
        return answers, seen

    def _require_equal(self, answers: Sequence[Any]) -> None:
        """Require that the last answer is the first one.

        Raises:
            EngineMismatchError: It is another.
        """
        if answers[-1] != answers[0]:
            facts_of(self.transport).is_unlike = True
            raise EngineMismatchError(
                "servers with different settings answer at one address",
                where=self.transport.base_url,
                expected=str(answers[0])[:300],
                got=str(answers[-1])[:300],
                remedy="Start them with the same settings. If one has just replaced another, ask again",
            )


async def _ask_process(transport: Transport, facts: ServerFacts) -> str:
    """Ask which process answers. Its name is empty if the server does not say."""
    before = facts_of(transport).connections
    try:
        reply = await transport.request("GET", _PROCESS_PATH)
    except EngineStatusError as error:
        if is_lost(error):
            raise
        facts.is_silent = True
        return ""
    lines = reply.body.decode("utf-8", "replace").splitlines()
    name = "\n".join(line for line in lines if line.startswith("process_start_time"))
    facts.is_silent = not name
    facts.alternates |= name != facts.latest and name in facts.processes
    if name != facts.latest:
        facts.answered_over.clear()
    facts.latest, facts.named_at = name, time.monotonic()
    now = facts_of(transport).connections
    if now is not None and before is not None:
        made = now.made - (before.made if before.pool == now.pool else 0)
        if made == reply.is_first:  # no other connection was made meanwhile
            facts.answered_over.put(now, True)
    return name


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
