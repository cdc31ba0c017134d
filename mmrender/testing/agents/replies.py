"""Replies of a gateway, read as agents read them: whole, or from a stream of events."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from mmrender.gateway.call import AnswerCall, ProtocolName
from mmrender.testing.agents.recordings import AgentAnswer


def read_answer(protocol: ProtocolName, body: bytes, *, streamed: bool) -> AgentAnswer:
    """Read a reply.

    Raises:
        ValueError: It is not a whole answer of the protocol, or ends in an error. The text says which.
    """
    try:
        reply = list(_events(body)) if streamed else json.loads(body)
        return _READERS[protocol, streamed](reply)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"the reply has another form: {type(error).__name__} {error}") from error


def _events(body: bytes) -> Iterable[Any]:
    """Yield the JSON data of server-sent events."""
    for line in body.splitlines():
        data = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)


def _fail(error: Any) -> None:
    raise ValueError(f"the stream ends in an error: {json.dumps(error)[:300]}")


def _check_end(is_whole: bool, sign: str) -> None:
    if not is_whole:
        raise ValueError(f"the stream ends without {sign}")


# --- chat completions ---


def _chat_message(message: Mapping[str, Any]) -> AgentAnswer:
    calls = [(each["id"], each["function"]) for each in message.get("tool_calls") or ()]
    made = tuple(AnswerCall(name, each["name"], each["arguments"]) for name, each in calls)
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    return AgentAnswer(message.get("content") or "", made, reasoning)


def _chat_chunks(chunks: Sequence[Any]) -> AgentAnswer:
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    is_whole = False
    for chunk in chunks:
        if chunk.get("error"):
            _fail(chunk["error"])
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {}
            is_whole |= choice.get("finish_reason") is not None
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or delta.get("reasoning") or ""
            for part in delta.get("tool_calls") or ():
                while len(message["tool_calls"]) <= part["index"]:
                    message["tool_calls"].append({"id": "", "function": {"name": "", "arguments": ""}})
                call, function = message["tool_calls"][part["index"]], part.get("function") or {}
                call["id"] = part.get("id") or call["id"]
                for name in ("name", "arguments"):
                    call["function"][name] += function.get(name) or ""
    _check_end(is_whole, "a finish reason")
    return _chat_message(message)


# --- responses ---


def _response_events(events: Sequence[Any]) -> AgentAnswer:
    for event in events:
        if event["type"] in ("error", "response.failed"):
            _fail(event.get("response", event).get("error", event))
    is_whole = any(event["type"] in ("response.completed", "response.incomplete") for event in events)
    _check_end(is_whole, "response.completed or response.incomplete")
    return _items([event["item"] for event in events if event["type"] == "response.output_item.done"])


def _items(items: Sequence[Any]) -> AgentAnswer:
    texts, thoughts, calls, item_ids = [], [], [], {}
    signature = None
    for item in items:
        kind = item["type"]
        name = item["call_id"] if kind == "function_call" else kind
        if item.get("id"):
            item_ids[name] = item["id"]
        if kind == "message":
            texts += [part["text"] for part in item["content"]]
        elif kind == "reasoning":
            thoughts += [part["text"] for part in item.get("content") or item["summary"]]
            signature = item.get("encrypted_content")
        elif kind == "function_call":
            calls.append(AnswerCall(name, item["name"], item["arguments"]))
    return AgentAnswer("".join(texts), tuple(calls), "".join(thoughts), signature, item_ids)


# --- messages ---


def _message_events(events: Sequence[Any]) -> AgentAnswer:
    blocks: dict[int, dict[str, Any]] = {}
    for event in events:
        kind = event["type"]
        if kind == "error":
            _fail(event["error"])
        elif kind == "content_block_start":
            blocks[event["index"]] = {**event["content_block"], "json": ""}
        elif kind == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            name, member = _DELTAS[delta["type"]]
            block[name] = block.get(name, "") + delta[member]
    _check_end(any(event["type"] == "message_stop" for event in events), "message_stop")
    for block in blocks.values():
        if block["json"]:
            block["input"] = json.loads(block["json"])
    return _blocks(list(blocks.values()))


_DELTAS: Final = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("signature", "signature"),
    "input_json_delta": ("json", "partial_json"),
}
"""By kind of delta, the member of the block that it extends, and its own member."""


def _blocks(blocks: Sequence[Any]) -> AgentAnswer:
    texts, thoughts, calls = [], [], []
    signature = None
    for block in blocks:
        kind = block["type"]
        if kind == "text":
            texts.append(block["text"])
        elif kind == "thinking":
            thoughts.append(block["thinking"])
            signature = block.get("signature")
        elif kind == "tool_use":
            arguments = json.dumps(block["input"], ensure_ascii=False)
            calls.append(AnswerCall(block["id"], block["name"], arguments))
    return AgentAnswer("".join(texts), tuple(calls), "".join(thoughts), signature)


_READERS: Final[Mapping[tuple[ProtocolName, bool], Callable[[Any], AgentAnswer]]] = {
    ("chat", False): lambda reply: _chat_message(reply["choices"][0]["message"]),
    ("chat", True): _chat_chunks,
    ("responses", False): lambda reply: _items(reply["output"]),
    ("responses", True): _response_events,
    ("messages", False): lambda reply: _blocks(reply["content"]),
    ("messages", True): _message_events,
}
"""Readers by protocol, and whether the reply is a stream."""
