"""OpenAI bodies taken apart and put together. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from mmrender.engines.interface import RequestPayload
from mmrender.errors import InputError


def opened(payload: RequestPayload) -> tuple[dict[str, Any], Any, dict[str, str]]:
    """Body, session and headers of a payload; the payload is not changed.

    Raises:
        InputError: There is no body.
    """
    body = payload.get("json")
    if not isinstance(body, Mapping):
        raise InputError(
            "the payload has no body",
            where="request_payload",
            expected="{'json': {...}, 'headers': {...}}",
            got=f"keys {sorted(payload)}",
        )
    copy = dict(body)
    session = copy.pop("session_id", None)
    return copy, session, dict(payload.get("headers") or {})


def listed_prompts(body: Mapping[str, Any]) -> list[Any]:
    """The prompts of a completion request: one or many, text or token ids.

    Raises:
        InputError: There is none, or it is of no such form.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, str) and prompt:
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(_is_id(each) for each in prompt):
            return [prompt]
        if all(isinstance(each, str) and each for each in prompt):
            return prompt
        if all(isinstance(each, list) and each and all(map(_is_id, each)) for each in prompt):
            return prompt
    raise InputError(
        "the prompt is not understood",
        where="prompt",
        expected="text, token ids, or a list of either, none of them empty",
        got=repr(prompt)[:80],
    )


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def image_urls(messages: Any) -> list[str]:
    """A short digest of each image of a conversation, in order."""
    found: list[str] = []
    for message in messages or ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            url = part.get("image_url") if isinstance(part, Mapping) else None
            url = url.get("url") if isinstance(url, Mapping) else url
            if isinstance(url, str):
                found.append(xxhash.xxh3_64_hexdigest(url.encode("utf-8", "surrogatepass")))
    return found


def combined(replies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Replies of single prompts as the reply of them all: choices numbered through, usage summed."""
    choices: list[dict[str, Any]] = []
    for reply in replies:
        for choice in reply["choices"]:
            choices.append({**choice, "index": len(choices)})
    usages = [reply.get("usage") or {} for reply in replies]
    names = {name for usage in usages for name, value in usage.items() if isinstance(value, int)}
    usage = {name: sum(each.get(name) or 0 for each in usages) for name in sorted(names)}
    return {**replies[0], "choices": choices, "usage": usage}
