"""vLLM engines of this process as backends: `vllm.LLM`, and `AsyncLLM`.

Their prompts and images are as for `RenderedTokens.to_vllm_prompt`: vLLM widens placeholders itself, and the
prompt that it reports must be ours, token for token.

Clips go to `AsyncLLM` as tensors. vLLM's renderer makes a prompt with silence of the clips' lengths, whose
tokens, names, dtypes and shapes must be ours, and then the clips' own tensors take the place of the silence.
"""

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Final

import numpy as np
import pybase64

from mmrender.client.exchange import check_request
from mmrender.client.reply import (
    LogprobEntry,
    PromptDetails,
    ReportedUsage,
    ReportedVersion,
    check_prompt_seen,
    only,
    response_of,
)
from mmrender.client.sampling import spell_in_process
from mmrender.client.transport import NullTransport, Transport
from mmrender.client.types import EngineRequest, EngineResponse, OnTokens, RendererBackend
from mmrender.client.vllm_fields import collate_items, item_tensors
from mmrender.client.vllm_images import dense_spans
from mmrender.client.vllm_render import compare_item
from mmrender.errors import EngineReplyError, EngineUnsupportedError, PromptTooLongError
from mmrender.media.encoded import encoded_image
from mmrender.media.vllm_items import decode_mm_kwargs_item, encode_mm_kwargs_item
from mmrender.messages import Modality
from mmrender.sidecar import MediaSpan, collapse

_ARRIVAL_SECONDS: Final = 0.002
"""Batching window of `LLM`: a batch begins when no request has arrived for this long."""


class AsyncLLMBackend(RendererBackend):
    """An `AsyncLLM`, which batches requests itself. A call that is cancelled ends in the engine.

    Args:
        engine: The engine.
        lora_request: The adapter to sample with.
    """

    name: ClassVar[str] = "vllm"
    takes: ClassVar[Sequence[Modality]] = ("image", "audio")

    def __init__(self, engine: Any, *, lora_request: Any = None) -> None:
        self.engine = engine
        self.transport = NullTransport()
        self._lora_request = lora_request

    async def generate(
        self, request: EngineRequest, transport: Transport | None = None, *, on_tokens: OnTokens | None = None
    ) -> EngineResponse:
        """Sample one completion; `transport` is ignored. `on_tokens` is called once, at the end.

        Raises:
            EngineUnsupportedError: A video, or for `LLM` a clip.
            EngineMismatchError: vLLM made another prompt of the media, or processes clips differently.
            MMRenderError: As for `RendererBackend.generate`.
        """
        limit = await self.resolve_max_prompt_len("")
        prompt, params, spans = await asyncio.to_thread(asked, request, limit, takes=self.takes)
        clips = [span for span in spans if span.modality == "audio"]
        if clips:
            (made,) = await self.engine.renderer.render_cmpl_async([prompt], skip_mm_cache=True)
            prompt = await asyncio.to_thread(_with_clips, made, clips, request)
        output = await self._output(request, prompt, params)
        response = answered(request, output, where=f"{type(self.engine).__name__}.generate")
        if on_tokens is not None:
            on_tokens(response.completion_ids, response.logprobs, response.finish_reason)
        return response

    async def _output(self, request: EngineRequest, prompt: dict[str, Any], params: Any) -> Any:
        outputs = self.engine.generate(
            prompt,
            params,
            request.request_id,
            lora_request=self._lora_request,
            priority=request.priority or 0,
        )
        return only([output async for output in outputs], where="AsyncLLM.generate")

    async def resolve_max_prompt_len(self, model: str, transport: Transport | None = None) -> int:
        """Return the longest prompt: one token less than the context. `model` is ignored."""
        return int(self.engine.model_config.max_model_len) - 1


class LLMBackend(AsyncLLMBackend):
    """A `vllm.LLM`. Requests that wait together are one batch. Later ones wait until it ends.

    A call that is cancelled goes on in the engine. It takes no clips, since `LLM` processes them itself.

    Args:
        engine: The engine.
        lora_request: The adapter to sample with.
    """

    takes = ("image",)

    def __init__(self, engine: Any, **options: Any) -> None:
        super().__init__(engine, **options)
        self._waiting: list[tuple[Any, Any, asyncio.Future[Any]]] = []
        self._lock = threading.Lock()
        self._is_queued = False
        # A thread begins on the first GPU, whichever this one uses.
        self._worker = ThreadPoolExecutor(1, "mmrender-vllm", _use_device, (_device(),))

    async def _output(self, request: EngineRequest, prompt: dict[str, Any], params: Any) -> Any:
        waiting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.append((prompt, params, waiting))
            is_queued, self._is_queued = self._is_queued, True
        if not is_queued:
            self._worker.submit(self._work)
        return await waiting

    def _work(self) -> None:
        """Sample all requests that wait, as one batch."""
        count = -1
        while count < len(self._waiting):
            count = len(self._waiting)
            time.sleep(_ARRIVAL_SECONDS)
        with self._lock:
            batch, self._waiting, self._is_queued = self._waiting, [], False
        prompts, params = [prompt for prompt, _, _ in batch], [each for _, each, _ in batch]
        try:
            outputs: Sequence[Any] = self.engine.generate(
                prompts, params, use_tqdm=False, lora_request=self._lora_request
            )
        except Exception as error:  # noqa: BLE001 - raised in the callers
            outputs = [error] * len(batch)
        for (_, _, waiting), output in zip(batch, outputs, strict=True):
            try:
                waiting.get_loop().call_soon_threadsafe(_settle, waiting, output)
            except RuntimeError:  # the loop has closed, so the caller is gone
                continue

    async def aclose(self) -> None:
        """End the thread. The engine stays the caller's."""
        await asyncio.to_thread(self._worker.shutdown)


