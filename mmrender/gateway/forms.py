"""Messages in a form that the model's template prints: later system messages, and pictures in tool results.

Agents send both, and many templates drop them. If a probe of the template shows that it prints neither, the
system message becomes a user message in `<system-reminder>`, and the pictures follow the tool results in a
user message. Each change is noted on the step.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mmrender.messages import Message, TextPart
from mmrender.protocols import RendererProtocol
from mmrender.template.profile import TemplateProfile

_SYSTEM_ROLES = ("system", "developer")
_OPEN, _CLOSE = "<system-reminder>\n", "\n</system-reminder>"


@dataclass(frozen=True, slots=True)
class WrittenMessages:
    """A conversation in the form that a template prints.

    Attributes:
        messages: For each message of the call the messages that are rendered for it.
        notes: By index of the message, the change in words.
    """

    messages: Sequence[Sequence[Message]]
    notes: Mapping[int, str] = field(default_factory=dict)

    def part(self, start: int, stop: int | None = None) -> list[Message]:
        """Return the rendered messages of the call's messages `[start, stop)`."""
        return [message for run in self.messages[start:stop] for message in run]

    def notes_from(self, start: int) -> tuple[str, ...]:
        """Return the changes of the call's messages from `start` on."""
        return tuple(note for index, note in self.notes.items() if index >= start)


async def written_for(
    renderer: RendererProtocol,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    template_arguments: Mapping[str, Any],
    sampled_ids: Mapping[str, str],
    *,
    is_whole: bool = True,
) -> WrittenMessages:
    """Return a conversation in the form that the renderer's template prints.

    Args:
        renderer: Its template is probed if need be.
        messages: The conversation as the agent sends it.
        tools: Definitions of the tools in the prompt.
        template_arguments: Template variables in force.
        sampled_ids: By id of a call, the id that the model itself sampled for it, which results must name.
        is_whole: Whether the conversation begins with `messages`.
    """
    if sampled_ids:
        messages = [_with_ids(message, sampled_ids) for message in messages]
    written: list[Sequence[Message]] = [(message,) for message in messages]
    notes: dict[int, str] = {}
    later = range(1 if is_whole else 0, len(messages))
    systems = [index for index in later if messages[index].role in _SYSTEM_ROLES]
    results = [index for index, message in enumerate(messages) if message.role == "tool"]
    shown = [index for index in results if any(messages[index].media())]
    if not systems and not shown:
        return WrittenMessages(written)
    profile = await profile_of(renderer, template_arguments, has_tools=tools is not None)
    if not profile.prints_later_systems:
        for index in systems:
            written[index] = (_reminder(messages[index]),)
            notes[index] = f"messages[{index}]: a later system message, rendered as a user's reminder"
    if "tool" not in profile.image_roles:
        _move_media(messages, shown, written)
        for index in shown:
            notes[index] = f"messages[{index}]: media of a tool result, rendered in a user message"
    return WrittenMessages(written, dict(sorted(notes.items())))


async def profile_of(
    renderer: RendererProtocol, template_arguments: Mapping[str, Any], *, has_tools: bool
) -> TemplateProfile:
    """Return the findings about a template. The first time it is probed, so this takes a thread."""
    return await asyncio.to_thread(renderer.template_profile, has_tools=has_tools, **template_arguments)


def _with_ids(message: Message, sampled_ids: Mapping[str, str]) -> Message:
    """Return a message with the model's own ids in place of the agent's."""
    if message.role == "tool":
        own = sampled_ids.get(message.tool_call_id or "", message.tool_call_id)
        return msgspec.structs.replace(message, tool_call_id=own)
    if any(call.id in sampled_ids for call in message.tool_calls):
        calls = [
            msgspec.structs.replace(call, id=sampled_ids.get(call.id or "", call.id))
            for call in message.tool_calls
        ]
        return msgspec.structs.replace(message, tool_calls=tuple(calls))
    return message


def _reminder(message: Message) -> Message:
    content = message.content
    inner = content if isinstance(content, tuple) else (TextPart(content or ""),)
    if all(isinstance(part, TextPart) for part in inner):
        text = "".join(part.text for part in inner if isinstance(part, TextPart))
        return Message(role="user", content=f"{_OPEN}{text}{_CLOSE}")
    return Message(role="user", content=(TextPart(_OPEN), *inner, TextPart(_CLOSE)))


def _move_media(messages: Sequence[Message], shown: Sequence[int], written: list[Sequence[Message]]) -> None:
    """Move media out of tool results, into a user message after the results that follow each other."""
    names = {call.id: call.name for message in messages for call in message.tool_calls if call.id}
    moved: list[Any] = []
    for index in shown:
        message = messages[index]
        name = message.name or names.get(message.tool_call_id or "") or "a tool"
        moved += [
            TextPart(f"From the result of {name} ({message.tool_call_id}):"),
            *(part for _, part in message.media()),
        ]
        rest = tuple(part for part in message.content or () if isinstance(part, TextPart))
        rest = rest if any(part.text.strip() for part in rest) else (TextPart("It follows as a picture."),)
        written[index] = (msgspec.structs.replace(message, content=rest),)
        following = index + 1
        while following < len(messages) and messages[following].role == "tool" and following not in shown:
            following += 1
        is_last = following == len(messages) or messages[following].role != "tool"
        if is_last:
            written[following - 1] = (*written[following - 1], Message(role="user", content=tuple(moved)))
            moved = []
