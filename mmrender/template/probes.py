"""Probes of a chat template: short conversations with unmistakable texts, rendered with it.

Everything that mmrender infers about a template is inferred through the `Probes` object here. A probe that
the template refuses returns None, which means "unknown" and never "yes".
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from mmrender.caching import cached_property
from mmrender.errors import TemplateError
from mmrender.messages import (
    UNKNOWN_PARTS,
    Message,
    Modality,
    RenderRequest,
    Role,
    TextPart,
    ThinkingPart,
    ToolCall,
)
from mmrender.model.tokenizer import Tokenizer
from mmrender.sidecar import common_prefix
from mmrender.template.chat import ChatTemplate, ToolImages, ViewForm
from mmrender.template.text import TracedStr, plain

WORD = "qwertz"
"""A word that no template writes by itself. Every text of a probe contains it."""

Carrier: TypeAlias = Literal["reasoning_content", "thinking_part"]
"""Field of a message that a template prints reasoning from."""

_CALL_ID = "call{:05d}"
"""Mistral's templates only accept ids of nine letters or digits."""


def user(text: str = f"{WORD}U", **fields: Any) -> Message:
    """A user message."""
    return Message(role="user", content=text, **fields)


def assistant(text: str | None = f"{WORD}A", **fields: Any) -> Message:
    """An assistant message."""
    return Message(role="assistant", content=text, **fields)


def probe_call(number: int = 1, *, name: str = "probe", **arguments: Any) -> ToolCall:
    """A tool call with an id of its own."""
    return ToolCall(name=name, arguments=arguments, id=_CALL_ID.format(number))


def tool_result(call: ToolCall) -> Message:
    """The tool message that answers a call."""
    return Message(role="tool", content=f"{WORD}T", name=call.name, tool_call_id=call.id)


