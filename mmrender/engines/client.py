"""`InferenceEngineClient`: many engines that act as one. Completions survive pauses and failures exactly."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Self

from mmrender.client.engine import ModelTokens
from mmrender.client.transport import NullTransport, RetryPolicy, Transport
from mmrender.client.types import EngineRequest, EngineResponse, OnTokens, RendererBackend
from mmrender.engines.continuation import Continuation
from mmrender.engines.fleet import HEALTH_TIMEOUT, Results, Timeouts
from mmrender.engines.http_engine import SESSION_HEADER, HTTPEngine, at_router
from mmrender.engines.interface import (
    Chunk,
    Control,
    EngineResult,
    InferenceEngineInterface,
    NamedWeightsUpdate,
    OpenAICall,
    PauseMode,
    RequestPayload,
    common,
    emitted,
    one_each,
)
from mmrender.engines.pool import ReplicaPool
from mmrender.engines.replicas import Replica, Work, bounded
from mmrender.errors import (
    EngineError,
    EngineTimeoutError,
    EngineUnavailableError,
    InputError,
)
from mmrender.protocols import RendererProtocol


class InferenceEngineClient(InferenceEngineInterface):
    """Many engines that act as one: it retries, fails over and pauses.

    Work that an engine aborts is asked again with its tokens so far, so that callers never see a pause. Work
    on a failing engine goes to the next. Sessions are hashed to an engine, other work goes to the engines in
    turn. To balance load, pass a router. Control calls go to all engines at once, and return one
    `EngineResult` for each.

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
            still run then are cancelled and asked again later.
        update_timeout: Seconds that engines may take for a call that moves weights or memory. None for no
            limit.
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
        update_timeout: float | None = 600.0,
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
        timeouts = Timeouts(attempt_timeout, pause_timeout, update_timeout)
        self._pool = ReplicaPool(engines, router, retries, timeouts)
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
        return self._pool.everyone

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
        request = self._tokens.added_to(request)
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
        pool = self._pool
        paused = await pool.until_resumed(work)
        if paused:
            return 0
        if paused is False and aborts >= self._max_idle_aborts:
            raise EngineUnavailableError(
                f"engines aborted a request {aborts} times in a row without a token, and are not paused",
                expected=f"at most {self._max_idle_aborts} such aborts",
                remedy="Look for another client that aborts on the servers",
            )
        await asyncio.sleep(pool.retries.wait_before(aborts + 1))
        return aborts

    async def max_prompt_len(self) -> int | None:
        """Return the maximum length of a prompt on every engine that serves, or None if no engine says.

        Each engine is asked until it has said. One that does not answer is down then.
        """
        pool = self._pool
        pool.enter()
        serving = [each for each in pool.targets if each.down is None]
        await asyncio.gather(*[self._ask_limit(each) for each in serving if each.limit is None])
        return min((each.limit for each in serving if each.limit is not None), default=None)

    async def _ask_limit(self, replica: Replica) -> None:
        try:
            replica.limit = await bounded(replica.engine.max_prompt_len(), HEALTH_TIMEOUT, replica.name)
        except EngineTimeoutError as error:
            self._pool.take_down(replica, str(error))  # so that nobody waits for it again
        except EngineError:
            return  # a request tells what is wrong with it

    def as_backend(self) -> RendererBackend:
        """Return this client as a backend of `mmrender.generate`, which needs no server then."""
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

    async def control(self, call: Control, /, **arguments: Any) -> list[EngineResult]:
        """Make a control call on all engines that serve.

        An engine that fails, or does not obey in time, is down until it has made up for the call.

        Raises:
            EngineError: An engine refuses, or none obeys.
        """
        return self._listed(await self._pool.control(call, **arguments))

    def _listed(self, results: Results) -> list[EngineResult]:
        """Return the results in the order of the engines."""
        return [results[each] for each in self._pool.everyone if each in results]

    async def pause_generation(
        self, mode: PauseMode = "abort", *, clear_cache: bool = True, deadline: float | None = 3600.0
    ) -> list[EngineResult]:
        """Pause engines that support the mode, and withhold requests from the rest.

        When it returns, no request of this client runs, batches included. An engine that fails, or does not
        obey in time, is down. A pause that is cancelled or refused is undone: each engine is resumed before
        it gets requests.

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
            EngineError: An engine refused, or none obeyed. Nothing is paused.
        """
        return self._listed(await self._pool.pause(mode, clear_cache, deadline))

    async def resume_generation(self) -> list[EngineResult]:
        """Resume all engines. One that does not resume gets no requests until it does.

        Cancelled, it leaves the client paused, and may be called again. A client that is not paused resumes
        engines that report a pause, such as the pause of a client that is gone.

        Raises:
            EngineStateError: Nothing is paused.
            EngineUnavailableError: No engine resumes. Requests then fail, waiting ones too. Each asks the
                engines again, and so does `check_health`.
        """
        return self._listed(await self._pool.resume())

    async def reports_pause(self) -> bool | None:
        """Return whether this client or an engine of it is paused, or None if an engine does not say."""
        return self.is_paused or await self._pool.reports_pause()

    async def abort_generation(self) -> list[EngineResult]:
        """End all work, running and waiting: each piece returns its tokens so far, with `abort`."""
        pool = self._pool
        pool.enter()
        pool.aborts += 1
        pool.changed.notify()
        results = pool.presence()
        return self._listed(results | await pool.end_calls(pool.timeouts.pause, look=0.0))

    async def check_health(self, *, every: bool = True) -> list[EngineResult]:
        """Ask all engines for their health, those that are down too.

        `every=False` returns once one serves.

        Raises:
            EngineUnavailableError: No engine serves.
        """
        pool = self._pool
        pool.enter()
        if not every:
            await pool.until_one_serves(pool.targets)
            return self._listed(pool.presence())
        # An engine that comes back may take long to read weights.
        await asyncio.wait(map(pool.begin_look, pool.everyone), timeout=2 * HEALTH_TIMEOUT)
        if all(each.down is not None for each in pool.targets):
            raise pool.unavailable()
        return self._listed(pool.presence())

    async def teardown(self, *, wait: float = 0.0) -> None:
        """Take no more work, let requests run for `wait` more seconds, end them, and close the engines."""
        pool = self._pool
        pool.enter()
        if pool.state == "closed":
            return
        pool.state = "closed"
        pool.changed.notify()
        if not await pool.until_idle(wait):
            for call in pool.calls():
                call.end("stopped")
            await pool.until_idle()
        await pool.end_watches()
        for result in (await pool.tell(self.replicas, "teardown")).values():
            if result.error is not None:
                raise result.error

    # --- weights ---

    async def init_weight_update_communicator(
        self, init_info: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> list[EngineResult]:
        """Let all engines join the trainer's group, with one mapping for all or one for each.

        Raises:
            EngineError: An engine is missing or fails.
        """
        pool = self._pool
        infos = one_each("engine", len(pool.replicas), init_info, where="init_info")
        await pool.require_all()
        call: Control = "init_weight_update_communicator"
        pairs = zip(pool.replicas, infos, strict=True)
        told = await asyncio.gather(*[pool.tell([each], call, init_info=info) for each, info in pairs])
        results: Results = {each: result for answer in told for each, result in answer.items()}
        pool.settle(results, call, {})
        for result in results.values():
            if result.error is not None:
                raise result.error
        return self._listed(results)

    async def update_named_weights(self, request: NamedWeightsUpdate) -> list[EngineResult]:
        """Let all engines receive weights at once. All must be up, or the transfer would hang.

        An engine that fails gets no requests until a later update.

        Raises:
            EngineError: An engine is missing or fails.
        """
        return self._listed(await self._pool.receive(request))

    async def load_weights(self, path: str, *, weight_version: str | None = None) -> list[EngineResult]:
        """Let all engines read weights. One that fails, or is down, reads them before it gets requests.

        Raises:
            EngineError: No engine has read them.
        """
        return self._listed(await self._pool.load({"path": path, "weight_version": weight_version}))

    async def weight_version(self) -> str | None:
        """Return the name of the weights, equal on all engines that serve.

        Raises:
            EngineStateError: Engines differ.
        """
        results = await self.control("weight_version")
        versions = {each.name: each.value for each in results if each.error is None}
        name: str | None = common("weights", versions)
        return name

    async def set_weight_version(self, version: str) -> list[EngineResult]:
        """Name the weights on all engines."""
        pool = self._pool
        results = await self.control("set_weight_version", version=version)
        pool.version = version
        if pool.loaded is not None:
            pool.loaded = {**pool.loaded, "weight_version": version}
        return results


@dataclass(frozen=True, slots=True)
class _ClientBackend(RendererBackend):
    """An `InferenceEngineClient` as a backend. A request's `X-Session-ID` header is its session."""

    engines: InferenceEngineClient
    # By which the prompt limit is remembered.
    transport: NullTransport = field(default_factory=partial(NullTransport, "engines:"))
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
