"""A conversation, as OpenAI and Hugging Face users pass it, in; canonical `Message`s out.

This is the hot path: a plain `{"role": …, "content": "…"}` takes one branch and no path string is built
until there is something to say about it.
"""

import json
from collections.abc import Sequence
from typing import Any

from mmrender.content.parts import normalize_content
from mmrender.content.tools import normalize_tool_call, normalize_tool_calls
from mmrender.content.values import (
    as_fields,
    as_identifier,
    as_sequence,
    as_text,
    copy_containers,
    describe,
    is_record,
    keys_of,
    member,
    one_of,
)
from mmrender.errors import MessageError
from mmrender.messages import (
    ROLES,
    ImagePart,
    Message,
    Part,
    Role,
    TextPart,
    ThinkingPart,
    ToolCall,
    VideoPart,
)

# `function` is how OpenAI named tool results before tool calls had ids.
_ROLE_OF: dict[str, Role] = {**{role: role for role in ROLES}, "function": "tool"}

# Transformers reads the reasoning of a message under these names; the first that is not None wins.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")

# No chat template reads media from here, so they would be lost without a word.
_MISPLACED_MEDIA = frozenset({"audio", "audios", "image", "images", "video", "videos"})

# Fields that responses and datasets carry along, and that mean nothing when they are empty.
_API_FIELDS = _MISPLACED_MEDIA | {"annotations", "parsed", "refusal"}

_MESSAGE = "a dict with role and content, a Message, a pydantic model or a dataclass"
_LIST = "a list of messages"


def normalize_messages(messages: Sequence[Any], *, where: str = "messages") -> tuple[Message, ...]:
    """Turn a conversation in any accepted form into canonical messages.

    The input is never changed, and no list or dict of it is shared with the result. Media are passed
    through untouched.

    Args:
        messages: A list of dicts, other mappings, pydantic models, dataclasses, msgspec structs and
            `Message`s (kept as they are), in any mixture.
        where: What paths in errors start with.

    Raises:
        MessageError: At the first thing that cannot be read, naming its path such as
            `messages[2].content[1].type`.
    """
    items = messages if type(messages) is list else _conversation(messages, where)
    if not items:
        raise MessageError("the conversation is empty", where=where, expected="at least one message")
    result: list[Message] = []
    for index, item in enumerate(items):
        if type(item) is dict and len(item) == 2:
            role, content = item.get("role"), item.get("content")
            if type(content) is str and type(role) is str and role in ROLES:
                if not content.isascii():
                    content = as_text(content, f"{where}[{index}].content")
                result.append(Message(role=role, content=content))
                continue
        elif type(item) is Message:
            result.append(item)
            continue
        result.append(normalize_message(item, f"{where}[{index}]"))
    return tuple(result)


def _conversation(messages: Any, where: str) -> Sequence[Any]:
    items = as_sequence(messages)
    if items is not None:
        return items
    remedy = None
    if isinstance(messages, str):
        remedy = 'Write [{"role": "user", "content": …}], or decode JSON text first'
    elif is_record(messages):
        remedy = "Wrap a single message in a list"
    raise MessageError(
        "is not a conversation", where=where, expected=_LIST, got=describe(messages), remedy=remedy
    )


def normalize_message(value: Any, where: str) -> Message:
    """Turn one message in any accepted form into a canonical one."""
    if isinstance(value, Message):
        return value
    if isinstance(value, (list, tuple)):
        raise MessageError(
            "is a list, not a message",
            where=where,
            expected=_MESSAGE,
            got=describe(value),
            remedy="Pass one conversation at a time",
        )
    fields = as_fields(value, where, _MESSAGE)
    role = _role(fields, where)
    content = normalize_content(fields.pop("content", None), f"{where}.content")
    if len(fields) == 0:
        return Message(role=role, content=content)
    tool_calls = _tool_calls(fields, role, where)
    reasoning = _reasoning(fields, where)
    name = fields.pop("name", None)
    tool_call_id = fields.pop("tool_call_id", None)
    return Message(
        role=role,
        content=content,
        reasoning_content=reasoning,
        tool_calls=tool_calls,
        name=None if name is None else as_identifier(name, f"{where}.name"),
        tool_call_id=None if tool_call_id is None else as_identifier(tool_call_id, f"{where}.tool_call_id"),
        extra=_extra(fields, where) if fields else {},
    )


