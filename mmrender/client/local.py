"""`LocalBackend`: a Transformers model in this process, for demonstrations, tests and audits.

It takes the tokens and pixels that a server would be sent, through the model's own `generate`. Logprobs are
vLLM's by default: of the raw logits, before temperature, penalties and biases. Requests run one after another
on a thread, so equal seeds give equal tokens whatever else is running.
"""

import asyncio
import copy
import inspect
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from mmrender.client.placeholders import check_request
from mmrender.client.sampling import check_sampling_params, where
from mmrender.client.transport import Transport
from mmrender.client.types import EngineRequest, EngineResponse, FinishReason, OnTokens, Usage
from mmrender.errors import (
    EngineReplyError,
    EngineStateError,
    EngineUnsupportedError,
    InputError,
    PromptTooLongError,
    SamplingParameterError,
)
from mmrender.model.files import find_model
from mmrender.model.tokenizer import Tokenizer
from mmrender.model.weights import load_model, replace_weights
from mmrender.spans import MultiModalData, mm_token_type_ids
from mmrender.trajectory.engine_data import WeightVersionSpan

_KNOWN: Final = frozenset(
    {
        "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "n",
        "repetition_penalty", "presence_penalty", "frequency_penalty", "stop_token_ids", "logprobs",
        "allowed_token_ids", "logit_bias", "structured_outputs",
        # How an engine would write the tokens as text; tokens and logprobs do not depend on these.
        "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
    }
)  # fmt: skip
_GREEDY_BELOW: Final = 1e-5
_PAD_SETTINGS: Final = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")


class LocalBackend:
    """A Transformers model behind the interface of an inference server.

    The event loop stays free while it computes. A call that is cancelled ends before its next token. A
    backend of a directory can be pickled, and loads the model again on arrival, with the directory's weights.

    Args:
        model: A directory in hub layout, or a loaded Transformers model that gives logits.
        max_model_len: Bound of prompt and completion together; by default what the model was made for.
        dtype: Dtype that a directory's weights are loaded in, by torch's name.
        device: Where they are loaded to, by torch's name.
        tokenizer: Encodes the texts of `structured_outputs`; by default the directory's.
        weight_version: Name of the weights that the model has.

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
    ) -> None:
        if max_model_len is not None and max_model_len < 1:
            raise InputError(
                "is too small", where="max_model_len", expected="1 or more", got=str(max_model_len)
            )
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
        }
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, "mmrender-local")
        self._updates: list[tuple[Callable[[], None], Future[None]]] = []
        self._running: dict[str, threading.Event] = {}
        self._transport = NullTransport()

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
            MMRenderError: As for `RendererBackend.generate`.
        """
        if request.request_id in self._running:
            raise EngineStateError("a request of this id is in flight", where=request.request_id)
        loop = asyncio.get_running_loop()
        stopped = threading.Event()

        def tell(*sampled: Any) -> None:
            if on_tokens is not None:
                loop.call_soon_threadsafe(on_tokens, *sampled)

        self._running[request.request_id] = stopped
        try:
            return await loop.run_in_executor(self._worker, self._sample, request, stopped, tell)
        except asyncio.CancelledError:
            stopped.set()
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

    @property
    def model(self) -> Any:
        """The Transformers model, loaded at first use."""
        with self._lock:
            if self._model is None:
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
        params = _checked_params(request.sampling_params, config.vocab_size)
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
        sampler = TokenSampler(params, request.prompt_ids, frozenset(stop_ids - {None}), choices)
        return sampler, min(params["max_tokens"], limit - length)

    def _sample(self, request: EngineRequest, stopped: threading.Event, tell: OnTokens) -> EngineResponse:
        """Sample one request to its end, on the worker's thread."""
        import torch
        from transformers import GenerationConfig

        model, length = self.model, len(request.prompt_ids)
        sampler, room = self._sampler(request, model)
        versions = [self._updated_version()]

        def after_token(input_ids: Any, _: Any) -> Any:
            """Report the token; whether it is the last one."""
            tell(sampler.tokens[-1:], sampler.logprobs[-1:], None)
            versions.append(self._updated_version())
            return torch.full((1,), sampler.has_ended or stopped.is_set(), device=input_ids.device)

        if not sampler.has_ended and not stopped.is_set():
            ids = torch.tensor([list(request.prompt_ids)], device=model.device)
            # The model's own generation config may set penalties and the like.
            plain = copy.copy(model)
            plain.generation_config = GenerationConfig(pad_token_id=0)
            with torch.inference_mode(), _stray_pads(model, ids, request.multi_modal_data):
                plain.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=room,
                    logits_processor=[sampler],
                    stopping_criteria=[after_token],
                    **_media_arguments(model, request.multi_modal_data, length),
                )
        tokens = sampler.tokens
        reason: FinishReason = "stop" if sampler.has_ended else "length" if len(tokens) >= room else "abort"
        tell([], [], reason)
        spans: list[WeightVersionSpan] = []
        for version, sampled in itertools.groupby(versions[: len(tokens)]):
            start = spans[-1].stop if spans else 0
            spans.append(WeightVersionSpan(version, start, start + len(list(sampled))))
        # As vLLM: nothing for the model's own end of turn.
        named = set(tokens[-1:]).intersection(request.sampling_params.get("stop_token_ids") or ())
        return EngineResponse(
            completion_ids=tokens,
            logprobs=sampler.logprobs,
            finish_reason=reason,
            usage=Usage(length, len(tokens), 0),
            stop_reason=next(iter(named), None),
            weight_versions=tuple(spans),
            request_id=request.request_id,
            top_logprobs=tuple(sampler.top) or None,
        )


