"""What a protocol is, and what all of them write: server-sent events, text in its order, errors."""

from collections.abc import Iterator, Mapping, Sequence
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


def text_of(answer: Answer, field: Field) -> str:
    """Text of one field of an answer."""
    return answer.content if field == "content" else answer.reasoning or ""


class Shown:
    """How much of each field of an answer has been sent."""

    def __init__(self) -> None:
        self._lengths: dict[Field, int] = {"reasoning": 0, "content": 0}

    def add(self, delta: Delta) -> None:
        """Count a delta."""
        self._lengths[delta.field] += len(delta.text)

    def rest(self, answer: Answer) -> Iterator[tuple[Field, str]]:
        """Yield the text of each field that has not been sent. Sent text is a beginning of the whole."""
        for field, length in self._lengths.items():
            if text := text_of(answer, field)[length:]:
                yield field, text


class EventWriter(Protocol):
    """Writes one streamed reply as server-sent events."""

    def begin(self) -> bytes:
        """Return the events before the first text."""
        ...

    def delta(self, delta: Delta) -> bytes:
        """Return the events of a piece of text."""
        ...

    def keep_alive(self) -> bytes:
        """Return bytes that clients ignore, to be sent while nothing is sampled."""
        return COMMENT

    def end(self, answers: Sequence[Answer]) -> bytes:
        """Return the events after the last text: calls, finish reasons, token counts."""
        ...

    def failure(self, status: int, code: str, message: str) -> bytes:
        """Return the events that end the stream with an error. Nothing breaks it off instead."""
        ...


class Blocks(EventWriter):
    """Text of one answer as blocks, one open at a time, for the protocols with typed blocks.

    A subclass writes the events that open, extend and close a block.
    """

    def __init__(self) -> None:
        self._shown = Shown()
        self._open: Field | None = None
        self._pieces: list[str] = []

    def opened(self, field: Field) -> bytes:
        """Return the events that open a block."""
        raise NotImplementedError

    def extended(self, field: Field, text: str) -> bytes:
        """Return the events of more text in the open block."""
        raise NotImplementedError

    def closed(self, field: Field, text: str) -> bytes:
        """Return the events that close the open block, which holds this text."""
        raise NotImplementedError

    def delta(self, delta: Delta) -> bytes:
        """Return the events of a piece of text."""
        self._shown.add(delta)
        return self._text(delta.field, delta.text)

    def rest(self, answer: Answer) -> bytes:
        """Return the events of the text that has not been sent, and close the last block."""
        events = [self._text(field, text) for field, text in self._shown.rest(answer)]
        return b"".join(events) + self._close()

    def _text(self, field: Field, text: str) -> bytes:
        before = b""
        if field != self._open:
            before = self._close() + self.opened(field)
            self._open = field
        self._pieces.append(text)
        return before + self.extended(field, text)

    def _close(self) -> bytes:
        field, text = self._open, "".join(self._pieces)
        self._open, self._pieces = None, []
        return b"" if field is None else self.closed(field, text)


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

    def events(self, call: Call, answer_ids: Sequence[str]) -> EventWriter:
        """Return the writer of a streamed reply, whose answers will have these ids."""
        ...

    def error(self, status: int, code: str, message: str, param: str | None) -> dict[str, Any]:
        """Return the body of an error."""
        return openai_error(status, code, message, param)
