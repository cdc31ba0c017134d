"""Canonical messages back to plain dicts in OpenAI's spelling."""

import json
from typing import Any

from mmrender.content.coerce import copy_containers
from mmrender.messages import ImagePart, Message, Part, TextPart, ThinkingPart, ToolCall, VideoPart


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
