"""Completions in text space, for engines that are asked on their own OpenAI routes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from mmrender.engines.dispatch import Dispatcher, no_progress, within
from mmrender.engines.interface import InferenceEngineInterface, RequestPayload
from mmrender.engines.openai_bodies import combined, image_urls, listed_prompts, opened
from mmrender.engines.text_continuation import TextContinuation
from mmrender.engines.text_kinds import ChatContinuation, CompletionContinuation
from mmrender.engines.text_stream import ChunkMerger, as_chunks
from mmrender.engines.together import produced, together
from mmrender.errors import InputError, MMRenderError


class TextCompleter:
    """Completes OpenAI requests, whatever pauses and failures fall into their time.

    Args:
        dispatcher: Sends single requests.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def chat(self, payload: RequestPayload) -> dict[str, Any]:
        """Answer a chat request."""
        body, session, headers = opened(payload)
        return await self._complete(ChatContinuation(body), session, headers, "messages")

    async def completion(self, payload: RequestPayload) -> dict[str, Any]:
        """Answer a completion request; several prompts are asked singly and put together in order."""
        body, session, headers = opened(payload)
        prompts = listed_prompts(body)
        if len(prompts) == 1:
            return await self._one(body, prompts[0], session, headers, 0)
        replies = await together(
            [self._one(body, prompt, session, headers, index) for index, prompt in enumerate(prompts)]
        )
        return combined(replies)

    async def _one(
        self, body: Mapping[str, Any], prompt: Any, session: Any, headers: Mapping[str, str], index: int
    ) -> dict[str, Any]:
        continuation = CompletionContinuation({**body, "prompt": prompt})
        return await self._complete(continuation, session, headers, f"prompt[{index}]")

    async def _complete(
        self, continuation: TextContinuation, session: Any, headers: Mapping[str, str], where: str
    ) -> dict[str, Any]:
        is_chat = isinstance(continuation, ChatContinuation)
        aborts = self._dispatcher.gate.aborts

        async def ask(engine: InferenceEngineInterface) -> bool:
            payload: RequestPayload = {"json": continuation.next_body(), "headers": headers}
            reply = await (engine.chat_completion if is_chat else engine.completion)(payload)
            return continuation.take(reply, ending=aborts != self._dispatcher.gate.aborts)

        await self._until_finished(continuation, ask, session, where)
        return continuation.result()

    # --- streams ---

    async def stream_chat(self, payload: RequestPayload) -> AsyncIterator[dict[str, Any]]:
        """Answer a chat request chunk by chunk, as the engine gives them."""
        body, session, headers = opened(payload)
        continuation = ChatContinuation(body)
        async for chunk in self._streamed(continuation, session, headers, "messages"):
            yield chunk

    async def stream_completion(self, payload: RequestPayload) -> AsyncIterator[dict[str, Any]]:
        """Answer a completion request of one prompt chunk by chunk."""
        body, session, headers = opened(payload)
        prompts = listed_prompts(body)
        if len(prompts) != 1:
            raise InputError("only one prompt can be streamed", where="prompt", got=f"{len(prompts)} prompts")
        continuation = CompletionContinuation({**body, "prompt": prompts[0]})
        async for chunk in self._streamed(continuation, session, headers, "prompt[0]"):
            yield chunk

    def _streamed(
        self, continuation: TextContinuation, session: Any, headers: Mapping[str, str], where: str
    ) -> AsyncIterator[dict[str, Any]]:
        if continuation.can_continue:

            async def produce(emit: Callable[[dict[str, Any]], None]) -> None:
                await self._relay(continuation, session, headers, where, emit)
        else:
            # What was shown cannot be taken back, and an abort would make it start over.
            async def produce(emit: Callable[[dict[str, Any]], None]) -> None:
                reply = await self._complete(continuation, session, headers, where)
                options = continuation.body.get("stream_options") or {}
                for chunk in as_chunks(reply, usage=bool(options.get("include_usage"))):
                    emit(chunk)

        return produced(produce)

    async def _relay(
        self,
        continuation: TextContinuation,
        session: Any,
        headers: Mapping[str, str],
        where: str,
        emit: Callable[[dict[str, Any]], None],
    ) -> None:
        is_chat = isinstance(continuation, ChatContinuation)
        merger = ChunkMerger(continuation)

        async def ask(engine: InferenceEngineInterface) -> bool:
            if continuation.finished is not None:  # by a request that failed behind its last token
                return True
            payload: RequestPayload = {"json": merger.begin(), "headers": headers}
            before = continuation.tokens
            stream = (engine.stream_chat_completion if is_chat else engine.stream_completion)(payload)
            try:
                async for chunk in stream:
                    for shown in merger.take(chunk):
                        emit(shown)
            except MMRenderError:
                for shown in merger.stop():  # its end was there
                    emit(shown)
                if continuation.finished is None:
                    raise
            for shown in merger.stop():
                emit(shown)
            return continuation.tokens > before or continuation.finished is not None

        await self._until_finished(continuation, ask, session, where)
        if not merger.closed:
            emit(merger.ended(continuation.finished or "abort"))
        for chunk in merger.end():
            emit(chunk)

    async def _until_finished(
        self,
        continuation: TextContinuation,
        ask: Callable[[InferenceEngineInterface], Awaitable[bool]],
        session: Any,
        where: str,
    ) -> None:
        policy = self._dispatcher.policy
        route = self._dispatcher.route(session, image_urls(continuation.body.get("messages")))
        idle = 0
        async with within(policy.deadline, where):
            while continuation.finished is None:
                answer = await self._dispatcher.send(ask, route)
                if answer.aborted:
                    continuation.give_up()
                elif answer.value or answer.paused:
                    idle = 0
                else:
                    idle += 1
                    if idle >= policy.max_idle_aborts:
                        raise no_progress(policy, idle)
                    await asyncio.sleep(policy.backoff(idle))
