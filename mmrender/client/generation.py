"""`generate`: render, check the length, call the engine, parse.

Backends and servers are resolved here too, by name. What an engine takes, and what its reply must be, is the
backend's.
"""

import asyncio
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, Final, Literal, TypeAlias, TypeGuard, Unpack, cast
from weakref import WeakValueDictionary

import numpy as np

from mmrender.caching import LRUCache
from mmrender.client.limits import forbidding
from mmrender.client.placeholders import known_tokens, media_token_ids
from mmrender.client.sampling import complete_sampling
from mmrender.client.server_facts import prompt_limit
from mmrender.client.transport import Server, Transport, TransportConfig
from mmrender.client.types import (
    EngineRequest,
    Generation,
    OnTokens,
    Prompt,
    RendererBackend,
)
from mmrender.errors import EngineError, InputError, PlaceholderError, PromptTooLongError
from mmrender.protocols import AsyncRenderer, ParseOptions, RendererProtocol, RenderOptions
from mmrender.sidecar import MultiModalData
from mmrender.tokens.ids import TokenIds
from mmrender.tokens.rendered import RenderedTokens

BackendName: TypeAlias = Literal["vllm", "sglang", "dynamo", "local"]

_BACKENDS: Final = {
    "vllm": "VLLMBackend",
    "sglang": "SGLangBackend",
    "dynamo": "DynamoBackend",
    "local": "LocalBackend",
}
"""By an engine's name its backend, in the module of that name."""


