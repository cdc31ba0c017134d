"""`ScriptedEngine`: an engine in memory whose model is a formula and whose faults are scripted.

A sampled token depends only on the tokens before it, so a completion is the same whether it was sampled in
one piece or in several. Some of its tokens have no text, as real tokens do.
"""

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import xxhash

from mmrender.client.types import EngineRequest, EngineResponse, FinishReason, OnTokens, Usage
from mmrender.engines.interface import Control, InferenceEngineInterface, PauseMode
from mmrender.errors import (
    EngineConnectionError,
    EngineStateError,
    EngineStatusError,
    EngineUnsupportedError,
)
from mmrender.trajectory.engine_data import WeightVersionSpan

STOP, MUTE, FIRST_LETTER = 0, 1, 2
"""The stop token, a token without text, and the first of 26 letters."""

FaultKind: TypeAlias = Literal[
    "none", "abort", "drop_logprobs", "short_logprobs", "bad_logprob", "stall", "error", "refuse", "die"
]


def next_token(ids: Sequence[int]) -> tuple[int, float]:
    """The greedy token after `ids`, and its logprob."""
    visible = [token for token in ids if token != MUTE]
    mute = 0
    while mute < len(ids) and ids[-1 - mute] == MUTE:
        mute += 1
    number = xxhash.xxh3_64_intdigest(repr((visible[-24:], len(visible), mute)).encode())
    logprob = -0.001 - (number >> 40) % 4096 / 4096
    if number % 61 == 0:
        return STOP, logprob
    if number % 5 == 0 and mute < 2:
        return MUTE, logprob
    return FIRST_LETTER + (number >> 8) % 26, logprob


def sampled(prompt_ids: Sequence[int], max_tokens: int, stop: Sequence[str] = ()) -> EngineResponse:
    """Completion of an undisturbed engine. A stop string ends it as in vLLM."""
    ids: list[int] = []
    logprobs: list[float] = []
    matched: int | str | None = None
    while len(ids) < max_tokens and matched is None:
        token, logprob = next_token([*prompt_ids, *ids])
        ids.append(token)
        logprobs.append(logprob)
        found = next((text for text in stop if text in letters(ids)), None)
        matched = found or (STOP if token == STOP else None)
    usage = Usage(len(prompt_ids), len(ids))
    reason: FinishReason = "length" if matched is None else "stop"
    return EngineResponse(ids, logprobs, reason, usage, stop_reason=matched)


def letters(ids: Sequence[int]) -> str:
    """Text of tokens. The stop token and mute tokens have none."""
    return "".join(chr(ord("a") + token - FIRST_LETTER) for token in ids if token not in (STOP, MUTE))


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault of one request, after a number of tokens.

    `abort` returns early, `..._logprob(s)` spoil a good reply, `stall` never answers, `error` is a status
    500, `refuse` a broken connection, and `die` ends the engine with all its requests.
    """

    kind: FaultKind
    after: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as the engine saw it."""

    prompt_ids: tuple[int, ...]
    params: Mapping[str, Any]
    images: tuple[str, ...]
    session_id: Hashable | None


@dataclass(eq=False)
class _Running:
    ids: list[int] = field(default_factory=list)
    aborted: bool = False


