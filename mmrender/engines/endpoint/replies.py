"""Completions as OpenAI's chat replies and chunks."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mmrender.client.types import EngineResponse, finish_reason_of
from mmrender.engines.endpoint.requests import ChatRequest
from mmrender.parsing import ParsedResponse

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class ChatHead:
    """What every chunk and reply of one request has in common."""

    model: str
    created: int
    name: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")

    def reply(self, kind: str, **more: Any) -> dict[str, Any]:
        """A reply or chunk."""
        return {"id": self.name, "object": kind, "created": self.created, "model": self.model, **more}


def message_of(parsed: ParsedResponse) -> dict[str, Any]:
    """The assistant's message; calls that are not well-formed stay out of it."""
    message = parsed.to_message()
    calls = [
        {
            "id": call.id or f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": msgspec.json.encode(call.arguments).decode(),
            },
        }
        for call in message.tool_calls
    ]
    content = parsed.content if parsed.content or not calls else None
    result: dict[str, Any] = {"role": "assistant", "content": content}
    if parsed.reasoning_content is not None:
        result["reasoning_content"] = parsed.reasoning_content
    if calls:
        result["tool_calls"] = calls
    return result


def logprobs_of(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    decode: Decode,
    top: Sequence[Sequence[tuple[int, float]]] | None = None,
) -> dict[str, Any]:
    """Logprobs of tokens, each with its text and its alternatives."""
    content = []
    for index, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        others = () if top is None or index >= len(top) else top[index]
        content.append(
            {
                **_token(token_id, logprob, decode),
                "top_logprobs": [_token(other, value, decode) for other, value in others],
            }
        )
    return {"content": content, "refusal": None}


def _token(token_id: int, logprob: float, decode: Decode) -> dict[str, Any]:
    text = decode([token_id])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}


def choice_of(
    index: int, request: ChatRequest, response: EngineResponse, parsed: ParsedResponse, decode: Decode
) -> dict[str, Any]:
    """One choice of a whole reply."""
    choice: dict[str, Any] = {
        "index": index,
        "message": message_of(parsed),
        "logprobs": None,
        "finish_reason": finish_reason_of(response, parsed),
        "stop_reason": response.stop_reason,
    }
    if request.wants_logprobs:
        choice["logprobs"] = logprobs_of(
            response.completion_ids, response.logprobs, decode, response.top_logprobs
        )
    if request.wants_token_ids:
        choice["token_ids"] = response.completion_ids
    return choice


def usage_of(responses: Sequence[EngineResponse]) -> dict[str, Any]:
    """Token counts; a prompt that was sampled from several times counts once."""
    prompt = responses[0].usage.prompt_tokens
    completion = sum(len(response.completion_ids) for response in responses)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    cached = responses[0].usage.cached_tokens
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage


def chunk_of(
    head: ChatHead,
    index: int,
    delta: Mapping[str, Any],
    logprobs: Any = None,
    reason: str | None = None,
    *,
    token_ids: Sequence[int] | None = None,
) -> dict[str, Any]:
    """One chunk of a stream."""
    choice = {"index": index, "delta": dict(delta), "logprobs": logprobs, "finish_reason": reason}
    if token_ids is not None:
        choice["token_ids"] = list(token_ids)
    return head.reply("chat.completion.chunk", choices=[choice])
