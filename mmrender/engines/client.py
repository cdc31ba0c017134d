"""`InferenceEngineClient`: many engines that act as one; completions survive pauses and failures exactly."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Self, TypeVar

from mmrender.client.placeholders import known_tokens
from mmrender.client.transport import RetryPolicy
from mmrender.client.types import (
    EngineRequest,
    EngineResponse,
    FinishReason,
    OnTokens,
    RendererBackend,
    Usage,
)
from mmrender.engines.continuation import Continuation, check_piece
from mmrender.engines.http_engine import SESSION_HEADER, HTTPEngine
from mmrender.engines.interface import (
    InferenceEngineInterface,
    NamedWeightsUpdate,
    PauseMode,
    RequestPayload,
    gather_all,
)
from mmrender.engines.openai import TokenAPI
from mmrender.engines.replicas import FAILED, Call, Ending, Replica, ReplicaPool
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

Result = TypeVar("Result")
_log = logging.getLogger("mmrender.engines")


class InferenceEngineClient(InferenceEngineInterface):
    """Many engines that act as one: it routes, retries, fails over and pauses.

    Work that an engine aborts is asked again with its tokens so far, so that callers never see a pause, and
    work on a failing engine goes to another. Sessions are hashed to an engine; other work goes to the engine
    with the fewest requests. It may be used from several event loops and threads at once. Pickled, it arrives
    as a client of the same engines, not paused, without requests.

    Args:
        engines: Engines with different names; requests and control calls go to these.
        router: An engine at a router's URL, in front of `engines`: all requests go there instead.
        renderer: Renders conversations and decodes completions. Without one only token ids are sampled from,
            OpenAI requests go to the engines' own routes, and an abort is returned to their callers.
        retries: How often and how soon failed requests are repeated.
        attempt_timeout: Seconds for one request, pauses not counted; None for no limit.
        deadline: Seconds for a whole completion, with waiting, retries and pauses; None for no limit.
        pause_timeout: Seconds that engines may take to obey a pause. After that, requests that still run are
            cancelled and asked again later.
        max_idle_aborts: Consecutive aborts without progress before giving up; pauses are not counted.
        name: Name of this client where it is an engine of another one.

    Raises:
        InputError: There is no engine, or two have one name.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngineInterface],
        *,
        router: InferenceEngineInterface | None = None,
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
        self.router = router
        self._settings: dict[str, Any] = {
            "retries": retries,
            "attempt_timeout": attempt_timeout,
            "deadline": deadline,
            "pause_timeout": pause_timeout,
            "max_idle_aborts": max_idle_aborts,
        }
        self._retries = retries or RetryPolicy(attempts=5, wait_jitter=0.1)
        self._deadline = deadline
        self._pause_timeout = pause_timeout
        self._max_idle_aborts = max_idle_aborts
        self._pool = ReplicaPool(engines, router, self._retries, attempt_timeout)
        self._paused: list[Replica] = []
        self._api = None if renderer is None else TokenAPI(self, renderer)
        for engine in (*engines, router):
            if isinstance(engine, HTTPEngine) and engine.renderer is None:
                engine.renderer = renderer

    def __reduce__(self) -> tuple[Any, ...]:
        given = {"router": self.router, "renderer": self.renderer, "name": self.name, **self._settings}
        return partial(type(self), **given), (self.engines,)

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
        """Where requests go, with what is in flight and why one is down; for metrics."""
        return self._pool.targets

    def tp_size(self) -> int:
        """Ranks that share each layer, equal on all engines."""
        return self._common("tp_size", {engine.tp_size() for engine in self.engines})

    def pp_size(self) -> int:
        """Pipeline stages, equal on all engines."""
        return self._common("pp_size", {engine.pp_size() for engine in self.engines})

    def dp_size(self) -> int:
        """Replicas, over all engines."""
        return sum(engine.dp_size() for engine in self.engines)

    def _common(self, what: str, sizes: set[int]) -> int:
        if len(sizes) > 1:
            raise EngineStateError("engines differ", where=what, got=", ".join(map(str, sorted(sizes))))
        return sizes.pop()

    # --- sampling ---

    async def complete(
        self,
        request: EngineRequest,
        *,
        session_id: Hashable | None = None,
        on_tokens: OnTokens | None = None,
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
                request = replace(request, **known_tokens(self.renderer, request.multi_modal_data))
        growing = _Growing(Continuation(request, decode), session_id, on_tokens)
        continuation = growing.continuation
        route = self._pool.route(session_id)
        idle = 0
        try:
            async with asyncio.timeout(self._deadline):
                while continuation.finished is None:
                    if sampled := len(continuation.completion_ids):
                        limit = await self.max_prompt_len()
                        if limit is not None and len(request.prompt_ids) + sampled > limit:
                            continuation.end("length")
                            break
                    piece = await self._pool.send(growing.ask, route)
                    aborted = self._pool.is_aborted(route)
                    moved = continuation.finished is not None
                    if piece is not None:
                        moved = continuation.add(piece, ending=aborted)
                    if aborted:
                        continuation.end("abort")
                    elif moved or route.paused:
                        idle = 0
                    else:
                        idle += 1
                        await self._wait_idle(idle)
                    growing.show()
        except TimeoutError as error:
            raise EngineTimeoutError(
                f"the completion was not finished within {self._deadline:g} s"
            ) from error
        growing.show()
        return continuation.result()

    async def _wait_idle(self, aborts: int) -> None:
        """Wait before asking again after an abort that brought no token, outside of pauses."""
        if aborts >= self._max_idle_aborts:
            raise EngineUnavailableError(
                f"engines aborted a request {aborts} times in a row without a token",
                expected=f"at most {self._max_idle_aborts} such aborts",
                remedy="Look for whoever pauses or aborts on the servers besides this client",
            )
        await asyncio.sleep(min(self._retries.wait_max, self._retries.wait_initial * 2.0 ** (aborts - 1)))

    async def max_prompt_len(self) -> int | None:
        """Return the most tokens that a prompt may have on every engine; None where none says."""
        limits = []
        for replica in self._pool.targets:
            with contextlib.suppress(EngineError):  # whether it serves shows when it is asked for tokens
                limits.append(await replica.engine.max_prompt_len())
        return min((limit for limit in limits if limit is not None), default=None)

    def as_backend(self) -> RendererBackend:
        """Return this client as a backend of `mmrender.client.generate`, which needs no server then."""
        return _ClientBackend(self)

    # --- OpenAI requests ---

    async def chat_completion(self, request_payload: RequestPayload) -> dict[str, Any]:
        """Answer an OpenAI chat request: in tokens with a renderer, else on an engine's own route."""
        body = _body_of(request_payload)
        if self._api is not None:
            return await self._api.chat(body)
        return await self._pass_on(body, lambda engine: engine.chat_completion(request_payload))

    async def completion(self, request_payload: RequestPayload) -> dict[str, Any]:
        """Answer an OpenAI completion request: in tokens for token ids, else on an engine's own route."""
        body = _body_of(request_payload)
        if self._api is not None and self._api.takes_prompt(body):
            return await self._api.completion(body)
        return await self._pass_on(body, lambda engine: engine.completion(request_payload))

    def stream_chat_completion(self, request_payload: RequestPayload) -> AsyncIterator[dict[str, Any]]:
        """Answer an OpenAI chat request as chunks."""
        body, api = _body_of(request_payload), self._api
        if api is not None:
            return emitted(lambda emit: api.chat(body, emit))
        return self._pass_stream(body, lambda engine: engine.stream_chat_completion(request_payload))

    def stream_completion(self, request_payload: RequestPayload) -> AsyncIterator[dict[str, Any]]:
        """Answer an OpenAI completion request as chunks."""
        body, api = _body_of(request_payload), self._api
        if api is not None and api.takes_prompt(body):
            return emitted(lambda emit: api.completion(body, emit))
        return self._pass_stream(body, lambda engine: engine.stream_completion(request_payload))

    async def _pass_on(
        self, body: Mapping[str, Any], ask: Callable[[InferenceEngineInterface], Awaitable[Result]]
    ) -> Result:
        route = self._pool.route(body.get("session_id"))
        while True:
            value = await self._pool.send(ask, route)
            if value is not None:
                return value
            if self._pool.is_aborted(route):
                raise EngineUnavailableError("the request was aborted")

    def _pass_stream(
        self,
        body: Mapping[str, Any],
        stream: Callable[[InferenceEngineInterface], AsyncIterator[dict[str, Any]]],
    ) -> AsyncIterator[dict[str, Any]]:
        """Pass on a stream; a failure after its first chunk is the caller's to see."""

        async def produce(emit: Callable[[dict[str, Any]], None]) -> None:
            begun = False

            async def ask(engine: InferenceEngineInterface) -> EngineError | Literal[True]:
                nonlocal begun
                if begun:
                    return EngineUnavailableError("the stream was ended by a pause")
                try:
                    async for chunk in stream(engine):
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

        return emitted(produce)

    # --- pausing ---

    async def pause_generation(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Stop all engines. When it returns, no request of this client runs, batches included.

        Raises:
            EngineStateError: It is paused already.
            EngineUnsupportedError: An engine cannot freeze requests, or cannot clear its cache. Nothing is
                paused then.
            EngineError: An engine refused. Nothing is paused then.
        """
        self._pool.move("open", "pausing", "the client is paused already")
        try:
            await self._pause(mode, clear_cache)
        except BaseException:
            paused, self._paused = self._paused, []
            for replica, error in await _results(paused, lambda engine: engine.resume_generation()):
                if not isinstance(error, EngineStateError | EngineUnsupportedError):
                    self._pool.take_down(replica, str(error))  # it may still be paused
            self._restart_clocks()
            self._pool.move("pausing", "open", "the client changed state")
            raise
        self._pool.move("pausing", "paused", "the client changed state")

    async def _pause(self, mode: PauseMode, clear_cache: bool) -> None:
        replicas = self._pool.healthy()
        # An engine that cannot be paused is left as it is: this client holds back all requests.
        told = [each for each in replicas if _can_be_told(each.engine, mode)]
        if mode == "wait":
            # Before engines are told: a request that reaches one after its pause would never end.
            for target in self._pool.targets:
                await target.wait_idle()
        else:
            for call in self._calls():
                call.stop_clock()
        self._paused = list(told)  # before they answer, since a pause that fails may have reached its server
        await self._on_each(told, lambda engine: _pause_one(engine, mode, clear_cache))
        if mode == "abort":
            await self._abort_calls("paused")
        if clear_cache and mode != "keep":
            others = [each for each in replicas if each not in told]
            await self._on_each(others, lambda engine: engine.reset_prefix_cache())

    async def resume_generation(self) -> None:
        """Resume all engines. One that does not resume gets no requests until it does.

        Raises:
            EngineStateError: It is not paused.
            EngineError: No engine resumes. The client stays paused.
        """
        self._pool.move("paused", "resuming", "the client is not paused")
        try:
            failed = await _results(self._paused, lambda engine: engine.resume_generation())
            serves = set(self._pool.healthy()) - dict(failed).keys()
            refusals = [error for _, error in failed if not isinstance(error, EngineConnectionError)]
            if refusals and not (serves and all(isinstance(error, EngineError) for error in refusals)):
                raise refusals[0]
            self._paused = []
            for replica, error in failed:
                self._pool.take_down(replica, str(error))
        except BaseException:
            self._pool.move("resuming", "paused", "the client changed state")
            raise
        self._restart_clocks()
        self._pool.move("resuming", "open", "the client changed state")

    async def abort_generation(self) -> None:
        """End all work, running and waiting: each piece returns what it has, with `abort`."""
        self._pool.abort()
        await self._abort_calls("aborted", first_look=0.0)

    def _calls(self) -> list[Call]:
        return [call for target in self._pool.targets for call in list(target.calls)]

    def _restart_clocks(self) -> None:
        for call in self._calls():
            call.restart_clock()

    async def _abort_calls(self, ending: Ending, first_look: float = 0.05) -> None:
        """Abort every request in flight, and wait until each has ended.

        Engines are told repeatedly as long as some still run, since one told too early does not know of a
        request that is on its way to it. Requests that run on after the timeout are cancelled, and return
        nothing.
        """
        running = set(self._calls())
        deadline = time.monotonic() + self._pause_timeout
        pause = first_look
        while True:
            look_until = time.monotonic() + pause
            for target in self._pool.targets:
                await target.wait_idle(running, max(0.0, look_until - time.monotonic()))
            running &= set(self._calls())
            if not running:
                return
            told = self._pool.healthy()
            if self.router is None:
                told = [each for each in self._pool.targets if each.calls & running]
            results = await asyncio.gather(
                *[each.engine.abort_generation() for each in told], return_exceptions=True
            )
            late = running if time.monotonic() > deadline else set()
            for replica, result in zip(told, results, strict=True):
                if isinstance(result, EngineUnsupportedError):
                    late = late | (running if self.router is not None else running & replica.calls)
            for call in late:
                call.end(ending)
            pause = min(2 * max(pause, 0.05), 1.0)

    async def _on_each(
        self, replicas: Sequence[Replica], action: Callable[[InferenceEngineInterface], Awaitable[None]]
    ) -> None:
        """Act on engines concurrently. One that is not reached is taken down; another error is raised."""
        failed = await _results(replicas, action)
        for replica, error in failed:
            if isinstance(error, EngineConnectionError):
                self._paused = [each for each in self._paused if each is not replica]
                self._pool.take_down(replica, str(error))
        for _, error in failed:
            if not isinstance(error, EngineConnectionError):
                raise error

    # --- control ---

    async def _on_all(self, action: Callable[[InferenceEngineInterface], Awaitable[None]]) -> None:
        replicas = self._pool.healthy()
        if not replicas:
            raise self._pool.unavailable()
        for _, error in await _results(replicas, action):
            raise error

    async def sleep(self, *, level: int = 1, tags: Sequence[str] | None = None) -> None:
        """Free the memory of all engines."""
        await self._on_all(lambda engine: engine.sleep(level=level, tags=tags))

    async def wake_up(self, *, tags: Sequence[str] | None = None) -> None:
        """Take the memory back on all engines."""
        await self._on_all(lambda engine: engine.wake_up(tags=tags))

    async def reset_prefix_cache(self) -> None:
        """Drop the cached prefixes of all engines."""
        await self._on_all(lambda engine: engine.reset_prefix_cache())

    async def init_weight_update_communicator(
        self, init_info: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> None:
        """Let all engines join the trainer's group; one mapping for all, or one each in their order."""
        replicas = await self._all_present()
        infos = [init_info] * len(replicas) if isinstance(init_info, Mapping) else list(init_info)
        if len(infos) != len(replicas):
            raise InputError(
                "must have one entry for each engine",
                where="init_info",
                expected=str(len(replicas)),
                got=str(len(infos)),
            )
        each_own = zip(replicas, infos, strict=True)
        await gather_all([each.engine.init_weight_update_communicator(info) for each, info in each_own])

    async def update_named_weights(self, request: NamedWeightsUpdate) -> None:
        """Let all engines receive weights at once; all must be there, or the transfer would hang."""
        replicas = await self._all_present()
        version = request.get("weight_version")
        errors = await self._update(replicas, lambda engine: engine.update_named_weights(request), version)
        if errors:
            raise errors[0]

    async def load_weights(self, path: str, *, weight_version: str | None = None) -> None:
        """Let all engines read weights; one that fails gets no requests until it has read them too."""
        replicas = self._pool.replicas
        errors = await self._update(
            replicas, lambda engine: engine.load_weights(path, weight_version=weight_version), weight_version
        )
        if len(errors) == len(replicas):
            raise errors[0]

    async def _all_present(self) -> list[Replica]:
        """Return every engine, once each is known to serve; where all failed in an update, all may try again.

        Raises:
            EngineUnavailableError: One is down.
        """
        down = []
        for replica in self._pool.replicas:
            if replica.down is None or await self._pool.look_at(replica):
                continue
            try:
                if replica.updates == FAILED:
                    await replica.engine.check_health()
                    continue
            except EngineError as error:
                _log.debug("engine %s does not serve: %s", replica.name, error)
            down.append(f"{replica.name}: {replica.down}")
        if down:
            raise EngineUnavailableError(
                "weights are sent to all engines at once, and some are down",
                got="; ".join(down),
                remedy="Bring them back, or make a client without them",
            )
        return self._pool.replicas

    async def _update(
        self,
        replicas: Sequence[Replica],
        action: Callable[[InferenceEngineInterface], Awaitable[None]],
        version: str | None,
    ) -> list[BaseException]:
        """Carry out a weight update; an engine that fails gets no requests until a later one succeeds."""
        pool = self._pool
        failed = dict(await _results(replicas, action))
        if len(failed) < len(replicas):
            pool.updates += 1
            pool.version = version
        for replica in replicas:
            if replica not in failed:
                replica.updates = pool.updates
                continue
            # If all failed, all may hold a part of the new weights; else it misses what others have.
            current = replica.updates in (FAILED, pool.updates)
            replica.updates = FAILED if len(failed) == len(replicas) and current else pool.updates - 1
            pool.take_down(replica, f"it missed a weight update: {failed[replica]}")
        return list(failed.values())

    async def weight_version(self) -> str | None:
        """Return the name of the weights, equal on all engines.

        Raises:
            EngineStateError: Engines differ.
        """
        replicas = self._pool.healthy()
        versions = await gather_all([each.engine.weight_version() for each in replicas])
        if len(set(versions)) > 1:
            named = [f"{each.name}: {version}" for each, version in zip(replicas, versions, strict=True)]
            raise EngineStateError("engines have different weights", got=", ".join(named))
        return versions[0] if versions else None

    async def set_weight_version(self, version: str) -> None:
        """Name the weights on all engines."""
        await self._on_all(lambda engine: engine.set_weight_version(version))
        self._pool.version = version

    async def check_health(self) -> None:
        """Return if any engine serves; those that are down are asked again.

        Raises:
            EngineUnavailableError: None does.
        """
        if not any(await asyncio.gather(*[self._pool.look_at(each) for each in self._pool.targets])):
            raise self._pool.unavailable()

    async def teardown(self, *, wait: float = 0.0) -> None:
        """Take no more work, let requests run for `wait` more seconds, end them, and close the engines."""
        if not self._pool.close():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                for target in self._pool.targets:
                    await target.wait_idle()
        for call in self._calls():
            call.end("aborted")
        for target in self._pool.targets:
            await target.wait_idle()
        closing = {*self._pool.replicas, *self._pool.targets}
        for _, error in await _results(list(closing), lambda engine: engine.teardown()):
            raise error


class _Growing:
    """One completion and its listener: makes the requests, and shows tokens once they are final."""

    def __init__(
        self, continuation: Continuation, session: Hashable | None, listener: OnTokens | None
    ) -> None:
        self.continuation = continuation
        self._session = session
        self._listener = listener
        self._shown = 0
        self._told_end = False

    async def ask(self, engine: InferenceEngineInterface) -> EngineResponse | None:
        """Make the next request; None where the completion has ended with what a stream has shown."""
        continuation, listener = self.continuation, self._listener
        if continuation.is_finished():  # by a request that failed behind its last token
            return None
        ids: list[int] = []
        logprobs: list[float] = []
        ending: FinishReason = "abort"

        def on_tokens(
            new_ids: Sequence[int], new_logprobs: Sequence[float], reason: FinishReason | None, /
        ) -> None:
            nonlocal ending
            check_piece(new_ids, new_logprobs, continuation.remaining - len(ids))
            ids.extend(new_ids)
            logprobs.extend(new_logprobs)
            ending = reason or ending
            if new_ids and listener is not None:
                listener(new_ids, new_logprobs, None)

        request = continuation.next_request()
        streams = listener is not None and continuation.can_stream
        try:
            piece = await engine.complete(
                request, session_id=self._session, on_tokens=on_tokens if streams else None
            )
            check_piece(piece.completion_ids, piece.logprobs, continuation.remaining)
        except BaseException as error:
            if ids or ending != "abort":  # it was shown, so it counts
                self._shown += len(ids)
                usage = Usage(len(request.prompt_ids), len(ids))
                continuation.add(EngineResponse(ids, logprobs, ending, usage))
            if isinstance(error, PromptTooLongError) and continuation.completion_ids:
                continuation.end("length")
            if continuation.is_finished() and isinstance(error, Exception):
                return None
            raise
        self._shown += len(ids)
        return piece

    def show(self) -> None:
        """Show tokens that were taken and not shown as they arrived, and the end."""
        continuation = self.continuation
        ended = continuation.finished
        if self._listener is None or self._told_end or not (ended or continuation.can_continue()):
            return
        start, self._shown = self._shown, len(continuation.completion_ids)
        self._told_end = ended is not None
        if ended is not None or start < self._shown:
            self._listener(continuation.completion_ids[start:], continuation.logprobs[start:], ended)


class _NoServer:
    base_url = "engines:"


@dataclass(frozen=True, slots=True)
class _ClientBackend:
    """An `InferenceEngineClient` as a backend; a request's `X-Session-ID` header is its session."""

    engines: InferenceEngineClient
    transport: Any = field(default_factory=_NoServer)  # beside which the prompt limit is kept
    name: str = "engines"

    async def generate(
        self, request: EngineRequest, transport: Any = None, *, on_tokens: OnTokens | None = None
    ) -> EngineResponse:
        """Sample one completion on one of the engines."""
        session = request.extra_headers.get(SESSION_HEADER)
        return await self.engines.complete(request, session_id=session, on_tokens=on_tokens)

    async def resolve_max_prompt_len(self, model: str, transport: Any = None) -> int | None:
        """Return the most tokens that every engine takes."""
        return await self.engines.max_prompt_len()

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


def _can_be_told(engine: InferenceEngineInterface, mode: PauseMode) -> bool:
    """Whether an engine itself is paused.

    Raises:
        EngineUnsupportedError: It would have to freeze requests, and cannot.
    """
    modes = engine.pause_modes
    if mode == "keep" and "keep" not in modes:
        raise EngineUnsupportedError(
            "the engine cannot freeze requests", where=engine.name, remedy="Pause with 'abort' or 'wait'"
        )
    return mode in modes or (mode == "wait" and "keep" in modes)


async def _pause_one(engine: InferenceEngineInterface, mode: PauseMode, clear_cache: bool) -> None:
    if mode in engine.pause_modes:
        await engine.pause_generation(mode, clear_cache=clear_cache)
        return
    # None of our requests runs there any more, so freezing is the same, except that it keeps the cache.
    if clear_cache:
        await engine.reset_prefix_cache()
    await engine.pause_generation("keep", clear_cache=False)


async def _results(
    replicas: Sequence[Replica], action: Callable[[InferenceEngineInterface], Awaitable[None]]
) -> list[tuple[Replica, BaseException]]:
    """Act on engines concurrently; return those that failed, with their errors."""
    results = await asyncio.gather(*[action(each.engine) for each in replicas], return_exceptions=True)
    failed = []
    for replica, result in zip(replicas, results, strict=True):
        if isinstance(result, BaseException):
            result.add_note(f"engine {replica.name}")
            failed.append((replica, result))
    return failed


async def emitted(
    produce: Callable[[Callable[[Result], None]], Awaitable[object]],
) -> AsyncGenerator[Result, None]:
    """Yield what a coroutine emits, as it emits it; ending the stream cancels the coroutine."""
    queue: asyncio.Queue[tuple[Result] | None] = asyncio.Queue()

    async def run() -> None:
        try:
            await produce(lambda value: queue.put_nowait((value,)))
        finally:
            queue.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while (entry := await queue.get()) is not None:
            yield entry[0]
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
