"""`generate`: render, check, call, parse."""

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmrender.client.backend import EngineRequest, EngineResponse, RendererBackend
from mmrender.client.backends import BackendName, RendererTransport, resolve_backend, resolve_transport
from mmrender.client.collapse import can_collapse, collapse, media_token_ids_of, placeholder_ids_of
from mmrender.client.generation import Generation, finish_reason_of
from mmrender.client.limits import LIMITS
from mmrender.client.prompts import Prompt, TokenIds, given_prompt, is_async, rendered_prompt
from mmrender.client.sampling import check_sampling_params, with_max_tokens, with_stop_token_ids
from mmrender.client.transport import Transport
from mmrender.errors import EngineConnectionError, EngineError, PromptTooLongError
from mmrender.protocols import TurnRenderer
from mmrender.spans import MultiModalData
from mmrender.tokens.rendered import RenderedTokens

if TYPE_CHECKING:
    from mmrender.parsing import ParsedResponse

_log = logging.getLogger("mmrender.client")


async def generate(
    *,
    client: Any = None,
    renderer: TurnRenderer,
    messages: Sequence[Any] | None = None,
    model: str,
    backend: RendererBackend | BackendName | None = None,
    transport: RendererTransport | None = None,
    prompt_ids: TokenIds | None = None,
    multi_modal_data: MultiModalData | None = None,
    prompt_attribution: RenderedTokens | None = None,
    tools: Sequence[Any] | None = None,
    sampling_params: Mapping[str, Any] | None = None,
    cache_salt: str | None = None,
    priority: int | None = None,
    extra_headers: Mapping[str, str] | None = None,
    max_prompt_len: int | None = None,
    routed_experts: bool = False,
    routed_experts_prompt_start: int | None = None,
    template_arguments: Mapping[str, Any] | None = None,
) -> Generation:
    """Sample one assistant turn from an engine.

    A call that is cancelled is aborted on the engine.

    Args:
        client: Base URL of the server, a transport, or an object with `base_url` and `api_key` such as
            `openai.AsyncOpenAI`. A `LocalBackend` needs none.
        renderer: A renderer, which renders on the event loop, or a pool, which keeps it free.
        messages: The conversation; not looked at where a prompt is given.
        model: Name under which the server knows the model; for `"local"` its directory.
        backend: The engine: `"vllm"` (default), `"sglang"`, `"dynamo"`, `"local"`, or a backend object.
        transport: Another spelling of `backend`: `"vllm_generate"`, `"sglang_generate"` or `"dynamo_chat"`.
        prompt_ids: The prompt, placeholders widened, such as a bridge gives it.
        multi_modal_data: Its sidecar.
        prompt_attribution: What is known of its tokens, as `RenderedTokens`; alone it stands for all three.
        tools: Tools that the model is offered.
        sampling_params: In vLLM's names, whatever the engine. Without `max_tokens` a completion may fill the
            engine's context, or have `DEFAULT_MAX_TOKENS` where its length is not known. The model's stop
            tokens are added.
        cache_salt: Keeps the prefix cache of unlike requests apart.
        priority: Lower is served first, where the engine schedules by priority.
        extra_headers: HTTP headers of this call.
        max_prompt_len: The longest prompt; by default what the engine takes, asked once for each server.
        routed_experts: Ask for router choices.
        routed_experts_prompt_start: Ask for them, without those of the prompt before this position.
        template_arguments: Further template variables, such as `{"enable_thinking": False}`.

    Raises:
        PromptTooLongError: The prompt is too long: seen before sending, or said by the engine.
        SamplingParameterError: The engine does not know a parameter, or not such a value.
        PlaceholderError: Tokens, ranges and items do not fit together.
        EngineError: The server could not be reached, refused, or gave an answer that cannot be used.
        InputError: Another argument cannot be used.
        MMRenderError: The conversation cannot be rendered; see `Renderer.render`.
    """
    engine = resolve_backend(backend, transport, model)
    way = resolve_transport(client, engine)
    sampling = check_sampling_params(sampling_params or {})
    arguments = dict(template_arguments or {})
    if prompt_ids is None and prompt_attribution is None:
        prompt = await rendered_prompt(renderer, messages, tools, arguments)
    else:
        prompt = given_prompt(renderer, prompt_ids, multi_modal_data, prompt_attribution)
    limit = max_prompt_len
    room = None
    if limit is None:
        limit = await _known_limit(engine, model, way, asks_server=client is not None)
        # The context holds prompt and completion, and a prompt leaves room for one token at least.
        room = None if limit is None else limit + 1 - len(prompt.ids)
    if limit is not None and len(prompt.ids) > limit:
        raise PromptTooLongError(len(prompt.ids), limit, where="prompt")
    stop_ids = renderer.get_stop_token_ids()
    sampling = with_stop_token_ids(with_max_tokens(sampling, room), stop_ids)
    request = EngineRequest(
        model=model,
        prompt_ids=prompt.ids,
        sampling_params=sampling,
        request_id=uuid.uuid4().hex,
        multi_modal_data=prompt.data,
        cache_salt=cache_salt,
        priority=priority,
        extra_headers=dict(extra_headers or {}),
        vocab_size=getattr(renderer, "vocab_size", None),
        collapsed_ids=_collapsed(renderer, prompt),
        media_token_ids=media_token_ids_of(renderer, prompt.data),
        routed_experts=routed_experts or routed_experts_prompt_start is not None,
        routed_experts_prompt_start=routed_experts_prompt_start,
        eos_token_ids=stop_ids,
    )
    response = await _called(engine, request, way, limit)
    # Many replies may come at once; other tasks have their turn between the reading of each.
    await asyncio.sleep(0)
    parsed = await _parsed(renderer, response.completion_ids, tools, prompt.ids, arguments)
    return Generation(
        prompt_ids=prompt.ids,
        completion_ids=response.completion_ids,
        logprobs=response.logprobs,
        finish_reason=finish_reason_of(response, parsed),
        usage=response.usage,
        parsed=parsed,
        message=parsed.to_message(),
        multi_modal_data=prompt.data,
        prompt_attribution=prompt.attribution,
        response=response,
    )


