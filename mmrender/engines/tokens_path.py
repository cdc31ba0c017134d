"""Completions in token space: the exact way, since nothing sampled is ever decoded and encoded again."""

import asyncio
from collections.abc import Sequence

from mmrender.client.types import EngineResponse, FinishReason, Usage
from mmrender.engines.continuation import Continuation, check_logprobs
from mmrender.engines.dispatch import Dispatcher, no_progress, within
from mmrender.engines.interface import InferenceEngineInterface, OnTokens
from mmrender.engines.work import Work
from mmrender.errors import EngineReplyError


class TokenCompleter:
    """Completes prompts, whatever pauses and failures fall into their time.

    Args:
        dispatcher: Sends single requests.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def complete(self, work: Work, *, timeout: float | None = None) -> EngineResponse:
        """Sample one completion.

        Raises:
            SamplingParameterError: There is no usable token budget.
            EngineTimeoutError: It was not finished in time.
            MMRenderError: An engine refused, or every attempt failed.
        """
        policy = self._dispatcher.policy
        asking = _Asking(work)
        continuation = asking.continuation
        route = self._dispatcher.route(work.session_id, work.image_ids)
        idle = 0
        async with within(timeout or policy.deadline, work.where):
            while continuation.finished is None:
                answer = await self._dispatcher.send(asking.ask, route)
                moved = continuation.finished is not None
                if isinstance(answer.value, EngineResponse):
                    moved = continuation.add(answer.value, ending=answer.aborted)
                if answer.aborted:
                    continuation.give_up()
                elif moved or answer.paused:
                    idle = 0
                else:
                    idle += 1
                    if idle >= policy.max_idle_aborts:
                        raise no_progress(policy, idle)
                    await asyncio.sleep(policy.backoff(idle))
                asking.show()
        asking.show()
        return continuation.result()


class _Asking:
    """The requests for one completion, and what of it has been shown to whoever listens."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.continuation = Continuation(work.prompt_ids, work.params)
        self._listener = work.on_tokens
        self._shown = 0

    async def ask(self, engine: InferenceEngineInterface) -> EngineResponse | None:
        """Make the next request; None where what a stream has shown is the whole completion.

        Raises:
            EngineReplyError: Tokens and logprobs of the reply do not fit together.
        """
        work, continuation = self._work, self.continuation
        if self._is_finished():  # by a request that failed behind its last token
            return None
        collapsed = None if work.collapsed_ids is None else continuation.next_ids(work.collapsed_ids)
        stream = None
        # Router choices come at the end of a stream, so that one that breaks off would lose its tokens' rows.
        if self._listener is not None and continuation.memoryless and not work.options.get("routed_experts"):
            stream = _Stream(self._listener, continuation.remaining)
        request = work.as_input(continuation.next_ids(), continuation.next_params(), collapsed, stream)
        try:
            output = await engine.generate(request)
        except BaseException as error:
            if stream is not None and (stream.ids or stream.finish_reason):  # it was shown, so it counts
                self._shown += len(stream.ids)
                continuation.add(stream.as_piece(len(work.prompt_ids)))
            if self._is_finished() and isinstance(error, Exception):
                return None
            raise
        piece = output["engine_responses"][0]
        continuation.check(piece)
        if stream is not None:
            self._shown += len(stream.ids)
        return piece

    def _is_finished(self) -> bool:
        return self.continuation.finished is not None

    def show(self) -> None:
        """Tell of tokens that were taken and not shown as they came."""
        continuation = self.continuation
        final = continuation.memoryless or continuation.finished is not None
        if self._listener is not None and final and self._shown < len(continuation.completion_ids):
            start = self._shown
            self._shown = len(continuation.completion_ids)
            self._listener(continuation.completion_ids[start:], continuation.logprobs[start:])


class _Stream:
    """Tokens of one request as they come, checked before they are shown.

    Args:
        listener: Whom they are shown to.
        asked: The most of them that there may be.
    """

    def __init__(self, listener: OnTokens, asked: int) -> None:
        self._listener = listener
        self._asked = asked
        self.finish_reason: FinishReason | None = None
        self.ids: list[int] = []
        self.logprobs: list[float] = []

    def __call__(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        check_logprobs(token_ids, logprobs)
        if len(self.ids) + len(token_ids) > self._asked:
            raise EngineReplyError(
                "the engine sampled more tokens than it was asked for",
                where="completion_ids",
                expected=f"at most {self._asked}",
                got=f"{len(self.ids) + len(token_ids)} or more",
            )
        self.ids += token_ids
        self.logprobs += logprobs
        self._listener(token_ids, logprobs)

    def ended(self, reason: FinishReason) -> None:
        """Take note that the completion has ended."""
        self.finish_reason = reason

    def as_piece(self, prompt_tokens: int) -> EngineResponse:
        reason = self.finish_reason or "abort"
        return EngineResponse(self.ids, self.logprobs, reason, Usage(prompt_tokens, len(self.ids)))
