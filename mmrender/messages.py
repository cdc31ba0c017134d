"""Canonical messages: what every later stage may rely on.

The types are frozen and strict. `mmrender.content.normalize_messages` builds them from what OpenAI and
Hugging Face users pass; nothing after it is tolerant.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias, get_args

import msgspec

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = get_args(Role)

Modality: TypeAlias = Literal["image", "video"]


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Text, exactly as the caller wrote it."""

    text: str


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image"):
    """One image.

    `source` is what the caller gave: a `PIL.Image.Image`, a numpy array, `bytes`, a `pathlib.Path`, or a
    `str` (a `data:`, `http(s):` or `file:` URL, or a path). `None` stands for an image that is known to be
    there but is not at hand: it renders as one unexpanded placeholder.
    """

    source: Any


class VideoPart(msgspec.Struct, frozen=True, tag_field="type", tag="video"):
    """One video. `source` is a sequence of frames, each as `ImagePart.source`, or what `ImagePart` takes."""

    source: Any
    fps: float | None = None


class ThinkingPart(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """A reasoning block that stands among the content parts."""

    thinking: str


Part: TypeAlias = TextPart | ImagePart | VideoPart | ThinkingPart


class ToolCall(msgspec.Struct, frozen=True):
    """One call of a tool by the assistant, with its arguments parsed."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation.

    `content` keeps the shape the caller chose: templates treat a string and a list of parts differently.
    `extra` holds keys that are not part of any standard; the template sees them under their own names.
    """

    role: Role
    content: str | tuple[Part, ...] | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    extra: Mapping[str, Any] = {}

    def media(self) -> Iterator[tuple[int, ImagePart | VideoPart]]:
        """Yield `(index in content, part)` for each media part, in order."""
        if isinstance(self.content, tuple):
            for index, part in enumerate(self.content):
                if isinstance(part, ImagePart | VideoPart):
                    yield index, part
