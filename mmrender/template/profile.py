"""The profile of a chat template, found by rendering probes and never assumed.

A profile holds the findings about one template with one set of template arguments: the shapes of messages
that it takes, its generation prompts, the tokens that end an assistant's turn, its spelling of reasoning,
whether it rewrites history, the roles that may hold images, and whether its whole output is attributed.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

from mmrender.messages import Message, Role
from mmrender.model.tokenizer import Tokenizer
from mmrender.template.chat import ViewForm
from mmrender.template.probes import (
    CALL,
    CALLING,
    RESULT,
    WORD,
    Carrier,
    Probes,
    assistant,
    messages_around,
    probe_call,
    tool_definition,
    user,
    with_reasoning,
)
from mmrender.template.text import TracedStr, plain

_TAG = r"<[^<>\s]+>|\[[^\[\]\s]+\]|\u25c1[^\u25c1\u25b7\s]+\u25b7"
_TAG_BEFORE = re.compile(rf"(?:{_TAG})\w*\Z")
_TAG_AFTER = re.compile(_TAG)
_NAMED_TAG = re.compile(r"([<\[\u25c1])(\w[^<>\[\]\u25c1\u25b7]*)([>\]\u25b7])")
_LETTERS = re.compile(r"\w+\Z")
_BREAK = "\n\n"
_SYSTEM = Message(role="system", content=f"{WORD}S")
_IMAGE_ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class ReasoningFormat:
    """Delimiters of a reasoning block, as the template prints them.

    Attributes:
        begin: Opening delimiter, such as `<think>`.
        end: Closing delimiter.
        after_begin: Template text between `begin` and the reasoning.
        before_end: Template text between the reasoning and `end`.
        after_end: Template text between `end` and the content.
        carrier: Field of a message that the template prints reasoning from.
    """

    begin: str
    end: str
    after_begin: str = ""
    before_end: str = ""
    after_end: str = ""
    carrier: Carrier = "reasoning_content"

    def is_open(self, turn: str) -> bool:
        """Whether the text of a turn, its generation prompt included, ends inside reasoning."""
        return turn.rfind(self.begin) > turn.rfind(self.end)

    @property
    def empty(self) -> re.Pattern[str]:
        """A block without reasoning, or the end of one, with the blanks after it."""
        return re.compile(rf"(?:{re.escape(self.begin)}\s*)?{re.escape(self.end)}\s*")

    def answer_start(self, text: str, turn: int, prompt: str) -> int | None:
        """Return the character at which the answer of a turn without reasoning begins in a conversation.

        None unless the turn's prompt ends in a block, open or empty, and the conversation continues the text
        before that block. Empty blocks in earlier turns make no difference: the template wrote them.

        Args:
            text: The rendered conversation.
            turn: Start of the turn in it.
            prompt: The rendered prompt of the turn.
        """
        start = prompt.rfind(self.begin)
        if start < 0 or self.empty.sub("", prompt[start + len(self.begin) :]).strip():
            return None
        header, before = prompt[:start], text[:turn]
        if not header.startswith(before):
            header, before = self.empty.sub("", header), self.empty.sub("", before)
        if not header.startswith(before) or not text.startswith(header[len(before) :], turn):
            return None
        answer = turn + len(header) - len(before)
        if (empty := self.empty.match(text, answer)) is not None:
            return empty.end()
        return None if text.startswith(self.begin, answer) else answer


@dataclass(frozen=True)
class TemplateProfile:
    """Findings about one template with one set of template arguments.

    Attributes:
        form: Shapes of messages that the template takes.
        generation_prompts: Texts that open the assistant's turn: first the text after a single user message,
            then others if they depend on the conversation.
        openings: Text between a question, or a tool's result, and the answer, without generation prompts.
        closes: Template text right after the assistant's content, by the message that follows: `user`,
            `tool`, or `end` without one.
        openers: Stop tokens that open the next turn, and are only written if it follows, by that message.
        stop_ids: Tokens that end the assistant's turn: the stop tokens of the model's files, and tokens that
            the template writes at the end of a turn.
        end_ids: Added tokens that close a turn at the end of a conversation.
        closer_ids: Special tokens that close a turn in history, but do not stop a model.
        prefix_stable: Whether each prompt of the probes was a prefix of the rendering that continued it. None
            if no probe rendered an answer.
        answers_stable: Whether the answers of the probes without reasoning followed their prompts, apart from
            empty blocks. See `ReasoningFormat.answer_start`.
        image_roles: Roles in which each image part writes a text.
        roles: Roles that the template accepts.
        prints_later_systems: Whether a system message after another one, and after a turn, is printed.
        prints_tools: Whether tool definitions are printed. None if the template refuses the probe.
        prints_tool_calls: Whether calls are printed. None if the template refuses the probe.
        writes_content_before_results: Whether the content of a message with calls is printed before the
            results of the calls.
        prints_reasoning: Turns whose `reasoning_content` is printed: `last` for the turns after the last user
            message, `history` for earlier turns.
        reasoning: Spelling of reasoning. None if the template prints none.
        arguments: Template variables that a caller may set, such as `enable_thinking`.
        unattributed: Probe texts that the template printed without their origin.
        reads_clock: Whether the text depends on the date.
    """

    form: ViewForm
    generation_prompts: tuple[str, ...]
    openings: tuple[str, ...]
    closes: Mapping[str, str]
    openers: Mapping[str, int]
    stop_ids: frozenset[int]
    end_ids: frozenset[int]
    closer_ids: frozenset[int]
    prefix_stable: bool | None
    answers_stable: bool
    image_roles: tuple[Role, ...]
    roles: tuple[Role, ...]
    prints_later_systems: bool
    prints_tools: bool | None
    prints_tool_calls: bool | None
    writes_content_before_results: bool
    prints_reasoning: tuple[str, ...]
    reasoning: ReasoningFormat | None
    arguments: tuple[str, ...]
    unattributed: tuple[str, ...]
    reads_clock: bool

    @property
    def generation_prompt(self) -> str:
        """Text that opens the assistant's turn after a user message. Empty if the template opens none."""
        return self.generation_prompts[0] if self.generation_prompts else ""