def tool_definition(name: str, properties: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A function that the model may call, as an OpenAI tool definition."""
    parameters = {"type": "object", "properties": dict(properties or {})}
    return {
        "type": "function",
        "function": {"name": name, "description": "a probe", "parameters": parameters},
    }


def with_reasoning(message: Message, text: str, carrier: Carrier) -> Message:
    """The message with reasoning in the field that the template prints it from."""
    if carrier == "reasoning_content":
        return msgspec.structs.replace(message, reasoning_content=text)
    content = (TextPart(message.content),) if isinstance(message.content, str) else message.content or ()
    return msgspec.structs.replace(message, content=(ThinkingPart(text), *content))


CALL = probe_call(alpha="bravo", count=7)
CALLING = assistant("", tool_calls=(CALL,))
RESULT = tool_result(CALL)


class ProbedTurn(NamedTuple):
    """One assistant turn as the template prints it.

    Attributes:
        header: The part of the generation prompt that the turn begins with.
        text: The text that the model would have sampled, without the stop token.
    """

    header: str
    text: str


class Probes:
    """Renders probes with one template and one set of template arguments.

    Args:
        template: The template.
        tokenizer: Finds added tokens, which no result cuts.
        arguments: Template variables.
        form: Shapes of messages that the template takes. None has them found by probing.
        tool_images: `"user"` moves images out of tool results if the template drops them there.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        arguments: Mapping[str, Any] | None = None,
        *,
        form: ViewForm | None = None,
        tool_images: ToolImages = "tool",
    ) -> None:
        self.template = template
        self.tokenizer = tokenizer
        self.arguments = dict(arguments or {})
        self._tool_images = tool_images
        self._questions: dict[str, list[str | None]] = {}
        if form is not None:
            self.form = form

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        prompt: bool = False,
        form: ViewForm | None = None,
    ) -> TracedStr | None:
        """Render a conversation, with the generation prompt if `prompt`. None if the template refuses it."""
        try:
            request = RenderRequest(
                messages, tools=tools, add_generation_prompt=prompt, variables=self.arguments
            )
            return self.template.render(request, form or self.form)
        except TemplateError:
            return None

    def prints(self, text: str, messages: Sequence[Message], **options: Any) -> bool | None:
        """Whether the template prints a text. `options` are as for `render`, and None means the same."""
        rendered = self.render(messages, **options)
        return None if rendered is None else text in rendered

    def generation_prompt(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str | None:
        """Text that opens the assistant's turn after `messages`, or None if the template refuses them."""
        without, with_prompt = (self.render(messages, tools=tools, prompt=prompt) for prompt in (False, True))
        if without is None or with_prompt is None:
            return None
        body, prompted = plain(without), plain(with_prompt)
        return prompted[len(body) :] if prompted.startswith(body) else self.inserted(body, prompted)

    def turn(
        self,
        message: Message,
        stop_ids: Collection[int] = (),
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> ProbedTurn | None:
        """The turn of an assistant message that answers a question, or None if the template refuses it.

        It ends before the first of the stop tokens after its last content.
        """
        key = repr(tools)
        if key not in self._questions:
            questions = [self.render([user()], tools=tools, prompt=prompt) for prompt in (False, True)]
            self._questions[key] = [None if text is None else plain(text) for text in questions]
        body, prompted = self._questions[key]
        full = self.render([user(), message], tools=tools)
        if body is None or prompted is None or full is None:
            return None
        text = plain(full)
        start = self._token_start(prompted, common_prefix(body, prompted))
        if not text.startswith(prompted[:start]):
            return None
        begin = self._token_start(prompted, common_prefix(prompted, text))
        ends = [stop for _, stop, origin in full.spans if origin.message == 1 and origin.is_content]
        last = max([begin, *ends])
        stops = [self.tokenizer.token(token_id) for token_id in stop_ids]
        places = [place for stop in stops if stop and (place := text.find(stop, last)) >= 0]
        return ProbedTurn(text[start:begin], text[begin : min(places, default=len(text))])

    @cached_property
    def form(self) -> ViewForm:
        """Shapes of messages that the template takes, each chosen by the output."""
        form = self._form_of_messages()
        if self._tool_images == "user" and not self.added_by("image", "tool", form):
            moved = replace(form, tool_images="user")
            form = moved if self.added_by("image", "tool", moved) else form
        return form

    def _form_of_messages(self) -> ViewForm:
        form = ViewForm()
        parts = [Message(role="user", content=(TextPart(f"{WORD}P"),))]
        rendered = self.render(parts, form=form) or ""
        text_only, listed = replace(form, content="text"), replace(form, content="list")
        if f"{WORD}P" not in rendered or f"'{WORD}P'" in rendered:
            form = text_only if self.prints(f"{WORD}P", parts, form=text_only) else form
        if form.content == "parts" and not self._prints_strings(form) and self._prints_strings(listed):
            form = listed
        if form.content != "text" and self.added_by("image", "user", form) == "":
            url = replace(form, image="image_url")
            form = url if self.added_by("image", "user", url) else form
        for none_content in ("none", "absent", "empty"):
            for arguments in ("parsed", "json"):
                candidate = replace(form, none_content=none_content, arguments=arguments)
                calling = self.render([user(), assistant(None, tool_calls=(CALL,))], form=candidate)
                if calling is not None and "None" not in calling and "{'alpha'" not in calling:
                    return candidate
        return replace(form, none_content="empty")

    def _prints_strings(self, form: ViewForm) -> bool:
        text = self.render([user(), assistant()], form=form) or ""
        return f"{WORD}U" in text and f"{WORD}A" in text and "'type'" not in text

    def added_by(self, modality: Modality, role: Role, form: ViewForm | None = None) -> str | None:
        """Text that a media part adds to a message of `role`, or None if the template refuses it."""
        before, middle, after = messages_around(role)
        texts = []
        for parts in ((), (UNKNOWN_PARTS[modality],)):
            message = msgspec.structs.replace(middle, content=(*parts, TextPart(f"{WORD}X")))
            text = self.render([*before, message, *after], form=form)
            if text is None:
                return None
            texts.append(plain(text))
        added = self.inserted(*texts)
        # A template that does not expect parts prints their Python form, which is not a placeholder.
        return "" if "'type'" in added else added

    def inserted(self, without: str, with_more: str) -> str:
        """The part of `with_more` between the beginning and the end that it shares with `without`.

        It cuts no added token.
        """
        start = self._token_start(with_more, common_prefix(without, with_more))
        rest, old = with_more[start:], without[start:]
        stop = len(rest) - common_prefix(old[::-1], rest[::-1])
        # The rest of an added token that begins in the part belongs to it.
        inside = (match for match in self.tokenizer.find(rest) if match.own_start < stop < match.own_stop)
        return rest[: next((match.own_stop for match in inside), stop)]

    def _token_start(self, text: str, position: int) -> int:
        """The start of the added token around a character, or the character itself."""
        inside = (match for match in self.tokenizer.find(text) if match.own_start < position < match.own_stop)
        return next((match.own_start for match in inside), position)


def messages_around(role: Role) -> tuple[list[Message], Message, list[Message]]:
    """A message of `role`, and the messages that a template expects before and after it."""
    match role:
        case "tool":
            return [user(), CALLING], RESULT, []
        case "assistant":
            return [user()], assistant(), []
        case "user":
            return [], user(), []
        case _:
            return [], Message(role=role, content=f"{WORD}S"), [user()]
