"""`LocalBackend`: a Transformers model in this process, for demonstrations, tests, audits and small training.

It takes the tokens and pixels that a server would get. A request joins the running ones at their next token,
whatever its length, and a prompt of several concurrent requests is prefilled once; see
`mmrender.client.decoding`. Each request has its own random generator: equal seeds produce equal tokens in any
company, with logprobs that differ by rounding alone. Logprobs are of the raw logits, before temperature,
penalties and biases, over the allowed tokens, unless `processed_logprobs` is set.
"""

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Final
from weakref import WeakSet

from mmcodecs.forks import watch_forks
from mmrender.client.decoding import Completion, decode
from mmrender.client.exchange import check_request
from mmrender.client.sampling import where
from mmrender.client.token_sampler import TokenSampler, checked_params
from mmrender.client.transport import NullTransport, Transport
from mmrender.client.types import EngineRequest, EngineResponse, OnTokens, RendererBackend
from mmrender.errors import (
    EngineStateError,
    EngineUnsupportedError,
    PromptTooLongError,
    SamplingParameterError,
    check_count,
)
from mmrender.messages import MODALITIES
from mmrender.model.convert import open_model
from mmrender.model.tokenizer import Tokenizer
from mmrender.model.weights import load_model, replace_weights

_ARRIVAL_SECONDS: Final = 0.001
"""Batching window: sampling begins when no request has arrived for this long."""


