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


class _MessageView:
    """Builds the dict of one message."""

    __slots__ = ("form", "index", "role")

    def __init__(self, index: int, message: Message, form: ViewForm) -> None:
        self.index = index
        self.role: Role = message.role
        self.form = form

    def origin(self, kind: Kind, path: str) -> Origin:
        return _origin(self.index, self.role, kind, path)

    def text(self, text: str, kind: Kind, path: str) -> TracedStr:
        return TracedStr.whole(text, _origin(self.index, self.role, kind, path))

    def content(self, content: str | tuple[Part, ...] | None) -> Any:
        if content is None:
            return "" if self.form.none_content == "empty" else None
        if isinstance(content, str):
            text = self.text(content, "content", "content")
            return [{"type": "text", "text": text}] if self.form.content == "list" else text
        parts = [self.part(part, f"content[{index}]") for index, part in enumerate(content)]
        if self.form.content == "text" and all(isinstance(part, TextPart) for part in content):
            return TracedStr("").join([part["text"] for part in parts])
        return parts

    def part(self, part: Part, path: str) -> dict[str, Any]:
        match part:
            case TextPart(text=text):
                return {"type": "text", "text": self.text(text, "content", f"{path}.text")}
            case ImagePart():
                if self.form.image == "image":
                    return {"type": "image"}
                return {"type": "image_url", "image_url": {}}
            case VideoPart():
                return {"type": "video"}
            case ThinkingPart(thinking=thinking):
                return {"type": "thinking", "thinking": self.text(thinking, "reasoning", f"{path}.thinking")}

    def call(self, call: ToolCall, path: str) -> dict[str, Any]:
        arguments = self.origin("tool_call", f"{path}.function.arguments")
        given: Any = call.arguments
        if self.form.arguments == "json":
            given = json.dumps(given, ensure_ascii=False)
        shown: dict[str, Any] = {"type": "function"}
        if call.id is not None:
            shown["id"] = self.text(call.id, "tool_call", f"{path}.id")
        name = self.text(call.name, "tool_call", f"{path}.function.name")
        return {**shown, "function": {"name": name, "arguments": traced(given, arguments)}}

    def build(self, message: Message) -> MessageDict:
        view = MessageDict(role=_role_text(self.index, self.role), content=self.content(message.content))
        view._owner = _origin(self.index, self.role, "scaffold", "")
        if message.reasoning_content is not None:
            reasoning = self.text(message.reasoning_content, "reasoning", "reasoning_content")
            view.update(reasoning_content=reasoning, thinking=reasoning)
        if message.tool_calls:
            calls = enumerate(message.tool_calls)
            view["tool_calls"] = [self.call(call, f"tool_calls[{index}]") for index, call in calls]
        if message.name is not None:
            view["name"] = self.text(message.name, "name", "name")
        if message.tool_call_id is not None:
            view["tool_call_id"] = self.text(message.tool_call_id, "name", "tool_call_id")
        for key, value in message.extra.items():
            view[key] = traced(value, self.origin("extra", key))
        return view


def view_messages(messages: Sequence[Message], form: ViewForm) -> list[MessageDict]:
    """Dicts for the template, each text with the origin of its field."""
    return [_MessageView(index, message, form).build(message) for index, message in enumerate(messages)]


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
