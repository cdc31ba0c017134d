"""`LocalBackend`: a Transformers model in this process, for demonstrations, tests, audits and small training.

It takes the tokens and pixels that a server would be sent. A request joins those that run, at their next
token and whatever their lengths, and a prompt that several bring at once is prefilled once; see
`mmrender.client.decoding`. Each has a generator of its own: equal seeds give equal tokens whatever else is
running, and logprobs that differ by rounding alone. Logprobs are of the raw logits, before temperature,
penalties and biases, among the tokens that were allowed.
"""

import asyncio
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Final

from mmcodecs.forks import watch_forks
from mmrender.client.decoding import Completion, decode
from mmrender.client.placeholders import check_request
from mmrender.client.sampling import where
from mmrender.client.token_sampler import TokenSampler, checked_params
from mmrender.client.transport import Transport
from mmrender.client.types import EngineRequest, EngineResponse, OnTokens, Usage
from mmrender.errors import (
    EngineStateError,
    EngineUnsupportedError,
    InputError,
    PromptTooLongError,
    SamplingParameterError,
)
from mmrender.model.files import find_model
from mmrender.model.tokenizer import Tokenizer
from mmrender.model.weights import load_model, replace_weights
from mmrender.trajectory.engine_data import WeightVersionSpan

_ARRIVAL_SECONDS: Final = 0.001
"""While requests arrive within this time of each other, they are waited for."""


class _Waiting:
    """A request, and the call that waits for its response on an event loop."""

    def __init__(
        self, request: EngineRequest, loop: asyncio.AbstractEventLoop, on_tokens: OnTokens | None
    ) -> None:
        self.request = request
        self.stopped = threading.Event()
        self.response: asyncio.Future[EngineResponse] = loop.create_future()
        self._loop, self._on_tokens = loop, on_tokens

    def tell(self, *sampled: Any) -> None:
        """Report tokens to the caller."""
        if self._on_tokens is not None:
            self._call(self._on_tokens, *sampled)

    def succeed(self, response: EngineResponse) -> None:
        """Give the caller its response."""
        self._call(self._settle, self.response.set_result, response)

    def fail(self, error: BaseException) -> None:
        """Give the caller an error, if it has no response yet."""
        self._call(self._settle, self.response.set_exception, error)

    def _settle(self, settle: Callable[[Any], None], outcome: Any) -> None:
        if not self.response.done():
            settle(outcome)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop has closed, and nobody waits
            self.stopped.set()


