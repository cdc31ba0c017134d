"""An engine in memory whose model is a formula and whose faults are scripted. For tests.

What it samples after a prompt is a function of the tokens before it, so that a completion is the same whether
it was sampled in one piece or in many. Some of its tokens have no text, as real ones do.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from mmrender.client.types import EngineResponse, FinishReason, Usage
from mmrender.engines.interface import (
    InferenceEngineInput,
    InferenceEngineOutput,
    NamedWeightsUpdate,
    OnTokens,
    PauseMode,
    RequestPayload,
)
from mmrender.engines.scripted_model import STOP, encoded, letters, sampled
from mmrender.engines.scripted_text import chat_reply, chat_text, chunks_of, completion_reply
from mmrender.engines.work import Work, joined, split
from mmrender.errors import (
    EngineConnectionError,
    EngineStateError,
    EngineStatusError,
    EngineUnsupportedError,
)
from mmrender.spans import MultiModalData
from mmrender.trajectory.engine_data import WeightVersionSpan

FaultKind: TypeAlias = Literal[
    "abort", "drop_logprobs", "short_logprobs", "bad_logprob", "stall", "error", "refuse", "die"
]


_SPOILS = ("drop_logprobs", "short_logprobs", "bad_logprob")


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one request.

    Attributes:
        kind: `abort` returns early; `..._logprob(s)` spoil a good reply; `stall` never answers; `error` is a
            status 500; `refuse` a broken connection; `die` ends the engine with all it has.
        after: Tokens sampled before.
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


def _no_fault() -> None:
    return None


@dataclass(eq=False)
class _Running:
    """A request under way."""

    prompt_ids: Sequence[int]
    budget: int
    on_tokens: OnTokens | None = None
    aborted: bool = False
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[WeightVersionSpan] = field(default_factory=list)


class ScriptedEngine:
    """An engine in memory.

    Args:
        name: Its name.
        faults: Asked for the fault of each request, in the order in which they come; None: no faults.
        pause_modes: Modes that it knows.
        travel: Turns of the event loop that a request takes to reach it.
        journal: Where it notes what happens, `asked` and, for sound replies that are no abort, `finished`;
            engines that share one share its order.

    Attributes:
        asked: Every request.
        running: Requests under way.
        most: The most requests that ever ran at once.
        alive: Whether it answers.
        version: Name of its weights.
    """

    def __init__(
        self,
        name: str = "scripted",
        *,
        faults: Callable[[], Fault | None] | None = None,
        pause_modes: Sequence[PauseMode] = ("abort", "keep", "wait"),
        travel: int = 2,
        journal: list[tuple[str, "Asked"]] | None = None,
    ) -> None:
        self._name = name
        self._faults = faults or _no_fault
        self._modes = frozenset(pause_modes)
        self._travel = travel
        self.journal = [] if journal is None else journal
        self.asked: list[Asked] = []
        self.running: list[_Running] = []
        self.most = 0
        self.alive = True
        self.paused: PauseMode | None = None
        self.version: str | None = None
        self.controls: list[str] = []
        self.torn_down = 0

    # --- what it is ---

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def pause_modes(self) -> frozenset[PauseMode]:
        """Modes that it knows."""
        return self._modes

    def tp_size(self) -> int:
        """One rank."""
        return 1

    def pp_size(self) -> int:
        """One stage."""
        return 1

    def dp_size(self) -> int:
        """One replica."""
        return 1

    # --- sampling ---

    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        """Sample, one prompt after the other."""
        work = split(input_batch)
        return joined(work, [await self._complete(each) for each in work], letters)

    async def sample(
        self,
        prompt_token_ids: Sequence[int],
        num_samples: int,
        sampling_params: Mapping[str, Any],
        *,
        multi_modal_data: MultiModalData | None = None,
        session_id: Hashable | None = None,
    ) -> InferenceEngineOutput:
        """Sample the same completion several times, as it is greedy."""
        return await self.generate(
            {
                "prompt_token_ids": [prompt_token_ids] * num_samples,
                "multi_modal_data": [multi_modal_data] * num_samples,
                "sampling_params": sampling_params,
                "session_ids": [session_id] * num_samples,
            }
        )

    async def chat_completion(self, request_payload: RequestPayload) -> dict[str, Any]:
        """Answer a chat request in text."""
        return (await self._chat(request_payload))[0]

    async def _chat(self, payload: RequestPayload) -> tuple[dict[str, Any], EngineResponse]:
        body = payload["json"]
        budget = body.get("max_completion_tokens") or body.get("max_tokens") or 64
        response = await self._complete(Work("messages", encoded(chat_text(body)), {"max_tokens": budget}))
        return chat_reply(body, response, len(self.asked)), response

    async def completion(self, request_payload: RequestPayload) -> dict[str, Any]:
        """Answer a completion request of one prompt."""
        return (await self._text(request_payload))[0]

    async def _text(self, payload: RequestPayload) -> tuple[dict[str, Any], EngineResponse]:
        body = payload["json"]
        ids = encoded(body["prompt"]) if isinstance(body["prompt"], str) else body["prompt"]
        response = await self._complete(Work("prompt", ids, {"max_tokens": body["max_tokens"]}))
        return completion_reply(body, response, len(self.asked)), response

    async def stream_chat_completion(self, request_payload: RequestPayload) -> AsyncIterator[dict[str, Any]]:
        """Answer a chat request token by token."""
        for chunk in chunks_of(*await self._chat(request_payload)):
            await asyncio.sleep(0)
            yield chunk

    async def stream_completion(self, request_payload: RequestPayload) -> AsyncIterator[dict[str, Any]]:
        """Answer a completion request token by token."""
        for chunk in chunks_of(*await self._text(request_payload)):
            await asyncio.sleep(0)
            yield chunk

    async def _complete(self, work: Work) -> EngineResponse:
        self._check_alive()
        if work.params["max_tokens"] < 1:
            raise EngineStatusError("the server answered 400: max_tokens must be at least 1", status=400)
        fault = self._faults()
        for _ in range(self._travel):
            await asyncio.sleep(0)
        self._check_alive()
        asked = Asked(tuple(work.prompt_ids), dict(work.params), tuple(work.image_ids), work.session_id)
        self.asked.append(asked)
        self.journal.append(("asked", asked))
        running = _Running(work.prompt_ids, work.params["max_tokens"], on_tokens=work.on_tokens)
        self.running.append(running)
        self.most = max(self.most, len(self.running))
        try:
            while self.paused is not None and not running.aborted:  # behind a pause: it waits
                await self._turn()
            response = await self._run(running, fault)
        finally:
            self.running.remove(running)
        sound = fault is None or fault.kind not in _SPOILS
        if response.finish_reason != "abort" and sound:
            self.journal.append(("finished", asked))
        return response

    async def _run(self, running: _Running, fault: Fault | None) -> EngineResponse:
        whole = sampled(running.prompt_ids, running.budget)
        steps = zip(whole.completion_ids, whole.logprobs, strict=True)
        for position, (token, logprob) in enumerate(steps):
            if fault is not None and fault.after == position:
                await self._break(fault, running)
            while self.paused == "keep" and not running.aborted:
                await self._turn()
            if running.aborted:
                return self._reply(running, "abort", None)
            running.ids.append(token)
            running.logprobs.append(logprob)
            if running.on_tokens is not None:
                running.on_tokens([token], [logprob])
            if self.version is not None:
                running.spans.append(WeightVersionSpan(self.version, position, position + 1))
            await self._turn()
        late = fault is not None and fault.kind == "abort" and fault.after >= len(running.ids)
        if late and whole.finish_reason == "length":  # it comes just as the budget is used up
            return self._reply(running, "abort", None)
        return self._reply(running, whole.finish_reason, fault)

    async def _turn(self) -> None:
        await asyncio.sleep(0)
        self._check_alive()

    async def _break(self, fault: Fault, running: _Running) -> None:
        if fault.kind == "abort":
            running.aborted = True
        elif fault.kind == "stall":
            await asyncio.Event().wait()
        elif fault.kind == "error":
            raise EngineStatusError("the server answered 500", status=500, where=self._name)
        elif fault.kind == "refuse":
            raise EngineConnectionError("the connection broke", where=self._name)
        elif fault.kind == "die":
            self.alive = False
            self._check_alive()

    def _reply(self, running: _Running, reason: FinishReason, fault: Fault | None) -> EngineResponse:
        logprobs = running.logprobs
        kind = fault.kind if fault is not None else None
        if kind == "drop_logprobs":
            logprobs = []
        elif kind == "short_logprobs":
            logprobs = logprobs[:-1]
        elif kind == "bad_logprob" and logprobs:
            logprobs = [*logprobs[:-1], float("nan")]
        return EngineResponse(
            running.ids,
            logprobs,
            reason,
            Usage(len(running.prompt_ids), len(running.ids)),
            stop_reason=STOP if reason == "stop" else None,
            weight_versions=tuple(running.spans),
            request_id=f"{self._name}-{len(self.asked)}",
        )

    def _check_alive(self) -> None:
        if not self.alive:
            raise EngineConnectionError("the server was not reached", where=self._name)

    # --- control ---

    async def pause_generation(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Pause as vLLM does: what comes later waits here."""
        self._control(f"pause {mode}")
        if mode not in self._modes:
            raise EngineUnsupportedError("no such pause", where=self._name)
        if self.paused is not None:
            raise EngineStateError("the engine is paused already", where=self._name)
        self.paused = mode
        if mode == "abort":
            self._abort()
        while mode == "wait" and any(not each.aborted for each in self.running):
            await self._turn()

    async def resume_generation(self) -> None:
        """Go on."""
        self._control("resume")
        if self.paused is None:
            raise EngineStateError("the engine is not paused", where=self._name)
        self.paused = None

    async def abort_generation(self) -> None:
        """Abort what has reached it."""
        self._control("abort")
        self._abort()

    def _abort(self) -> None:
        for running in self.running:
            running.aborted = True

    async def check_health(self) -> None:
        """Say whether it is alive."""
        self._check_alive()

    async def weight_version(self) -> str | None:
        """Name of its weights."""
        return self.version

    async def set_weight_version(self, version: str) -> None:
        """Name its weights."""
        self._control(f"version {version}")
        self.version = version

    async def update_named_weights(self, request: NamedWeightsUpdate) -> None:
        """Take note."""
        self._control("update")
        self.version = request.get("weight_version") or self.version

    async def load_weights(self, path: str, *, weight_version: str | None = None) -> None:
        """Take note."""
        self._control(f"load {path}")
        self.version = weight_version or self.version

    async def init_weight_update_communicator(self, init_info: Mapping[str, Any]) -> None:
        """Take note."""
        self._control("init")

    async def sleep(self, *, level: int = 1, tags: Sequence[str] | None = None) -> None:
        """Take note."""
        self._control(f"sleep {level}")

    async def wake_up(self, *, tags: Sequence[str] | None = None) -> None:
        """Take note."""
        self._control("wake")

    async def reset_prefix_cache(self) -> None:
        """Take note."""
        self._control("reset")

    async def teardown(self) -> None:
        """Count the call."""
        self.torn_down += 1

    def _control(self, what: str) -> None:
        self._check_alive()
        self.controls.append(what)
