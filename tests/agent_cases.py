"""Answers, recorded requests, and official clients that talk to a protocol without a network."""

import base64
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2
import msgspec

from kit import blocks, encoded
from mmrender.client.types import Usage
from mmrender.gateway.call import Answer, AnswerCall, Call, Delta
from mmrender.gateway.reading import SAMPLING
from mmrender.gateway.writing import AgentProtocol
from mmrender.messages import Message, ToolCall

PICTURE = base64.b64encode(encoded(blocks(0, 8, 8))).decode()
PICTURE_URL = f"data:image/png;base64,{PICTURE}"

LOOK = AnswerCall("call_A1", "look", '{"at": 3, "why":"café"}')
GO = AnswerCall("call_A2", "go", '{"d":null,"b":1e3}')


def answer(
    content: str = "  Four legs.\n", *, id: str = "aB3" * 8, calls: Sequence[AnswerCall] = (), **fields: Any
) -> Answer:
    """An answer of the gateway."""
    return Answer(
        **{
            "id": id,
            "created": 1_790_000_000,
            "step": 0,
            "reasoning": None,
            "content": content,
            "calls": tuple(calls),
            "finish_reason": "tool_calls" if calls else "stop",
            "stop": None,
            "usage": Usage(100, 7, 64),
            "token_ids": (5, 6),
            "logprobs": (-0.5, -1.5),
            **fields,
        }
    )


ANSWERS = {
    "text": answer(),
    "empty": answer(""),
    "thought": answer(reasoning=" Let me\nlook. "),
    "only thought": answer("", reasoning="Hm"),
    "call": answer("", calls=[LOOK]),
    "all": answer("I look, and go. 😀", reasoning="Two at once.", calls=[LOOK, GO]),
    "cut": answer("Once upon", finish_reason="length"),
    "cut in thought": answer("", reasoning="Once upon", finish_reason="length"),
}


def message_of(answer: Answer) -> Message:
    """The canonical message of an answer."""
    calls = tuple(ToolCall(call.name, msgspec.json.decode(call.arguments), call.id) for call in answer.calls)
    content = answer.content if answer.content or not calls else None
    return Message(role="assistant", content=content, reasoning_content=answer.reasoning, tool_calls=calls)


def deltas(answers: Sequence[Answer], *, size: int = 3, share: float = 1.0) -> Iterator[Delta]:
    """The answers in pieces of some characters, reasoning first. A share of each text comes before the end."""
    for index, each in enumerate(answers):
        for field, text in (("reasoning", each.reasoning or ""), ("content", each.content)):
            sent = text[: int(len(text) * share)]
            for begin in range(0, len(sent), size):
                yield Delta(index, field, sent[begin : begin + size])
            if share < 1:
                break


class Wire:
    """A server in place of the network: it reads requests with a protocol and answers as it is told."""

    def __init__(self, protocol: AgentProtocol, answers: Sequence[Answer] = (), **pieces: Any) -> None:
        self.protocol = protocol
        self.answers = list(answers)
        self.pieces = pieces
        self.calls: list[Call] = []
        self.failure: tuple[int, str, str] | None = None
        self.fails_in_stream = False

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        body = msgspec.json.decode(request.content)
        call = self.protocol.read(body, dict(request.headers))
        self.calls.append(call)
        if self.failure and not self.fails_in_stream:
            status, code, message = self.failure
            return json_reply(self.protocol.error(status, code, message, None), status)
        if not call.stream:
            return json_reply(self.protocol.reply(call, self.answers))
        events = b"".join(self.events(call))
        return httpx2.Response(200, content=events, headers={"content-type": "text/event-stream"})

    def events(self, call: Call) -> Iterator[bytes]:
        """The events of a stream."""
        writer = self.protocol.events(call, [each.id for each in self.answers])
        yield writer.begin()
        for delta in deltas(self.answers, **self.pieces):
            yield writer.delta(delta)
            yield writer.keep_alive()
        yield writer.failure(*self.failure) if self.failure else writer.end(self.answers)

    def client(self) -> httpx2.Client:
        """An HTTP client whose requests come here."""
        return httpx2.Client(transport=httpx2.MockTransport(self))


def json_reply(value: Any, status: int = 200) -> httpx2.Response:
    """A reply with a JSON body."""
    return httpx2.Response(
        status, content=msgspec.json.encode(value), headers={"content-type": "application/json"}
    )


def sent(value: Any) -> Any:
    """A value as a client decodes it."""
    return msgspec.json.decode(msgspec.json.encode(value))


def data_of(events: bytes) -> list[dict[str, Any]]:
    """The JSON data of server-sent events."""
    lines = [line.removeprefix(b"data: ") for line in events.splitlines() if line.startswith(b"data: ")]
    return [msgspec.json.decode(line) for line in lines if line != b"[DONE]"]


def plain(value: Any, *dropped: str) -> Any:
    """A client's value as JSON, without empty members and those of these names."""
    if isinstance(value, dict):
        members = {key: plain(item, *dropped) for key, item in value.items() if key not in dropped}
        return {key: item for key, item in members.items() if item not in (None, "", [], {})}
    if isinstance(value, list):
        return [plain(item, *dropped) for item in value]
    return value


def unlisted(params: Any, module: Any) -> set[str]:
    """Fields of a client's typed dict that a protocol's module does not list anywhere."""
    names = set(params.__annotations__)
    form = module._Request
    return names - set(form.__struct_fields__) - form.ignored - module.REFUSED.keys() - SAMPLING
