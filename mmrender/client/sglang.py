"""`SGLangBackend`: SGLang's `POST /generate`.

Over HTTP SGLang takes images only encoded, and widens placeholders itself. So the prompt goes out with one
placeholder for each image, and the prompt that comes back must be ours, token for token. Facts were read from
SGLang 0.5.23's sources and seen on a running server.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from mmrender.client.backend import EngineRequest, EngineResponse
from mmrender.client.checks import Placed, check_prompt, check_sidecar
from mmrender.client.collapse import collapse
from mmrender.client.item_checks import check_data_url
from mmrender.client.off_loop import read_off_loop
from mmrender.client.sampling import where as parameter
from mmrender.client.sglang_errors import overflow_error
from mmrender.client.sglang_reply import read_reply
from mmrender.client.spelling import translate
from mmrender.client.transport import Transport
from mmrender.errors import (
    EngineError,
    EngineReplyError,
    EngineStatusError,
    EngineTimeoutError,
    EngineUnsupportedError,
    PlaceholderError,
    PromptTooLongError,
    SamplingParameterError,
)
from mmrender.media.item import encoded_image

_ABORT_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class SGLangBackend:
    """SGLang over HTTP.

    SGLang reports the logprobs of what it sampled from: unlike vLLM's they are taken after the division by
    `temperature` (and before `top_p`, `top_k` and `min_p`), unless the server runs with
    `SGLANG_RETURN_ORIGINAL_LOGPROB=1`.

    Attributes:
        routed_experts_shape: `(layers, experts of a token)` of the model, which SGLang does not say. Needed
            where router choices are asked for.
        deterministic: The server runs with `--enable-deterministic-inference`. Others ignore seeds, so a seed
            is then refused.
        low_priority_values_first: The server runs with `--schedule-low-priority-values-first`. By default
            SGLang serves high values first, and the sign of a priority is turned.
    """

    routed_experts_shape: tuple[int, int] | None = None
    deterministic: bool = False
    low_priority_values_first: bool = False

    @property
    def name(self) -> str:
        """`sglang`."""
        return "sglang"

    async def generate(self, request: EngineRequest, transport: Transport) -> EngineResponse:
        """Sample one completion.

        A call that is cancelled or times out is aborted on the server, by its `request_id`.

        Raises:
            PromptTooLongError: The server says that the prompt is too long.
            SamplingParameterError: SGLang does not know a parameter, would ignore it, or has no room for it.
            PlaceholderError: Tokens, ranges and items do not fit together.
            EngineMismatchError: The server made another prompt of it than the renderer.
            EngineUnsupportedError: A video, or router choices that the server does not give.
            EngineError: The server could not be reached, refused, or gave an answer that cannot be used.
        """
        body = await self._body(request)
        try:
            reply = await transport.request("POST", "/generate", json=body, headers=request.extra_headers)
        except (asyncio.CancelledError, EngineTimeoutError):
            await _abort(request.request_id, transport)
            raise
        except EngineStatusError as error:
            overflow = overflow_error(error, body["sampling_params"]["max_new_tokens"])
            if overflow is None:
                raise
            raise overflow from error
        return await read_off_loop(
            reply.body, lambda: read_reply(reply.body, request, self.routed_experts_shape)
        )

    async def resolve_max_prompt_len(self, model: str, transport: Transport) -> int | None:
        """Return the longest prompt: one token less than `max_req_input_len`, which already is too long.

        It lies some tokens below the model's context length, which `/v1/models` has.

        Raises:
            EngineError: The server could not be asked.
        """
        reply = await transport.request("GET", "/server_info")
        try:
            limit = msgspec.json.decode(reply.body).get("max_req_input_len")
        except (msgspec.DecodeError, AttributeError) as error:
            raise EngineReplyError(
                "the server's answer is not to be understood", where="GET /server_info", got=str(error)
            ) from error
        return limit - 1 if isinstance(limit, int) else None

    def is_overflow_error(self, exc: BaseException) -> bool:
        """Whether the server refused a prompt, or prompt and completion together, as too long."""
        if isinstance(exc, EngineStatusError):
            return overflow_error(exc, 1) is not None
        return isinstance(exc, PromptTooLongError)

    async def _body(self, request: EngineRequest) -> dict[str, Any]:
        ids = check_prompt(request.prompt_ids, request.vocab_size)
        placed = check_sidecar(ids, request.multi_modal_data, token_ids=request.media_token_ids)
        spelled = translate(request.sampling_params, "sglang")
        self._check_sampling(request.sampling_params)
        body: dict[str, Any] = {
            "input_ids": list(request.prompt_ids),
            "rid": request.request_id,
            "stream": False,
            "sampling_params": {"skip_special_tokens": False, "no_stop_trim": True, **spelled.sampling},
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "return_text_in_logprobs": False,
            "return_prompt_token_ids": True,
            **spelled.request,
            **self._options(request),
        }
        if placed:
            body["input_ids"] = _collapsed_ids(request, placed)
            # Encoding takes tens of milliseconds for an image that was not sent before.
            body["image_data"] = await asyncio.to_thread(_image_data, placed)
        return body

    def _check_sampling(self, params: Mapping[str, Any]) -> None:
        if params.get("max_tokens") is None:
            raise SamplingParameterError(
                "is missing, and SGLang would stop after 128 tokens",
                where=parameter("max_tokens"),
                expected="an integer of 1 or more",
            )
        if params.get("seed") is not None and not self.deterministic:
            raise SamplingParameterError(
                "SGLang ignores seeds unless it runs with --enable-deterministic-inference",
                where=parameter("seed"),
                remedy="Start it so, and say it with SGLangBackend(deterministic=True)",
            )
        if (params.get("logprobs") or 0) < 0:
            raise SamplingParameterError(
                "SGLang does not report the whole vocabulary",
                where=parameter("logprobs"),
                expected="0 or more",
                got=str(params["logprobs"]),
            )

    def _options(self, request: EngineRequest) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if request.cache_salt is not None:
            options["cache_salt"] = request.cache_salt
        if request.priority is not None:
            options["priority"] = request.priority if self.low_priority_values_first else -request.priority
        if request.routed_experts:
            if self.routed_experts_shape is None:
                raise EngineUnsupportedError(
                    "SGLang gives router choices without their shape",
                    where="routed_experts",
                    remedy="Name it with SGLangBackend(routed_experts_shape=(layers, experts of a token))",
                )
            options["return_routed_experts"] = True
            options["routed_experts_start_len"] = request.routed_experts_prompt_start or 0
        return options


def _collapsed_ids(request: EngineRequest, placed: Sequence[Placed]) -> list[int]:
    """The prompt with one placeholder for each image, and no other token that would be taken for one."""
    collapsed = request.collapsed_ids
    if collapsed is None:
        collapsed = collapse(request.prompt_ids, request.multi_modal_data)
    saved = sum(entry.range.length - 1 for entry in placed)
    position = placed[0].start
    expected = len(request.prompt_ids) - saved
    if len(collapsed) != expected:
        raise PlaceholderError(
            "the prompt with one placeholder for each image has another length",
            where="collapsed_ids",
            expected=str(expected),
            got=str(len(collapsed)),
        )
    placeholder = collapsed[position]
    count = sum(token == placeholder for token in collapsed)
    if count != len(placed):
        raise PlaceholderError(
            "SGLang takes every placeholder token for an image",
            where="collapsed_ids",
            expected=f"{len(placed)} of the token {placeholder}, one for each image",
            got=str(count),
            remedy="A placeholder that the model itself sampled cannot be sent along with images",
        )
    return list(collapsed)


def _image_data(placed: Sequence[Placed]) -> list[str]:
    for entry in placed:
        if entry.modality != "image":
            raise EngineUnsupportedError(
                f"SGLang is sent images only, and this is of modality {entry.modality!r}", where=entry.where
            )
    return [
        check_data_url(encoded_image(entry.item).data_url, where=f"image_data[{index}]")
        for index, entry in enumerate(placed)
    ]


async def _abort(request_id: str, transport: Transport) -> None:
    """Tell the server to stop sampling; it also does so by itself, some seconds after a disconnect."""
    call = transport.request(
        "POST", "/abort_request", json={"rid": request_id}, timeout=_ABORT_SECONDS, idempotent=True
    )
    try:
        # A second cancellation must not keep the server sampling.
        await asyncio.shield(asyncio.ensure_future(call))
    except EngineError:
        return
