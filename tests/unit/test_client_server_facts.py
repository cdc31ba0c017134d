"""What is known of a server: asked once, by all at once, and again after a failure."""

import asyncio
from typing import Any

import pytest

from mmrender.caching import AsyncSingleFlight
from mmrender.client import server_facts
from mmrender.client.engine import Engine
from mmrender.client.server_facts import facts_of, forget
from mmrender.client.vllm import VLLMBackend
from mmrender.errors import EngineConnectionError, EngineStatusError
from mmrender.testing.memory_transport import DROPPED, Answer, MemoryTransport


def models(*answers: Any) -> MemoryTransport:
    return MemoryTransport({"GET /v1/models": list(answers)})


def of_length(length: int | None) -> dict[str, Any]:
    return {"data": [{"id": name, "max_model_len": length} for name in ("m", "n")]}


def ask(transport: MemoryTransport, model: str = "m", times: int = 1) -> list[Any]:
    async def together() -> list[Any]:
        engine = Engine(VLLMBackend(), transport, model=model)
        calls = (engine.max_prompt_len() for _ in range(times))
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(together())


@pytest.mark.parametrize(("length", "limit"), [(2048, 2047), (None, None)])
def test_an_answer_is_kept_for_each_server_and_model(length: int | None, limit: int | None) -> None:
    here, there = models(of_length(length), of_length(9), of_length(5)), models(of_length(7))
    assert ask(here, times=20) == [limit] * 20
    assert ask(here) == [limit]
    assert (ask(here, "n"), ask(there)) == ([8], [6])
    assert (len(here.asked), len(there.asked)) == (2, 1)
    forget(here)
    assert ask(here) == [4]


def test_a_server_that_cannot_say_is_asked_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(server_facts.time, "monotonic", lambda: now[0])
    transport = models(Answer("no", status=500), of_length(8))
    assert ask(transport, times=3) == [None] * 3
    now[0] += 9.0
    assert ask(transport) == [None]
    assert len(transport.asked) == 1
    now[0] += 2.0
    assert ask(transport) == [7]


def test_a_server_that_is_not_reached_is_an_error_and_asked_again() -> None:
    transport = models(DROPPED, of_length(8))
    (error,) = ask(transport)
    assert isinstance(error, EngineConnectionError)
    assert ask(transport) == [7]


def test_a_server_is_asked_anew_after_a_minute_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(server_facts.time, "monotonic", lambda: now[0])
    transport = models(of_length(8), of_length(6))
    for _ in range(3):
        now[0] += 59.0
        assert ask(transport) == [7]
    facts_of(transport).hashes.put("a", True)
    now[0] += 61.0
    assert ask(transport) == [5]
    assert "a" not in facts_of(transport).hashes


# --- the single flight beneath ---


class Question:
    """A question that takes a while; notes that it was asked, and that it was cancelled."""

    def __init__(self) -> None:
        self.events: list[str] = []

    async def __call__(self) -> int:
        self.events.append("asked")
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.events.append("cancelled")
            raise
        return 7


async def test_one_who_gives_up_takes_the_answer_from_nobody() -> None:
    single, ask = AsyncSingleFlight(), Question()
    first, second = (asyncio.create_task(single.run("key", ask)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 7
    assert first.cancelled()
    assert ask.events == ["asked"]


async def test_when_all_give_up_the_question_is_withdrawn() -> None:
    single, ask = AsyncSingleFlight(), Question()
    tasks = [asyncio.create_task(single.run("key", ask)) for _ in range(2)]
    for _ in range(3):
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(asyncio.all_tasks()) == 1
    assert await single.run("key", ask) == 7
    assert ask.events == ["asked", "cancelled", "asked"]


async def test_an_error_reaches_all_who_wait_and_is_not_kept() -> None:
    single, refusal = AsyncSingleFlight(), EngineStatusError("no", status=500)

    async def fail() -> int:
        await asyncio.sleep(0)
        raise refusal

    found = await asyncio.gather(*(single.run("key", fail) for _ in range(3)), return_exceptions=True)
    assert found == [refusal] * 3
    assert await single.run("key", Question()) == 7