def probe_template(probes: Probes, model_stop_ids: Collection[int] = ()) -> TemplateProfile:
    """Run every probe. `model_stop_ids` are the stop tokens that the model's files name."""
    thought = f"{WORD}R"
    thinking = assistant(reasoning_content=thought)
    turns = {"last": [user(), thinking], "history": [user(), thinking, user("next"), assistant()]}
    with_both = probes.render([user(), assistant(tool_calls=(CALL,)), RESULT]) or ""
    closes = _closes(probes)
    prompts = _generation_prompts(probes)
    tools = [tool_definition(f"{WORD}F")]
    around = {role: messages_around(role) for role in get_args(Role)}
    later = Message(role="system", content=f"{WORD}L")
    systems = [_SYSTEM, later, user()], [_SYSTEM, user(), assistant(), user("next"), later]
    takes_parts = probes.form.content != "text"
    reasoning = _reasoning(probes, prompts[0] if prompts else "")
    return TemplateProfile(
        form=probes.form,
        generation_prompts=prompts,
        openings=() if any(prompts) else _openings(probes),
        closes=closes,
        **_turn_ends(closes, probes.tokenizer, frozenset(model_stop_ids)),
        prefix_stable=_is_prefix_stable(probes),
        answers_stable=reasoning is not None and _are_answers_stable(probes, reasoning),
        image_roles=tuple(role for role in _IMAGE_ROLES if takes_parts and probes.added_by("image", role)),
        roles=tuple(
            role
            for role, (before, middle, after) in around.items()
            if probes.prints(str(middle.content), [*before, middle, *after])
        ),
        prints_later_systems=all(probes.prints(f"{WORD}L", messages, prompt=True) for messages in systems),
        prints_tools=probes.prints(f"{WORD}F", [user()], tools=tools),
        prints_tool_calls=probes.prints("bravo", [user(), CALLING]),
        writes_content_before_results=f"{WORD}A" in with_both.partition(f"{WORD}T")[0],
        prints_reasoning=tuple(name for name, messages in turns.items() if probes.prints(thought, messages)),
        reasoning=reasoning,
        arguments=probes.template.variables,
        unattributed=_unattributed(probes),
        reads_clock=probes.template.reads_clock,
    )


