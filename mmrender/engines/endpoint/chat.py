"""Chat in tokens: rendered here, sampled from ids, read here."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from mmrender.client.generation import is_async, rendered_prompt
from mmrender.client.sampling import complete_sampling
from mmrender.client.types import EngineResponse, Prompt
from mmrender.engines.client import InferenceEngineClient
from mmrender.engines.endpoint.deltas import DeltaWriter
from mmrender.engines.endpoint.replies import ChatHead, choice_of, chunk_of, logprobs_of, usage_of
from mmrender.engines.endpoint.requests import ChatRequest
from mmrender.engines.endpoint.settings import ServerSettings
from mmrender.engines.interface import OnTokens
from mmrender.engines.seeds import seeded
from mmrender.engines.together import produced, together
from mmrender.errors import PromptTooLongError, SamplingParameterError
from mmrender.parsing import ParsedResponse
from mmrender.protocols import RendererProtocol


class _Turn(NamedTuple):
    """What the choices of one request have in common."""

    head: ChatHead
    request: ChatRequest
    prompt: Prompt
    session: Hashable | None


class TokenChat:
    """Answers chat requests over a client that samples from token ids.

    Args:
        client: Samples.
        renderer: Renders and reads.
        settings: Model name and defaults.
    """

    def __init__(self, client: InferenceEngineClient, renderer: Any, settings: ServerSettings) -> None:
        self._client = client
        self._renderer = renderer
        self._settings = settings

    async def reply(self, request: ChatRequest, session: Hashable | None) -> dict[str, Any]:
        """Answer in one piece."""
        head = ChatHead(self._settings.model, int(time.time()))
        prompt = await self._prompt(request)
        params = await self._params(request, prompt)
        responses = await together([self._sampled(request, prompt, each, session) for each in params])
        parses = await together([self._read(request, prompt, each.completion_ids) for each in responses])
        choices = [
            choice_of(index, request, response, parsed, self._renderer.decode)
            for index, (response, parsed) in enumerate(zip(responses, parses, strict=True))
        ]
        more = {"prompt_token_ids": prompt.ids} if request.wants_token_ids else {}
        return head.reply("chat.completion", choices=choices, usage=usage_of(responses), **more)

    def stream(self, request: ChatRequest, session: Hashable | None) -> AsyncIterator[dict[str, Any]]:
        """Answer chunk by chunk."""
        head = ChatHead(self._settings.model, int(time.time()))

        async def produce(emit: Callable[[dict[str, Any]], None]) -> None:
            prompt = await self._prompt(request)
            params = await self._params(request, prompt)
            turn = _Turn(head, request, prompt, session)
            choices = [self._stream_choice(turn, index, each, emit) for index, each in enumerate(params)]
            responses = await together(choices)
            if request.stream_usage:
                emit(head.reply("chat.completion.chunk", choices=[], usage=usage_of(responses)))

        return produced(produce)

    async def _stream_choice(
        self,
        turn: "_Turn",
        index: int,
        params: Mapping[str, Any],
        emit: Callable[[dict[str, Any]], None],
    ) -> EngineResponse:
        head, request, prompt, session = turn
        writer = DeltaWriter(
            lambda ids: self._parse(request, prompt, ids), has_tools=request.tools is not None
        )
        first = chunk_of(head, index, {"role": "assistant", "content": ""})
        if request.wants_token_ids and index == 0:
            first["prompt_token_ids"] = prompt.ids
        emit(first)

        def on_tokens(
            token_ids: Sequence[int],
            logprobs: Sequence[float],
            top: Sequence[Sequence[tuple[int, float]]] | None = None,
        ) -> None:
            for delta in writer.add(token_ids):
                emit(chunk_of(head, index, delta))
            if request.wants_logprobs or request.wants_token_ids:
                emit(self._tokens_chunk(turn, index, token_ids, logprobs, top))

        if request.wants_alternatives:  # which come with whole completions only
            response = await self._sampled(request, prompt, params, session)
            on_tokens(response.completion_ids, response.logprobs, response.top_logprobs)
        else:
            response = await self._sampled(request, prompt, params, session, on_tokens)
        parsed = await self._read(request, prompt, response.completion_ids)
        for delta in writer.end(parsed):
            emit(chunk_of(head, index, delta))
        last = choice_of(index, request, response, parsed, self._renderer.decode)
        emit(chunk_of(head, index, {}, None, last["finish_reason"]))
        return response

    def _tokens_chunk(
        self,
        turn: "_Turn",
        index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        top: Sequence[Sequence[tuple[int, float]]] | None,
    ) -> dict[str, Any]:
        """What was asked to be told of the tokens themselves."""
        request = turn.request
        told = None
        if request.wants_logprobs:
            told = logprobs_of(token_ids, logprobs, self._renderer.decode, top)
        return chunk_of(turn.head, index, {}, told, token_ids=token_ids if request.wants_token_ids else None)

    # --- steps ---

    async def _prompt(self, request: ChatRequest) -> Prompt:
        arguments = request.template_arguments
        renderer = self._renderer
        if is_async(renderer):
            return await rendered_prompt(
                cast(RendererProtocol, renderer), request.messages, request.tools, arguments
            )
        rendered = await asyncio.to_thread(
            self._renderer.render,
            request.messages,
            tools=request.tools,
            add_generation_prompt=True,
            **arguments,
        )
        return Prompt(rendered.token_ids, rendered.multi_modal_data, rendered)

    async def _params(self, request: ChatRequest, prompt: Prompt) -> list[Mapping[str, Any]]:
        params = {**self._settings.sampling_defaults, **request.params}
        limit = await self._client.max_prompt_len()
        if limit is not None and len(prompt.ids) > limit:
            raise PromptTooLongError(len(prompt.ids), limit, where="messages")
        if params.get("max_tokens") is None:
            params["max_tokens"] = self._budget(limit, len(prompt.ids))
        return seeded(
            complete_sampling(params, stop_token_ids=self._renderer.get_stop_token_ids()), request.count
        )

    def _budget(self, limit: int | None, prompt_tokens: int) -> int:
        if self._settings.default_max_tokens is not None:
            return self._settings.default_max_tokens
        if limit is None:
            raise SamplingParameterError(
                "the request names no budget, and the engine does not say how long its context is",
                where="max_tokens",
            )
        return limit + 1 - prompt_tokens

    async def _sampled(
        self,
        request: ChatRequest,
        prompt: Prompt,
        params: Mapping[str, Any],
        session: Hashable | None,
        on_tokens: OnTokens | None = None,
    ) -> EngineResponse:
        return await self._client.complete(
            prompt.ids,
            params,
            multi_modal_data=prompt.data,
            session_id=session,
            cache_salt=request.cache_salt,
            priority=request.priority,
            on_tokens=on_tokens,
        )

    def _parse(self, request: ChatRequest, prompt: Prompt, ids: Sequence[int]) -> ParsedResponse:
        parsed: ParsedResponse = self._renderer.parse_response(
            ids, tools=request.tools, prompt_ids=prompt.ids, **request.template_arguments
        )
        return parsed

    async def _read(self, request: ChatRequest, prompt: Prompt, ids: Sequence[int]) -> ParsedResponse:
        return self._parse(request, prompt, ids)
