"""What is known of a server between calls: its models, its prompt limit, the images it has seen.

Everything is asked once and kept beside the transport, for as long as that lives. A connection that breaks
may mean that the server restarts with other flags; `forget` drops everything then.
"""

import logging
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable
from typing import Any, Final
from weakref import WeakKeyDictionary

import msgspec

from mmrender.caching import AsyncSingleFlight, LRUCache
from mmrender.client.reply import decode_as
from mmrender.client.transport import Transport
from mmrender.client.types import RendererBackend
from mmrender.errors import (
    EngineConnectionError,
    EngineError,
)

RENDER_PATH: Final = "/v1/chat/completions/render"
INFO_PATH: Final = "/server_info?config_format=json"
_log = logging.getLogger("mmrender.client")
_PAUSE: Final = 10.0
"""Seconds after a failed look-up of the prompt limit in which it is not repeated."""


class ServerFacts:
    """Answers of one server, and the hashes of images it was sent. Thread-safe."""

    def __init__(self) -> None:
        self._answers: LRUCache[Hashable, tuple[Any]] = LRUCache(4096)
        self._asking: AsyncSingleFlight[Hashable, Any] = AsyncSingleFlight()
        self._seen: LRUCache[str, bool] = LRUCache(1 << 16)
        self.limits_failed_at: dict[Hashable, float] = {}

    async def ask_once(self, key: Hashable, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Return the answer to a question; concurrent callers share one request, and errors are not kept."""
        if (known := self._answers.get(key)) is not None:
            return known[0]
        answer = await self._asking.run(key, ask)
        self._answers.put(key, (answer,))
        return answer

    def seen(self, hashes: Collection[str]) -> set[str]:
        """Return those of `hashes` whose data the server has been sent."""
        return {digest for digest in hashes if self._seen.get(digest)}

    def remember(self, hashes: Iterable[str]) -> None:
        """Note that the server has the data of these."""
        for digest in hashes:
            self._seen.put(digest, True)

    def unsee(self, hashes: Iterable[str]) -> None:
        """Note that the server no longer has the data of these."""
        for digest in hashes:
            self._seen.pop(digest)


_facts: WeakKeyDictionary[Transport, ServerFacts] = WeakKeyDictionary()
_lock = threading.Lock()


def facts_of(transport: Transport) -> ServerFacts:
    """Return what is known of the server of a transport."""
    with _lock:
        facts = _facts.get(transport)
        if facts is None:
            facts = _facts[transport] = ServerFacts()
    return facts


def forget(transport: Transport) -> None:
    """Forget what is known of a server."""
    with _lock:
        _facts.pop(transport, None)


async def prompt_limit(backend: RendererBackend, model: str, transport: Transport) -> int | None:
    """Return the most tokens that a prompt may have, asked once; None if unknown.

    A server that cannot say is asked again after a pause, and refuses long prompts itself meanwhile.
    """
    facts = facts_of(transport)
    key = ("limit", backend.name, model)
    if time.monotonic() < facts.limits_failed_at.get(key, 0.0) + _PAUSE:
        return None
    try:
        limit: int | None = await facts.ask_once(
            key, lambda: backend.resolve_max_prompt_len(model, transport)
        )
    except EngineConnectionError:
        raise
    except EngineError as error:
        facts.limits_failed_at[key] = time.monotonic()
        _log.warning("prompts are not checked for length before they are sent: %s", error)
        return None
    return limit


class ModelCard(msgspec.Struct):
    """One entry of `/v1/models`. `max_model_len` is vLLM's and SGLang's, `context_window` Dynamo's."""

    id: str
    parent: str | None = None
    max_model_len: int | None = None
    context_window: int | None = None


class _ModelCards(msgspec.Struct):
    data: list[ModelCard]


async def model_cards(transport: Transport) -> dict[str, ModelCard]:
    """Return a server's models by name."""
    reply = await transport.request("GET", "/v1/models")
    cards = decode_as(reply.body, _ModelCards, where=f"{transport.base_url}/v1/models")
    return {card.id: card for card in cards.data}
