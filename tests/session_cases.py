"""What tests of sessions share: an engine that follows a script, and turns without templates."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from item_cases import patch_item
from mmrender.client.types import Usage
from mmrender.gateway.call import Answer, Call, Delta
from mmrender.gateway.gateway import Gateway
from mmrender.messages import ImagePart, Message, TextPart
from mmrender.sidecar import MultiModalData, PlaceholderRange
from mmrender.trajectory.conversation import without_sources

END, PAD, PLACES = 1, 2, 6


@dataclass
class Script:
    """Answers `number of the call: last text`, after `gate` opens. `fault` is raised once."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    fault: BaseException | None = None
    asked: int = 0
    running: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    async def say(self, words: str, emit: Callable[[str], None]) -> str:
        self.asked += 1
        said = f"{self.asked}: {words}"
        self.running += 1
        try:
            emit(said[:2])
            await asyncio.sleep(0)
            await self.gate.wait()
            if self.fault is not None:
                fault, self.fault = self.fault, None
                raise fault
            emit(said[2:])
            return said
        finally:
            self.running -= 1


def words_of(message: Message) -> str:
    parts = message.content if isinstance(message.content, tuple) else [TextPart(message.content or "")]
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def rendered(messages: Any) -> tuple[list[int], MultiModalData]:
    """A token for each character, six for each picture, and an end."""
    ids: list[int] = []
    places = []
    for message in messages:
        for part in message.content if isinstance(message.content, tuple) else ():
            if isinstance(part, ImagePart):
                places.append(
                    (PlaceholderRange(len(ids), PLACES), patch_item(64, 96, seed=int(part.source[-4:])))
                )
                ids += [PAD] * PLACES
        ids += [ord(letter) for letter in words_of(message)] + [END]
    return ids, MultiModalData.of(places)


async def take_turn(
    engine: Any,
    trajectory: Any,
    index: Any,
    call: Call,
    *,
    on_delta: Any,
    number: int,
    answer_id: str,
    **_: Any,
) -> Any:
    """Sample from a `Script` and record, as `mmrender.gateway.turn.take_turn` does."""
    said = await engine.say(
        words_of(call.messages[-1]), lambda text: on_delta(Delta(number, "content", text))
    )
    prompt, data = rendered(call.messages)
    ids = [ord(letter) for letter in said] + [END]
    logprobs = [-0.5] * len(ids)
    answer = Answer(
        id=answer_id,
        created=int(time.time()),
        step=len(trajectory),
        reasoning=None,
        content=said,
        calls=(),
        finish_reason="stop",
        stop=None,
        usage=Usage(len(prompt), len(ids)),
        token_ids=ids,
        logprobs=logprobs,
    )
    step = trajectory.append(
        prompt,
        ids,
        logprobs=logprobs,
        multi_modal_data=data,
        messages=[*map(without_sources, call.messages), Message(role="assistant", content=said)],
        extra={"gateway": {"response": answer_id}},
    )
    index.append(step.index)
    return step, answer


def new_index(steps: Any) -> list[int]:
    return [step.index for step in steps]


def gateway(script: Script, **options: Any) -> Gateway:
    """A gateway over a script."""
    from mmrender.client.engine import Engine

    class Scripted(Engine):
        say = staticmethod(script.say)

        def __init__(self) -> None:
            self.renderer = None

    return Gateway(Scripted(), None, take_turn=take_turn, new_index=new_index, **options)  # type: ignore[arg-type]


def user(words: str, *pictures: int) -> Message:
    parts = [*(ImagePart(f"data:image/png;{number:04}") for number in pictures), TextPart(words)]
    return Message(role="user", content=tuple(parts) if pictures else words)


def said(answer: Answer) -> Message:
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
