"""The profile of a chat template, found by rendering probes and never assumed.

A profile answers for one template with one set of template arguments: which shapes it takes, what its
generation prompt is, what ends an assistant's turn, how it writes reasoning, whether history stays as it was
written, which roles may hold images, and whether everything that it prints is attributed.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import get_args

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
_IMAGE_ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class ReasoningFormat:
    """Delimiters of a reasoning block, as the template prints them.

    Attributes:
        begin: Opens it, such as `<think>`.
        end: Closes it.
        after_begin: What the template writes between `begin` and the reasoning.
        before_end: What it writes between the reasoning and `end`.
        after_end: What it writes between `end` and the content.
        carrier: Which field of a message the template prints reasoning from.
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
        before that block. Empty blocks in earlier turns make no difference: nobody wrote them.

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
        form: Shapes the template takes.
        generation_prompts: What it writes to open the assistant's turn; several where that depends on the
            conversation, the one after a lone user message first.
        openings: Text between a question, or a tool's result, and the answer, if there are no generation
            prompts.
        closes: What it writes right after the assistant's content, by what follows: `user`, `tool`, `end`.
        openers: Stop tokens that open the next turn, and are written only once it follows, by what follows:
            `user`, `tool`.
        stop_ids: Tokens that end the assistant's turn: those of the model's files, and those that the
            template writes at its end.
        end_ids: Added tokens that close a turn which nothing follows.
        closer_ids: Special tokens that close a turn in history, on which no model stops.
        prefix_stable: Whether each prompt of the probes was a prefix of the rendering that continued it; None
            where no probe showed an answer.
        answers_stable: Whether the answers of the probes without reasoning followed their prompts, but for
            empty blocks; see `ReasoningFormat.answer_start`.
        image_roles: Roles in which an image part writes something, and never less than one per part.
        roles: Roles the template accepts.
        prints_tools: Whether tool definitions are printed; None where the template refuses the probe.
        prints_tool_calls: Whether calls are printed; None where the template refuses the probe.
        writes_content_before_results: Whether content beside calls is printed, and before the calls' results.
        prints_reasoning: Where `reasoning_content` is printed: in the turns after the last user message
            (`last`), in earlier ones (`history`).
        reasoning: How reasoning is written; None where the template shows none.
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
        """Text that opens the assistant's turn after a user message; empty where the template opens none."""
        return self.generation_prompts[0] if self.generation_prompts else ""

    def generation_prompt_of(self, text: str) -> str:
        """The generation prompt that a text ends in; empty if it ends in none."""
        return max(filter(text.endswith, self.generation_prompts), key=len, default="")

    def opens_answer(self, text: str) -> bool:
        """Whether an assistant's turn begins after a text, rather than goes on."""
        if any(self.generation_prompts):
            return self.generation_prompt_of(text) != ""
        return text.endswith(self.openings)


def probe_template(probes: Probes, model_stop_ids: Collection[int] = ()) -> TemplateProfile:
    """Run every probe; `model_stop_ids` are the stop tokens that the model's files name."""
    thought = f"{WORD}R"
    thinking = assistant(reasoning_content=thought)
    places = {"last": [user(), thinking], "history": [user(), thinking, user("next"), assistant()]}
    with_both = probes.render([user(), assistant(tool_calls=(CALL,)), RESULT]) or ""
    closes = _closes(probes)
    written = _close_ids(closes, probes.tokenizer)
    special_ids = probes.tokenizer.special_ids
    stop_ids = _stop_ids(written, special_ids, frozenset(model_stop_ids))
    prompts = _generation_prompts(probes)
    tools = [tool_definition(f"{WORD}F")]
    around = {role: messages_around(role) for role in get_args(Role)}
    takes_parts = probes.form.content != "text"
    reasoning = _reasoning(probes, prompts[0] if prompts else "")
    return TemplateProfile(
        form=probes.form,
        generation_prompts=prompts,
        openings=() if any(prompts) else _openings(probes),
        closes=closes,
        openers=_openers(closes, probes.tokenizer, stop_ids),
        stop_ids=stop_ids,
        end_ids=frozenset(written.get("end", ())),
        closer_ids=_unstopped_closers(written, special_ids, stop_ids),
        prefix_stable=_is_prefix_stable(probes),
        answers_stable=reasoning is not None and _are_answers_stable(probes, reasoning),
        image_roles=tuple(role for role in _IMAGE_ROLES if takes_parts and probes.added_by_image(role)),
        roles=tuple(
            role
            for role, (before, middle, after) in around.items()
            if probes.shows(str(middle.content), [*before, middle, *after])
        ),
        prints_tools=probes.shows(f"{WORD}F", [user()], tools=tools),
        prints_tool_calls=probes.shows("bravo", [user(), CALLING]),
        writes_content_before_results=f"{WORD}A" in with_both.partition(f"{WORD}T")[0],
        prints_reasoning=tuple(place for place, shown in places.items() if probes.shows(thought, shown)),
        reasoning=reasoning,
        arguments=probes.template.arguments,
        unattributed=_unattributed(probes),
        reads_clock=probes.template.reads_clock,
    )