def _settle(waiting: asyncio.Future[Any], output: Any) -> None:
    if waiting.done():
        return
    if isinstance(output, Exception):
        waiting.set_exception(output)
    else:
        waiting.set_result(output)


def _device() -> int | None:
    """Return the GPU of this thread, or None if there is none in use."""
    import torch

    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _use_device(device: int | None) -> None:
    if device is not None:
        import torch

        torch.cuda.set_device(device)


def _with_clips(made: dict[str, Any], clips: Sequence[MediaSpan], request: EngineRequest) -> dict[str, Any]:
    """Return a prompt that vLLM made of silence, with the tensors of clips in its place.

    Raises:
        EngineMismatchError: vLLM made another prompt, or has other tensors.
    """
    from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    where = "AsyncLLM.renderer"
    check_prompt_seen(made["prompt_token_ids"], request, where=where)
    encoder, decoder = MsgpackEncoder(size_threshold=1 << 62), MsgpackDecoder(t=MultiModalKwargsItem)
    items, hashes = [], []
    silences = zip(dense_spans(clips), made["mm_kwargs"]["audio"], strict=True)
    for span, silence in silences:
        served = decode_mm_kwargs_item(pybase64.b64encode(encoder.encode(silence)[0]))
        form = compare_item(span.item, served, False, where)
        (item,) = collate_items(form.layout, [item_tensors(span.item, form)])
        items.append(decoder.decode(pybase64.b64decode(encode_mm_kwargs_item(item))))
        hashes.append(form.mm_hash(span.item))
    kwargs = MultiModalKwargsItems({**made["mm_kwargs"], "audio": items})
    return {**made, "mm_kwargs": kwargs, "mm_hashes": {**made["mm_hashes"], "audio": hashes}}


def asked(
    request: EngineRequest, max_prompt_len: int, *, takes: Sequence[Modality] = ("image",)
) -> tuple[dict[str, Any], Any, Sequence[MediaSpan]]:
    """Return the prompt and the sampling parameters of a request in vLLM's classes, and its media.

    Clips are silent.

    Raises:
        PromptTooLongError: The prompt is too long, which would fail a whole batch.
        EngineUnsupportedError: A medium that is not one of `takes`.
        MMRenderError: The prompt, its sidecar or a parameter cannot be used.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    ids, spans = check_request(request, takes=takes)
    if len(ids) > max_prompt_len:
        raise PromptTooLongError(len(ids), max_prompt_len, where="prompt_ids")
    prompt: dict[str, Any] = {
        "prompt_token_ids": collapse(ids.tolist(), request.multi_modal_data, request.placeholder_ids)
    }
    if request.cache_salt is not None:
        prompt["cache_salt"] = request.cache_salt
    for span in spans:
        if span.modality == "audio":
            rate, count = span.item.size
            medium: Any = np.zeros(count, np.float32), rate
        else:
            medium = encoded_image(span.item).image
        prompt.setdefault("multi_modal_data", {}).setdefault(span.modality, []).append(medium)
        prompt.setdefault("multi_modal_uuids", {}).setdefault(span.modality, []).append(span.item.identity)
    spelled = spell_in_process(request.sampling_params)
    if structures := spelled.get("structured_outputs"):
        spelled["structured_outputs"] = StructuredOutputsParams(**structures)
    params = SamplingParams(**{"logprobs": 0, **spelled, "output_kind": RequestOutputKind.FINAL_ONLY})
    return prompt, params, spans


def answered(request: EngineRequest, output: Any, *, where: str) -> EngineResponse:
    """Read vLLM's `RequestOutput`, checked as the reply of a server.

    Raises:
        EngineReplyError: It is unusable.
        EngineMismatchError: vLLM saw another prompt.
    """
    completion = only(output.outputs, where=where)
    if request.routed_experts:
        raise EngineUnsupportedError(
            "router choices are not read from an engine in this process", where=where
        )
    ids, reported = list(map(int, completion.token_ids)), completion.logprobs
    if reported is None:
        raise EngineReplyError("the engine sent no logprobs", where=where)
    entries = [_entry(token, row) for token, row in zip(ids, reported, strict=True)]
    versions = [
        ReportedVersion(str(span.version), span.start, span.end) for span in completion.weight_versions or ()
    ]
    return response_of(
        request,
        where=where,
        ids=ids,
        entries=entries,
        reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        seen=output.prompt_token_ids,
        usage=ReportedUsage(prompt_tokens_details=PromptDetails(getattr(output, "num_cached_tokens", None))),
        versions=versions,
        request_id=output.request_id,
    )


def _entry(token: int, row: Mapping[int, Any]) -> LogprobEntry:
    """Return the logprob of a sampled token with its alternatives, likeliest first."""
    ranked = sorted(row.items(), key=lambda pair: pair[1].rank or 0)
    others = [LogprobEntry(float(each.logprob), other) for other, each in ranked]
    return LogprobEntry(float(row[token].logprob), token, top_logprobs=others)