class ScriptedEngine(InferenceEngineInterface):
    """An engine in memory.

    Args:
        name: Its name.
        faults: Called for the fault of each request, in order of arrival.
        pause_modes: Modes that it supports.
        journal: Receives `asked` and, for sound replies that are not aborts, `finished`. Several engines may
            share it.
        limit: The longest prompt, if there is a limit.

    Attributes:
        asked: Requests, in order.
        running: Requests in flight.
        controls: Control calls, in order.
        alive: Whether it can be reached.
        paused: How it is paused.
        version: Name of its weights.
    """

    def __init__(
        self,
        name: str = "scripted",
        *,
        faults: Callable[[], Fault | None] | None = None,
        pause_modes: Sequence[PauseMode] = ("abort", "keep", "wait"),
        journal: list[tuple[str, Asked]] | None = None,
        limit: int | None = None,
    ) -> None:
        self.name = name
        self.pause_modes = frozenset(pause_modes)
        self.journal = [] if journal is None else journal
        self.asked: list[Asked] = []
        self.running: list[_Running] = []
        self.alive = True
        self.paused: PauseMode | None = None
        self.version: str | None = None
        self.controls: list[str] = []
        self._faults = faults
        self._limit = limit

    async def max_prompt_len(self) -> int | None:
        """The longest prompt."""
        return self._limit

    async def complete(
        self,
        request: EngineRequest,
        *,
        session_id: Hashable | None = None,
        on_tokens: OnTokens | None = None,
    ) -> EngineResponse:
        """Sample one completion, with the fault of its turn."""
        self._check_alive()
        if request.sampling_params["max_tokens"] < 1:
            raise EngineStatusError("the server answered 400: max_tokens must be at least 1", status=400)
        fault = (None if self._faults is None else self._faults()) or Fault("none", -1)
        for _ in range(2):  # on its way to the engine
            await asyncio.sleep(0)
        self._check_alive()
        images = tuple(name for names in request.multi_modal_data.mm_hashes.values() for name in names)
        asked = Asked(tuple(request.prompt_ids), dict(request.sampling_params), images, session_id)
        self.asked.append(asked)
        self.journal.append(("asked", asked))
        running = _Running()
        self.running.append(running)
        try:
            while self.paused is not None and not running.aborted:  # it came behind a pause, and waits
                await self._turn()
            response = await self._run(request, running, fault, on_tokens)
        finally:
            self.running.remove(running)
        if response.finish_reason != "abort" and "logprob" not in fault.kind:
            self.journal.append(("finished", asked))
        return response

    async def _run(
        self, request: EngineRequest, running: _Running, fault: Fault, on_tokens: OnTokens | None
    ) -> EngineResponse:
        params = request.sampling_params
        whole = sampled(request.prompt_ids, params["max_tokens"], params.get("stop") or ())
        tell: Any = on_tokens or (lambda *_: None)
        spans: list[WeightVersionSpan] = []
        for position, (token, logprob) in enumerate(zip(whole.completion_ids, whole.logprobs, strict=True)):
            if fault.after == position:
                running.aborted |= fault.kind == "abort"
                self.alive &= fault.kind != "die"
                self._check_alive()
                if fault.kind == "stall":
                    await asyncio.Event().wait()
                elif fault.kind == "error":
                    raise EngineStatusError("the server answered 500", status=500, where=self.name)
                elif fault.kind == "refuse":
                    raise EngineConnectionError("the connection broke", where=self.name)
            while self.paused == "keep" and not running.aborted:
                await self._turn()
            if running.aborted:
                break
            running.ids.append(token)
            tell([token], [logprob], None)
            if self.version is not None:
                spans.append(WeightVersionSpan(self.version, position, position + 1))
            await self._turn()
        count = len(running.ids)
        logprobs = whole.logprobs[:count]
        reply = replace(
            whole,
            completion_ids=running.ids,
            logprobs=logprobs,
            usage=Usage(len(request.prompt_ids), count),
            weight_versions=tuple(spans),
            request_id=f"{self.name}-{len(self.asked)}",
        )
        # An abort may come just as the budget is used up.
        late = fault.kind == "abort" and fault.after >= count and whole.finish_reason == "length"
        if late or count < len(whole.completion_ids):
            return replace(reply, finish_reason="abort", stop_reason=None)
        tell([], [], whole.finish_reason)
        spoilt: dict[str, list[float]] = {
            "drop_logprobs": [],
            "short_logprobs": logprobs[:-1],
            "bad_logprob": [*logprobs[:-1], float("nan")],
        }
        return replace(reply, logprobs=spoilt.get(fault.kind, logprobs))

    async def _turn(self) -> None:
        await asyncio.sleep(0)
        self._check_alive()

    def _check_alive(self) -> None:
        if not self.alive:
            raise EngineConnectionError("the server was not reached", where=self.name)

    def _note(self, control: str) -> None:
        self._check_alive()
        self.controls.append(control)

    async def pause_generation(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Pause as vLLM does: requests that come later wait here."""
        self._note(f"pause_generation {mode}")
        if mode not in self.pause_modes:
            raise EngineUnsupportedError("unknown pause mode", where=self.name)
        if self.paused is not None:
            raise EngineStateError("the engine is paused already", where=self.name)
        self.paused = mode
        for running in self.running if mode == "abort" else ():
            running.aborted = True
        while mode == "wait" and any(not each.aborted for each in self.running):
            await self._turn()

    async def resume_generation(self) -> None:
        """Resume."""
        self._note("resume_generation")
        if self.paused is None:
            raise EngineStateError("the engine is not paused", where=self.name)
        self.paused = None

    async def abort_generation(self) -> None:
        """Abort the requests that have reached the engine."""
        self._note("abort_generation")
        for running in self.running:
            running.aborted = True

    async def reports_pause(self) -> bool:
        """Whether it is paused."""
        self._check_alive()
        return self.paused is not None

    async def control(self, call: Control, /, **arguments: Any) -> Any:
        """Note a call with its arguments. A call that names weights names the engine's."""
        if call == "weight_version":
            return self.version
        self._check_alive()
        if call != "check_health":
            given = [str(value) for value in arguments.values() if value is not None]
            self._note(" ".join([call, *given]))
            named = arguments.get("request", arguments)
            self.version = named.get("weight_version") or named.get("version") or self.version
        return None

    async def teardown(self) -> None:
        """Note the call."""
        self.controls.append("teardown")