async def generate(
    *,
    client: Server | None = None,
    renderer: RendererProtocol,
    messages: Sequence[Any] | None = None,
    model: str,
    backend: RendererBackend | BackendName | None = None,
    prompt_ids: TokenIds | None = None,
    multi_modal_data: MultiModalData | None = None,
    prompt_attribution: RenderedTokens | None = None,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Any] | None = None,
    continue_final_message: bool | str = False,
    sampling_params: Mapping[str, Any] | None = None,
    cache_salt: str | None = None,
    priority: int | None = None,
    extra_headers: Mapping[str, str] | None = None,
    extra_body: Mapping[str, Any] | None = None,
    max_prompt_len: int | None = None,
    routed_experts: bool = False,
    routed_experts_prompt_start: int | None = None,
    forbid_media_tokens: bool = False,
    template_arguments: Mapping[str, Any] | None = None,
    on_tokens: OnTokens | None = None,
) -> Generation:
    """Sample one assistant turn from an engine.

    A call that is cancelled is aborted on the engine.

    Args:
        client: Base URL of the server, a transport, or an object with `base_url` and `api_key` such as
            `openai.AsyncOpenAI`. A `LocalBackend` needs none.
        renderer: A renderer, which renders on the event loop, or a pool, which keeps the loop free.
        messages: The conversation; ignored where a prompt is given.
        model: Name under which the server knows the model; for `"local"` its directory.
        backend: The engine: `"vllm"` (default), `"sglang"`, `"dynamo"`, `"local"`, or a backend object.
        prompt_ids: The prompt, placeholders widened, such as a bridge gives it.
        multi_modal_data: Its sidecar.
        prompt_attribution: Its `RenderedTokens`. If given alone, it replaces messages, `prompt_ids` and
            `multi_modal_data`.
        tools: Tools that the model is offered.
        documents: Documents for templates that take them.
        continue_final_message: Whether the model goes on with the text of the last message instead of opening
            a turn, or the name of the field to go on with. The completion is what follows that text.
        sampling_params: In vLLM's names, whatever the engine. Without `max_tokens` a completion may fill the
            engine's context, or have `DEFAULT_MAX_TOKENS` where its length is unknown. The model's stop
            tokens are added; what else its files recommend is `renderer.sampling_defaults`, for whoever wants
            it. The member `extra` is a mapping of parameters that are sent unchecked.
        cache_salt: Separates the prefix caches of requests that must not share one.
        priority: Lower is served first, where the engine schedules by priority.
        extra_headers: HTTP headers of this call.
        extra_body: Members of the request body that this version does not know; sent unchecked.
        max_prompt_len: The longest prompt; by default the engine's limit, asked once for each server.
        routed_experts: Ask for router choices.
        routed_experts_prompt_start: Ask for them, without those of the prompt before this position.
        forbid_media_tokens: Never sample a token that stands for media, such as `<|image_pad|>`. A model that
            was trained does not; one with random weights does, and a trainer cannot take it.
        template_arguments: Further template variables, such as `{"enable_thinking": False}`.
        on_tokens: Called with tokens as they arrive; see `OnTokens`.

    Raises:
        PromptTooLongError: The prompt is too long: seen before sending, or reported by the engine.
        SamplingParameterError: The engine does not know a parameter, or not such a value.
        PlaceholderError: Tokens, ranges and items do not fit together.
        EngineError: The server could not be reached, refused, or gave an unusable answer.
        InputError: Another argument cannot be used.
        MMRenderError: The conversation cannot be rendered; see `Renderer.render`.
    """
    engine = resolve_backend(backend, model)
    # A backend that has a transport of its own, such as a model in this process, needs no server.
    own: Transport | None = getattr(engine, "transport", None) if client is None else None
    server = as_transport(client) if own is None else own
    if prompt_ids is None and prompt_attribution is None:
        prompt_attribution = await render_prompt(
            renderer,
            messages,
            tools=tools,
            documents=documents,
            continue_final_message=continue_final_message,
            chat_template_kwargs=template_arguments,
        )
    prompt = _given_prompt(renderer, prompt_ids, multi_modal_data, prompt_attribution)
    limit, room = max_prompt_len, None
    if limit is None and (limit := await prompt_limit(engine, model, server)) is not None:
        # The context holds prompt and completion, and a prompt leaves room for one token at least.
        room = limit + 1 - len(prompt.ids)
    if limit is not None and len(prompt.ids) > limit:
        raise PromptTooLongError(len(prompt.ids), limit, where="prompt")
    known = known_tokens(renderer, prompt.data)
    forbidden = sorted(media_token_ids(renderer)) if forbid_media_tokens else []
    request = EngineRequest(
        model=model,
        prompt_ids=prompt.ids,
        sampling_params=complete_sampling(
            forbidding(sampling_params, forbidden), room=room, stop_token_ids=known["eos_token_ids"] or ()
        ),
        request_id=uuid.uuid4().hex,
        multi_modal_data=prompt.data,
        cache_salt=cache_salt,
        priority=priority,
        extra_headers=dict(extra_headers or {}),
        extra_body=dict(extra_body or {}),
        routed_experts=routed_experts or routed_experts_prompt_start is not None,
        routed_experts_prompt_start=routed_experts_prompt_start,
        forbidden_token_ids=forbidden,
        **known,
    )
    try:
        response = await engine.generate(request, server, on_tokens=on_tokens)
    except (EngineError, PromptTooLongError) as error:
        has_length = isinstance(error, PromptTooLongError) and error.prompt_len is not None
        if has_length or not engine.is_overflow_error(error):
            raise
        raise PromptTooLongError(len(prompt.ids), limit, where="prompt") from error
    # Many replies may come at once; other tasks have their turn between the parsing of each.
    await asyncio.sleep(0)
    options: ParseOptions = {
        "tools": tools,
        "prompt_ids": prompt.ids,
        "chat_template_kwargs": template_arguments,
    }
    if is_async(renderer):
        parsed = await renderer.aparse_response(response.completion_ids, **options)
    else:
        parsed = renderer.parse_response(response.completion_ids, **options)
    held_to = (sampling_params or {}).get("structured_outputs")
    called = any(attempt.status == "ok" for attempt in parsed.tool_calls)
    return Generation(
        prompt_ids=prompt.ids,
        completion_ids=response.completion_ids,
        logprobs=response.logprobs,
        finish_reason="tool_calls" if called and response.finish_reason == "stop" else response.finish_reason,
        usage=response.usage,
        parsed=parsed,
        message=parsed.to_message(),
        multi_modal_data=prompt.data,
        prompt_attribution=prompt.attribution,
        response=response,
        restricted=tuple(sorted(held_to)) if held_to and not response.allowed else (),
    )


def resolve_backend(backend: RendererBackend | BackendName | None, model: str) -> RendererBackend:
    """Return a backend by itself or by its name; vLLM's by default.

    All that name one directory share a model. It is freed when none of them holds it and another is named.

    Args:
        backend: The backend, or its name.
        model: The model, which for `"local"` is its directory.

    Raises:
        InputError: The backend is unknown.
    """
    if backend is not None and not isinstance(backend, str):
        return backend
    name = backend or "vllm"
    if name not in _BACKENDS:
        raise InputError(
            "unknown backend",
            where="backend",
            expected=f"{', '.join(_BACKENDS)}, or an object such as VLLMBackend()",
            got=repr(name),
        )
    if name != "local":
        return _server_backend(name)
    key = os.getpid(), model  # a child process cannot use the model of its parent
    _newest[0] = found = _models.get(key) or _models.setdefault(key, _class_of(name)(model))
    return found


def _class_of(name: str) -> Callable[..., RendererBackend]:
    backend_class = getattr(import_module(f"mmrender.client.{name}"), _BACKENDS[name])
    return cast(Callable[..., RendererBackend], backend_class)


@cache
def _server_backend(name: str) -> RendererBackend:
    return _class_of(name)()


