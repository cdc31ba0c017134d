"""`Engine`: one model on one server, as one renderer samples from it.

It is made once. Its wire, its transport and the model's tokens are looked up then, and its limit at the first
turn.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final, Unpack

import numpy as np

from mmrender.caching import cached_property
from mmrender.client.reply import check_response
from mmrender.client.resolve import BackendName, as_transport, resolve_backend
from mmrender.client.sampling import complete_sampling
from mmrender.client.server_facts import Process, facts_of
from mmrender.client.transport import Server
from mmrender.client.types import (
    EngineRequest,
    EngineResponse,
    Generation,
    OnTokens,
    Prompt,
    RendererBackend,
    RequestOptions,
)
from mmrender.content.ids import TokenIds
from mmrender.errors import (
    EngineConnectionError,
    EngineError,
    InputError,
    PlaceholderError,
    PromptTooLongError,
)
from mmrender.protocols import BridgeOptions, ParseOptions, RendererProtocol, has_vocabulary, is_multimodal
from mmrender.sidecar import MultiModalData, Repeat
from mmrender.tokens.rendered import RenderedTokens

_log = logging.getLogger("mmrender.client")
_SHORT: Final = 1024
"""Tokens of a completion that are parsed on the event loop, in 0.3 ms. Waking a thread takes as long."""
_PAUSE: Final = 10.0
"""Seconds after a failed look-up of the prompt limit before it is repeated."""


class ModelTokens:
    """The model's tokens, as far as a renderer, or None, knows them. Each is looked up once."""

    def __init__(self, renderer: RendererProtocol | None) -> None:
        self._renderer = renderer
        known = renderer if has_vocabulary(renderer) else None
        self._vocab_size = None if known is None else known.vocab_size
        self._token_id: Callable[[str], int | None] = lambda text: None
        if known is not None:
            self._token_id = cache(known.tokenizer.token_id)
        media = renderer.media if known is not None and is_multimodal(renderer) else None
        self._processor = None if media is None else media.processor

    def __reduce__(self) -> tuple[object, ...]:
        return ModelTokens, (self._renderer,)

    @cached_property
    def stop_ids(self) -> list[int] | None:
        """Tokens on which the model itself ends a completion."""
        return None if self._renderer is None else self._renderer.get_stop_token_ids()

    @cached_property
    def media_ids(self) -> frozenset[int]:
        """Tokens of media."""
        ids = map(self._token_id, self._processor.placeholder_tokens if self._processor else ())
        return frozenset(token_id for token_id in ids if token_id is not None)

    @cached_property
    def placeholder_ids(self) -> dict[str, int]:
        """Token that the template writes for an item, by modality."""
        texts = self._processor.placeholder if self._processor else {}
        ids = {modality: self._token_id(text) for modality, text in texts.items()}
        return {modality: token_id for modality, token_id in ids.items() if token_id is not None}

    def added_to(self, request: EngineRequest) -> EngineRequest:
        """Return a request with the model's tokens, unless it has them."""
        if self._renderer is None or request.vocab_size is not None:
            return request
        columns = () if self._vocab_size is None else request.multi_modal_data.mm_items.values()
        pieces = [piece for items in columns for item in items for piece in item.expansion]
        ids = {piece.token: self._token_id(piece.token) for piece in pieces if isinstance(piece, Repeat)}
        return replace(
            request,
            vocab_size=self._vocab_size,
            placeholder_ids=self.placeholder_ids,
            media_token_ids={text: token_id for text, token_id in ids.items() if token_id is not None},
            eos_token_ids=self.stop_ids,
        )


