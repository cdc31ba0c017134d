"""Laws of many engines that hang, die, come back and are updated: nobody waits, and nothing is sampled with old weights."""

import asyncio
import functools
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_cases import on_fake_clock
from mmrender.client.transport import RetryPolicy
from mmrender.engines.client import InferenceEngineClient
from mmrender.engines.interface import EngineResult, new_request
from scripted_engine import ScriptedEngine, sampled

DEADLINE = 30.0
METHODS = (
    *("complete", "max_prompt_len", "check_health", "pause_generation", "resume_generation"),
    *("abort_generation", "reports_pause", "control"),
)


class Mortal(ScriptedEngine):
    """An engine that may hang: then no call returns, and calls that came before have no effect any more."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.version = "0"
        self.is_hung = False

    async def _call(self, method: str, *args: Any, **options: Any) -> Any:
        if self.is_hung:
            await asyncio.Event().wait()
        return await getattr(ScriptedEngine, method)(self, *args, **options)

    async def _turn(self) -> None:
        await asyncio.sleep(0.5 if self.is_hung else 0.01)  # so that the fake clock goes on
        while self.is_hung:
            await asyncio.sleep(0.5)
        self._check_alive()


for name in METHODS:
    setattr(Mortal, name, functools.partialmethod(Mortal._call, name))


@dataclass
class Fleet:
    """Three engines, of which the first is always well, their controller, and completions with the weights of their time."""

    engines: list[Mortal] = field(default_factory=lambda: [Mortal(f"engine{number}") for number in range(3)])
    version: int = 0
    updates: int = 0
    asked: list[tuple[int, list[int], asyncio.Task[Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        retries = RetryPolicy(attempts=60, wait_initial=0.01, wait_jitter=0.0)
        timeouts = {"attempt_timeout": 100, "pause_timeout": DEADLINE, "update_timeout": DEADLINE}
        self.client = InferenceEngineClient(self.engines, retries=retries, **timeouts)

    def ask(self, number: int) -> None:
        for seed in range(number):
            prompt = [2 + seed, 2 + len(self.asked) % 30]
            task = asyncio.create_task(self.client.complete(new_request(prompt, {"max_tokens": 12})))
            self.asked.append((self.version, prompt, task))

    async def step(
        self, mode: Any, cancelled_at: int | None = None, update_cancelled_at: int | None = None
    ) -> None:
        """Pause, update and resume; or cancel the pause, or a first update, after some turns of the event loop."""
        begun = asyncio.get_running_loop().time()
        pausing = asyncio.create_task(self.client.pause_generation(mode))
        if cancelled_at is not None:
            for _ in range(cancelled_at):
                await asyncio.sleep(0)
            if pausing.cancel():
                ended = asyncio.get_running_loop().time()
                await asyncio.gather(pausing, return_exceptions=True)
                assert asyncio.get_running_loop().time() - ended < 1
                assert not self.client.is_paused
                return
        results = await pausing
        if update_cancelled_at is not None:
            await self.update(update_cancelled_at)
        results += await self.update()
        results += await self.client.resume_generation()
        assert asyncio.get_running_loop().time() - begun < 6 * DEADLINE
        assert all(isinstance(each, EngineResult) for each in results)
        assert [each.name for each in results] == [engine.name for engine in self.engines] * 3

    async def update(self, cancelled_at: int | None = None) -> list[EngineResult]:
        """Update the weights, or give it up after some turns: then engines have them before they get requests."""
        self.updates += 1
        call = self.client.load_weights(f"step-{self.updates}", weight_version=str(self.updates))
        updating = asyncio.create_task(call)
        if cancelled_at is None:
            results, self.version = await updating, self.updates
            return results
        for _ in range(1 + cancelled_at):
            await asyncio.sleep(0)
        updating.cancel()
        await asyncio.gather(updating, return_exceptions=True)
        self.version = int(self.client._pool.version or self.version)  # it may not have begun
        return []


@dataclass(frozen=True)
class Event:
    """What happens next: to an engine, or by the controller."""

    kind: str
    engine: int
    mode: Any
    moment: int
    seconds: float


events = st.lists(
    st.builds(
        Event,
        st.sampled_from(
            [
                "hang",
                "hang",
                "free",
                "die",
                "come back",
                "step",
                "step",
                "cancel",
                "cancel update",
                "ask",
                "wait",
            ]
        ),
        st.integers(1, 2),
        st.sampled_from(["abort", "keep", "wait"]),
        st.integers(0, 12),
        st.sampled_from([0.0, 1.0, 20.0]),
    ),
    max_size=14,
)


async def happen(fleet: Fleet, event: Event) -> None:
    engine = fleet.engines[event.engine]
    if event.kind in ("hang", "free"):
        engine.is_hung = event.kind == "hang"
    elif event.kind == "die":
        engine.alive = False
        await fleet.client.check_health()  # so that it is noticed
    elif event.kind == "come back" and not engine.alive:
        engine.alive, engine.version, engine.paused = True, "0", None  # from its first weights
    elif event.kind == "step":
        await fleet.step(event.mode)
    elif event.kind == "step, update again":
        await fleet.step(event.mode, None, event.moment)
    elif event.kind == "cancel":
        await fleet.step(event.mode, event.moment)
    elif event.kind == "cancel update":
        await fleet.update(event.moment)
    elif event.kind == "ask":
        fleet.ask(event.moment)
    await asyncio.sleep(event.seconds)


@given(events)
@settings(max_examples=30)
@on_fake_clock
async def test_engines_that_hang_die_and_come_back_are_updated_before_they_are_used(
    plan: list[Event],
) -> None:
    fleet = Fleet()
    fleet.ask(4)
    for event in plan:
        await happen(fleet, event)
        fleet.ask(2)
    for engine in fleet.engines:
        engine.is_hung, engine.alive = False, True
    for version, prompt, task in fleet.asked:
        response = await task
        assert response.completion_ids == sampled(prompt, 12).completion_ids
        spans = [int(span.version) for span in response.weight_versions]
        assert min(spans) >= version
        assert spans == sorted(spans)
    await asyncio.sleep(100)
    assert all(each.outcome == "ok" for each in await fleet.client.check_health())
    assert [engine.version for engine in fleet.engines] == [str(fleet.version)] * 3
    assert not any(engine.paused for engine in fleet.engines)
    await fleet.client.teardown()
    assert len(asyncio.all_tasks()) == 1
