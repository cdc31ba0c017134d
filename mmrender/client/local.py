"""`LocalBackend`: a Transformers model in this process, for demonstrations, tests and audits.

It takes the tokens and pixels that a server would be sent, through the model's own `generate`. Logprobs are
vLLM's by default: of the raw logits, before temperature, penalties and biases. Requests run one after another
on a thread, so equal seeds give equal tokens whatever else is running.
"""

import asyncio
import itertools
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, cast

import msgspec
from msgspec import Meta

from mmrender.client.placeholders import check_placeholders, check_prompt
from mmrender.client.sampling import check_sampling_params, where
from mmrender.client.transport import Reply, Transport
from mmrender.client.types import EngineRequest, EngineResponse, FinishReason, OnTokens, Usage
from mmrender.errors import (
    EngineStateError,
    EngineUnsupportedError,
    InputError,
    MissingDependencyError,
    ModelError,
    PromptTooLongError,
    SamplingParameterError,
)
from mmrender.model.files import find_model
from mmrender.model.tokenizer import Tokenizer
from mmrender.spans import MultiModalData
from mmrender.tokens.rendered import mm_token_type_ids
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
        dtype: In which a directory's weights are loaded, by torch's name.
        device: Where to, by torch's name.
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
        self._directory = Path(model) if isinstance(model, str | os.PathLike) else None
        self._model: Any = None if self._directory is not None else model
        self._options: dict[str, Any] = {
            "max_model_len": max_model_len,
            "dtype": dtype,
            "device": device,
            "tokenizer": tokenizer,
            "weight_version": weight_version,
        }
        self._tokenizer = tokenizer
        self._weight_version = weight_version
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, "mmrender-local")
        self._updates: list[tuple[Iterable[tuple[str, Any]], str, Future[None]]] = []
        self._running: dict[str, threading.Event] = {}
        self._transport = NullTransport()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._directory is None:
            raise EngineStateError(
                "a backend around a loaded model cannot be sent to another process",
                remedy="Make it with the model's directory",
            )
        return partial(LocalBackend, str(self._directory), **self._options), ()

    # --- what `generate` asks of a backend ---

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

    # --- control ---

    @property
    def model(self) -> Any:
        """The Transformers model, loaded at first use."""
        with self._lock:
            if self._model is None:
                self._model = load_model(
                    str(self._directory), self._options["dtype"], self._options["device"]
                )
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
        aborted = self._running.get(request_id)
        if aborted is not None:
            aborted.set()
        return aborted is not None

    def abort_all(self) -> int:
        """End every request before its next token, and return how many there were."""
        return sum(self.abort(request_id) for request_id in list(self._running))

    def update_weights(self, weights: Iterable[tuple[str, Any]], version: str) -> None:
        """Replace parameters between two tokens; requests go on with them, and say so in `weight_versions`.

        Args:
            weights: Names as in the model's `state_dict`, and tensors of the same shapes.
            version: Name of the weights from then on.

        Raises:
            ModelError: A name or a shape is not the model's. Nothing was changed.
        """
        future: Future[None] = Future()
        self._updates.append((weights, version, future))
        self._worker.submit(self._apply_updates)  # unless a request in flight does it before
        future.result()

    def _apply_updates(self) -> str:
        """Carry out waiting updates, on the worker's thread; return the weights' name."""
        while self._updates:
            weights, version, future = self._updates.pop(0)
            try:
                _load_weights(self.model, weights)
                self._weight_version = version
                future.set_result(None)
            except BaseException as error:  # noqa: BLE001 - whoever updates gets it
                future.set_exception(error)
        return self._weight_version

    def _limit(self, model: Any) -> int:
        made_for = int(model.config.get_text_config().max_position_embeddings)
        return min(self._options["max_model_len"] or made_for, made_for)

    def _sampler(self, request: EngineRequest) -> "tuple[TokenSampler, int]":
        """Check a request; return its sampler and the most tokens that its completion may have."""
        model = self.model
        if request.routed_experts:
            raise EngineUnsupportedError("the local backend does not record router choices")
        vocab_size = int(model.config.get_text_config().vocab_size)
        params = _checked_params(request.sampling_params, vocab_size)
        limit, length = self._limit(model), len(request.prompt_ids)
        if length >= limit:
            raise PromptTooLongError(length, limit - 1)
        check_placeholders(check_prompt(request.prompt_ids, vocab_size), request, only_images=False)
        stop_ids = set(params.get("stop_token_ids") or ())
        if not params.get("ignore_eos"):
            eos_ids = getattr(model.generation_config, "eos_token_id", None)
            if eos_ids is None:
                eos_ids = getattr(model.config.get_text_config(), "eos_token_id", None)
            stop_ids.update(eos_ids if isinstance(eos_ids, list | tuple) else [eos_ids])
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
        room = min(params["max_tokens"], limit - length)
        return TokenSampler(params, request.prompt_ids, frozenset(stop_ids - {None}), choices), room

    def _sample(self, request: EngineRequest, stopped: threading.Event, tell: OnTokens) -> EngineResponse:
        """Sample one request to its end, on the worker's thread."""
        import torch
        from transformers import GenerationConfig

        sampler, room = self._sampler(request)
        model, prompt_len = self.model, len(request.prompt_ids)
        reason: FinishReason | None = (
            "stop" if sampler.allowed() == [] else "abort" if stopped.is_set() else None
        )
        versions = [self._apply_updates()]

        def choose(_: Any, scores: Any) -> Any:
            token = sampler.choose(scores[0].to("cpu", torch.float32, copy=True))
            return torch.full_like(scores, -math.inf).index_fill_(
                1, torch.tensor([token], device=scores.device), 0.0
            )

        def is_done(input_ids: Any, _: Any) -> Any:
            nonlocal reason
            if sampler.tokens[-1] in sampler.stop_ids or sampler.allowed() == []:
                reason = "stop"
            elif len(sampler.tokens) >= room:
                reason = "length"
            elif stopped.is_set():
                reason = "abort"
            tell(sampler.tokens[-1:], sampler.logprobs[-1:], reason)
            versions.append(self._apply_updates())
            return torch.full((1,), reason is not None, device=input_ids.device)

        if reason is None:
            ids = torch.tensor([list(request.prompt_ids)], device=model.device)
            media = _media_arguments(model, request.multi_modal_data, prompt_len)
            # The model's own generation config may set penalties and the like, which are undone here.
            plain = GenerationConfig().to_dict()
            changed = model.generation_config.to_diff_dict() if model.generation_config is not None else {}
            settings = {
                name: plain[name] for name in changed if name in plain and name != "transformers_version"
            }
            settings |= {"use_cache": True, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            with torch.inference_mode(), _stray_pads(model, ids, request.multi_modal_data):
                model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=room,
                    logits_processor=[choose],
                    stopping_criteria=[is_done],
                    **settings,
                    **media,
                )
        tokens, last = sampler.tokens, sampler.tokens[-1:]
        spans: list[WeightVersionSpan] = []
        for version, sampled in itertools.groupby(versions[: len(tokens)]):
            start = spans[-1].stop if spans else 0
            spans.append(WeightVersionSpan(version, start, start + len(list(sampled))))
        named = request.sampling_params.get("stop_token_ids") or ()
        return EngineResponse(
            completion_ids=tokens,
            logprobs=sampler.logprobs,
            finish_reason=reason or "length",
            usage=Usage(prompt_len, len(tokens), 0),
            # As vLLM: nothing for the model's own end of turn.
            stop_reason=last[0] if reason == "stop" and last and last[0] in named else None,
            weight_versions=tuple(spans),
            request_id=request.request_id,
            top_logprobs=tuple(sampler.top) if request.sampling_params.get("logprobs") else None,
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
    if "structured_outputs" in params:
        try:
            msgspec.convert(params["structured_outputs"], _Choices)
        except msgspec.ValidationError as error:
            raise SamplingParameterError(
                "the local backend has no such structured output",
                where=where("structured_outputs"),
                expected="{'choice': [text, ...]}",
                got=repr(dict(params["structured_outputs"]))[:200],
            ) from error
    return params


class TokenSampler:
    """Chooses the tokens of one completion. Equal seeds and equal logits give equal tokens.

    The order of steps, and what reported logprobs are computed from, follow `vllm/v1/sample/sampler.py` of
    vLLM 0.32: a grammar masks the logits first; logprobs are the log-softmax of these; then come allowed
    tokens, `min_tokens`, `logit_bias`, penalties, temperature, `min_p`, `top_k` and `top_p`.

    Args:
        params: Checked sampling parameters.
        prompt_ids: The prompt, which `repetition_penalty` looks at.
        stop_ids: Tokens that end the completion; `min_tokens` forbids them at first.
        choices: Token sequences of which the completion is one, followed by a stop token.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        prompt_ids: Sequence[int],
        stop_ids: frozenset[int],
        choices: Sequence[Sequence[int]] | None = None,
    ) -> None:
        import torch

        self.params = params
        self.stop_ids = stop_ids
        self._choices = choices
        self._generator = torch.Generator()
        if params.get("seed") is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params["seed"])
        self._prompt_ids = sorted(set(prompt_ids))
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[tuple[tuple[int, float], ...]] = []

    def allowed(self) -> list[int] | None:
        """Return the tokens that continue a choice (none after its end); None where all are allowed."""
        if self._choices is None:
            return None
        count = len(self.tokens)
        fitting = [choice for choice in self._choices if list(choice[:count]) == self.tokens]
        following = {choice[count] for choice in fitting if len(choice) > count}
        return sorted(following.union(*(self.stop_ids for choice in fitting if len(choice) == count)))

    def choose(self, logits: Any) -> int:
        """Sample one token, and note its logprob and its alternatives, likeliest first.

        Args:
            logits: float32 of shape `(vocabulary,)` on the CPU; changed.
        """
        allowed = self.allowed()
        if allowed is not None:
            _keep_only(logits, allowed)
        logprobs = logits.log_softmax(-1)
        token = self._sampled(logits)
        self.tokens.append(token)
        self.logprobs.append(float(logprobs[token]))
        count = self.params.get("logprobs") or 0
        best = logprobs.topk(len(logprobs) if count < 0 else min(count, len(logprobs)))
        self.top.append(tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
        return token

    def _sampled(self, logits: Any) -> int:
        import torch

        params = self.params
        self._adjust(logits)
        likeliest = int(logits.argmax())
        if logits[likeliest] == -math.inf:
            raise SamplingParameterError(
                "the parameters together leave no token to sample",
                where="sampling_params",
                remedy="Look at allowed_token_ids, logit_bias, min_tokens and structured_outputs",
            )
        temperature = params.get("temperature", 1.0)
        if temperature < _GREEDY_BELOW:
            return likeliest
        logits = logits / temperature
        if params.get("min_p"):
            logits[logits < logits.max() + math.log(params["min_p"])] = -math.inf
        top_k, top_p = params.get("top_k", 0), params.get("top_p", 1.0)
        if 0 < top_k < len(logits) or top_p < 1.0:
            ordered, places = logits.sort()
            if 0 < top_k < len(logits):
                ordered[ordered < ordered[-top_k].clone()] = -math.inf
            if top_p < 1.0:
                outside = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
                outside[-1] = False
                ordered[outside] = -math.inf
            logits.scatter_(0, places, ordered)
        noise = torch.empty_like(logits).exponential_(generator=self._generator)
        # The largest p / Exp(1) is distributed as p: one draw a token of the vocabulary, no cumulative sum.
        return int((logits.softmax(-1) / noise).argmax())

    def _adjust(self, logits: Any) -> None:
        """Apply in place what may change even the likeliest token."""
        params, seen = self.params, sorted(set(self.tokens))
        if params.get("allowed_token_ids") is not None:
            _keep_only(logits, params["allowed_token_ids"])
        if len(self.tokens) < params.get("min_tokens", 0):
            logits[sorted(self.stop_ids)] = -math.inf
        for token, bias in (params.get("logit_bias") or {}).items():
            logits[int(token)] += min(100.0, max(-100.0, bias))  # vLLM clamps as OpenAI does
        penalty = params.get("repetition_penalty", 1.0)
        if penalty != 1.0:
            repeated = sorted({*self._prompt_ids, *seen})
            values = logits[repeated]
            logits[repeated] = (values / penalty).where(values > 0, values * penalty)
        frequency, presence = params.get("frequency_penalty", 0.0), params.get("presence_penalty", 0.0)
        if seen and (frequency or presence):
            counts = logits.new_tensor([self.tokens.count(token) for token in seen])
            logits[seen] -= frequency * counts + presence


def _keep_only(logits: Any, tokens: Sequence[int]) -> None:
    kept = logits[list(tokens)]
    logits.fill_(-math.inf)
    logits[list(tokens)] = kept


# --- the model ---


def load_model(directory: str | os.PathLike[str], dtype: str, device: str) -> Any:
    """Load weights and configuration from a directory in hub layout, in evaluation mode.

    Raises:
        MissingDependencyError: torch or Transformers is not installed.
        ModelError: Transformers cannot load the model.
    """
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
        from transformers.utils import logging
    except ImportError as error:
        package, extra = ("torch", "torch") if "torch" in str(error.name) else ("transformers", "hf")
        raise MissingDependencyError.of_extra(package, extra, "the local backend") from error
    has_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # it would be drawn into whatever the host shows
    try:
        config = AutoConfig.from_pretrained(directory)
        is_multimodal = type(config) in AutoModelForImageTextToText._model_mapping
        kind = AutoModelForImageTextToText if is_multimodal else AutoModelForCausalLM
        model = kind.from_pretrained(directory, config=config, dtype=getattr(torch, dtype))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            "Transformers cannot load the model", where=str(directory), got=str(error)
        ) from error
    finally:
        if has_bar:
            logging.enable_progress_bar()
    return model.to(device).eval()


def _load_weights(model: Any, weights: Iterable[tuple[str, Any]]) -> None:
    import torch

    own = dict(model.state_dict())
    given = dict(weights)
    for name, value in given.items():
        if name not in own:
            raise ModelError("the model has no such parameter", where=name)
        if own[name].shape != value.shape:
            expected, got = str(list(own[name].shape)), str(list(value.shape))
            raise ModelError("the parameter has another shape", where=name, expected=expected, got=got)
    with torch.no_grad():
        for name, value in given.items():
            own[name].copy_(value)


def _media_arguments(model: Any, data: MultiModalData, length: int) -> dict[str, Any]:
    """Return the keyword arguments for the items of a prompt, joined in prompt order."""
    import inspect

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
    """Let pad tokens that stand for no image, which a model may sample, be ordinary tokens of a prompt.

    Transformers takes every pad token for an image's. So such a token is given to the model under another id,
    and the embedding that this looks up is replaced by the pad's own.
    """
    import torch

    found = (getattr(model.config, name, None) for name in _PAD_SETTINGS)
    pad_ids = {pad for pad in found if isinstance(pad, int)}
    flat = ids[0]
    stray = torch.isin(flat, torch.tensor(sorted(pad_ids), device=flat.device))
    for ranges in data.mm_placeholders.values():
        for place in ranges:
            window = slice(place.offset, place.offset + place.length)
            stray[window] &= ~torch.from_numpy(place.is_embed).to(stray.device)
    if not bool(stray.any()):
        yield
        return
    meant = flat[stray]
    flat[stray] = next(token for token in itertools.count() if token not in pad_ids)
    embedding = model.get_input_embeddings()

    def embed_as_meant(_: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        if inputs[0].shape != ids.shape:
            return output
        output = output.clone()
        output[0, stray] = embedding.weight[meant].to(output.dtype)
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

    async def request(self, method: str, path: str, **options: Any) -> Reply:
        """Refuse, as `stream`."""
        return cast(Reply, self.stream(method, path))

    async def aclose(self) -> None:
        """Do nothing."""