class LocalBackend:
    """A Transformers model behind the interface of an inference server.

    The event loop stays free while it computes. A call that is cancelled ends before its next token. `aclose`
    frees the model, and so does dropping the backend. A backend of a directory can be pickled, and loads the
    model again on arrival, with the directory's weights.

    Args:
        model: A directory in hub layout, or a loaded Transformers model that gives logits.
        max_model_len: Bound of prompt and completion together; by default what the model was made for.
        dtype: Dtype that a directory's weights are loaded in, by torch's name.
        device: Where they are loaded to, by torch's name.
        tokenizer: Encodes the texts of `structured_outputs`; by default the directory's.
        weight_version: Name of the weights that the model has.
        max_batch_size: The most requests that run at once.

    Raises:
        InputError: The bound is too small.
    """

    name: Final = "local"

    def __init__(
        self,
        model: Any,
        *,
        max_model_len: int | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        tokenizer: Tokenizer | None = None,
        weight_version: str = "0",
        max_batch_size: int = 256,
    ) -> None:
        for name, bound in (("max_model_len", max_model_len), ("max_batch_size", max_batch_size)):
            if bound is not None and bound < 1:
                raise InputError("is too small", where=name, expected="1 or more", got=str(bound))
        self._directory = os.fspath(model) if isinstance(model, str | os.PathLike) else None
        self._model = model if self._directory is None else None
        self._tokenizer = tokenizer
        self._weight_version = weight_version
        self._options: dict[str, Any] = {
            "max_model_len": max_model_len,
            "dtype": dtype,
            "device": device,
            "tokenizer": tokenizer,
            "weight_version": weight_version,
            "max_batch_size": max_batch_size,
        }
        self._max_batch = max_batch_size
        self._transport = NullTransport()
        self._is_of_parent = self._closed = False
        self._begin()
        watch_forks(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, "mmrender-local")
        self._waiting: deque[_Waiting] = deque()
        self._updates: list[tuple[Callable[[], None], Future[None]]] = []
        self._running: dict[str, threading.Event] = {}

    def renew_after_fork(self) -> None:
        """Begin without requests; a model that the parent has loaded is refused."""
        self._begin()
        self._is_of_parent = self._model is not None

    def __reduce__(self) -> tuple[Any, ...]:
        if self._directory is None:
            raise EngineStateError(
                "a backend around a loaded model cannot be sent to another process",
                remedy="Make it with the model's directory",
            )
        return partial(LocalBackend, self._directory, **self._options), ()

    async def generate(
        self, request: EngineRequest, transport: Transport | None = None, *, on_tokens: OnTokens | None = None
    ) -> EngineResponse:
        """Sample one completion; `transport` is ignored.

        Raises:
            EngineUnsupportedError: Router choices were asked for.
            EngineStateError: The backend is closed, or a request of this id is in flight.
            MMRenderError: As for `RendererBackend.generate`.
        """
        self._check_open()
        if request.request_id in self._running:
            raise EngineStateError("a request of this id is in flight", where=request.request_id)
        waiting = _Waiting(request, asyncio.get_running_loop(), on_tokens)
        self._running[request.request_id] = waiting.stopped
        self._waiting.append(waiting)
        self._worker.submit(self._work)
        try:
            return await waiting.response
        except asyncio.CancelledError:
            waiting.stopped.set()
            raise
        finally:
            del self._running[request.request_id]

    async def resolve_max_prompt_len(self, model: str, transport: Transport | None = None) -> int:
        """Return the longest prompt: one token less than the context, as for vLLM. `model` is ignored."""
        return self._limit(await asyncio.to_thread(lambda: self.model)) - 1

    def is_overflow_error(self, exc: BaseException) -> bool:
        """Whether `exc` says that the prompt is too long."""
        return isinstance(exc, PromptTooLongError)

    @property
    def transport(self) -> "NullTransport":
        """A transport to nowhere, for callers that need one."""
        return self._transport

    async def aclose(self) -> None:
        """End every request before its next token, and free the model and its thread."""
        self._closed = True
        self.abort_all()
        await asyncio.to_thread(self._worker.shutdown)
        self._model = None

    def _check_open(self) -> None:
        if self._closed:
            raise EngineStateError("the backend is closed", where="local", remedy="Make another one")

    @property
    def model(self) -> Any:
        """The Transformers model, loaded at first use.

        Raises:
            EngineStateError: It was loaded before this process forked.
        """
        if self._is_of_parent:
            raise EngineStateError(
                "the model was loaded before this process forked, and torch's threads are the parent's",
                expected="a backend made in this process",
                remedy="Make it after the fork, or start the process by spawn",
            )
        with self._lock:
            if self._model is None:
                self._check_open()
                directory, dtype, device = (
                    str(self._directory),
                    self._options["dtype"],
                    self._options["device"],
                )
                self._model = load_model(directory, dtype, device, purpose="the local backend")
            return self._model

    @property
    def weight_version(self) -> str:
        """Name of the weights that the next token is sampled with."""
        return self._weight_version

    def abort(self, request_id: str) -> bool:
        """End a request before its next token; it returns what it has, with finish reason `abort`.

        Returns:
            Whether there was such a request.
        """
        stopped = self._running.get(request_id)
        if stopped is not None:
            stopped.set()
        return stopped is not None

    def abort_all(self) -> int:
        """End every request before its next token, and return how many there were."""
        return sum(map(self.abort, list(self._running)))

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: str) -> None:
        """Replace parameters between two tokens; requests go on with them, and say so in `weight_versions`.

        Args:
            weights: Names as in the model's `state_dict`, and tensors of the same shapes.
            version: Name of the weights from then on.

        Raises:
            ModelError: A name or a shape is not the model's. Nothing was changed.
        """
        self._check_open()

        def update() -> None:
            replace_weights(self.model, weights)
            self._weight_version = version

        done: Future[None] = Future()
        self._updates.append((update, done))
        self._worker.submit(self._updated_version)  # unless a request in flight does it before
        done.result()

    def _updated_version(self) -> str:
        """Carry out waiting updates, on the worker's thread; return the weights' name."""
        while self._updates:
            update, done = self._updates.pop(0)
            try:
                done.set_result(update())
            except BaseException as error:  # noqa: BLE001 - whoever updates gets it
                done.set_exception(error)
        return self._weight_version

    def _limit(self, model: Any) -> int:
        made_for = int(model.config.get_text_config().max_position_embeddings)
        return min(self._options["max_model_len"] or made_for, made_for)

    def _sampler(self, request: EngineRequest, model: Any) -> "tuple[TokenSampler, int]":
        """Check a request; return its sampler and the most tokens that its completion may have."""
        if request.routed_experts:
            raise EngineUnsupportedError("the local backend does not record router choices")
        config = model.config.get_text_config()
        params = checked_params(request.sampling_params, config.vocab_size)
        limit, length = self._limit(model), len(request.prompt_ids)
        if length >= limit:
            raise PromptTooLongError(length, limit - 1)
        check_request(replace(request, vocab_size=config.vocab_size), takes_videos=True)
        stop_ids = set(params.get("stop_token_ids") or ())
        if not params.get("ignore_eos"):
            own = getattr(model.generation_config, "eos_token_id", None)
            own = getattr(config, "eos_token_id", None) if own is None else own
            stop_ids.update(own if isinstance(own, list | tuple) else [own])
        choices = None
        if "structured_outputs" in params:
            if self._tokenizer is None and self._directory is not None:
                self._tokenizer = Tokenizer.load(find_model(self._directory))
            if self._tokenizer is None:
                raise SamplingParameterError(
                    "texts cannot be followed without a tokenizer",
                    where=where("structured_outputs"),
                    remedy="Pass tokenizer=... to LocalBackend",
                )
            choices = [self._tokenizer.encode(text) for text in params["structured_outputs"]["choice"]]
        stops, forbidden = frozenset(stop_ids - {None}), request.forbidden_token_ids
        sampler = TokenSampler(params, request.prompt_ids, stops, choices, forbidden)
        return sampler, min(params["max_tokens"], limit - length)

    def _work(self) -> None:
        """Sample what waits, and what comes meanwhile, to its end, on the worker's thread."""
        count, taken = 0, set[_Waiting]()
        while count < len(self._waiting) < self._max_batch:
            count = len(self._waiting)
            time.sleep(_ARRIVAL_SECONDS)

        def arrivals(room: int) -> list[Completion]:
            completions = []
            for waiting in [self._waiting.popleft() for _ in range(min(len(self._waiting), room))]:
                taken.add(waiting)
                try:
                    completions.append(self._completion(waiting, taken))
                except Exception as error:  # noqa: BLE001 - the others go on
                    taken.discard(waiting)
                    waiting.fail(error)
            return completions

        try:
            decode(self.model, arrivals, self._updated_version, most=self._max_batch)
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            for waiting in taken:
                waiting.fail(error)

    def _completion(self, waiting: _Waiting, taken: set[_Waiting]) -> Completion:
        """Check a request of those `taken`, which it leaves at its end, and begin its completion."""
        sampler, room = self._sampler(waiting.request, self.model)

        def done(completion: Completion, error: Exception | None) -> None:
            taken.discard(waiting)
            if error is not None:
                waiting.fail(error)
            else:
                waiting.tell([], [], completion.finish_reason)
                waiting.succeed(_response_of(completion))

        return Completion(waiting.request, sampler, room, waiting.tell, done, waiting.stopped)


