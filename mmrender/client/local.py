"""`LocalBackend`: a Transformers model in this process, for demonstrations, tests and audits.

It takes the tokens and pixels that a server would be sent, through the model's own `forward`. What it reports
is what vLLM reports by default: logprobs of the raw logits, which temperature, penalties and biases leave as
they are. Each sequence is computed by itself, so equal seeds give equal tokens whatever else is running.
"""

import asyncio
import itertools
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from mmrender.client.local_choice import ChoiceGuide
from mmrender.client.local_model import LocalModel
from mmrender.client.local_sampling import LocalSampling
from mmrender.client.local_sequence import LocalSequence
from mmrender.client.local_turns import TurnTaker
from mmrender.client.placeholders import check_placeholders, check_prompt
from mmrender.client.transport import Reply, Transport
from mmrender.client.types import EngineRequest, EngineResponse, OnTokens
from mmrender.errors import (
    EngineStateError,
    EngineUnsupportedError,
    InputError,
    PromptTooLongError,
    SamplingParameterError,
)
from mmrender.model.files import find_model
from mmrender.model.tokenizer import Tokenizer

_numbers = itertools.count(1)


class LocalBackend:
    """A Transformers model behind the interface of an inference server.

    A thread of its own computes while there is something to compute; the event loop stays free. Requests take
    turns token by token, and a call that is cancelled ends before its next token. A back end of a directory
    can be pickled, and loads the model again where it arrives, with the weights that the directory holds.

    Args:
        model: A directory in hub layout, or a loaded Transformers model that gives logits.
        max_model_len: Bound of prompt and completion together; by default what the model was made for.
        max_concurrency: Requests under way at once, each with its own keys and values; further ones wait.
        dtype: In which a directory's weights are loaded, by torch's name.
        device: Where to, by torch's name.
        tokenizer: Encodes the texts of `structured_outputs`; by default the directory's.
        weight_version: Name of the weights that the model has.

    Raises:
        InputError: A bound is too small.
    """

    name: Final = "local"

    def __init__(
        self,
        model: Any,
        *,
        max_model_len: int | None = None,
        max_concurrency: int = 16,
        dtype: str = "float32",
        device: str = "cpu",
        tokenizer: Tokenizer | None = None,
        weight_version: str = "0",
    ) -> None:
        for option, value in (("max_model_len", max_model_len), ("max_concurrency", max_concurrency)):
            if value is not None and value < 1:
                raise InputError("is too small", where=option, expected="1 or more", got=str(value))
        self._directory = Path(model) if isinstance(model, str | os.PathLike) else None
        self._loaded = None if self._directory is not None else LocalModel(model)
        self._options = {
            "max_model_len": max_model_len,
            "max_concurrency": max_concurrency,
            "dtype": dtype,
            "device": device,
            "tokenizer": tokenizer,
            "weight_version": weight_version,
        }
        self._dtype, self._device = dtype, device
        self._max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._weight_version = weight_version
        self._lock = threading.Lock()
        self._turns = TurnTaker(max_concurrency)
        self._transport = NoTransport()
        self._running: dict[str, LocalSequence] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        if self._directory is None:
            raise EngineStateError(
                "a back end around a loaded model cannot be sent to another process",
                remedy="Make it with the model's directory",
            )
        return _arrived, (str(self._directory), self._options)

    # --- what `generate` asks of a back end ---

    async def generate(
        self,
        request: EngineRequest,
        transport: Transport | None = None,
        *,
        on_tokens: OnTokens | None = None,
    ) -> EngineResponse:
        """Sample one completion; `transport` is not used.

        Raises:
            PromptTooLongError: The prompt leaves no room for a token.
            SamplingParameterError: A parameter is not known here, or has a wrong value.
            PlaceholderError: Ids, ranges and items do not fit together.
            EngineUnsupportedError: Router choices were asked for.
        """
        model = await self._model_off_loop()
        sequence = self._sequence(model, request)
        if request.request_id in self._running:
            raise EngineStateError("there is a request of this id already", where=request.request_id)
        self._running[request.request_id] = sequence
        future = self._turns.submit(sequence.steps())
        try:
            # Cancelling the await cancels the future, which the thread sees before the next token.
            response = await asyncio.wrap_future(future)
        finally:
            del self._running[request.request_id]
        if on_tokens is not None:
            on_tokens(response.completion_ids, response.logprobs, response.finish_reason)
        return response

    async def resolve_max_prompt_len(self, model: str, transport: Transport | None = None) -> int:
        """Tokens that a prompt may have: one less than the whole, as for vLLM. `model` is not looked at."""
        return self._limit(await self._model_off_loop()) - 1

    def is_overflow_error(self, exc: BaseException) -> bool:
        """Whether `exc` says that the prompt is too long."""
        return isinstance(exc, PromptTooLongError)

    @property
    def transport(self) -> "NoTransport":
        """What stands in the place of the way to a server, for callers that need one."""
        return self._transport

    # --- control ---

    @property
    def model(self) -> Any:
        """The Transformers model, loaded if need be."""
        return self._model().model

    @property
    def weight_version(self) -> str:
        """Name of the weights that the next token is sampled with."""
        return self._weight_version

    def abort(self, request_id: str) -> bool:
        """End a request before its next token; it gives what it has, with finish reason `abort`.

        Returns:
            Whether there was such a request.
        """
        sequence = self._running.get(request_id)
        if sequence is not None:
            sequence.is_aborted = True
        return sequence is not None

    def abort_all(self) -> int:
        """End every request before its next token, and return how many there were."""
        return sum(self.abort(request_id) for request_id in list(self._running))

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: str) -> None:
        """Replace parameters between two tokens; requests go on with them, and say so in `weight_versions`.

        Args:
            weights: Names as in the model's `state_dict`, and tensors of the same shapes.
            version: Name of what the model has then.

        Raises:
            ModelError: A name or a shape is not the model's. Nothing was changed.
        """
        model = self._model()
        with self._turns.between_steps():
            model.load_weights(weights)
            self._weight_version = version

    # --- the model ---

    async def _model_off_loop(self) -> LocalModel:
        if self._loaded is not None:
            return self._loaded
        return await asyncio.to_thread(self._model)

    def _model(self) -> LocalModel:
        with self._lock:
            loaded = self._loaded or LocalModel.load(str(self._directory), self._dtype, self._device)
            self._loaded = loaded
            return loaded

    def _limit(self, model: LocalModel) -> int:
        return min(self._max_model_len or model.context_length, model.context_length)

    def _sequence(self, model: LocalModel, request: EngineRequest) -> LocalSequence:
        if request.routed_experts:
            raise EngineUnsupportedError("the local back end does not record router choices")
        sampling = LocalSampling.of(request.sampling_params, model.vocab_size)
        limit = self._limit(model)
        if len(request.prompt_ids) >= limit:
            raise PromptTooLongError(len(request.prompt_ids), limit - 1)
        check_placeholders(check_prompt(request.prompt_ids, model.vocab_size), request, only_images=False)
        stop_ids = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else model.eos_token_ids)
        room = min(sampling.max_tokens, limit - len(request.prompt_ids))
        return LocalSequence(
            model,
            request,
            sampling,
            stop_ids=stop_ids,
            room=room,
            guide=self._guide(sampling, stop_ids),
            weight_version=lambda: self._weight_version,
        )

    def _guide(self, sampling: LocalSampling, stop_ids: frozenset[int]) -> ChoiceGuide | None:
        if sampling.choices is None:
            return None
        if self._tokenizer is None and self._directory is not None:
            self._tokenizer = Tokenizer.load(find_model(self._directory))
        if self._tokenizer is None:
            raise SamplingParameterError(
                "texts cannot be followed without a tokenizer",
                where="sampling_params['structured_outputs']",
                remedy="Pass tokenizer=... to LocalBackend",
            )
        return ChoiceGuide([self._tokenizer.encode(choice) for choice in sampling.choices], stop_ids)


class NoTransport:
    """A transport to nowhere: `LocalBackend` sends nothing."""

    base_url: Final = "local:"

    def __init__(self) -> None:
        self._number = next(_numbers)

    def __reduce__(self) -> tuple[Any, ...]:
        # The number counts in one process only.
        return NoTransport, ()

    @property
    def server_key(self) -> str:
        """What is learnt of one model in this process does not hold for another."""
        return f"{self.base_url}#{self._number}"

    async def request(self, method: str, path: str, **options: Any) -> Reply:
        """Refuse.

        Raises:
            EngineUnsupportedError: Always.
        """
        raise EngineUnsupportedError("a model in this process has no server", where=f"{method} {path}")

    def stream(self, method: str, path: str, **options: Any) -> Any:
        """Refuse, as `request`."""
        raise EngineUnsupportedError("a model in this process has no server", where=f"{method} {path}")

    async def aclose(self) -> None:
        """Do nothing."""


def _arrived(directory: str, options: dict[str, Any]) -> LocalBackend:
    return LocalBackend(directory, **options)
