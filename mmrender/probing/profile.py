"""What a template does, found by rendering probes and never assumed.

A probe is a short conversation whose texts are unmistakable. The profile says which shapes the template
takes, how it opens and closes the assistant's turn, whether history stays as it was written, which roles
may hold images, and whether everything that it prints is attributed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec

from mmrender.errors import TemplateError
from mmrender.messages import ImagePart, Message, Part, Role, TextPart, ToolCall
from mmrender.template.chat import ChatTemplate
from mmrender.template.traced import TracedStr, plain
from mmrender.template.view import ViewForm

_WORD = "qwertz"
_ARGUMENTS = {"alpha": "bravo", "count": 7}


def _user(text: str = f"{_WORD}U") -> Message:
    return Message(role="user", content=text)


def _assistant(text: str = f"{_WORD}A", **fields: Any) -> Message:
    return Message(role="assistant", content=text, **fields)


_CALL = (ToolCall(name="probe", arguments=_ARGUMENTS, id="call00001"),)
_TOOL_TURN = Message(role="tool", content=f"{_WORD}T", name="probe", tool_call_id="call00001")


@dataclass(frozen=True)
class TemplateProfile:
    """What was found out about one template with one set of template arguments.

    Attributes:
        form: Shapes the template takes.
        generation_prompts: What it writes to open the assistant's turn; several where that depends on the
            conversation.
        closes: What it writes right after the assistant's content, by what follows: `user`, `tool`, `end`.
        prefix_stable: Whether each prompt of the probes was a prefix of the rendering that continued it.
        image_roles: Roles in which an image part writes something, and never less than one per part.
        roles: Roles the template accepts.
        prints_tools: Whether tool definitions are printed.
        prints_tool_calls: Whether calls are printed.
        prints_reasoning: Where `reasoning_content` is printed: in the turns after the last user message
            (`last`), in earlier ones (`history`).
        reasoning: What opens a reasoning block, such as `<think>`, and all that stands between the block's
            text and the content; None where the template prints no reasoning.
        arguments: Template variables that a caller may set, such as `enable_thinking`.
        unattributed: Probe texts that the template printed without their origin.
        reads_clock: Whether the text depends on the date.
    """

    form: ViewForm
    generation_prompts: tuple[str, ...]
    closes: Mapping[str, str]
    prefix_stable: bool
    image_roles: tuple[Role, ...]
    roles: tuple[Role, ...]
    prints_tools: bool
    prints_tool_calls: bool
    prints_reasoning: tuple[str, ...]
    reasoning: tuple[str, str] | None
    arguments: tuple[str, ...]
    unattributed: tuple[str, ...]
    reads_clock: bool


class Prober:
    """Renders probes of one template.

    Args:
        template: The template.
        arguments: Template variables that hold for every probe.
    """

    def __init__(self, template: ChatTemplate, arguments: Mapping[str, Any] | None = None) -> None:
        self._template = template
        self._arguments = dict(arguments or {})

    def render(
        self, messages: Sequence[Message], *, form: ViewForm | None = None, **options: Any
    ) -> TracedStr | None:
        """Render a probe; None where the template refuses it."""
        try:
            return self._template.render(
                messages, form=form or self.form, arguments=self._arguments, **options
            )
        except TemplateError:
            return None

    @cached_property
    def form(self) -> ViewForm:
        """Shapes that the template takes, each chosen by what it prints."""
        form = ViewForm()
        parts = Message(role="user", content=(TextPart(f"{_WORD}P"),))
        shown = self.render([parts], form=form)
        if shown is None or f"'{_WORD}P'" in shown or f"{_WORD}P" not in shown:
            text_only = replace(form, content="text")
            flat = self.render([parts], form=text_only)
            if flat is not None and f"{_WORD}P" in flat:
                form = text_only
        if form.content == "parts" and self._added_by_image(form, "user") == "":
            url = replace(form, image="image_url")
            if self._added_by_image(url, "user"):
                form = url
        return self._call_form(form)

    def _call_form(self, form: ViewForm) -> ViewForm:
        conversation = [_user(), Message(role="assistant", content=None, tool_calls=_CALL)]
        for none_content in ("none", "absent", "empty"):
            for arguments in ("parsed", "json"):
                candidate = replace(form, none_content=none_content, arguments=arguments)
                shown = self.render(conversation, form=candidate)
                if shown is not None and "None" not in shown and "{'alpha'" not in shown:
                    return candidate
        return replace(form, none_content="empty")

    def _added_by_image(self, form: ViewForm, role: Role) -> str | None:
        """What an image part adds to a message of `role`; None where the template refuses it."""
        before, middle, after = self._around(role)
        without = self.render([*before, _with_content(middle, (TextPart(f"{_WORD}X"),)), *after], form=form)
        with_image = self.render(
            [*before, _with_content(middle, (ImagePart(None), TextPart(f"{_WORD}X"))), *after], form=form
        )
        if without is None or with_image is None:
            return None
        added = _inserted(plain(without), plain(with_image))
        # A template that does not expect parts prints their Python form, which is no placeholder.
        return "" if "'type'" in added else added

    @staticmethod
    def _around(role: Role) -> tuple[list[Message], Message, list[Message]]:
        """Messages before and after one of `role`, and that message."""
        if role == "tool":
            return [_user(), _assistant("", tool_calls=_CALL)], _TOOL_TURN, []
        if role == "assistant":
            return [_user()], _assistant(), []
        if role == "user":
            return [], _user(), []
        return [], Message(role=role, content=f"{_WORD}S"), [_user()]

    @cached_property
    def image_roles(self) -> tuple[Role, ...]:
        """Roles in which an image part writes something."""
        roles: tuple[Role, ...] = ("system", "user", "assistant", "tool")
        if self.form.content == "text":
            return ()
        return tuple(role for role in roles if self._added_by_image(self.form, role))

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        """Roles whose messages the template prints."""
        every: tuple[Role, ...] = ("system", "developer", "user", "assistant", "tool")
        found = []
        for role in every:
            before, middle, after = self._around(role)
            shown = self.render([*before, middle, *after])
            if shown is not None and isinstance(middle.content, str) and middle.content in shown:
                found.append(role)
        return tuple(found)

    def generation_prompts(self) -> set[str]:
        """What the generation prompt adds, over several conversations that end differently."""
        found = set()
        for messages in self._openings():
            without = self.render(messages)
            with_prompt = self.render(messages, add_generation_prompt=True)
            if without is None or with_prompt is None:
                continue
            body, prompted = plain(without), plain(with_prompt)
            found.add(prompted[len(body) :] if prompted.startswith(body) else _inserted(body, prompted))
        return found

    @staticmethod
    def _openings() -> list[list[Message]]:
        system = Message(role="system", content=f"{_WORD}S")
        called = _assistant("", tool_calls=_CALL)
        return [
            [_user()],
            [system, _user()],
            [_user(), _assistant(), _user("next")],
            [_user(), called, _TOOL_TURN],
            [_user(), called, _TOOL_TURN, _TOOL_TURN],
        ]

    @cached_property
    def closes(self) -> dict[str, str]:
        """Text right after the assistant's content, by what follows it, up to the next content."""
        found = {}
        end = self.render([_user(), _assistant()])
        if end is not None and f"{_WORD}A" in end:
            found["end"] = plain(end).rpartition(f"{_WORD}A")[2]
        user = self.render([_user(), _assistant(), _user(f"{_WORD}N")])
        if user is not None and f"{_WORD}N" in user:
            found["user"] = plain(user).rpartition(f"{_WORD}A")[2].partition(f"{_WORD}N")[0]
        tool = self.render([_user(), _assistant(), _TOOL_TURN])
        if tool is not None and f"{_WORD}T" in tool:
            found["tool"] = plain(tool).rpartition(f"{_WORD}A")[2].partition(f"{_WORD}T")[0]
        return found

    def prefix_stable(self) -> bool:
        """Whether every prompt is a prefix of what continues it, with calls and reasoning."""
        thought = {"reasoning_content": f"{_WORD}R"}
        called = _assistant("", tool_calls=_CALL, **thought)
        conversations = [
            [_user(), _assistant(), _user("next"), _assistant()],
            [_user(), _assistant(**thought), _user("next"), _assistant(**thought)],
            [_user(), called, _TOOL_TURN, _assistant(), _user("next"), _assistant()],
            [Message(role="system", content=f"{_WORD}S"), _user(), _assistant(), _user("next"), _assistant()],
        ]
        return all(self._is_stable(messages) for messages in conversations)

    def _is_stable(self, messages: list[Message]) -> bool:
        full = self.render(messages)
        if full is None:
            return True
        for index, message in enumerate(messages):
            if message.role == "assistant":
                prompt = self.render(messages[:index], add_generation_prompt=True)
                if prompt is None or not plain(full).startswith(plain(prompt)):
                    return False
        return True

    def prints_reasoning(self) -> tuple[str, ...]:
        """Where reasoning is printed."""
        thinker = _assistant(reasoning_content=f"{_WORD}R")
        last = self.render([_user(), thinker])
        earlier = self.render([_user(), thinker, _user("next"), _assistant()])
        found = {"last": last, "history": earlier}
        return tuple(place for place, shown in found.items() if shown is not None and f"{_WORD}R" in shown)

    def reasoning(self) -> tuple[str, str] | None:
        """What opens a reasoning block, and what stands between its text and the content."""
        shown = self.render([_user(), _assistant(reasoning_content=f"{_WORD}R")])
        if shown is None or f"{_WORD}R" not in shown:
            return None
        before, _, after = plain(shown).partition(f"{_WORD}R")
        between, found, _ = after.partition(f"{_WORD}A")
        opener = re.search(r"(<[^<>\s]*>|\[[^\[\]\s]*\]|\S+)\s*\Z", before)
        return (opener.group(1), between) if opener and found else None

    def unattributed(self) -> tuple[str, ...]:
        """Probe texts that were printed without their origin."""
        thinker = _assistant(f"{_WORD}A", reasoning_content=f"{_WORD}R", tool_calls=_CALL)
        shown = self.render([_user(), thinker, _TOOL_TURN])
        if shown is None:
            shown = self.render([_user(), _assistant()])
        if shown is None:
            return ()
        texts = [f"{_WORD}{letter}" for letter in "UART"] + ["bravo"]
        return tuple(text for text in texts if text in shown and not _is_attributed(shown, text))

    def profile(self) -> TemplateProfile:
        """Run every probe."""
        tools = [{"type": "function", "function": {"name": f"{_WORD}F", "parameters": {"type": "object"}}}]
        with_tools = self.render([_user()], tools=tools)
        with_call = self.render([_user(), _assistant("", tool_calls=_CALL)])
        return TemplateProfile(
            form=self.form,
            generation_prompts=tuple(sorted(self.generation_prompts())),
            closes=self.closes,
            prefix_stable=self.prefix_stable(),
            image_roles=self.image_roles,
            roles=self.roles,
            prints_tools=with_tools is not None and f"{_WORD}F" in with_tools,
            prints_tool_calls=with_call is not None and "bravo" in with_call,
            prints_reasoning=self.prints_reasoning(),
            reasoning=self.reasoning(),
            arguments=self._template.arguments,
            unattributed=self.unattributed(),
            reads_clock=self._template.reads_clock,
        )


def _with_content(message: Message, content: tuple[Part, ...]) -> Message:
    return msgspec.structs.replace(message, content=content)


def _inserted(without: str, with_more: str) -> str:
    """What stands in `with_more` beyond the common beginning and end."""
    start = 0
    while start < min(len(without), len(with_more)) and without[start] == with_more[start]:
        start += 1
    rest = with_more[start:]
    end = 0
    while end < min(len(without) - start, len(rest)) and without[-1 - end] == rest[-1 - end]:
        end += 1
    return rest[: len(rest) - end]


def _is_attributed(shown: TracedStr, text: str) -> bool:
    body = plain(shown)
    position = body.find(text)
    while position >= 0:
        stop = position + len(text)
        covered = sum(
            min(high, stop) - max(low, position)
            for low, high, origin in shown._spans
            if low < stop and high > position and origin.is_content
        )
        if covered == len(text):
            return True
        position = body.find(text, stop)
    return False
