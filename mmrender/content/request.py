"""From the arguments of a call to one checked `RenderRequest`."""

import difflib
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

from mmrender.content.messages import normalize_messages
from mmrender.content.parts import attach_media
from mmrender.content.tools import normalize_documents, normalize_tools
from mmrender.content.values import copy_containers, describe
from mmrender.errors import InputError
from mmrender.messages import MediaPart, RenderRequest, RequestMedia


def read_request(
    messages: Sequence[Any],
    *,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Any] | None = None,
    images: Sequence[Any] | None = None,
    videos: Sequence[Any] | None = None,
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
    if images is not None or videos is not None:
        conversation = attach_media(conversation, images, videos, where=where)
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
            for position, part in message.media()
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


def _unread(
    name: str, where: str, known: Collection[str], options: Collection[str], reserved: Collection[str]
) -> InputError:
    """Build the error for an argument that neither the renderer nor the template reads."""
    if name == "chat_template":
        return InputError(
            "a renderer has one chat template",
            where=where,
            remedy="Open another renderer: Renderer.from_pretrained(..., chat_template=...)",
        )
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
