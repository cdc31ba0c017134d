"""What a template sees of the canonical messages: plain dicts whose texts are traced.

The shape is that of Transformers: parts as `{"type": ...}`, tool calls as `{"type": "function", "id",
"function": {"name", "arguments"}}`, reasoning under `reasoning_content` and `thinking`. Media parts carry no
payload, since no template reads one.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from mmrender.messages import ImagePart, Message, Part, Role, TextPart, ThinkingPart, ToolCall, VideoPart
from mmrender.template.attribution import MessageDict
from mmrender.template.text import Kind, Origin, TracedStr
from mmrender.template.values import traced


@dataclass(frozen=True, slots=True)
class ViewForm:
    """Which of the shapes in use a template takes, found by probing.

    Attributes:
        none_content: How absent content is given: as `None`, by leaving the key out, or as empty text.
        arguments: How the arguments of a call are given: parsed, or as JSON text.
        image: How an image part names itself.
        content: Whether the template takes text and lists of parts, text only, or lists only.
    """

    none_content: Literal["none", "absent", "empty"] = "none"
    arguments: Literal["parsed", "json"] = "parsed"
    image: Literal["image", "image_url"] = "image"
    content: Literal["parts", "text", "list"] = "parts"


@lru_cache(maxsize=1 << 16)
def _origin(message: int, role: Role, kind: Kind, path: str) -> Origin:
    """The origin of a field. Conversations have the same few hundred of them over and over."""
    where = f"messages[{message}]"
    if kind == "scaffold":
        return Origin(message, role, kind, where)
    return Origin(message, role, kind, f"{where}.{path}", _origin(message, role, "scaffold", ""))


@lru_cache(maxsize=1 << 12)
def _role_text(message: int, role: Role) -> TracedStr:
    return TracedStr.whole(role, _origin(message, role, "role", "role"))


def _content(
    content: str | tuple[Part, ...], index: int, role: Role, form: ViewForm
) -> TracedStr | list[dict[str, Any]]:
    """Text, or a list of parts, as the template takes them."""
    if isinstance(content, str):
        text = TracedStr.whole(content, _origin(index, role, "content", "content"))
        return [{"type": "text", "text": text}] if form.content == "list" else text
    parts: list[dict[str, Any]] = []
    for position, part in enumerate(content):
        path = f"content[{position}]"
        match part:
            case TextPart(text=written):
                origin = _origin(index, role, "content", f"{path}.text")
                parts.append({"type": "text", "text": TracedStr.whole(written, origin)})
            case ImagePart():
                image = {"type": "image"} if form.image == "image" else {"type": "image_url", "image_url": {}}
                parts.append(image)
            case VideoPart():
                parts.append({"type": "video"})
            case ThinkingPart(thinking=thinking):
                origin = _origin(index, role, "reasoning", f"{path}.thinking")
                parts.append({"type": "thinking", "thinking": TracedStr.whole(thinking, origin)})
    if form.content == "text" and all(isinstance(part, TextPart) for part in content):
        return TracedStr("").join([part["text"] for part in parts])
    return parts


def _call(call: ToolCall, index: int, role: Role, path: str, form: ViewForm) -> dict[str, Any]:
    def origin(field: str) -> Origin:
        return _origin(index, role, "tool_call", f"{path}.{field}")

    arguments: Any = call.arguments
    if form.arguments == "json":
        arguments = json.dumps(arguments, ensure_ascii=False)
    shown: dict[str, Any] = {"type": "function"}
    if call.id is not None:
        shown["id"] = TracedStr.whole(call.id, origin("id"))
    shown["function"] = {
        "name": TracedStr.whole(call.name, origin("function.name")),
        "arguments": traced(arguments, origin("function.arguments")),
    }
    return shown


def _view(message: Message, index: int, form: ViewForm) -> MessageDict:
    role = message.role
    view = MessageDict(role=_role_text(index, role))
    if message.content is not None:
        view["content"] = _content(message.content, index, role, form)
    elif form.none_content != "absent":
        view["content"] = None if form.none_content == "none" else ""
    view._owner = _origin(index, role, "scaffold", "")
    if message.reasoning_content is not None:
        origin = _origin(index, role, "reasoning", "reasoning_content")
        reasoning = TracedStr.whole(message.reasoning_content, origin)
        view.update(reasoning_content=reasoning, thinking=reasoning)
    if message.tool_calls:
        view["tool_calls"] = [
            _call(call, index, role, f"tool_calls[{position}]", form)
            for position, call in enumerate(message.tool_calls)
        ]
    for field, text in (("name", message.name), ("tool_call_id", message.tool_call_id)):
        if text is not None:
            view[field] = TracedStr.whole(text, _origin(index, role, "name", field))
    for key, value in message.extra.items():
        view[key] = traced(value, _origin(index, role, "extra", key))
    return view


def view_messages(messages: Sequence[Message], form: ViewForm) -> list[MessageDict]:
    """Dicts for the template, each text with the origin of its field."""
    return [_view(message, index, form) for index, message in enumerate(messages)]


def view_values(
    values: Sequence[Mapping[str, Any]] | None, kind: Literal["tools", "documents"]
) -> list[Any] | None:
    """Tool definitions or retrieved documents for the template; each is of one origin, `tools[k]`."""
    if values is None:
        return None
    return [traced(value, Origin(-1, None, kind, f"{kind}[{index}]")) for index, value in enumerate(values)]


def view_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Template arguments of a caller; text in them is content, numbers and flags stay as they are."""
    return {
        name: traced(value, Origin(-1, None, "documents", name))
        if isinstance(value, str | Mapping | list | tuple)
        else value
        for name, value in arguments.items()
    }
