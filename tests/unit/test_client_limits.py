"""The engine's limit: asked once, by all at once, and again after a failure."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from mmrender.client.server_facts import PromptLimits
from mmrender.client.transport import Transport
from mmrender.client.types import EngineRequest, EngineResponse, RendererBackend
from mmrender.errors import EngineStatusError
from mmrender.testing.memory_transport import MemoryTransport


@dataclass
class Asked:
    """A backend that counts how often it asks."""

    answers: list[Any]
    name: str = "fake"
    calls: int = 0
    gate: asyncio.Event | None = field(default=None)

    async def generate(self, request: EngineRequest, transport: Transport) -> EngineResponse:
        raise NotImplementedError

    async def resolve_max_prompt_len(self, model: str, transport: Transport) -> int | None:
        self.calls += 1
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(0)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def is_overflow_error(self, exc: BaseException) -> bool:
        return False


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


HERE = MemoryTransport(base_url="http://here")
THERE = MemoryTransport(base_url="http://there")
REFUSED = EngineStatusError("no", status=500)


@pytest.mark.parametrize("answer", [2047, None])
def test_an_answer_is_kept_for_each_server_model_and_engine(answer: int | None) -> None:
    backend, other = Asked([answer, 1, 2]), Asked([3], name="other")
    assert isinstance(backend, RendererBackend)
    limits = PromptLimits()

    async def ask() -> list[int | None]:
        return [
            await limits.get(backend, "m", HERE),
            await limits.get(backend, "m", HERE),
            await limits.get(backend, "n", HERE),
            await limits.get(backend, "m", THERE),
            await limits.get(other, "m", HERE),
        ]

    assert asyncio.run(ask()) == [answer, answer, 1, 2, 3]
    assert asyncio.run(limits.get(backend, "m", HERE)) == answer
    assert (backend.calls, other.calls) == (3, 1)
    limits.forget()
    backend.answers = [5]
    assert asyncio.run(limits.get(backend, "m", HERE)) == 5


def test_calls_at_the_same_time_share_one_request() -> None:
    backend, limits = Asked([7]), PromptLimits()

    async def ask() -> list[int | None]:
        return await asyncio.gather(*[limits.get(backend, "m", HERE) for _ in range(20)])

    assert asyncio.run(ask()) == [7] * 20
    assert backend.calls == 1


def test_a_failure_is_for_all_who_asked_and_is_tried_again_later() -> None:
    clock = Clock()
    backend, limits = Asked([REFUSED, 7]), PromptLimits(pause=10, clock=clock)

    async def ask() -> list[Any]:
        return await asyncio.gather(
            *[limits.get(backend, "m", HERE) for _ in range(3)], return_exceptions=True
        )

    assert asyncio.run(ask()) == [REFUSED] * 3
    assert backend.calls == 1
    clock.now = 9.0
    assert asyncio.run(limits.get(backend, "m", HERE)) is None
    assert backend.calls == 1
    clock.now = 10.0
    assert asyncio.run(limits.get(backend, "m", HERE)) == 7
    assert backend.calls == 2


def test_one_who_gives_up_takes_nothing_from_the_others() -> None:
    async def ask() -> None:
        backend, limits = Asked([7], gate=asyncio.Event()), PromptLimits()
        first = asyncio.create_task(limits.get(backend, "m", HERE))
        second = asyncio.create_task(limits.get(backend, "m", HERE))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert backend.gate is not None
        backend.gate.set()
        assert await second == 7
        assert first.cancelled()
        assert backend.calls == 1

    asyncio.run(ask())


def test_a_look_up_that_its_loop_cut_short_is_made_again() -> None:
    limits = PromptLimits()

    async def leave() -> None:
        backend = Asked([7], gate=asyncio.Event())
        asyncio.create_task(limits.get(backend, "m", HERE))  # noqa: RUF006 - cut short by the loop's end
        await asyncio.sleep(0.001)

    asyncio.run(leave())
    assert asyncio.run(limits.get(Asked([8]), "m", HERE)) == 8