def _generation_prompts(probes: Probes) -> tuple[str, ...]:
    conversations = [
        [user()],
        [Message(role="system", content=f"{WORD}S"), user()],
        [user(), assistant(), user("next")],
        [user(), CALLING, RESULT],
        [user(), CALLING, RESULT, RESULT],
    ]
    found = [probes.generation_prompt(messages) for messages in conversations]
    return tuple(dict.fromkeys(prompt for prompt in found if prompt is not None))


def _openings(probes: Probes) -> tuple[str, ...]:
    """Text after the last content of a prompt, with a question and with a tool's result at its end."""
    shown = [probes.render(messages, prompt=True) for messages in ([user()], [user(), CALLING, RESULT])]
    return tuple(
        plain(text[max([stop for _, stop, origin in text.spans if origin.is_content], default=0) :])
        for text in shown
        if text is not None
    )


def _closes(probes: Probes) -> dict[str, str]:
    """Text right after the assistant's content, up to the next content, by what follows."""
    found = {}
    following = {"end": [], "user": [user(f"{WORD}N")], "tool": [RESULT]}
    for name, messages in following.items():
        shown = plain(probes.render([user(), assistant(), *messages]) or "")
        next_text = str(messages[0].content) if messages else ""
        if f"{WORD}A" in shown and next_text in shown:
            after = shown.rpartition(f"{WORD}A")[2]
            found[name] = after.partition(next_text)[0] if next_text else after
    return found


def _stop_ids(
    written: Mapping[str, Sequence[int]], special_ids: frozenset[int], model_stop_ids: frozenset[int]
) -> frozenset[int]:
    """The model's stop tokens, and the first token of a close that holds none of these, if it is special.

    Where the last turn closes with one of the model's, other closes hold what stands for it in history.
    """
    if model_stop_ids.intersection(written.get("end", ())[:1]):
        return model_stop_ids
    return model_stop_ids | _unstopped_closers(written, special_ids, model_stop_ids)


def _close_ids(closes: Mapping[str, str], tokenizer: Tokenizer) -> dict[str, list[int]]:
    """The added tokens of each close, by what follows."""
    return {
        name: [tokenizer.added_ids[match.token] for match in tokenizer.find(text)]
        for name, text in closes.items()
    }


def _unstopped_closers(
    written: Mapping[str, Sequence[int]], special_ids: frozenset[int], stop_ids: frozenset[int]
) -> frozenset[int]:
    """The first token of each close that holds no stop token, if it is special."""
    return special_ids & {ids[0] for ids in written.values() if ids and stop_ids.isdisjoint(ids)}


def _openers(closes: Mapping[str, str], tokenizer: Tokenizer, stop_ids: frozenset[int]) -> dict[str, int]:
    """Stop tokens that only what follows the turn writes, by what follows."""
    found = {}
    end = closes.get("end")
    for following, text in closes.items():
        if end is not None and following != "end" and text.startswith(end):
            token = next(iter(tokenizer.find(text[len(end) :])), None)
            if token is not None and token.start == 0 and tokenizer.added_ids[token.token] in stop_ids:
                found[following] = tokenizer.added_ids[token.token]
    return found