def _generation_prompts(probes: Probes) -> tuple[str, ...]:
    conversations = [
        [user()],
        [_SYSTEM, user()],
        [user(), assistant(), user("next")],
        [user(), CALLING, RESULT],
        [user(), CALLING, RESULT, RESULT],
    ]
    prompts = map(probes.generation_prompt, conversations)
    return tuple(dict.fromkeys(prompt for prompt in prompts if prompt is not None))


def _openings(probes: Probes) -> tuple[str, ...]:
    """Text after the last content of a prompt that ends with a question, and with a tool's result."""
    texts = [probes.render(messages, prompt=True) for messages in ([user()], [user(), CALLING, RESULT])]
    return tuple(
        plain(text[max([stop for _, stop, origin in text.spans if origin.is_content], default=0) :])
        for text in texts
        if text is not None
    )


def _closes(probes: Probes) -> dict[str, str]:
    """Text right after the assistant's content, up to the next content, by the message that follows."""
    closes = {}
    following = {"end": [], "user": [user(f"{WORD}N")], "tool": [RESULT]}
    for name, messages in following.items():
        text = plain(probes.render([user(), assistant(), *messages]) or "")
        next_text = str(messages[0].content) if messages else ""
        if f"{WORD}A" in text and next_text in text:
            after = text.rpartition(f"{WORD}A")[2]
            closes[name] = after.partition(next_text)[0] if next_text else after
    return closes


def _turn_ends(
    closes: Mapping[str, str], tokenizer: Tokenizer, model_stop_ids: frozenset[int]
) -> dict[str, Any]:
    """The tokens that end a turn, by field of the profile.

    If the last turn closes with a stop token of the model, a close without one has a substitute for it in
    history. Otherwise the first special token of that close is a stop token, too.
    """
    tokens = {
        name: [tokenizer.added_ids[match.token] for match in tokenizer.find(text)]
        for name, text in closes.items()
    }
    end, end_ids = closes.get("end"), tokens.get("end", [])

    def closers_without(stop_ids: frozenset[int]) -> frozenset[int]:
        firsts = {ids[0] for ids in tokens.values() if ids and stop_ids.isdisjoint(ids)}
        return tokenizer.special_ids & firsts

    stop_ids = model_stop_ids
    if stop_ids.isdisjoint(end_ids[:1]):
        stop_ids |= closers_without(stop_ids)
    openers = {}
    for following, text in closes.items():
        if end is not None and following != "end" and text.startswith(end):
            match = next(iter(tokenizer.find(text[len(end) :])), None)
            if match is not None and match.start == 0 and tokenizer.added_ids[match.token] in stop_ids:
                openers[following] = tokenizer.added_ids[match.token]
    return {
        "openers": openers,
        "stop_ids": stop_ids,
        "end_ids": frozenset(end_ids),
        "closer_ids": closers_without(stop_ids),
    }


def _answers(
    probes: Probes, conversations: Iterable[Sequence[Message]]
) -> Iterator[tuple[TracedStr, int, str | None]]:
    """Each assistant message of conversations: the rendered conversation, its index, and its prompt."""
    for messages in conversations:
        text = probes.render(messages)
        if text is None:
            continue
        for index, message in enumerate(messages):
            if message.role == "assistant":
                prompt = probes.render(messages[:index], prompt=True)
                yield text, index, None if prompt is None else plain(prompt)


def _is_prefix_stable(probes: Probes) -> bool | None:
    """Whether each prompt is a prefix of the text that continues it, with calls and reasoning, or None."""
    thinking = assistant(reasoning_content=f"{WORD}R")
    calling = assistant("", tool_calls=(CALL,), reasoning_content=f"{WORD}R")
    conversations = [
        [user(), assistant(), user("next"), assistant()],
        [user(), thinking, user("next"), thinking],
        [user(), calling, RESULT, assistant(), user("next"), assistant()],
        [_SYSTEM, user(), assistant(), user("next"), assistant()],
    ]
    findings = (
        prompt is not None and plain(text).startswith(prompt)
        for text, _, prompt in _answers(probes, conversations)
        if f"{WORD}A" in text
    )
    first = next(findings, None)
    return first and all(findings)