class LocalBackend(RendererBackend):
    """A Transformers model behind the interface of an inference server.

    The event loop stays free while it computes. A call that is cancelled ends before its next token. `aclose`
    frees the model, and so does dropping the backend. A backend of a directory can be pickled, and loads the
    directory's weights again on arrival.

    Args:
        model: A directory in hub layout, or a loaded Transformers model that returns logits.
        max_model_len: Maximum tokens of prompt and completion together, by default the model's limit.
        dtype: Dtype of a directory's weights, by torch's name.
        device: Their device, by torch's name.
        tokenizer: Encodes the texts of `structured_outputs`, by default the directory's.
        weight_version: Name of the model's weights.
        max_batch_size: Maximum number of requests that run at once.
        processed_logprobs: Report log-probabilities after temperature, penalties and the cuts of `top_k` and
            the like, as vLLM's `processed_logprobs` are, instead of the raw logits'.

    Raises:
        InputError: A maximum is too small.
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
        processed_logprobs: bool = False,
    ) -> None:
        for name, bound in (("max_model_len", max_model_len), ("max_batch_size", max_batch_size)):
            if bound is not None:
                check_count(name, bound)
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
            "processed_logprobs": processed_logprobs,
        }
        self._transport = NullTransport()
        self._is_of_parent = self._closed = False
        self._begin()
        watch_forks(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, "mmrender-local")
        self._waiting: deque[Completion] = deque()
        self._is_queued = False  # whether `_work` is still to begin, which takes all waiting requests
        self._updates: list[tuple[Callable[[], None], Future[None]]] = []
        self._running: dict[str, threading.Event] = {}

    def renew_after_fork(self) -> None:
        """Begin without requests. A model that the parent has loaded is refused."""
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
            EngineUnsupportedError: Router choices were requested.
            EngineStateError: The backend is closed, or a request of this id is in flight.
            MMRenderError: As for `RendererBackend.generate`.
        """
        self._check_open()
        if request.request_id in self._running:
            raise EngineStateError("a request of this id is in flight", where=request.request_id)
        completion = Completion(request, asyncio.get_running_loop(), on_tokens)
        self._running[request.request_id] = completion.stopped
        self._waiting.append(completion)
        if not self._is_queued:
            self._is_queued = True
            self._worker.submit(self._work)
        try:
            return replace(await completion.response, sampler=self._facts())
        except asyncio.CancelledError:
            completion.stopped.set()
            raise
        finally:
            del self._running[request.request_id]

    def _facts(self) -> dict[str, str]:
        """Return the facts that travel with the samples."""
        model = self._model
        dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
        attention = str(getattr(getattr(model, "config", None), "_attn_implementation", ""))
        return {"engine": self.name, "dtype": dtype, "attention_backend": attention}

    async def resolve_max_prompt_len(self, model: str, transport: Transport | None = None) -> int:
        """Return the longest prompt: one token less than the context, as for vLLM. `model` is ignored."""
        return self._limit(await asyncio.to_thread(lambda: self.model)) - 1

    @property
    def transport(self) -> NullTransport:
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
                dtype, device = self._options["dtype"], self._options["device"]
                self._model = load_model(str(self._directory), dtype, device, purpose="the local backend")
            return self._model

    @property
    def weight_version(self) -> str:
        """Name of the weights of the next token."""
        return self._weight_version

    def abort(self, request_id: str) -> bool:
        """End a request before its next token. It returns its tokens so far, with finish reason `abort`.

        Returns:
            Whether the request was in flight.
        """
        stopped = self._running.get(request_id)
        if stopped is not None:
            stopped.set()
        return stopped is not None

    def abort_all(self) -> int:
        """End every request before its next token, and return their number."""
        return sum(map(self.abort, list(self._running)))

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: str) -> None:
        """Replace parameters between two tokens. Requests go on, and report both in `weight_versions`.

        Args:
            weights: Names as in the model's `state_dict`, and tensors of the same shapes.
            version: Name of the new weights.

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
        """Carry out waiting updates on the worker's thread, and return the weights' name."""
        while self._updates:
            update, done = self._updates.pop(0)
            try:
                done.set_result(update())
            except BaseException as error:  # noqa: BLE001 - raised in the thread that updates
                done.set_exception(error)
        return self._weight_version

    def _limit(self, model: Any) -> int:
        limit = int(model.config.get_text_config().max_position_embeddings)
        return min(self._options["max_model_len"] or limit, limit)

    def _begin_completion(self, completion: Completion) -> None:
        """Check a request, and set its sampler and the maximum number of its tokens."""
        request, model = completion.request, self.model
        if request.routed_experts:
            raise EngineUnsupportedError("the local backend does not record router choices")
        config = model.config.get_text_config()
        params = checked_params(request.sampling_params, config.vocab_size)
        limit, length = self._limit(model), len(request.prompt_ids)
        if length >= limit:
            raise PromptTooLongError(length, limit - 1)
        check_request(replace(request, vocab_size=config.vocab_size), takes=MODALITIES)
        stop_ids = set(params.get("stop_token_ids") or ())
        if not params.get("ignore_eos"):
            ends = getattr(model.generation_config, "eos_token_id", None)
            ends = getattr(config, "eos_token_id", None) if ends is None else ends
            stop_ids.update(ends if isinstance(ends, list | tuple) else [ends])
        choices = None
        if "structured_outputs" in params:
            if self._tokenizer is None and self._directory is not None:
                self._tokenizer = Tokenizer.load(open_model(self._directory))
            if self._tokenizer is None:
                raise SamplingParameterError(
                    "texts cannot be followed without a tokenizer",
                    where=where("structured_outputs"),
                    remedy="Pass tokenizer=... to LocalBackend",
                )
            choices = [self._tokenizer.encode(text) for text in params["structured_outputs"]["choice"]]
        stops, forbidden = frozenset(stop_ids - {None}), request.forbidden_token_ids
        sampler = TokenSampler(
            params,
            request.prompt_ids,
            stops,
            choices,
            forbidden,
            processed_logprobs=self._options["processed_logprobs"],
        )
        completion.begin(sampler, min(params["max_tokens"], limit - length))

    def _work(self) -> None:
        """Sample waiting and arriving requests to their ends, on the worker's thread."""
        self._is_queued = False
        count, taken, max_batch_size = 0, WeakSet[Completion](), self._options["max_batch_size"]
        while count < len(self._waiting) < max_batch_size:
            count = len(self._waiting)
            time.sleep(_ARRIVAL_SECONDS)

        def arrivals(room: int) -> list[Completion]:
            completions = []
            for completion in [self._waiting.popleft() for _ in range(min(len(self._waiting), room))]:
                taken.add(completion)
                try:
                    self._begin_completion(completion)
                    completions.append(completion)
                except Exception as error:  # noqa: BLE001 - other requests go on
                    completion.fail(error)
            return completions

        try:
            decode(self.model, arrivals, self._updated_version, max_batch_size=max_batch_size)
        except BaseException as error:  # noqa: BLE001 - raised in the callers
            for completion in taken:
                completion.fail(error)