def _is_prefix_stable(probes: Probes) -> bool | None:
    """Whether every prompt is a prefix of what continues it, with calls and reasoning; None where unknown."""
    thinking = assistant(reasoning_content=f"{WORD}R")
    calling = assistant("", tool_calls=(CALL,), reasoning_content=f"{WORD}R")
    conversations = [
        [user(), assistant(), user("next"), assistant()],
        [user(), thinking, user("next"), thinking],
        [user(), calling, RESULT, assistant(), user("next"), assistant()],
        [Message(role="system", content=f"{WORD}S"), user(), assistant(), user("next"), assistant()],
    ]
    found = None
    for messages in conversations:
        full = probes.render(messages)
        if full is None or f"{WORD}A" not in full:
            continue
        found = True
        for index in [index for index, message in enumerate(messages) if message.role == "assistant"]:
            prompt = probes.render(messages[:index], prompt=True)
            if prompt is None or not plain(full).startswith(plain(prompt)):
                return False
    return found


def _are_answers_stable(probes: Probes, reasoning: ReasoningFormat) -> bool:
    """Whether the answers of all turns without reasoning follow their prompts, but for empty blocks."""
    system, calling = Message(role="system", content=f"{WORD}S"), assistant(tool_calls=(CALL,))
    for before in ([system, user(), assistant()], [user(), calling, RESULT, assistant()]):
        messages = [*before, user("next"), assistant()]
        full = probes.render(messages)
        if full is None:
            continue
        for index in [index for index, message in enumerate(messages) if message.role == "assistant"]:
            turn = next((low for low, _, origin in full.spans if origin.message == index), len(full))
            prompt = probes.render(messages[:index], prompt=True)
            if prompt is None or reasoning.answer_start(plain(full), turn, plain(prompt)) is None:
                return False
    return True


def _unattributed(probes: Probes) -> tuple[str, ...]:
    """Probe texts that were printed without their origin."""
    thinker = assistant(reasoning_content=f"{WORD}R", tool_calls=(CALL,))
    shown = probes.render([user(), thinker, RESULT]) or probes.render([user(), assistant()])
    texts = [*(f"{WORD}{letter}" for letter in "UART"), "bravo"]
    return tuple(text for text in texts if shown and text in shown and not _is_attributed(shown, text))


def _is_attributed(shown: TracedStr, text: str) -> bool:
    content = [range(low, high) for low, high, origin in shown.spans if origin.is_content]
    covered = {char for span in content for char in span}
    places = [found.start() for found in re.finditer(re.escape(text), plain(shown))]
    return any(covered.issuperset(range(place, place + len(text))) for place in places)


def _reasoning(probes: Probes, generation_prompt: str) -> ReasoningFormat | None:
    """Find the delimiters printed around reasoning, else those of the block that the prompt opens."""
    content, thought = f"{WORD}C", f"{WORD}R"
    # Some templates print reasoning beside calls only.
    for carrier, calls in product(get_args(Carrier), ((), (probe_call(name="probe_none"),))):
        turn = probes.turn(with_reasoning(assistant(content, tool_calls=calls), thought, carrier))
        before, found, rest = ("" if turn is None else turn.header + turn.text).partition(thought)
        if not found:
            continue
        between = rest.partition(content)[0]
        after = between.lstrip()
        begin, end = _last_delimiter(probes, before.rstrip()), _first_delimiter(probes, after)
        if begin is None or end is None:
            continue
        answer = probes.turn(assistant(content, tool_calls=calls))
        ahead = "" if answer is None else answer.text.partition(content)[0]
        if turn is not None and ahead.rfind(begin) > ahead.rfind(end):
            # Content follows the same delimiter: what leads up to it tells them apart.
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
    """The block that the generation prompt opens, if the template takes such a block out of content."""
    content, thought = f"{WORD}C", f"{WORD}R"
    opened = generation_prompt.rstrip()
    begin = _last_delimiter(probes, opened)
    tag = _NAMED_TAG.fullmatch(begin) if begin is not None else None
    if begin is None or tag is None:
        return None
    end = f"{tag.group(1)}/{tag.group(2)}{tag.group(3)}"

    def is_taken_out(between: str) -> bool:
        turn = probes.turn(assistant(f"{begin}{thought}{end}{between}{content}"))
        return turn is not None and thought not in turn.text and turn.text.startswith(content)

    if not is_taken_out(""):
        return None
    space = generation_prompt[len(opened) :]
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