class _Choices(msgspec.Struct):
    """The one structured output that can be followed here."""

    choice: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]


def _checked_params(given: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    params = check_sampling_params(given)
    if unknown := params.keys() - _KNOWN:
        raise SamplingParameterError(
            "the local backend has no such sampling parameter",
            where=where(min(unknown)),
            remedy=f"It has: {', '.join(sorted(_KNOWN))}",
        )
    if "max_tokens" not in params:
        raise SamplingParameterError("is missing", where=where("max_tokens"), expected="1 or more")
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        outside = [token for token in map(int, params.get(name) or ()) if token >= vocab_size]
        if outside:
            raise SamplingParameterError(
                "a token id is outside the vocabulary",
                where=where(name),
                expected=f"0 to {vocab_size - 1}",
                got=str(outside[0]),
            )
    try:
        msgspec.convert(params.get("structured_outputs", {"choice": ["x"]}), _Choices)
    except msgspec.ValidationError as error:
        raise SamplingParameterError(
            "the local backend has no such structured output",
            where=where("structured_outputs"),
            expected="{'choice': [text, ...]}",
            got=repr(dict(params["structured_outputs"]))[:200],
        ) from error
    return params


class TokenSampler:
    """Chooses the tokens of one completion, as a logits processor of Transformers.

    Equal seeds and equal logits give equal tokens. The steps are those of Transformers, in the order of
    `vllm/v1/sample/sampler.py` of vLLM 0.32: a grammar masks the logits first; reported logprobs are the
    log-softmax of these; then come allowed tokens, `min_tokens`, `logit_bias`, penalties, temperature,
    `min_p`, `top_k` and `top_p`.

    Args:
        params: Checked sampling parameters.
        prompt_ids: The prompt, which `repetition_penalty` looks at.
        stop_ids: Tokens that end the completion; `min_tokens` forbids them at first.
        choices: Token sequences of which the completion is one, followed by a stop token.

    Attributes:
        tokens: What was sampled.
        logprobs: Of each of them.
        top: For each of them the likeliest tokens with their logprobs, likeliest first; where asked for.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        prompt_ids: Sequence[int],
        stop_ids: frozenset[int],
        choices: Sequence[Sequence[int]] | None = None,
    ) -> None:
        import torch
        from transformers.generation import logits_process

        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[tuple[tuple[int, float], ...]] = []
        self._stop_ids = stop_ids
        self._choices = choices
        self._num_top = params.get("logprobs") or 0
        self._prompt_ids = torch.tensor([list(prompt_ids)])
        self._generator = torch.Generator()
        if params.get("seed") is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params["seed"])
        temperature = float(params.get("temperature", 1.0))
        self._is_greedy = temperature < _GREEDY_BELOW
        only = logits_process.PrefixConstrainedLogitsProcessor
        self._grammar = only(lambda *_: self.allowed(), 1) if choices is not None else None
        self._steps: list[Callable[[Any, Any], Any]] = []
        if params.get("allowed_token_ids") is not None:
            self._steps.append(only(lambda *_: params["allowed_token_ids"], 1))
        if params.get("min_tokens") and stop_ids:
            self._steps.append(
                logits_process.MinNewTokensLengthLogitsProcessor(
                    len(prompt_ids), params["min_tokens"], sorted(stop_ids)
                )
            )
        if params.get("logit_bias"):
            # vLLM clamps as OpenAI does.
            biases = [
                [[int(token)], min(100.0, max(-100.0, float(bias)))]
                for token, bias in params["logit_bias"].items()
            ]
            self._steps.append(logits_process.SequenceBiasLogitsProcessor(biases))
        if params.get("repetition_penalty", 1.0) != 1.0:
            penalty = float(params["repetition_penalty"])
            self._steps.append(logits_process.RepetitionPenaltyLogitsProcessor(penalty))
        frequency, presence = params.get("frequency_penalty", 0.0), params.get("presence_penalty", 0.0)
        if frequency or presence:

            def penalize(ids: Any, logits: Any) -> Any:
                counts = ids[0, len(prompt_ids) :].bincount(minlength=logits.shape[-1])
                return logits - (frequency * counts + presence * (counts > 0))

            self._steps.append(penalize)
        if self._is_greedy:
            return
        if temperature != 1.0:
            self._steps.append(logits_process.TemperatureLogitsWarper(temperature))
        if params.get("min_p"):
            self._steps.append(logits_process.MinPLogitsWarper(float(params["min_p"])))
        if params.get("top_k", 0) > 0:
            self._steps.append(logits_process.TopKLogitsWarper(params["top_k"]))
        if params.get("top_p", 1.0) < 1.0:
            self._steps.append(logits_process.TopPLogitsWarper(float(params["top_p"])))

    def allowed(self) -> list[int] | None:
        """Return the tokens that continue a choice (none after its end); None where all are allowed."""
        if self._choices is None:
            return None
        count = len(self.tokens)
        fitting = [choice for choice in self._choices if list(choice[:count]) == self.tokens]
        following = {choice[count] for choice in fitting if len(choice) > count}
        return sorted(following.union(*(self._stop_ids for choice in fitting if len(choice) == count)))

    @property
    def has_ended(self) -> bool:
        """Whether a stop token was sampled, or a choice is complete."""
        return bool(self.tokens and self.tokens[-1] in self._stop_ids) or self.allowed() == []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Sample one token, and note its logprob and its alternatives.

        Args:
            input_ids: Prompt and sampled tokens, int64 of shape `(1, n)`.
            scores: The logits, float32 of shape `(1, vocabulary)`.

        Returns:
            `scores`, where the token's is infinite.
        """
        import torch

        logits, ids = scores.to("cpu"), input_ids
        if bool(logits.isnan().any()):
            raise EngineReplyError(
                "the model gave logits that are not numbers",
                where=f"token {len(self.tokens)} of the completion",
                expected="finite logits, or -inf",
                got=f"NaN for {int(logits.isnan().sum())} of {logits.shape[-1]} tokens",
                remedy="Look at the weights, or at the dtype, in which a value may be too large",
            )
        if self._steps:  # a prompt's stray pads are given to the model under another id
            sampled = input_ids[:, self._prompt_ids.shape[1] :].to("cpu")
            ids = torch.cat([self._prompt_ids, sampled], 1)
        if self._grammar is not None:
            logits = self._grammar(ids, logits)
        logprobs = logits[0].log_softmax(-1)
        for step in self._steps:
            logits = step(ids, logits)
        if not self._is_greedy:
            # The largest p / Exp(1) is distributed as p: one draw for each token of the vocabulary.
            logits = logits.softmax(-1) / torch.empty_like(logits).exponential_(generator=self._generator)
        best, likeliest = logits.max(-1)
        if not float(best) > -math.inf:  # probabilities of nothing are no numbers
            raise SamplingParameterError(
                "the parameters together leave no token to sample",
                where="sampling_params",
                remedy="Look at allowed_token_ids, logit_bias, min_tokens and structured_outputs",
            )
        token = int(likeliest)
        self.tokens.append(token)
        self.logprobs.append(float(logprobs[token]))
        if self._num_top:
            count = len(logprobs) if self._num_top < 0 else min(self._num_top, len(logprobs))
            top = logprobs.topk(count)
            self.top.append(tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
        scores[0, token] = math.inf
        return scores


def _media_arguments(model: Any, data: MultiModalData, length: int) -> dict[str, Any]:
    """Return the keyword arguments for the items of a prompt, joined in prompt order."""
    import torch

    if not data:
        return {}
    spans = data.spans(length)
    dtype: Any = str(model.dtype).removeprefix("torch.")
    joined: dict[str, list[Any]] = {}
    for span in spans:
        for name, tensor in span.item.tensors(dtype, framework="torch").items():
            joined.setdefault(name, []).append(tensor)
    media = {name: torch.cat(tensors).to(model.device) for name, tensors in joined.items()}
    arguments = inspect.signature(model.forward).parameters
    # Gemma 3 calls them otherwise, and lets the tokens of an image see one another.
    for name in {"mm_token_type_ids", "token_type_ids"} & set(arguments):
        media[name] = torch.from_numpy(mm_token_type_ids(spans, length))[None].to(model.device)
    if unknown := sorted(media.keys() - set(arguments)):
        raise EngineUnsupportedError(
            f"{type(model).__name__} does not take what the items hold",
            where="multi_modal_data",
            expected=f"some of {', '.join(sorted(arguments))}",
            got=", ".join(unknown),
        )
    return media


@contextmanager
def _stray_pads(model: Any, ids: Any, data: MultiModalData) -> Iterator[None]:
    """Let pad tokens without an image, which a model may sample, be ordinary tokens of a prompt.

    Transformers takes every pad token for an image's. So such a token is given to the model under another id,
    and the embedding that this looks up is replaced by the pad's own.
    """
    import torch

    pads: set[Any] = {getattr(model.config, name, None) for name in _PAD_SETTINGS} - {None}
    stray = torch.isin(ids, torch.tensor(list(pads), device=ids.device))
    for ranges in data.mm_placeholders.values():
        for place in ranges:
            embeds = torch.from_numpy(place.is_embed).to(ids.device)
            stray[0, place.offset : place.offset + place.length] &= ~embeds
    if not bool(stray.any()):
        yield
        return
    meant = ids[stray]
    ids[stray] = next(token for token in itertools.count() if token not in pads)
    embedding = model.get_input_embeddings()

    def embed_as_meant(_: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        if inputs[0].shape == ids.shape:
            output = output.clone()
            output[stray] = embedding.weight[meant].to(output.dtype)
        return output

    handle = embedding.register_forward_hook(embed_as_meant)
    try:
        yield
    finally:
        handle.remove()


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
