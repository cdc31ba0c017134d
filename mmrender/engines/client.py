"""`InferenceEngineClient`: many engines that act as one. Completions survive pauses and failures exactly."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Self

from mmrender.client.engine import ModelTokens
from mmrender.client.transport import RetryPolicy, Transport
from mmrender.client.types import EngineRequest, EngineResponse, OnTokens, RendererBackend
from mmrender.engines.continuation import Continuation
from mmrender.engines.http_engine import SESSION_HEADER, HTTPEngine, at_router
from mmrender.engines.interface import (
    Chunk,
    Control,
    InferenceEngineInterface,
    NamedWeightsUpdate,
    OpenAICall,
    PauseMode,
    RequestPayload,
    common,
    emitted,
    gather_all,
    one_each,
)
from mmrender.engines.replicas import HEALTH_TIMEOUT, Action, Replica, ReplicaPool, Work
from mmrender.errors import (
    EngineConnectionError,
    EngineError,
    EngineStateError,
    EngineTimeoutError,
    EngineUnavailableError,
    EngineUnsupportedError,
    InputError,
    PromptTooLongError,
)
from mmrender.protocols import RendererProtocol


class InferenceEngineClient(InferenceEngineInterface):
    """Many engines that act as one: it retries, fails over and pauses.

    Work that an engine aborts is asked again with its tokens so far, so that callers never see a pause. Work
    on a failing engine goes to the next. Sessions are hashed to an engine, other work goes to the engines in
    turn. To balance load, pass a router. Control calls go to all engines at once.

    One event loop uses a client at a time. Other threads call `asyncio.run_coroutine_threadsafe`. Pickled
    without a renderer, it arrives as a client of the same engines, not paused and without requests.

    Args:
        engines: Engines with different names, which get requests and control calls.
        router: Target of all requests in their place: the URL of a router in front of `engines`, asked as
            they are, or an engine of its own. Control calls go to `engines`.
        renderer: Renders conversations and decodes completions. Without one, only token ids are sampled from.
            OpenAI requests go to the engines' own routes, and an abort is returned to their callers.
        retries: How often and how soon failed requests are repeated.
        attempt_timeout: Seconds for one request, pauses not counted. None for no limit.
        deadline: Seconds for a whole completion, with waiting, retries and pauses. None for no limit.
        pause_timeout: Seconds that engines may take to obey a pause or a short control call. Requests that
            still run that long after a pause are cancelled and asked again later.
        max_idle_aborts: Consecutive aborts without a token before giving up on an engine that says that it is
            not paused. A paused engine is waited for, whichever client paused it. One that does not say is
            asked again until the deadline.
        name: Name of this client if it is an engine of another client.

    Raises:
        InputError: `engines` is empty, or two have the same name. A router's URL is passed for engines that
            differ in backend or model, or for other ones than `HTTPEngine`.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngineInterface],
        *,
        router: InferenceEngineInterface | str | None = None,
        renderer: RendererProtocol | None = None,
        retries: RetryPolicy | None = None,
        attempt_timeout: float | None = None,
        deadline: float | None = None,
        pause_timeout: float = 60.0,
        max_idle_aborts: int = 32,
        name: str = "engines",
    ) -> None:
        self.name = name
        self.renderer = renderer
        self.engines = list(engines)
        self.router = router = at_router(router, engines) if isinstance(router, str) else router
        self._deadline = deadline
        self._max_idle_aborts = max_idle_aborts
        self._tokens = ModelTokens(renderer)
        retries = retries or RetryPolicy(attempts=5, wait_jitter=0.1)
        self._pool = ReplicaPool(engines, router, retries, attempt_timeout, pause_timeout)
        for engine in (*engines, router):
            if isinstance(engine, HTTPEngine) and engine.renderer is None:
                engine.renderer = renderer

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.teardown()

    # --- state ---

    @property
    def pause_modes(self) -> frozenset[PauseMode]:  # type: ignore[override]
        """`abort` and `wait`, and `keep` if every engine knows it."""
        able = all("keep" in engine.pause_modes for engine in self.engines)
        return frozenset({"abort", "wait", "keep"} if able else {"abort", "wait"})

    @property
    def is_paused(self) -> bool:
        """Whether requests wait for `resume_generation`."""
        return self._pool.state in ("pausing", "paused", "resuming")

    @property
    def replicas(self) -> Sequence[Replica]:
        """A router if there is one, then the engines, with requests in flight and reasons of being down."""
        return list(dict.fromkeys([*self._pool.targets, *self._pool.replicas]))

    def tp_size(self) -> int:
        """Ranks that share each layer, equal on all engines."""
        return common("tp_size", {engine.name: engine.tp_size() for engine in self.engines})

    def pp_size(self) -> int:
        """Pipeline stages, equal on all engines."""
        return common("pp_size", {engine.name: engine.pp_size() for engine in self.engines})

    def dp_size(self) -> int:
        """Replicas, over all engines."""
        return sum(engine.dp_size() for engine in self.engines)

    # --- sampling ---

    async def complete(
        self, request: EngineRequest, *, session_id: Hashable | None = None, on_tokens: OnTokens | None = None
    ) -> EngineResponse:
        """Sample one completion through pauses and failures.

        `on_tokens` receives tokens once they are final: as they arrive, or in whole pieces if the completion
        may have to start over after an abort.

        Raises:
            SamplingParameterError: The token budget is missing or unusable.
            EngineTimeoutError: It was not finished in time.
            EngineError: An engine refused, or every attempt failed.
        """
        decode = None if self.renderer is None else self.renderer.decode
        if self.renderer is not None and request.vocab_size is None:
            request = replace(request, **self._tokens.fields(request.multi_modal_data))
        continuation = Continuation(request, decode, on_tokens)
        ask = partial(continuation.ask, session_id=session_id)
        work = self._pool.begin(session_id, f"a prompt of {len(request.prompt_ids)} tokens")
        idle = 0
        try:
            async with asyncio.timeout(self._deadline):
                while continuation.finished is None:
                    if kept := continuation.kept:
                        limit = await self.max_prompt_len()
                        if limit is not None and len(request.prompt_ids) + kept > limit:
                            continuation.end("length")
                            break
                    await self._pool.send(ask, work)
                    if self._pool.is_aborted(work):
                        continuation.end("abort")
                    elif continuation.kept > kept or work.paused:
                        idle = 0
                    elif continuation.finished is None:
                        idle = await self._wait_idle(idle + 1, work)
        except TimeoutError as error:
            problem = f"the completion was not finished within {self._deadline:g} s"
            raise EngineTimeoutError(problem) from error
        return continuation.result()

    async def _wait_idle(self, aborts: int, work: Work) -> int:
        """Wait before the next request after an abort without a token. Return the number of counted aborts.

        An engine that another client has paused is waited for.
        """
        waits = itertools.count(aborts + 1)
        while paused := await self._pool.reports_pause(work.last):
            if self._pool.state == "closed" or self._pool.is_aborted(work):
                return 0
            aborts = 0
            await asyncio.sleep(self._pool.retries.wait_before(next(waits)))
        if paused is False and aborts >= self._max_idle_aborts:
            raise EngineUnavailableError(
                f"engines aborted a request {aborts} times in a row without a token, and are not paused",
                expected=f"at most {self._max_idle_aborts} such aborts",
                remedy="Look for another client that aborts on the servers",
            )
        await asyncio.sleep(self._pool.retries.wait_before(aborts + 1))
        return aborts

    async def max_prompt_len(self) -> int | None:
        """Return the maximum length of a prompt on every engine that serves, or None if no engine says."""
        pool = self._pool
        serving = [each for each in pool.targets if each.down is None]
        limits = await pool.answers(serving, lambda engine: engine.max_prompt_len(), within=HEALTH_TIMEOUT)
        for replica, limit in limits.items():
            if isinstance(limit, EngineTimeoutError):
                pool.take_down(replica, str(limit))  # so that nobody waits for it again
            elif isinstance(limit, BaseException) and not isinstance(limit, EngineError):
                raise limit
        return min((limit for limit in limits.values() if isinstance(limit, int)), default=None)

    def as_backend(self) -> RendererBackend:
        """Return this client as a backend of `mmrender.client.generate`, which needs no server then."""
        return _ClientBackend(self)

    # --- OpenAI requests ---

    async def openai(self, call: OpenAICall, request_payload: RequestPayload) -> Chunk:
        """Answer an OpenAI request on an engine's own route."""
        body = _body_of(request_payload)
        reply: Chunk = await self._pass_on(body, lambda engine: engine.openai(call, request_payload))
        return reply

    def stream_openai(self, call: OpenAICall, request_payload: RequestPayload) -> AsyncGenerator[Chunk, None]:
        """Answer an OpenAI request as chunks. A failure after the first one is raised, not repeated."""
        body = _body_of(request_payload)

        async def pass_on(emit: Callable[[Chunk], None]) -> None:
            begun = False

            async def ask(engine: InferenceEngineInterface) -> EngineError | Literal[True]:
                nonlocal begun
                if begun:
                    return EngineUnavailableError("the stream was ended by a pause")
                try:
                    async for chunk in engine.stream_openai(call, request_payload):
                        begun = True
                        emit(chunk)
                except EngineError as error:
                    if begun:
                        return error
                    raise
                return True

            result = await self._pass_on(body, ask)
            if isinstance(result, EngineError):
                raise result

        return emitted(pass_on)

    async def _pass_on(
        self, body: Mapping[str, Any], ask: Callable[[InferenceEngineInterface], Awaitable[Any]]
    ) -> Any:
        work = self._pool.begin(body.get("session_id"), "an OpenAI request")
        while (value := await self._pool.send(ask, work)) is None:
            if self._pool.is_aborted(work):
                raise EngineUnavailableError("the request was aborted")
        return value

    # --- control ---

    async def control(self, call: Control, /, **arguments: Any) -> dict[Replica, Any]:
        """Make a control call on all engines that serve and return their answers, or raise the first error.

        Calls that move no memory are bounded by `pause_timeout`.
        """
        replicas = self._pool.healthy()
        if not replicas:
            raise self._pool.unavailable()
        within = None if call in ("sleep", "wake_up") else self._pool.pause_timeout
        action = lambda engine: getattr(engine, call)(**arguments)  # noqa: E731
        answers = await self._pool.answers(replicas, action, within=within)
        for answer in answers.values():
            if isinstance(answer, BaseException):
                raise answer
        return answers

    async def pause_generation(
        self, mode: PauseMode = "abort", *, clear_cache: bool = True, deadline: float | None = 3600.0
    ) -> None:
        """Pause engines that support the mode, and withhold requests from the rest.

        When it returns, no request of this client runs, batches included.

        Args:
            mode: How running requests are paused.
            clear_cache: Drop cached prefixes too, as new weights need. Frozen requests keep theirs.
            deadline: Seconds that requests may run on in the mode `wait`, or None for no limit.

        Raises:
            EngineStateError: It is paused already.
            EngineTimeoutError: A request did not end by the deadline. The error names it and its engine, and
                nothing is paused.
            EngineUnsupportedError: An engine cannot freeze requests, or cannot clear its cache. Nothing is
                paused.
            EngineError: An engine refused. Nothing is paused.
        """
        pool = self._pool
        pool.move("open", "pausing", "the client is paused already")
        serving = pool.healthy()
        able = [each for each in serving if mode in each.engine.pause_modes]
        others = [each for each in serving if each not in able]
        for each in pool.replicas:
            each.halted = False
        try:
            if mode == "keep" and others:
                problem, remedy = "the engine cannot freeze requests", "Pause with 'abort' or 'wait'"
                raise EngineUnsupportedError(problem, where=others[0].name, remedy=remedy)
            # Before engines pause: a request that reaches one after its pause would never end.
            if mode == "wait" and not await pool.until_idle(deadline):
                calls = [f"{each.name}: {call.about}" for each in pool.targets for call in each.calls]
                more = f"; and {len(calls) - 8} more" if len(calls) > 8 else ""
                raise EngineTimeoutError(
                    f"requests did not end within {deadline:g} s, so nothing was paused",
                    where="pause_generation",
                    got="; ".join(calls[:8]) + more,
                    remedy="Pause with 'abort', after which they are continued, or pass a longer deadline",
                )
            for call in pool.calls():
                call.set_time(None)
            for each in able:
                each.halted = True
            pausing = lambda engine: engine.pause_generation(mode, clear_cache=clear_cache)  # noqa: E731
            await self._reach(able, pausing)
            if mode == "abort":
                await pool.end_calls()
            if clear_cache:
                await self._reach(others, lambda engine: engine.reset_prefix_cache())
        except BaseException:
            # Engines that have not answered are resumed too, since their pause may have reached the server.
            # One that hangs must not hold up the caller, who may have been cancelled.
            failed = await self._resume_halted(min(pool.pause_timeout, HEALTH_TIMEOUT))
            for replica, error in failed.items():
                if not isinstance(error, EngineStateError | EngineUnsupportedError):
                    pool.take_down(replica, str(error))  # it may still be paused
            pool.move("pausing", "open")
            raise
        pool.move("pausing", "paused")

    async def _reach(self, replicas: Sequence[Replica], action: Action) -> None:
        """Act on engines concurrently. One that is not reached is taken down. Another error is raised."""
        failed = await self._pool.failures(replicas, action, within=self._pool.pause_timeout)
        refusals = []
        for replica, error in failed.items():
            if isinstance(error, EngineConnectionError | EngineTimeoutError):
                replica.halted = False
                self._pool.take_down(replica, str(error))
            else:
                refusals.append(error)
        for error in refusals:
            raise error

    async def _resume_halted(self, within: float) -> dict[Replica, BaseException]:
        """Resume the engines that were paused and return the errors of those that failed."""
        halted = [each for each in self._pool.replicas if each.halted]
        return await self._pool.failures(halted, lambda engine: engine.resume_generation(), within=within)

    async def resume_generation(self) -> None:
        """Resume all engines. One that does not resume gets no requests until it does.

        Raises:
            EngineStateError: It is not paused.
            EngineUnavailableError: No engine resumes. Requests then fail, waiting ones too. Each asks the
                engines again, and so does `check_health`.
        """
        pool = self._pool
        pool.move("paused", "resuming", "the client is not paused")
        try:
            failed = await self._resume_halted(pool.pause_timeout)
        except BaseException:
            pool.move("resuming", "paused")
            raise
        for replica, error in failed.items():
            pool.take_down(replica, f"it did not resume: {error}")
        pool.move("resuming", "open")  # even if no engine resumed, so that waiting requests fail
        if failed and not pool.healthy():
            raise pool.unavailable() from next(iter(failed.values()))

    async def reports_pause(self) -> bool | None:
        """Return whether this client or an engine of it is paused, or None if an engine does not say."""
        return self.is_paused or await self._pool.reports_pause()

    async def abort_generation(self) -> None:
        """End all work, running and waiting: each piece returns its tokens so far, with `abort`."""
        pool = self._pool
        pool.enter()
        pool.aborts += 1
        pool.changed.notify_all()
        await pool.end_calls(look=0.0)

    async def check_health(self) -> None:
        """Return if any engine serves, after asking those that are down too.

        Raises:
            EngineUnavailableError: No engine serves.
        """
        if not any(await asyncio.gather(*map(self._pool.look_at, self._pool.targets))):
            raise self._pool.unavailable()

    async def teardown(self, *, wait: float = 0.0) -> None:
        """Take no more work, let requests run for `wait` more seconds, end them, and close the engines."""
        pool = self._pool
        pool.enter()
        if pool.state == "closed":
            return
        pool.state = "closed"
        pool.changed.notify_all()
        if not await pool.until_idle(wait):
            for call in pool.calls():
                call.end("stopped")
            await pool.until_idle()
        for error in (await pool.failures(self.replicas, lambda engine: engine.teardown())).values():
            raise error

    # --- weights ---

    async def init_weight_update_communicator(
        self, init_info: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> None:
        """Let all engines join the trainer's group, with one mapping for all or one for each."""
        engines = [each.engine for each in await self._pool.all_present()]
        infos = one_each("engine", len(engines), init_info, where="init_info")
        pairs = zip(engines, infos, strict=True)
        await gather_all([engine.init_weight_update_communicator(info) for engine, info in pairs])

    async def update_named_weights(self, request: NamedWeightsUpdate) -> None:
        """Let all engines receive weights at once. All must be up, or the transfer would hang."""
        await self._pool.all_present()
        for error in await self._pool.update(
            lambda engine: engine.update_named_weights(request), request.get("weight_version")
        ):
            raise error

    async def load_weights(self, path: str, *, weight_version: str | None = None) -> None:
        """Let all engines read weights. One that fails gets no requests until it has read them too."""
        errors = await self._pool.update(
            lambda engine: engine.load_weights(path, weight_version=weight_version), weight_version
        )
        if len(errors) == len(self._pool.replicas):
            raise errors[0]

    async def weight_version(self) -> str | None:
        """Return the name of the weights, equal on all engines that serve.

        Raises:
            EngineStateError: Engines differ.
            EngineTimeoutError: One does not answer within `pause_timeout`.
        """
        answers = await self.control("weight_version")
        name: str | None = common("weights", {each.name: version for each, version in answers.items()})
        return name

    async def set_weight_version(self, version: str) -> None:
        """Name the weights on all engines."""
        await self.control("set_weight_version", version=version)
        self._pool.version = version


class _NoServer:
    base_url = "engines:"


@dataclass(frozen=True, slots=True)
class _ClientBackend:
    """An `InferenceEngineClient` as a backend. A request's `X-Session-ID` header is its session."""

    engines: InferenceEngineClient
    transport: _NoServer = field(default_factory=_NoServer)  # by which the prompt limit is remembered
    name: str = "engines"

    async def generate(
        self, request: EngineRequest, transport: Transport | None = None, *, on_tokens: OnTokens | None = None
    ) -> EngineResponse:
        """Sample one completion on one of the engines."""
        session = request.extra_headers.get(SESSION_HEADER)
        return await self.engines.complete(request, session_id=session, on_tokens=on_tokens)

    async def resolve_max_prompt_len(self, model: str, transport: Transport | None = None) -> int | None:
        """Return the maximum prompt length of every engine, or raise if no engine says."""
        limit = await self.engines.max_prompt_len()
        if limit is None:
            raise EngineUnavailableError("no engine says how long a prompt may be")
        return limit

    def is_overflow_error(self, exc: BaseException) -> bool:
        """Whether an engine said that the prompt is too long."""
        return isinstance(exc, PromptTooLongError)


def _body_of(payload: RequestPayload) -> Mapping[str, Any]:
    body = payload.get("json")
    if not isinstance(body, Mapping):
        raise InputError(
            "the payload has no body",
            where="request_payload",
            expected="{'json': {...}, 'headers': {...}}",
            got=f"keys {sorted(payload)}",
        )
    return body