def _are_answers_stable(probes: Probes, reasoning: ReasoningFormat) -> bool:
    """Whether the answers of all turns without reasoning follow their prompts, apart from empty blocks."""
    calling = assistant(tool_calls=(CALL,))
    conversations = [
        [*before, user("next"), assistant()]
        for before in ([_SYSTEM, user(), assistant()], [user(), calling, RESULT, assistant()])
    ]
    for text, index, prompt in _answers(probes, conversations):
        turn = next((low for low, _, origin in text.spans if origin.message == index), len(text))
        if prompt is None or reasoning.answer_start(plain(text), turn, prompt) is None:
            return False
    return True


def _unattributed(probes: Probes) -> tuple[str, ...]:
    """Probe texts that were printed without their origin."""
    thinker = assistant(reasoning_content=f"{WORD}R", tool_calls=(CALL,))
    rendered = probes.render([user(), thinker, RESULT]) or probes.render([user(), assistant()])
    texts = [*(f"{WORD}{letter}" for letter in "UART"), "bravo"]
    if rendered is None:
        return ()
    content = {char for low, high, origin in rendered.spans if origin.is_content for char in range(low, high)}

    def is_attributed(text: str) -> bool:
        matches = re.finditer(re.escape(text), plain(rendered))
        return any(content.issuperset(range(*match.span())) for match in matches)

    return tuple(text for text in texts if text in rendered and not is_attributed(text))


def _reasoning(probes: Probes, generation_prompt: str) -> ReasoningFormat | None:
    """Find the delimiters around reasoning, or around the block that the prompt opens."""
    content, thought = f"{WORD}C", f"{WORD}R"
    # Some templates print reasoning only in messages with calls.
    for carrier, calls in product(get_args(Carrier), ((), (probe_call(name="probe_none"),))):
        turn = probes.turn(with_reasoning(assistant(content, tool_calls=calls), thought, carrier))
        before, printed, rest = ("" if turn is None else turn.header + turn.text).partition(thought)
        if not printed:
            continue
        between = rest.partition(content)[0]
        after = between.lstrip()
        begin, end = _last_delimiter(probes, before.rstrip()), _first_delimiter(probes, after)
        if begin is None or end is None:
            continue
        answer = probes.turn(assistant(content, tool_calls=calls))
        ahead = "" if answer is None else answer.text.partition(content)[0]
        if turn is not None and ahead.rfind(begin) > ahead.rfind(end):
            # Content follows the same delimiter, so the text before the delimiter tells them apart.
            begin = turn.text.partition(thought)[0].rstrip()
        return ReasoningFormat(
            begin,
            end,
            after_begin=before[len(before.rstrip()) :],
            before_end=between[: len(between) - len(after)],
            after_end=after[len(end) :] if content in rest and not calls else "",
            carrier=carrier,
        )
    return _prompted_reasoning(probes, generation_prompt)


def _prompted_reasoning(probes: Probes, generation_prompt: str) -> ReasoningFormat | None:
    """The block that the generation prompt opens, if the template takes blocks like it out of content."""
    content, thought = f"{WORD}C", f"{WORD}R"
    prompt = generation_prompt.rstrip()
    begin = _last_delimiter(probes, prompt)
    tag = _NAMED_TAG.fullmatch(begin) if begin is not None else None
    if begin is None or tag is None:
        return None
    end = f"{tag.group(1)}/{tag.group(2)}{tag.group(3)}"

    def is_taken_out(between: str) -> bool:
        turn = probes.turn(assistant(f"{begin}{thought}{end}{between}{content}"))
        return turn is not None and thought not in turn.text and turn.text.startswith(content)

    if not is_taken_out(""):
        return None
    space = generation_prompt[len(prompt) :]
    after_end = _BREAK if is_taken_out(_BREAK) else ""
    return ReasoningFormat(begin, end, after_begin=space, before_end=space, after_end=after_end)


def _last_delimiter(probes: Probes, text: str) -> str | None:
    """The delimiter that ends a text: an added token or a tag, also with a word after it."""
    tokens = probes.tokenizer.find(text)
    if tokens and (tokens[-1].stop == len(text) or _LETTERS.fullmatch(text, tokens[-1].stop) is not None):
        return text[tokens[-1].start :]
    tag = _TAG_BEFORE.search(text)
    return tag.group() if tag is not None else None


def _first_delimiter(probes: Probes, text: str) -> str | None:
    token = next(iter(probes.tokenizer.find(text)), None)
    if token is not None and token.start == 0:
        return token.token
    tag = _TAG_AFTER.match(text)
    return tag.group() if tag is not None else None
