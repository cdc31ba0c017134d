"""What tests of sessions share: a gateway over an engine that follows a script, and agents that talk to it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kit import data_url, noise
from mmrender.client.transport import NullTransport
from mmrender.client.types import EngineResponse, Usage
from mmrender.content import normalize_messages
from mmrender.gateway.call import Answer, Call
from mmrender.gateway.gateway import Gateway
from mmrender.messages import Message
from mmrender.sidecar import MultiModalData


@dataclass
class Script:
    """An engine whose answer number n is "answer n", once `gate` is open. It raises `fault` once.

    `streamed` counts the requests for a stream.
    """

    renderer: Any
    asked: int = 0
    fault: BaseException | None = None
    running: int = 0
    streamed: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    prompts: list[tuple[list[int], MultiModalData]] = field(default_factory=list)
    newest: Any = None
    name = "script"

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def transport(self) -> NullTransport:
        return NullTransport()

    async def generate(self, request: Any, transport: Any, *, on_tokens: Any = None) -> EngineResponse:
        self.asked += 1
        self.running += 1
        self.streamed += on_tokens is not None
        number = self.asked
        try:
            await self.gate.wait()
            if self.fault is not None:
                fault, self.fault = self.fault, None
                raise fault
        finally:
            self.running -= 1
        self.newest = request
        self.prompts.append((list(request.prompt_ids), request.multi_modal_data))
        return self.completion(request, number)

    def completion(self, request: Any, number: int) -> EngineResponse:
        stop = self.renderer.get_stop_token_ids()[0]
        ids = [*self.renderer.tokenizer.encode(f"answer {number}"), stop]
        logprobs = [-0.5 - token / 1024 for token in ids]
        return EngineResponse(ids, logprobs, "stop", Usage(len(request.prompt_ids), len(ids)))

    async def resolve_max_prompt_len(self, model: str, transport: Any) -> int | None:
        return None

    def is_overflow_error(self, exc: BaseException) -> bool:
        return False

    def gateway(self, out: Path | None = None, **options: Any) -> Gateway:
        """A gateway over this engine."""
        return Gateway(self, self.renderer, model="m", out=out, **options)


def user(words: str, *pictures: int) -> Message:
    """A user's message with pictures, which are equal for equal numbers."""
    shown = [{"type": "image_url", "image_url": {"url": data_url(noise(each))}} for each in pictures]
    content = [*shown, {"type": "text", "text": words}] if pictures else words
    [message] = normalize_messages([{"role": "user", "content": content}])
    return message


def said(answer: Answer) -> Message:
    """The message with which an agent repeats an answer."""
    return Message(role="assistant", content=answer.content)


def ask(*messages: Message, **fields: Any) -> Call:
    """A call with these messages."""
    return replace(Call("chat", "m", tuple(messages)), **fields)


@dataclass
class Agent:
    """Talks to a session turn by turn."""

    session: Any
    messages: list[Message] = field(default_factory=list)

    async def turn(self, words: str, *pictures: int) -> Answer:
        self.messages.append(user(words, *pictures))
        [answer] = await self.session.answer(ask(*self.messages))
        self.messages.append(said(answer))
        return answer


def distinct_bytes(trajectories: Sequence[Any]) -> int:
    """Bytes of pixels, tokens and log-probabilities, each once for each trajectory."""
    numbers = sum(8 * len(step.completion_ids) for tree in trajectories for step in tree.steps)
    return numbers + sum(tree.nbytes for tree in trajectories)
