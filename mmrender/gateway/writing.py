"""What a protocol is, and what all of them write: server-sent events, text in its order, errors."""

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias

import msgspec

from mmrender.client.types import Usage
from mmrender.gateway.call import Answer, Call, Delta, ProtocolName

Field: TypeAlias = Literal["reasoning", "content"]

COMMENT: Final = b": keep-alive\n\n"
"""A comment of an event stream, which clients skip."""


def event(data: Any, name: str | None = None) -> bytes:
    """Return one server-sent event with JSON data."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


class EventWriter(ABC):
    """Writes one streamed reply as server-sent events.

    Args:
        call: The call.
        answer_ids: Ids that its answers will have.
        created: Unix time of the reply, by default now.
    """

    def __init__(self, call: Call, answer_ids: Sequence[str], created: int | None = None) -> None:
        self._call = call
        self._ids = answer_ids
        self._created = int(time.time()) if created is None else created
        self._sent: Counter[tuple[int, Field]] = Counter()

    @abstractmethod
    def begin(self) -> bytes:
        """Return the events before the first text."""

    @abstractmethod
    def text(self, delta: Delta) -> bytes:
        """Return the events of a piece of text."""

    def delta(self, delta: Delta) -> bytes:
        """Return the events of a piece of text, and note that it has been sent."""
        self._sent[delta.index, delta.field] += len(delta.text)
        return self.text(delta)

    def rest(self, answer: Answer, index: int = 0) -> bytes:
        """Return the events of the text that has not been sent. Sent text is a beginning of the whole."""
        texts: dict[Field, str] = {"reasoning": answer.reasoning or "", "content": answer.content}
        rest = [Delta(index, field, text[self._sent[index, field] :]) for field, text in texts.items()]
        return b"".join([self.text(delta) for delta in rest if delta.text])

    def keep_alive(self) -> bytes:
        """Return bytes that clients ignore, to be sent while nothing is sampled."""
        return COMMENT

    @abstractmethod
    def end(self, answers: Sequence[Answer]) -> bytes:
        """Return the events after the last text: calls, finish reasons, token counts."""

    @abstractmethod
    def failure(self, status: int, code: str, message: str) -> bytes:
        """Return the events that end the stream with an error. Nothing breaks it off instead."""


class Blocks(EventWriter):
    """Text of one answer as blocks, one open at a time, for the protocols with typed blocks.

    A subclass writes the events that open, extend and close a block.
    """

    _open: Field | None = None
    _pieces: list[str]

    @abstractmethod
    def opened(self, field: Field) -> bytes:
        """Return the events that open a block."""

    @abstractmethod
    def extended(self, field: Field, text: str) -> bytes:
        """Return the events of more text in the open block."""

    @abstractmethod
    def closed(self, field: Field, text: str) -> bytes:
        """Return the events that close the open block, which holds this text."""

    def text(self, delta: Delta) -> bytes:
        """Return the events of a piece of text."""
        before = b""
        if delta.field != self._open:
            before = self.close() + self.opened(delta.field)
            self._open, self._pieces = delta.field, []
        self._pieces.append(delta.text)
        return before + self.extended(delta.field, delta.text)

    def close(self) -> bytes:
        """Return the events that close the open block, if there is one."""
        field, self._open = self._open, None
        return b"" if field is None else self.closed(field, "".join(self._pieces))


def total_usage(answers: Sequence[Answer]) -> Usage:
    """Token counts of a reply. The answers share one prompt, which counts once."""
    first = answers[0].usage
    completion = sum(answer.usage.completion_tokens for answer in answers)
    return Usage(first.prompt_tokens, completion, first.cached_tokens)


def is_cut(answer: Answer) -> bool:
    """Whether sampling ended before the answer did."""
    return answer.finish_reason in ("length", "abort")


def openai_error(status: int, code: str, message: str, param: str | None) -> dict[str, Any]:
    """Return an error in OpenAI's envelope."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def openai_logprobs(answer: Answer) -> list[dict[str, Any]]:
    """Log-probabilities of the sampled tokens and of their alternatives, in OpenAI's form."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        token = answer.token_texts.get(token_id, "")
        return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "replace"))}

    alternatives = answer.top_logprobs or [()] * len(answer.token_ids)
    return [
        {**entry(token_id, logprob), "top_logprobs": [entry(*other) for other in others]}
        for token_id, logprob, others in zip(answer.token_ids, answer.logprobs, alternatives, strict=True)
    ]


class AgentProtocol(Protocol):
    """One protocol of agents. A module each: `chat`, `responses` and `messages`."""

    name: ProtocolName
    path: str
    """Path of its calls, from `/v1/` on."""
    events: type[EventWriter]
    """The writer of its streamed replies."""

    def read(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Call:
        """Read a request.

        Args:
            body: The decoded JSON body.
            headers: The request's headers, with names in lower case.

        Raises:
            InputError: A field is unknown, malformed or unsupported. `where` names it.
            MessageError: A message is malformed.
            SamplingParameterError: A sampling parameter has an unusable value.
        """
        ...

    def reply(self, call: Call, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body of an unstreamed reply."""
        ...

    def error(self, status: int, code: str, message: str, param: str | None) -> dict[str, Any]:
        """Return the body of an error."""
        return openai_error(status, code, message, param)