class Engine:
    """One model on one server, for one renderer. Making it asks the server nothing.

    Args:
        backend: The engine's wire: `"vllm"` (default), `"sglang"`, `"dynamo"`, `"local"`, or a backend
            object.
        server: The server, as for `as_transport`. None for a backend with a transport of its own, such as a
            model in this process.
        model: Name under which the server knows the model. For `"local"` its directory.
        renderer: Knows the model's tokens, and parses completions.
        max_prompt_len: The longest prompt, by default the server's limit.

    Raises:
        InputError: The backend is unknown, or `server` cannot be used.
    """

    def __init__(
        self,
        backend: RendererBackend | BackendName | None = None,
        server: Server | None = None,
        *,
        model: str = "",
        renderer: RendererProtocol | None = None,
        max_prompt_len: int | None = None,
    ) -> None:
        self.backend = resolve_backend(backend, model)
        self.transport = as_transport(getattr(self.backend, "transport", None) if server is None else server)
        self.model = model
        self.renderer = renderer
        self._max_prompt_len = max_prompt_len

    @cached_property
    def tokens(self) -> ModelTokens:
        """The model's tokens, as far as the renderer knows them."""
        return ModelTokens(self.renderer)

    async def max_prompt_len(self) -> int | None:
        """Return the maximum length of a prompt, asked once for each server. None if it does not say.

        A server that cannot say is asked again after a pause, and refuses long prompts itself meanwhile.
        """
        facts, key = facts_of(self.transport), ("limit", self.backend.name, self.model)
        if time.monotonic() < facts.limits_failed_at.get(key, 0.0) + _PAUSE:
            return None
        ask = partial(self.backend.resolve_max_prompt_len, self.model, self.transport)
        try:
            limit: int | None = await Process(self.transport, facts).ask_once(key, ask)
        except EngineConnectionError:
            raise
        except EngineError as error:
            now = time.monotonic()
            if now >= facts.limits_failed_at.get(key, 0.0) + _PAUSE:  # concurrent turns fail together
                _log.warning("prompts are not checked for length before they are sent: %s", error)
            facts.limits_failed_at[key] = now
            return None
        return limit

    async def sample(
        self,
        prompt: Prompt,
        sampling_params: Mapping[str, Any] | None = None,
        *,
        on_tokens: OnTokens | None = None,
        **options: Unpack[RequestOptions],
    ) -> EngineResponse:
        """Sample one completion, with arguments as of `generate`. A call that is cancelled is aborted.

        Raises:
            PromptTooLongError: The prompt is too long: seen before sending, or reported by the server.
            InputError: An option is unknown.
            MMRenderError: As for `RendererBackend.generate`.
        """
        known_options = RequestOptions.__annotations__
        if unknown := sorted(options.keys() - known_options.keys()):
            raise InputError("unknown option", where=unknown[0], expected=", ".join(known_options))
        count = len(prompt.ids)
        limit, room = self._max_prompt_len, None
        if limit is None and (limit := await self.max_prompt_len()) is not None:
            # The context holds prompt and completion, and a prompt leaves room for one token at least.
            room = limit + 1 - count
        if limit is not None and count > limit:
            raise PromptTooLongError(count, limit, where="prompt")
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        if "routed_experts_prompt_start" in given:
            given["routed_experts"] = True
        forbidden = sorted(self.tokens.media_ids) if given.pop("forbid_media_tokens", False) else []
        request = EngineRequest(
            model=self.model,
            prompt_ids=prompt.ids,
            sampling_params=complete_sampling(
                sampling_params, room=room, stop_token_ids=self.tokens.stop_ids or (), forbidden=forbidden
            ),
            request_id=os.urandom(16).hex(),
            multi_modal_data=prompt.data,
            forbidden_token_ids=forbidden,
            **given,
        )
        try:
            request = self.tokens.added_to(request)
            response = await self.backend.generate(request, self.transport, on_tokens=on_tokens)
            return check_response(response, request, where=self.backend.name)
        except (EngineError, PromptTooLongError) as error:
            has_length = isinstance(error, PromptTooLongError) and error.prompt_len is not None
            if has_length or not self.backend.is_overflow_error(error):
                raise
            raise PromptTooLongError(count, limit, where="prompt") from error

    async def turn(
        self,
        prompt: Prompt,
        sampling_params: Mapping[str, Any] | None = None,
        *,
        tools: Sequence[Any] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        on_tokens: OnTokens | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Sample one completion and parse it by the renderer, with arguments as of `generate`."""
        renderer = self.renderer
        if renderer is None:
            raise InputError("a completion cannot be parsed without a renderer", where="renderer")
        response = await self.sample(prompt, sampling_params, on_tokens=on_tokens, **options)
        # Many replies may come at once. Other tasks have their turn between the parsing of each.
        await asyncio.sleep(0)
        parsing: ParseOptions = {
            "tools": tools,
            "prompt_ids": prompt.ids,
            "chat_template_kwargs": template_arguments,
        }
        if len(response.completion_ids) > _SHORT and hasattr(renderer, "aparse_response"):
            parsed = await renderer.aparse_response(response.completion_ids, **parsing)
        else:
            parsed = renderer.parse_response(response.completion_ids, **parsing)
        structures = (sampling_params or {}).get("structured_outputs")
        reported = {name: getattr(response, name) for name in EngineResponse.__slots__}
        if response.finish_reason == "stop" and any(call.status == "ok" for call in parsed.tool_calls):
            reported["finish_reason"] = "tool_calls"
        return Generation(
            **reported,
            prompt_ids=prompt.ids,
            parsed=parsed,
            message=parsed.to_message(),
            multi_modal_data=prompt.data,
            prompt_attribution=prompt.attribution,
            response=response,
            restricted=tuple(sorted(structures)) if structures and not response.allowed else (),
        )

    def prompt(
        self,
        ids: TokenIds | None = None,
        data: MultiModalData | None = None,
        attribution: RenderedTokens | None = None,
    ) -> Prompt:
        """Return a prompt of given tokens, such as a bridge returns it, or of `attribution` alone.

        Raises:
            InputError: The attribution belongs to other tokens than `ids`.
            PlaceholderError: The tokens contain media, and the sidecar is missing.
        """
        if attribution is not None:
            # A rendering may be memoised, and the prompt's list is the caller's to change.
            token_ids = list(attribution.token_ids)
            if ids is not None and not np.array_equal(ids, token_ids):
                raise InputError(
                    "the attribution belongs to other tokens than the prompt's",
                    where="prompt_attribution",
                    expected=f"the {len(ids)} tokens of prompt_ids",
                    got=f"{len(token_ids)} tokens",
                )
            return Prompt(token_ids, attribution.multi_modal_data if data is None else data, attribution)
        token_ids = ids.tolist() if isinstance(ids, np.ndarray) else list(ids or ())
        if data is None:
            # Without a sidecar, an engine would answer as if no image were there.
            media = self.tokens.media_ids
            position = next((index for index, token in enumerate(token_ids) if token in media), None)
            if position is not None:
                raise PlaceholderError(
                    "the prompt holds media tokens, but comes without a sidecar",
                    where=f"prompt_ids[{position}]",
                    expected="multi_modal_data",
                    got=f"the token {token_ids[position]}",
                    remedy="Pass the sidecar. An empty MultiModalData() says that the model itself "
                    "sampled them",
                )
        return Prompt(token_ids, MultiModalData() if data is None else data, None)


async def bridge_turn(
    renderer: RendererProtocol,
    prompt_ids: TokenIds,
    completion_ids: TokenIds,
    new_messages: Sequence[Any],
    **options: Unpack[BridgeOptions],
) -> tuple[RenderedTokens | None, str]:
    """Append new messages to a sampled turn, off the event loop.

    Arguments and errors are as for `Renderer.bridge_to_next_turn`. If the first value is None, the second is
    the reason.
    """
    turn = prompt_ids, completion_ids, new_messages

    def bridge() -> tuple[RenderedTokens | None, str | None]:
        # The reason belongs to the thread that bridged.
        return renderer.bridge_to_next_turn(*turn, **options), renderer.why_not_bridged

    why = None
    if not hasattr(renderer, "abridge_to_next_turn"):
        bridged, why = await asyncio.to_thread(bridge)
    elif (bridged := await renderer.abridge_to_next_turn(*turn, **options)) is None:
        why = renderer.why_not_bridged
    return bridged, why or "the renderer gave no reason"
