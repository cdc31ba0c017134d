"""`generate`: render a conversation, sample one turn from an engine, parse it."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from mmrender.client.engine import Engine
from mmrender.client.resolve import BackendName
from mmrender.client.transport import Server
from mmrender.client.types import Generation, OnTokens, RendererBackend, RequestOptions
from mmrender.content.ids import TokenIds
from mmrender.errors import InputError
from mmrender.protocols import RendererProtocol, RenderOptions
from mmrender.sidecar import MultiModalData
from mmrender.tokens.rendered import RenderedTokens


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
    max_prompt_len: int | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    on_tokens: OnTokens | None = None,
    **options: Unpack[RequestOptions],
) -> Generation:
    """Sample one assistant turn from an engine. For many turns, make one `Engine` or `RendererClient`.

    A call that is cancelled is aborted on the engine.

    Args:
        client: Base URL of the server, a transport, or an object with `base_url` and `api_key` such as
            `openai.AsyncOpenAI`. A `LocalBackend` needs no server.
        renderer: A renderer, or a pool of them.
        messages: The conversation. Ignored if a prompt is passed.
        model: Name under which the server knows the model. For `"local"` its directory.
        backend: The engine: `"vllm"` (default), `"sglang"`, `"dynamo"`, `"local"`, or a backend object.
        prompt_ids: The prompt, placeholders widened, such as a bridge returns it.
        multi_modal_data: Its sidecar.
        prompt_attribution: Its `RenderedTokens`. Alone, it replaces messages, `prompt_ids` and
            `multi_modal_data`.
        tools: Tools that the model is offered.
        documents: Documents for templates that take them.
        continue_final_message: Whether the model goes on with the text of the last message instead of opening
            a turn, or the name of the field to go on with. The completion follows that text.
        sampling_params: In vLLM's names, whatever the engine. Without `max_tokens` a completion may fill the
            engine's context, or have `DEFAULT_MAX_TOKENS` if its length is unknown. The model's stop tokens
            are added. Other recommendations of its files are `renderer.sampling_defaults`, and are not
            applied. The member `extra` is a mapping of parameters that are sent unchecked.
        max_prompt_len: The longest prompt, by default the engine's limit, asked once for each server.
        template_arguments: Further template variables, such as `{"enable_thinking": False}`.
        on_tokens: Called with tokens as they arrive. See `OnTokens`.
        **options: Options of the request. See `RequestOptions`.

    Raises:
        PromptTooLongError: The prompt is too long: seen before sending, or reported by the engine.
        SamplingParameterError: The engine does not know a parameter, or its value.
        PlaceholderError: Tokens, ranges and items do not fit together.
        EngineError: The server could not be reached, refused, or returned an unusable answer.
        InputError: Another argument cannot be used.
        MMRenderError: The conversation cannot be rendered. See `Renderer.render`.
    """
    engine = Engine(backend, client, model=model, renderer=renderer, max_prompt_len=max_prompt_len)
    if prompt_ids is None and prompt_attribution is None:
        prompt_attribution = await render_prompt(
            renderer,
            messages,
            tools=tools,
            documents=documents,
            continue_final_message=continue_final_message,
            chat_template_kwargs=template_arguments,
        )
    return await engine.turn(
        engine.prompt(prompt_ids, multi_modal_data, prompt_attribution),
        sampling_params,
        tools=tools,
        template_arguments=template_arguments,
        on_tokens=on_tokens,
        **options,
    )


async def render_prompt(
    renderer: RendererProtocol,
    messages: Sequence[Any] | None,
    *,
    in_thread: bool = False,
    **options: Unpack[RenderOptions],
) -> RenderedTokens:
    """Render a prompt: with the generation prompt, unless the last message is to be continued.

    With `in_thread` a renderer without `arender`, too, leaves the event loop free.
    """
    if messages is None:
        raise InputError("the prompt is missing", where="messages", expected="messages, or prompt_ids")
    options.setdefault("add_generation_prompt", not options.get("continue_final_message"))
    if hasattr(renderer, "arender"):  # `isinstance` of a protocol takes far longer
        rendered: RenderedTokens = await renderer.arender(messages, **options)
        return rendered
    if in_thread:
        return await asyncio.to_thread(renderer.render, messages, **options)
    return renderer.render(messages, **options)
