"""Read the arguments of a call, such as messages in any common form, into one checked `RenderRequest`.

Messages are the hot path: a plain `{"role": …, "content": "…"}` takes one branch, and a path is built only
for an error.
"""

import difflib
import json
import re
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import msgspec

from mmrender.content.parts import attach_media, normalize_content
from mmrender.content.tools import (
    normalize_documents,
    normalize_tool_call,
    normalize_tool_calls,
    normalize_tools,
)
from mmrender.content.values import (
    as_fields,
    as_identifier,
    as_list,
    as_sequence,
    as_text,
    copy_containers,
    describe,
    is_record,
    keys_of,
    member,
)
from mmrender.errors import InputError, MessageError, one_of
from mmrender.messages import (
    ROLES,
    MediaPart,
    Message,
    Part,
    RenderRequest,
    RequestMedia,
    Role,
    TextPart,
    ThinkingPart,
    ToolCall,
)

# `function` is how OpenAI named tool results before tool calls had ids.
_ROLE_OF: dict[str, Role] = {**{role: role for role in ROLES}, "function": "tool"}

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names under which Transformers reads the reasoning of a message. The first that is not None wins."""

# No chat template reads media from here, so they would be lost without a word.
_MISPLACED_MEDIA = frozenset({"audio", "audios", "image", "images", "video", "videos"})

# Fields of responses and datasets that are dropped if they are empty.
_API_FIELDS = _MISPLACED_MEDIA | {"annotations", "parsed", "refusal"}

_MEMBERS = ("role", "content", *REASONING_KEYS, "tool_calls", "name", "tool_call_id", "function_call")

_MISSPELT = 0.8
"""Likeness, by `difflib`, from which a member counts as one of `_MEMBERS` misspelt."""

_MESSAGE = "a dict with role and content, a Message, a pydantic model or a dataclass"


def read_request(
    messages: Sequence[Any],
    *,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Any] | None = None,
    images: Sequence[Any] | None = None,
    videos: Sequence[Any] | None = None,
    audio: Sequence[Any] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool | str = False,
    variables: Mapping[str, Any] | None = None,
    fingerprint: Callable[[MediaPart], Hashable | None] | None = None,
    where: str = "messages",
    allow_empty: bool = False,
) -> RenderRequest:
    """Read the arguments of `Renderer.render`, in any accepted form, into a request.

    `variables` come from `read_variables`. Without `fingerprint`, a function of a media part, the
    request has no media. `where` is the name of the messages in errors, and `allow_empty` accepts a
    conversation without messages.

    Raises:
        InputError: The prompt would both open a turn and continue one.
        MessageError: A message, tool, document or part is malformed.
    """
    if add_generation_prompt and continue_final_message:
        raise InputError(
            "a prompt either opens the assistant's turn or continues it",
            where="continue_final_message",
            expected="add_generation_prompt=False",
        )
    conversation = () if allow_empty and not len(messages) else normalize_messages(messages, where=where)
    if images is not None or videos is not None or audio is not None:
        conversation = attach_media(conversation, images, videos, audio, where=where)
    media: tuple[RequestMedia, ...] = ()
    if fingerprint is not None:
        media = tuple([
            RequestMedia(
                path=f"{where}[{index}].content[{position}]",
                message=index,
                position=position,
                role=message.role,
                part=part,
                fingerprint=fingerprint(part),
            )
            for index, message in enumerate(conversation)
            if type(message.content) is tuple
            for position, part in enumerate(message.content)
            if isinstance(part, MediaPart)
        ])  # fmt: skip
    continued = continue_final_message if isinstance(continue_final_message, str) else "content"
    return RenderRequest(
        conversation,
        media,
        None if tools is None else normalize_tools(tools),
        None if documents is None else normalize_documents(documents),
        bool(add_generation_prompt),
        continued if continue_final_message else None,
        variables or {},
        where,
    )


def read_variables(
    mapping: Any,
    keywords: Mapping[str, Any],
    *,
    known: Collection[str],
    options: Collection[str],
    reserved: Collection[str],
) -> dict[str, Any]:
    """Merge template variables from `chat_template_kwargs` and keywords, with copies of lists and dicts.

    Args:
        mapping: `chat_template_kwargs`.
        keywords: Further keywords of the call.
        known: Variables that the chat template reads.
        options: Options of the call.
        reserved: Variables that the renderer sets.

    Raises:
        InputError: `mapping` is not a mapping by name, or a variable is unknown, reserved or comes both ways.
    """
    if mapping is None:
        mapping = {}
    if not isinstance(mapping, Mapping) or not all(isinstance(name, str) for name in mapping):
        raise InputError(
            "template variables come in a mapping",
            where="chat_template_kwargs",
            expected="a dict by name",
            got=describe(mapping),
        )
    for name in keywords.keys() & mapping.keys():
        raise InputError(
            "the template variable comes twice", where=name, remedy="Leave it out of chat_template_kwargs"
        )
    variables = {name: copy_containers(value, name) for name, value in {**mapping, **keywords}.items()}
    for name in variables:
        if name not in known:
            where = f"chat_template_kwargs.{name}" if name in mapping else name
            raise _unread(name, where, known, options, reserved)
    return variables


_OPENED_WITH = {
    "chat_template": ("a renderer has one chat template", "chat_template"),
    # Transformers has two names for it.
    **dict.fromkeys(
        ("use_audio_in_video", "load_audio_from_video"),
        ("a renderer has one rule for the sound tracks of all videos", "use_audio_in_video"),
    ),
}
"""Settings of a renderer that are not arguments of a call: the problem, and the option of a renderer."""


def _unread(
    name: str, where: str, known: Collection[str], options: Collection[str], reserved: Collection[str]
) -> InputError:
    """Build the error for an argument that neither the renderer nor the template reads."""
    if name in _OPENED_WITH:
        problem, option = _OPENED_WITH[name]
        remedy = f"Open another renderer: Renderer.from_pretrained(..., {option}=...)"
        return InputError(problem, where=where, remedy=remedy)
    if name in options:
        problem = f"{name!r} is an option of the call, not a variable of the template"
        return InputError(problem, where=where, remedy=f"Pass it as a keyword: {name}=...")
    if name in reserved:
        return InputError(
            f"{name!r} is set by the renderer",
            where=where,
            remedy="Pass only other variables of the template",
        )
    names = (*known, *options)
    near = difflib.get_close_matches(name, names, n=1)
    return InputError(
        "neither the renderer nor the chat template reads this argument",
        where=where,
        expected=f"one of {', '.join(names)}",
        remedy=f"Did you mean {near[0]!r}?" if near else "Leave it out",
    )


def normalize_messages(messages: Sequence[Any], *, where: str = "messages") -> tuple[Message, ...]:
    """Turn a conversation in any accepted form into canonical messages.

    The input is not changed, and the result does not share lists or dicts with it. Media stay as they are.

    Args:
        messages: A list of dicts, other mappings, pydantic models, dataclasses, msgspec structs and
            `Message`s (kept as they are), in any mixture.
        where: Start of the paths in errors.

    Raises:
        MessageError: Something cannot be read. `where` is its path, such as `messages[2].content[1].type`.
    """
    items: Sequence[Any] = messages
    if type(messages) is not list:
        remedy = "Wrap a single message in a list" if is_record(messages) else None
        if isinstance(messages, str):
            remedy = 'Write [{"role": "user", "content": …}], or decode JSON text first'
        expected = "a list of messages"
        items = as_list(messages, where, "is not a conversation", expected=expected, remedy=remedy)
    if not items:
        raise MessageError("the conversation is empty", where=where, expected="at least one message")
    result: list[Message] = []
    for index, item in enumerate(items):
        # The usual shapes are read here.
        role: Any = item.get("role") if type(item) is dict and len(item) == 2 else None
        content = item.get("content") if type(role) is str and role in ROLES else None
        if type(content) is str and content.isascii():
            result.append(Message(role=role, content=content))
        elif type(content) is list or type(content) is str:
            parts = normalize_content(content, f"{where}[{index}].content")
            result.append(Message(role=role, content=parts))
        else:
            result.append(item if type(item) is Message else normalize_message(item, f"{where}[{index}]"))
    return tuple(result)


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
    name = fields.pop("role", None)
    role = _ROLE_OF.get(name) if isinstance(name, str) else None
    if name is None:
        raise MessageError(
            "the message lacks a role", where=where, expected="a key 'role'", got=keys_of(fields)
        )
    if role is None:
        raise MessageError("unknown role", where=f"{where}.role", expected=one_of(ROLES), got=describe(name))
    content = normalize_content(fields.pop("content", None), f"{where}.content")
    if not fields:
        return Message(role=role, content=content)
    tool_calls = _tool_calls(fields, role, where)
    reasoning: str | None = None
    for key in REASONING_KEYS:
        if key in fields:
            text = as_text(fields[key], f"{where}.{key}")
            reasoning = text if reasoning is None else reasoning
            # Another text under a later name stays in `extra`, since a template may read it by that name.
            if text == reasoning:
                del fields[key]
    name, tool_call_id = (
        as_identifier(fields.pop(key), f"{where}.{key}") if key in fields else None
        for key in ("name", "tool_call_id")
    )
    return Message(
        role=role,
        content=content,
        reasoning_content=reasoning,
        tool_calls=tool_calls,
        name=name,
        tool_call_id=tool_call_id,
        extra=_extra(fields, where) if fields else {},
    )


def _tool_calls(fields: dict[str, Any], role: Role, where: str) -> tuple[ToolCall, ...]:
    key, calls = "tool_calls", normalize_tool_calls(fields.pop("tool_calls", None), f"{where}.tool_calls")
    legacy = fields.pop("function_call", None)
    if legacy:
        if calls:
            raise MessageError(
                "the message has both tool_calls and function_call", where=where, expected="only one of them"
            )
        key, calls = "function_call", (normalize_tool_call(legacy, f"{where}.function_call"),)
    if calls and role != "assistant":
        raise MessageError(
            "only an assistant calls tools",
            where=f"{where}.{key}",
            expected="role assistant",
            got=f"role {role}",
        )
    return calls


def _extra(fields: dict[Any, Any], where: str) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    for key, value in fields.items():
        path = member(where, key)
        if not isinstance(key, str):
            raise MessageError(
                "keys of a message are text", where=where, expected="str keys", got=describe(key)
            )
        items = value if isinstance(value, (str, dict)) else as_sequence(value)
        if key in _API_FIELDS and items is not None and not items:
            continue
        if key in _MISPLACED_MEDIA:
            raise MessageError(
                "media of a message belong in its content",
                where=path,
                expected='parts such as {"type": "image", "image": …} in content',
                got=describe(value),
            )
        extra[key] = copy_containers(value, path)
    return extra


def refuse_misspelt(request: RenderRequest, template: str) -> None:
    """Refuse a member of a message that a chat template cannot read, if another member was probably meant.

    Other members that are not part of any standard, such as a row's `weight`, may stay.

    Args:
        request: The conversation.
        template: Jinja text of the chat template.

    Raises:
        MessageError: The member resembles a standard one, or its message has no content at all.
    """
    for index, message in enumerate(request.messages):
        is_empty = message.content is None and not message.tool_calls and message.reasoning_content is None
        for key in message.extra:
            near = difflib.get_close_matches(key, _MEMBERS, n=1, cutoff=_MISSPELT)
            if (not near and not is_empty) or re.search(rf"\b{re.escape(key)}\b", template):
                continue
            raise MessageError(
                "neither the renderer nor the chat template reads this member",
                where=member(f"{request.where}[{index}]", key),
                expected=one_of(_MEMBERS),
                remedy=f"Did you mean {near[0]!r}?" if near else "Write the text as the message's content",
            )


def to_openai(message: Message) -> dict[str, Any]:
    """Convert a message into a new dict, which `normalize_messages` reads back as an equal message.

    Content keeps its shape. Sources that are text become `image_url` and `video_url` parts. Other sources
    stay objects in `image` and `video` parts, so the dict is JSON only if all sources are text. Arguments
    become JSON text. Fields that are not set are left out, except `content`.
    """
    content = message.content
    result: dict[str, Any] = {
        "role": message.role,
        "content": [_openai_part(part) for part in content] if isinstance(content, tuple) else content,
    }
    for key in ("reasoning_content", "name", "tool_call_id"):
        if (value := getattr(message, key)) is not None:
            result[key] = value
    for call in message.tool_calls:
        function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        wrapped = {"type": "function", "function": function}
        result.setdefault("tool_calls", []).append(wrapped if call.id is None else {"id": call.id, **wrapped})
    for key, value in message.extra.items():
        result[key] = copy_containers(value, key)
    return result


def _openai_part(part: Part) -> dict[str, Any]:
    if isinstance(part, TextPart | ThinkingPart):
        fields: dict[str, Any] = msgspec.to_builtins(part)
        return fields
    modality, source = part.modality, part.source
    fields = {"type": modality} if source is None else {"type": modality, modality: source}
    if isinstance(source, str):
        fields = {"type": f"{modality}_url", f"{modality}_url": {"url": source}}
    for name in part.__struct_fields__:
        value = getattr(part, name)
        if name != "source" and value is not None:
            fields[name] = list(value) if isinstance(value, tuple) else value
    return fields