async def _known_limit(
    engine: RendererBackend, model: str, transport: Transport, *, asks_server: bool
) -> int | None:
    """The engine's own limit; where it cannot be asked for, the engine will refuse what is too long."""
    if not asks_server:
        return await engine.resolve_max_prompt_len(model, transport)
    try:
        return await LIMITS.get(engine, model, transport)
    except EngineConnectionError:
        raise
    except EngineError as error:
        _log.warning("prompts are not checked for length before they are sent: %s", error)
        return None


def _collapsed(renderer: TurnRenderer, prompt: Prompt) -> list[int] | None:
    if not prompt.data:
        return None
    placeholders = placeholder_ids_of(renderer)
    if not can_collapse(prompt.data, placeholders):
        return None
    return collapse(prompt.ids, prompt.data, placeholders)


async def _called(
    engine: RendererBackend, request: EngineRequest, transport: Transport, limit: int | None
) -> EngineResponse:
    try:
        return await engine.generate(request, transport)
    except (EngineError, PromptTooLongError) as error:
        if isinstance(error, PromptTooLongError) and error.prompt_len is not None:
            raise
        if not engine.is_overflow_error(error):
            raise
        raise PromptTooLongError(len(request.prompt_ids), limit, where="prompt") from error


async def _parsed(
    renderer: TurnRenderer,
    completion_ids: Sequence[int],
    tools: Sequence[Any] | None,
    prompt_ids: Sequence[int],
    template_arguments: Mapping[str, Any],
) -> "ParsedResponse":
    options = {"tools": tools, "prompt_ids": prompt_ids, **template_arguments}
    if is_async(renderer):
        return await renderer.aparse_response(completion_ids, **options)
    return renderer.parse_response(completion_ids, **options)
