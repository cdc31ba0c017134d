"""The OpenAI routes of the scripted engine."""

from collections.abc import Iterator, Mapping
from typing import Any

from mmrender.client.types import EngineResponse
from mmrender.engines.scripted_model import letters, token_text


def chat_text(body: Mapping[str, Any]) -> str:
    """What the engine's template writes."""
    messages = body["messages"]
    text = "".join(f"[{each['role']}]{_flat(each['content'])}[end]" for each in messages)
    if body.get("continue_final_message"):
        return text.removesuffix("[end]")
    return f"{text}[assistant]"


def _flat(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "<image>" for part in content)


def _tokens(response: EngineResponse) -> list[str]:
    return [token_text(token) for token in response.completion_ids]


def _text(response: EngineResponse) -> str:
    return letters(response.completion_ids)


def chat_reply(body: Mapping[str, Any], response: EngineResponse, number: int) -> dict[str, Any]:
    """The JSON of a chat completion."""
    entries: list[dict[str, Any]] = [
        {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(_tokens(response), response.logprobs, strict=False)
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": _text(response), "tool_calls": []},
        "logprobs": {"content": entries} if body.get("logprobs") else None,
        "finish_reason": response.finish_reason,
    }
    return _reply("chat.completion", f"chatcmpl-{number}", body, choice, response)


def completion_reply(body: Mapping[str, Any], response: EngineResponse, number: int) -> dict[str, Any]:
    """The JSON of a text completion."""
    tokens = _tokens(response)
    offsets = [len("".join(tokens[:index])) for index in range(len(tokens))]
    logprobs = {"tokens": tokens, "token_logprobs": response.logprobs, "text_offset": offsets}
    choice = {
        "index": 0,
        "text": _text(response),
        "logprobs": logprobs if body.get("logprobs") is not None else None,
        "finish_reason": response.finish_reason,
    }
    if body.get("return_token_ids"):
        choice["token_ids"] = response.completion_ids
    return _reply("text_completion", f"cmpl-{number}", body, choice, response)


def _reply(
    kind: str, name: str, body: Mapping[str, Any], choice: Mapping[str, Any], response: EngineResponse
) -> dict[str, Any]:
    prompt, completion = response.usage.prompt_tokens, response.usage.completion_tokens
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    return {
        "id": name,
        "object": kind,
        "created": 1,
        "model": body.get("model"),
        "choices": [choice],
        "usage": usage,
    }


def chunks_of(reply: Mapping[str, Any], response: EngineResponse) -> Iterator[dict[str, Any]]:
    """A reply as a stream of one token a chunk, as the engines send it; logprobs that lack, lack there."""
    chat = reply["object"] == "chat.completion"
    kind = "chat.completion.chunk" if chat else "text_completion"
    usage = {"usage": reply["usage"]}
    head = {"id": reply["id"], "created": reply["created"], "model": reply["model"], "object": kind}
    choice = reply["choices"][0]
    if chat:
        first = {**reply["usage"], "completion_tokens": 0}
        role = {"delta": {"role": "assistant", "content": ""}}
        yield {**head, "choices": [_chunk(role, None)], "usage": first}
    logprobs: list[float | None] = [*response.logprobs]
    logprobs += [None] * (len(response.completion_ids) - len(logprobs))
    for token_id, token, logprob in zip(response.completion_ids, _tokens(response), logprobs, strict=True):
        text = token.replace("<stop>", "")
        fields: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
        if "token_ids" in choice:
            fields["token_ids"] = [token_id]
        known = choice["logprobs"] is not None and logprob is not None
        yield {**head, "choices": [_chunk(fields, _logprobs(token, logprob, chat) if known else None)]}
    end: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
    yield {**head, "choices": [_chunk(end, None, choice["finish_reason"])]}
    yield {**head, "choices": [], **usage}


def _logprobs(token: str, logprob: float | None, chat: bool) -> dict[str, Any]:
    if chat:
        return {"content": [{"token": token, "logprob": logprob}]}
    return {"tokens": [token], "token_logprobs": [logprob]}


def _chunk(fields: Mapping[str, Any], logprobs: Any, reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, **fields, "logprobs": logprobs, "finish_reason": reason}
