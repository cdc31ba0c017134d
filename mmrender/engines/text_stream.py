"""Streams in text space: chunks of several requests as those of one. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmrender.engines.continuation import check_finite
from mmrender.engines.text_continuation import TextContinuation
from mmrender.engines.text_kinds import ChatContinuation
from mmrender.errors import EngineReplyError


class ChunkMerger:
    """Makes one stream of the streams of several requests.

    A chunk whose tokens have no text is held back until text or the end follows: after an abort such tokens
    are sampled again, and must not have been shown.

    Args:
        continuation: Grows with what is shown.

    Attributes:
        closed: Whether a chunk with a finish reason was among those to be shown.
    """

    def __init__(self, continuation: TextContinuation) -> None:
        self._continuation = continuation
        self._chat = isinstance(continuation, ChatContinuation)
        options = continuation.body.get("stream_options") or {}
        self._wants_usage = bool(options.get("include_usage"))
        self._wants_logprobs = continuation.wants_logprobs
        self._head: dict[str, Any] = {}
        self._held: list[dict[str, Any]] = []
        self._held_tokens = 0
        self._prompt_tokens: int | None = None
        self._before = 0
        self._end: tuple[Mapping[str, Any], dict[str, Any]] | None = None
        self.closed = False

    def begin(self) -> dict[str, Any]:
        """Body of the next request."""
        self._held, self._held_tokens, self._end = [], 0, None
        self._before = self._continuation.tokens
        options = {
            **(self._continuation.body.get("stream_options") or {}),
            "include_usage": True,
            "continuous_usage_stats": True,  # so that a stream that breaks off has told its prompt's length
        }
        return {**self._continuation.next_body(), "stream": True, "stream_options": options}

    def take(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Take a chunk; return what is to be shown of it.

        Raises:
            EngineReplyError: It is no chunk, its tokens lack their logprobs, or the engine reports an error.
        """
        if "error" in chunk:
            raise EngineReplyError("the engine failed within a stream", got=repr(chunk["error"])[:300])
        usage = chunk.get("usage")
        if isinstance(usage, Mapping) and self._prompt_tokens is None:
            self._prompt_tokens = usage.get("prompt_tokens", 0) - self._before
        is_first = not self._head
        if is_first:
            self._head = {name: chunk[name] for name in chunk if name not in ("choices", "usage")}
        choices = chunk.get("choices") or ()
        shown = self._take_choice(choices[0], is_first=is_first) if choices else []
        if self._end is not None and isinstance(usage, Mapping):
            return [*shown, *self.stop(usage.get("completion_tokens"))]
        return shown

    def _take_choice(self, choice: Mapping[str, Any], *, is_first: bool) -> list[dict[str, Any]]:
        reason = choice.get("finish_reason")
        text, tokens = self._text(choice), self._tokens(choice)
        if text and not tokens and reason is None:
            raise EngineReplyError(
                "a chunk has text and no logprobs, which tell how many tokens it is",
                where="choices[0].logprobs",
            )
        check_finite(self._numbers(choice))
        chunk = self._shown(choice, None if reason == "abort" else reason)
        if reason is not None and reason != "abort":
            self._end = (choice, chunk)
            return []
        if text:
            held, self._held = self._held, []
            self._grow(choice, text, tokens + self._held_tokens)
            self._held_tokens = 0
            return [*held, chunk]
        if tokens:
            self._held.append(chunk)
            self._held_tokens += tokens
            return []
        return [chunk] if is_first else []  # the role, once

    def stop(self, completion_tokens: int | None = None) -> list[dict[str, Any]]:
        """The request has ended; return what is still to be shown of it.

        Raises:
            EngineReplyError: It sampled `completion_tokens`, and not as many came with their logprobs.
        """
        if self._end is None:
            return []
        (choice, chunk), self._end = self._end, None
        tokens = self._tokens(choice)
        came = self._continuation.tokens - self._before + self._held_tokens + tokens
        if completion_tokens is not None and came != completion_tokens:
            raise EngineReplyError(
                "tokens and logprobs differ in number",
                where="choices[0].logprobs",
                expected=str(completion_tokens),
                got=str(came),
            )
        self._grow(choice, self._text(choice), tokens + self._held_tokens)
        self._continuation.finished = choice["finish_reason"]
        held, self._held = self._held, []
        self.closed = True
        return [*held, chunk]

    def _grow(self, choice: Mapping[str, Any], text: str, tokens: int) -> None:
        self._continuation.grow(text, tokens, choice.get("token_ids"))

    def _text(self, choice: Mapping[str, Any]) -> str:
        text = (choice.get("delta") or {}).get("content") if self._chat else choice.get("text")
        return text or ""

    def _tokens(self, choice: Mapping[str, Any]) -> int:
        logprobs = choice.get("logprobs") or {}
        return len(logprobs.get("content" if self._chat else "tokens") or ())

    def _numbers(self, choice: Mapping[str, Any]) -> Sequence[Any]:
        logprobs = choice.get("logprobs") or {}
        if self._chat:
            return [entry.get("logprob") for entry in logprobs.get("content") or ()]
        return logprobs.get("token_logprobs") or ()

    def _shown(self, choice: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
        kept = {**choice, "index": 0, "finish_reason": reason}
        if not self._wants_logprobs:
            kept["logprobs"] = None
        return {**self._head, "choices": [kept]}

    def end(self) -> Iterator[dict[str, Any]]:
        """What closes the stream: the usage, where it was asked for."""
        if self._wants_usage:
            prompt, completion = self._prompt_tokens or 0, self._continuation.tokens
            usage = {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            }
            yield {**self._head, "choices": [], "usage": usage}

    def ended(self, reason: str) -> dict[str, Any]:
        """A last chunk for a stream that the client itself ends."""
        empty: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        return {
            **self._head,
            "choices": [{"index": 0, **empty, "logprobs": None, "finish_reason": reason}],
        }


def as_chunks(reply: Mapping[str, Any], *, usage: bool) -> Iterator[dict[str, Any]]:
    """A whole reply as a stream of one chunk."""
    head = {name: value for name, value in reply.items() if name not in ("choices", "usage")}
    if head.get("object") == "chat.completion":
        head["object"] = "chat.completion.chunk"
    choices = []
    for choice in reply["choices"]:
        chunk = {name: value for name, value in choice.items() if name != "message"}
        if "message" in choice:
            chunk["delta"] = _delta(choice["message"])
        choices.append(chunk)
    yield {**head, "choices": choices}
    if usage:
        yield {**head, "choices": [], "usage": reply.get("usage")}


def _delta(message: Mapping[str, Any]) -> dict[str, Any]:
    delta = {name: value for name, value in message.items() if value is not None}
    calls = delta.get("tool_calls")
    if calls:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    else:
        delta.pop("tool_calls", None)
    return delta
