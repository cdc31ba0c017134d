"""Facts about a server, kept between calls: its prompt limit, the pixels it takes, the images it has seen.

Everything is asked once and kept beside the transport. A server may come back with other flags behind the
same URL, so what is known is dropped when a connection breaks, when a gateway answers in the server's
place, and after a minute without a call.
"""

import logging
import threading
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import msgspec

from mmrender.caching import AsyncSingleFlight, LRUCache
from mmrender.client.reply import decode_as
from mmrender.client.transport import Transport
from mmrender.client.types import RendererBackend
from mmrender.errors import EngineConnectionError, EngineError

_log = logging.getLogger("mmrender.client")
_PAUSE: Final = 10.0
"""Seconds after a failed look-up of the prompt limit in which it is not repeated."""
_IDLE: Final = 60.0
"""Seconds without a call after which a server is asked anew."""


@dataclass(slots=True)
class ServerFacts:
    """Answers of one server.

    Attributes:
        answers: By question.
        asking: Questions under way.
        hashes: Hashes of the images whose data the server has been sent.
        limits_failed_at: When the look-up of a prompt limit failed, by backend and model.
        used_at: When something was last asked here.
    """

    answers: dict[Hashable, Any] = field(default_factory=dict)
    asking: AsyncSingleFlight[Hashable, Any] = field(default_factory=AsyncSingleFlight)
    hashes: LRUCache[str, bool] = field(default_factory=lambda: LRUCache(1 << 16))
    limits_failed_at: dict[Hashable, float] = field(default_factory=dict)
    used_at: float = 0.0


_facts: WeakKeyDictionary[Transport, ServerFacts] = WeakKeyDictionary()
_lock = threading.Lock()


def facts_of(transport: Transport) -> ServerFacts:
    """Return what is known of the server of a transport."""
    now = time.monotonic()
    with _lock:
        facts = _facts.get(transport)
        if facts is None or now - facts.used_at > _IDLE:
            facts = _facts[transport] = ServerFacts()
        facts.used_at = now
    return facts


def forget(transport: Transport) -> None:
    """Forget what is known of a server."""
    with _lock:
        _facts.pop(transport, None)


async def ask_once(transport: Transport, key: Hashable, ask: Callable[[], Awaitable[Any]]) -> Any:
    """Return a server's answer to a question. Concurrent callers share one request; errors are not kept."""
    facts = facts_of(transport)
    if key not in facts.answers:
        try:
            facts.answers[key] = await facts.asking.run(key, ask)
        except EngineConnectionError:
            forget(transport)
            raise
    return facts.answers[key]


async def prompt_limit(backend: RendererBackend, model: str, transport: Transport) -> int | None:
    """Return the most tokens that a prompt may have, asked once; None if unknown.

    A server that cannot say is asked again after a pause, and refuses long prompts itself meanwhile.
    """
    facts = facts_of(transport)
    key = ("limit", backend.name, model)
    if time.monotonic() < facts.limits_failed_at.get(key, 0.0) + _PAUSE:
        return None
    try:
        ask = partial(backend.resolve_max_prompt_len, model, transport)
        limit: int | None = await ask_once(transport, key, ask)
    except EngineConnectionError:
        raise
    except EngineError as error:
        facts.limits_failed_at[key] = time.monotonic()
        _log.warning("prompts are not checked for length before they are sent: %s", error)
        return None
    return limit


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
