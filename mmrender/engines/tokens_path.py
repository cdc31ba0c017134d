"""Completions in token space: the exact way, since nothing sampled is ever decoded and encoded again."""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from mmrender.client.backend import EngineResponse
from mmrender.engines.continuation import Continuation
from mmrender.engines.dispatch import Dispatcher, no_progress, within
from mmrender.engines.interface import InferenceEngineInterface
from mmrender.engines.work import Work

OnPiece: TypeAlias = Callable[[EngineResponse], None]
"""Told of tokens as they are taken, in order, each once."""


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
        continuation = Continuation(work.prompt_ids, work.params)
        route = self._dispatcher.route(work.session_id, work.image_ids)
        idle = 0

        async def ask(engine: InferenceEngineInterface) -> EngineResponse:
            return await _ask(engine, work, continuation)

        async with within(timeout or policy.deadline, work.where):
            while continuation.finished is None:
                answer = await self._dispatcher.send(ask, route)
                moved = False
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
        return continuation.result()


async def _ask(engine: InferenceEngineInterface, work: Work, continuation: Continuation) -> EngineResponse:
    collapsed = None if work.collapsed_ids is None else continuation.next_ids(work.collapsed_ids)
    output = await engine.generate(
        work.as_input(continuation.next_ids(), continuation.next_params(), collapsed)
    )
    piece = output["engine_responses"][0]
    continuation.check(piece)
    return piece