def _response_of(completion: Completion) -> EngineResponse:
    """Return what an engine would answer."""
    request, sampler = completion.request, completion.sampler
    tokens = sampler.tokens
    spans: list[WeightVersionSpan] = []
    for version, sampled in itertools.groupby(completion.versions):
        start = spans[-1].stop if spans else 0
        spans.append(WeightVersionSpan(version, start, start + len(list(sampled))))
    # As vLLM: nothing for the model's own end of turn.
    named = set(tokens[-1:]).intersection(request.sampling_params.get("stop_token_ids") or ())
    return EngineResponse(
        completion_ids=tokens,
        logprobs=sampler.logprobs,
        finish_reason=completion.finish_reason or "abort",
        usage=Usage(len(request.prompt_ids), len(tokens), 0),
        stop_reason=next(iter(named), None),
        allowed=sampler.allowed,
        weight_versions=tuple(spans),
        request_id=request.request_id,
        top_logprobs=tuple(sampler.top) or None,
    )


class NullTransport:
    """A transport to nowhere, for backends in this process."""

    base_url: Final = "local:"

    def stream(self, method: str, path: str, **options: Any) -> Any:
        """Refuse.

        Raises:
            EngineUnsupportedError: Always.
        """
        raise EngineUnsupportedError("a model in this process has no server", where=f"{method} {path}")

    async def request(self, method: str, path: str, **options: Any) -> Any:
        """Refuse, as `stream`."""
        return self.stream(method, path)

    async def aclose(self) -> None:
        """Do nothing."""
