"""Engines, faults and pauses that several tests use."""

import asyncio
import functools
import selectors
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

from hypothesis import strategies as st

from mmrender.client.transport import RetryPolicy
from mmrender.engines.client import InferenceEngineClient
from mmrender.errors import EngineStatusError
from mmrender.sidecar import MultiModalData, PlaceholderRange
from scripted_engine import Asked, Fault, ScriptedEngine


def in_loop(test):
    """A coroutine function as a test, in an event loop of its own."""

    @functools.wraps(test)
    def run(*args, **options):
        asyncio.run(test(*args, **options))

    return run


class _NoWaiting(selectors.DefaultSelector):
    """Takes the time that it would wait for as passed."""

    passed = 0.0

    def select(self, timeout=None):
        ready = super().select(timeout and 0)
        self.passed += 0.0 if ready or timeout is None else timeout
        return ready


class FakeClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers take no time: its clock jumps to the next one when nothing else is to do."""

    def __init__(self):
        self._clock = _NoWaiting()
        super().__init__(self._clock)

    def time(self):
        return self._clock.passed


def on_fake_clock(test):
    """A coroutine function as a test, in an event loop whose timers take no time."""

    @functools.wraps(test)
    def run(*args, **options):
        with asyncio.Runner(loop_factory=FakeClockLoop) as runner:
            runner.run(test(*args, **options))

    return run


def patient(*, attempts=60, attempt_timeout=0.05, pause_timeout=0.1, **settings):
    """Settings of a client that retries without waiting; what stalls is given up after 50 ms."""
    retries = RetryPolicy(attempts=attempts, wait_initial=0.0, wait_jitter=0.0, wait_max=0.0)
    timeouts = {"attempt_timeout": attempt_timeout, "pause_timeout": pause_timeout}
    return {"retries": retries, **timeouts, **settings}


MODES = ("abort", "keep", "wait")

KINDS = (*["abort"] * 3, "drop_logprobs", "short_logprobs", "bad_logprob", "error", "refuse", "die")

# Stalls cost real time, so they are rare.
faults = st.lists(
    st.none()
    | st.builds(Fault, st.sampled_from(KINDS), st.integers(0, 6))
    | st.builds(Fault, st.just("stall"), st.integers(0, 1)).filter(lambda fault: fault.after == 1),
    max_size=14,
)
pauses = st.lists(st.tuples(st.sampled_from(MODES), st.integers(0, 9), st.integers(0, 9)), max_size=4)
prompts = st.lists(st.lists(st.integers(2, 40), min_size=1, max_size=5), min_size=1, max_size=6)


@dataclass
class Setup:
    """Engines that share a journal and a list of faults; the first of them never dies."""

    engines: list[ScriptedEngine]
    client: InferenceEngineClient
    journal: list[tuple[str, Asked]]


def setup(
    plan: Sequence[Fault | None] = (),
    *,
    count: int = 3,
    policy: Any = None,
    kind: Any = ScriptedEngine,
    **options: Any,
) -> Setup:
    script: Iterator[Fault | None] = iter(plan)
    journal: list[tuple[str, Asked]] = []

    def fault_of(index: int):
        def next_fault() -> Fault | None:
            fault = next(script, None)
            if fault is not None and fault.kind == "die" and index == 0:
                return Fault("refuse", fault.after)
            return fault

        return next_fault

    engines = [
        kind(f"engine{index}", faults=fault_of(index), journal=journal, **options) for index in range(count)
    ]
    return Setup(engines, InferenceEngineClient(engines, **(policy or patient())), journal)


class Faulty(ScriptedEngine):
    """An engine whose methods, by name, `hang` or `fail`, or do so `late`: after their effect.

    Attributes:
        calls: By method, its fault.
        called: Methods, in the order of their calls.
    """

    def __init__(self, name: str = "faulty", calls: Mapping[str, str] = MappingProxyType({}), **options: Any):
        super().__init__(name, **options)
        self.calls = calls
        self.called: list[str] = []

    async def _call(self, method: str, *args: Any, **options: Any) -> Any:
        self.called.append(method)
        fault, result = self.calls.get(method, ""), None
        if not fault or "late" in fault:
            result = await getattr(ScriptedEngine, method)(self, *args, **options)
        if "hang" in fault:
            await asyncio.Event().wait()
        if "fail" in fault:
            raise EngineStatusError("the server answered 500", status=500)
        return result


FAULTY = (
    "max_prompt_len",
    "check_health",
    "pause_generation",
    "resume_generation",
    "abort_generation",
    "control",
)
HANGING = dict.fromkeys(FAULTY, "hang")
for name in FAULTY:
    setattr(Faulty, name, functools.partialmethod(Faulty._call, name))


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def while_pausing(setup: Setup, plan: Sequence[tuple[str, int, int]], sampling: Any) -> Any:
    """Await a coroutine, pausing and resuming; between the two nothing may move."""
    task = asyncio.create_task(sampling)
    await turns(1)
    for number, (mode, before, during) in enumerate(plan):
        await turns(before)
        await setup.client.pause_generation(mode)
        # An engine that died is told nothing, and what it had is gone.
        living = [engine for engine in setup.engines if engine.alive]
        if mode != "keep":
            assert not any(engine.running for engine in living)
        held = [len(running.ids) for engine in living for running in engine.running]
        asked = len(setup.journal)
        await turns(during)
        assert held == [len(running.ids) for engine in living for running in engine.running]
        assert asked == len(setup.journal)
        for engine in living:
            engine.version = f"step-{number + 1}"
        await setup.client.resume_generation()
    return await task


def sidecar(*names: str) -> MultiModalData:
    """A sidecar of items that hold nothing."""
    items = [SimpleNamespace(identity=name, modality="image", nbytes=1) for name in names]
    ranges = [PlaceholderRange(index, 1) for index in range(len(names))]
    return MultiModalData({"image": list(names)}, {"image": ranges}, {"image": items})