def _role(fields: dict[str, Any], where: str) -> Role:
    value = fields.pop("role", None)
    role = _ROLE_OF.get(value) if isinstance(value, str) else None
    if role is not None:
        return role
    if value is None:
        got = keys_of(fields) if fields else "no keys"
        raise MessageError("the message has no role", where=where, expected="a key 'role'", got=got)
    raise MessageError("unknown role", where=f"{where}.role", expected=one_of(ROLES), got=describe(value))


def _tool_calls(fields: dict[str, Any], role: Role, where: str) -> tuple[ToolCall, ...]:
    value = fields.pop("tool_calls", None)
    calls = normalize_tool_calls(value, f"{where}.tool_calls") if value is not None else ()
    legacy = fields.pop("function_call", None)
    key = "tool_calls"
    if legacy:
        if calls:
            raise MessageError(
                "the message has both tool_calls and function_call", where=where, expected="only one of them"
            )
        key = "function_call"
        calls = (normalize_tool_call(legacy, f"{where}.function_call"),)
    if calls and role != "assistant":
        raise MessageError(
            "only an assistant calls tools",
            where=f"{where}.{key}",
            expected="role assistant",
            got=f"role {role}",
        )
    return calls


def _reasoning(fields: dict[str, Any], where: str) -> str | None:
    # A name that loses with a text of its own stays behind in `extra`: a template may read it by that name.
    reasoning: str | None = None
    for key in _REASONING_KEYS:
        if key in fields:
            text = as_text(fields[key], f"{where}.{key}")
            reasoning = text if reasoning is None else reasoning
            if text == reasoning:
                del fields[key]
    return reasoning


def _extra(fields: dict[Any, Any], where: str) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    for key, value in fields.items():
        path = member(where, key)
        if not isinstance(key, str):
            raise MessageError(
                "keys of a message are text", where=where, expected="str keys", got=describe(key)
            )
        if key in _API_FIELDS and _is_empty(value):
            continue
        if key in _MISPLACED_MEDIA:
            raise MessageError(
                "media of a message stand in its content",
                where=path,
                expected='parts such as {"type": "image", "image": …} in content',
                got=describe(value),
            )
        extra[key] = copy_containers(value, path)
    return extra


def _is_empty(value: Any) -> bool:
    if isinstance(value, (str, dict)):
        return not value
    items = as_sequence(value)
    return items is not None and not items


def to_openai(message: Message) -> dict[str, Any]:
    """Write a message as a dict of its own; `normalize_messages` reads it back as an equal message.

    Content keeps its shape. Sources given as text become `image_url` and `video_url` parts; other sources
    stay objects in `image` and `video` parts, so the dict is JSON only where the sources are text. Arguments
    become JSON text. Fields that are not set are left out, except `content`.
    """
    content = message.content
    result: dict[str, Any] = {
        "role": message.role,
        "content": [_part(part) for part in content] if isinstance(content, tuple) else content,
    }
    if message.reasoning_content is not None:
        result["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        result["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    for key, value in message.extra.items():
        result[key] = copy_containers(value, key)
    return result


def _part(part: Part) -> dict[str, Any]:
    match part:
        case TextPart(text=text):
            return {"type": "text", "text": text}
        case ThinkingPart(thinking=thinking):
            return {"type": "thinking", "thinking": thinking}
        case ImagePart(source=source):
            return _media("image", source)
        case VideoPart(source=source, fps=fps):
            return _media("video", source) | ({} if fps is None else {"fps": fps})


def _media(modality: str, source: Any) -> dict[str, Any]:
    if source is None:
        return {"type": modality}
    if isinstance(source, str):
        return {"type": f"{modality}_url", f"{modality}_url": {"url": source}}
    return {"type": modality, modality: source}


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    wrapped: dict[str, Any] = {"type": "function", "function": function}
    return wrapped if call.id is None else {"id": call.id, **wrapped}