_models: WeakValueDictionary[tuple[int, str], RendererBackend] = WeakValueDictionary()
_newest: list[RendererBackend | None] = [None]
"""The model in this process that was named last. Others are freed with the last client that holds them."""


_shared: LRUCache[tuple[object, ...], Transport] = LRUCache(256)
# Headers that an SDK always sends, beside those that its user set.
_SDK_HEADERS: Final = ("accept", "authorization", "content-type", "user-agent", "x-stainless-")


def as_transport(client: Server | None) -> Transport:
    """Return the transport to a server; equal configurations share one and its connections.

    Args:
        client: A transport; a `TransportConfig`; a base URL; or an object with `base_url` and `api_key`, such
            as `openai.AsyncOpenAI`, whose `default_headers` are sent too. A trailing `/v1` of the URL is left
            out, since engines serve their own routes beside it. Timeouts and retries are those of
            `TransportConfig`, not the object's.

    Raises:
        InputError: `client` is something else, or its URL cannot be used.
        MissingDependencyError: The HTTP client is not installed.
    """
    # `isinstance` of a protocol costs as much as the rest of a call's checks.
    if all(hasattr(client, name) for name in ("request", "stream", "aclose", "base_url")):
        return cast(Transport, client)
    url = client if isinstance(client, str) else getattr(client, "base_url", None)
    if url is None:
        raise InputError(
            "cannot build a transport from this",
            where="client",
            expected="a base URL, a transport, or an object with base_url and api_key",
            got=type(client).__name__,
        )
    config = client if isinstance(client, TransportConfig) else None
    if config is None:
        key, headers = getattr(client, "api_key", None), getattr(client, "default_headers", None)
        config = TransportConfig(
            server_root(str(url)),
            api_key=key if isinstance(key, str) and key else None,
            headers={
                name: value
                for name, value in (headers if isinstance(headers, Mapping) else {}).items()
                if isinstance(value, str) and not name.lower().startswith(_SDK_HEADERS)
            },
        )
    from mmrender.client.http import HTTPTransport

    return _shared.get_or_compute(config.key, lambda: HTTPTransport(config))


def server_root(url: str) -> str:
    """Strip a trailing slash and `/v1` from a base URL."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def is_async(renderer: object) -> TypeGuard[AsyncRenderer]:
    """Whether a renderer works off the event loop; `isinstance` of a protocol takes far longer."""
    return hasattr(renderer, "arender") and hasattr(renderer, "aparse_response")


async def render_prompt(
    renderer: RendererProtocol,
    messages: Sequence[Any] | None,
    *,
    in_thread: bool = False,
    **options: Unpack[RenderOptions],
) -> RenderedTokens:
    """Render a prompt: with the generation prompt, unless the last message is to be continued.

    Args:
        renderer: A renderer; one with `arender` leaves the event loop free.
        messages: The conversation.
        in_thread: Whether a renderer without `arender`, too, leaves the event loop free.
        **options: Those of `Renderer.render`.
    """
    if messages is None:
        raise InputError("the prompt is missing", where="messages", expected="messages, or prompt_ids")
    options.setdefault("add_generation_prompt", not options.get("continue_final_message"))
    if is_async(renderer):
        return await renderer.arender(messages, **options)
    if in_thread:
        return await asyncio.to_thread(renderer.render, messages, **options)
    return renderer.render(messages, **options)


def _given_prompt(
    renderer: RendererProtocol,
    prompt_ids: TokenIds | None,
    data: MultiModalData | None,
    attribution: RenderedTokens | None,
) -> Prompt:
    """Take a prompt as it is, such as a bridge gives it."""
    if attribution is not None:
        # A rendering may be memoised, and the prompt's list is the caller's to change.
        ids = list(attribution.token_ids)
        if prompt_ids is not None and not np.array_equal(prompt_ids, ids):
            raise InputError(
                "the attribution belongs to other tokens than the prompt's",
                where="prompt_attribution",
                expected=f"the {len(prompt_ids)} tokens of prompt_ids",
                got=f"{len(ids)} tokens",
            )
        return Prompt(ids, attribution.multi_modal_data if data is None else data, attribution)
    ids = prompt_ids.tolist() if isinstance(prompt_ids, np.ndarray) else list(prompt_ids or ())
    if data is None:
        # Without a sidecar, an engine would answer as if no image were there.
        tokens = media_token_ids(renderer)
        found = next((index for index, token in enumerate(ids) if token in tokens), None)
        if found is not None:
            raise PlaceholderError(
                "the prompt holds media tokens, but comes without a sidecar",
                where=f"prompt_ids[{found}]",
                expected="multi_modal_data",
                got=f"the token {ids[found]}",
                remedy="Pass the sidecar; an empty MultiModalData() says that the model itself sampled them",
            )
    return Prompt(ids, MultiModalData() if data is None else data, None)
