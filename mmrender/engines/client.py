"""`InferenceEngineClient`: many engines that act as one; completions survive pauses and failures exactly."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Self

from mmrender.client.placeholders import ModelTokens
from mmrender.client.transport import RetryPolicy, Transport
from mmrender.client.types import EngineRequest, EngineResponse, OnTokens, RendererBackend
from mmrender.engines.calls import Replica, answers, failures
from mmrender.engines.continuation import Continuation
from mmrender.engines.http_engine import SESSION_HEADER, HTTPEngine
from mmrender.engines.interface import (
    Control,
    InferenceEngineInterface,
    NamedWeightsUpdate,
    OpenAICall,
    PauseMode,
    RequestPayload,
    Result,
    gather_all,
    one_each,
)
from mmrender.engines.openai import TokenAPI
from mmrender.engines.replicas import ReplicaPool, Work
from mmrender.errors import (
    EngineError,
    EngineStateError,
    EngineTimeoutError,
    EngineUnavailableError,
    InputError,
    PromptTooLongError,
)
from mmrender.protocols import RendererProtocol

Chunk = dict[str, Any]


class InferenceEngineClient(InferenceEngineInterface):
    """Many engines that act as one: it retries, fails over and pauses.

    Work that an engine aborts is asked again with its tokens so far, so that callers never see a pause, and
    work on a failing engine goes to the next. Sessions are hashed to an engine; other work goes to the
    engines in turn. To balance load, give a router. It may be used from several event loops and threads at
    once. Pickled without a renderer, it arrives as a client of the same engines, not paused and without
    requests.

    Control calls go to all engines at once. `pause_generation` returns when no request of this client runs,
    batches included; one that an engine refuses pauses nothing.

    Args:
        engines: Engines with different names; requests and control calls go to these.
        router: Where all requests go instead: the URL of a router in front of `engines`, asked as they are,
            or an engine of its own. Control calls go to `engines`.
        renderer: Renders conversations and decodes completions. Without one only token ids are sampled from,
            OpenAI requests go to the engines' own routes, and an abort is returned to their callers.
        retries: How often and how soon failed requests are repeated.
        attempt_timeout: Seconds for one request, pauses not counted; None for no limit.
        deadline: Seconds for a whole completion, with waiting, retries and pauses; None for no limit.
        pause_timeout: Seconds that engines may take to obey a pause or a short control call. Requests that
            still run that long after a pause are cancelled and asked again later.
        max_idle_aborts: Consecutive aborts without a token before giving up on an engine that says that it is
            not paused. A paused engine is waited for, whichever client paused it; one that does not say is
            asked again until the deadline.
        name: Name of this client where it is an engine of another one.

    Raises:
        InputError: There is no engine, or two have one name. A router's URL is given for engines that are no
            `HTTPEngine`, or that differ in backend or model.
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
        self.router = router = _at_router(router, engines) if isinstance(router, str) else router
        self._retries = retries or RetryPolicy(attempts=5, wait_jitter=0.1)
        self._deadline = deadline
        self._max_idle_aborts = max_idle_aborts
        self._api = None if renderer is None else TokenAPI(self.as_backend(), renderer)
        self._pool = ReplicaPool(engines, router, self._retries, attempt_timeout, pause_timeout)
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
        """`abort` and `wait`, and `keep` where every engine knows it."""
        able = all("keep" in engine.pause_modes for engine in self.engines)
        return frozenset({"abort", "wait", "keep"} if able else {"abort", "wait"})

    @property
    def is_paused(self) -> bool:
        """Whether requests wait for `resume_generation`."""
        return self._pool.state in ("pausing", "paused", "resuming")

    @property
    def replicas(self) -> Sequence[Replica]:
        """Targets of requests, with what is in flight and why one is down; for metrics.

        Where there is a router, it comes first, and the engines behind it follow.
        """
        pool = self._pool
        return pool.targets if pool.targets is pool.replicas else [*pool.targets, *pool.replicas]

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
        """Sample one completion, whatever pauses and failures occur meanwhile.

        `on_tokens` receives tokens once they are final: as they arrive, or in whole pieces where the
        completion may have to start over after an abort.

        Raises:
            SamplingParameterError: The token budget is missing or unusable.
            EngineTimeoutError: It was not finished in time.
            EngineError: An engine refused, or every attempt failed.
        """
        decode = None
        if self.renderer is not None:
            decode = self.renderer.decode
            if request.vocab_size is None:
                request = replace(request, **ModelTokens(self.renderer).fields(request.multi_modal_data))
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
            raise EngineTimeoutError(
                f"the completion was not finished within {self._deadline:g} s"
            ) from error
        return continuation.result()

    async def _wait_idle(self, aborts: int, work: Work) -> int:
        """Wait before asking again after an abort that brought no token; return how many aborts count.

        An engine that another client has paused is waited for.
        """
        waits = itertools.count(aborts + 1)
        while paused := await self._pool.reports_pause(work.last):
            if self._pool.state == "closed" or self._pool.is_aborted(work):
                return 0
            aborts = 0
            await asyncio.sleep(self._retries.wait_before(next(waits)))
        if paused is False and aborts >= self._max_idle_aborts:
            raise EngineUnavailableError(
                f"engines aborted a request {aborts} times in a row without a token, and are not paused",
                expected=f"at most {self._max_idle_aborts} such aborts",
                remedy="Look for whoever aborts on the servers besides this client",
            )
        await asyncio.sleep(self._retries.wait_before(aborts + 1))
        return aborts

    async def max_prompt_len(self) -> int | None:
        """Return the maximum length of a prompt on every engine that serves; None if no engine says."""
        return await self._pool.max_prompt_len()

    def as_backend(self) -> RendererBackend:
        """Return this client as a backend of `mmrender.client.generate`, which needs no server then."""
        return _ClientBackend(self)

    # --- OpenAI requests ---

    async def openai(self, call: OpenAICall, request_payload: RequestPayload) -> Chunk:
        """Answer an OpenAI request: in tokens with a renderer (`completion`: where prompts are token ids).

        All others go to an engine's own route.
        """
        body = _body_of(request_payload)
        if self._api is not None and self._api.takes(call, body):
            return await self._api.answer(call, body)
        reply: Chunk = await self._pass_on(body, lambda engine: engine.openai(call, request_payload))
        return reply

    def stream_openai(self, call: OpenAICall, request_payload: RequestPayload) -> AsyncGenerator[Chunk, None]:
        """Answer an OpenAI request as chunks; a failure after the first one is the caller's to see."""
        body, api = _body_of(request_payload), self._api
        if api is not None and api.takes(call, body):
            return emitted(lambda emit: api.answer(call, body, emit))

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

    async def control(self, call: Control, /, **arguments: Any) -> Any:
        """Make a control call on all engines that serve; the first error is raised.

        Calls that move no memory are bounded by `pause_timeout`.
        """
        replicas = self._pool.healthy()
        if not replicas:
            raise self._pool.unavailable()
        within = None if call in ("sleep", "wake_up") else self._pool.pause_timeout
        action = lambda engine: getattr(engine, call)(**arguments)  # noqa: E731
        for _, error in await failures(replicas, action, within=within):
            raise error

    async def pause_generation(
        self, mode: PauseMode = "abort", *, clear_cache: bool = True, deadline: float | None = 3600.0
    ) -> None:
        """Stop all engines. When it returns, no request of this client runs, batches included.

        Args:
            mode: How running requests are paused.
            clear_cache: Drop cached prefixes too, as new weights need; frozen requests keep theirs.
            deadline: Seconds that requests may run on in the mode `wait`; None for no bound.

        Raises:
            EngineStateError: It is paused already.
            EngineTimeoutError: A request did not end by the deadline; the error says which and where. Nothing
                is paused then.
            EngineUnsupportedError: An engine cannot freeze requests, or cannot clear its cache. Nothing is
                paused then.
            EngineError: An engine refused. Nothing is paused then.
        """
        await self._pool.pause(mode, clear_cache, deadline)

    async def resume_generation(self) -> None:
        """Resume all engines. One that does not resume gets no requests until it does.

        Raises:
            EngineStateError: It is not paused.
            EngineUnavailableError: No engine resumes. Requests then fail, those that waited too; each asks
                the engines again, and so does `check_health`.
        """
        await self._pool.resume()

    async def reports_pause(self) -> bool | None:
        """Return whether this client or an engine of it is paused; None if an engine does not say."""
        return self.is_paused or await self._pool.reports_pause()

    async def abort_generation(self) -> None:
        """End all work, running and waiting: each piece returns what it has, with `abort`."""
        await self._pool.abort()

    async def init_weight_update_communicator(
        self, init_info: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> None:
        """Let all engines join the trainer's group; one mapping for all, or one each in their order."""
        replicas = await self._pool.all_present()
        infos = one_each("engine", len(replicas), init_info, where="init_info")
        each_own = zip(replicas, infos, strict=True)
        await gather_all([each.engine.init_weight_update_communicator(info) for each, info in each_own])

    async def update_named_weights(self, request: NamedWeightsUpdate) -> None:
        """Let all engines receive weights at once; all must be up, or the transfer would hang."""
        replicas = await self._pool.all_present()
        version = request.get("weight_version")
        for error in await self._pool.update(
            replicas, lambda engine: engine.update_named_weights(request), version
        ):
            raise error

    async def load_weights(self, path: str, *, weight_version: str | None = None) -> None:
        """Let all engines read weights; one that fails gets no requests until it has read them too."""
        replicas = self._pool.replicas
        errors = await self._pool.update(
            replicas, lambda engine: engine.load_weights(path, weight_version=weight_version), weight_version
        )
        if len(errors) == len(replicas):
            raise errors[0]

    async def weight_version(self) -> str | None:
        """Return the name of the weights, equal on all engines.

        Raises:
            EngineStateError: Engines differ.
            EngineTimeoutError: One does not answer within `pause_timeout`.
        """
        replicas, within = self._pool.healthy(), self._pool.pause_timeout
        versions: list[Any] = await answers(replicas, lambda engine: engine.weight_version(), within=within)
        for version in versions:
            if isinstance(version, BaseException):
                raise version
        names = [each.name for each in replicas]
        name: str | None = common("weights", dict(zip(names, versions, strict=True))) if replicas else None
        return name

    async def set_weight_version(self, version: str) -> None:
        """Name the weights on all engines."""
        await self.control("set_weight_version", version=version)
        self._pool.version = version

    async def check_health(self) -> None:
        """Return if any engine serves; those that are down are asked again.

        Raises:
            EngineUnavailableError: None does.
        """
        if not any(await asyncio.gather(*map(self._pool.look_at, self._pool.targets))):
            raise self._pool.unavailable()

    async def teardown(self, *, wait: float = 0.0) -> None:
        """Take no more work, let requests run for `wait` more seconds, end them, and close the engines."""
        if await self._pool.close(wait):
            closing = {*self._pool.replicas, *self._pool.targets}
            for _, error in await failures(closing, lambda engine: engine.teardown()):
                raise error


def _at_router(url: str, engines: Sequence[InferenceEngineInterface]) -> HTTPEngine:
    servers = [engine for engine in engines if isinstance(engine, HTTPEngine)]
    kinds = {f"{engine.backend.name} {engine.model}" for engine in servers}
    others = {type(engine).__name__ for engine in engines} - {type(engine).__name__ for engine in servers}
    if len(kinds) != 1 or others:
        raise InputError(
            "a router's URL does not say how these engines are asked",
            where="router",
            expected="HTTPEngine objects of one backend and model",
            got=", ".join(sorted(kinds | others)),
            remedy="Give router=HTTPEngine(...)",
        )
    return servers[0].behind(url)


def common(what: str, values: Mapping[str, Result]) -> Result:
    """Return the value that all engines have, by their names."""
    if len(set(values.values())) > 1:
        got = ", ".join(f"{name}: {value}" for name, value in values.items())
        raise EngineStateError(f"engines have different {what}", got=got)
    return next(iter(values.values()))


class _NoServer:
    base_url = "engines:"


@dataclass(frozen=True, slots=True)
class _ClientBackend:
    """An `InferenceEngineClient` as a backend; a request's `X-Session-ID` header is its session."""

    engines: InferenceEngineClient
    transport: _NoServer = field(default_factory=_NoServer)  # beside which the prompt limit is kept
    name: str = "engines"

    async def generate(
        self, request: EngineRequest, transport: Transport | None = None, *, on_tokens: OnTokens | None = None
    ) -> EngineResponse:
        """Sample one completion on one of the engines."""
        session = request.extra_headers.get(SESSION_HEADER)
        return await self.engines.complete(request, session_id=session, on_tokens=on_tokens)

    async def resolve_max_prompt_len(self, model: str, transport: Transport | None = None) -> int | None:
        """Return the most tokens that every engine takes; asked again while no engine says."""
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


async def emitted(
    produce: Callable[[Callable[[Chunk], None]], Awaitable[object]],
) -> AsyncGenerator[Chunk, None]:
    """Yield what a coroutine emits, as it emits it; ending the stream cancels the coroutine."""
    queue: asyncio.Queue[Chunk | None] = asyncio.Queue()

    async def run() -> None:
        try:
            await produce(queue.put_nowait)
        finally:
            queue.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while (chunk := await queue.get()) is not None:
            yield chunk
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
