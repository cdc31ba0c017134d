"""Matching: which recorded step a call continues.

An agent sends its whole conversation with every call, and few agents repeat it byte for byte. This module
alone decides when two messages are equal:

- Messages of users, tools and systems: role, name, the id of the call that a tool answers, and all content,
  text exactly. A text equals its one text part. A picture is its source: a `data:` URL by its characters, any
  other URL by its address. Empty members equal absent ones.
- Answers: the call ids that we made, which are unique, also if an agent writes them inside a text. Without
  them, the text with runs of blanks folded, and the calls by name and arguments as JSON: key order does not
  count, and 1000.0 equals 1000. Reasoning, signatures and ids of items never count, since agents drop them.
- Tools and template arguments come first. The order of tools counts, the order of keys does not.

A context is a digest of everything before an answer. The context after a recorded answer depends on the
step, so equal words that were sampled as other tokens lead to other contexts.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
from blake3 import blake3

from mmrender.errors import InputError
from mmrender.gateway import work
from mmrender.gateway.call import ID_LENGTH, Answer, Call
from mmrender.gateway.reading import read_arguments
from mmrender.messages import MediaPart, Message, TextPart
from mmrender.trajectory.step import Step

EXTRA: Final = "gateway"
"""Key of a step's `extra` that holds the gateway's record."""

Digest: TypeAlias = str
"""32 hexadecimal digits."""

_CALL_IDS: Final = re.compile(rf"(?<![0-9A-Za-z])(?:call|toolu)_[0-9A-Za-z]{{{ID_LENGTH}}}(?![0-9A-Za-z])")
_EXACT: Final = 2**53
"""Integers from here on are not exact in JavaScript, through which many agents send them."""
_MAX_SEARCHED: Final = 1 << 18
"""Characters at the end of an answer in which ids are looked for."""
_LARGEST: Final = 1 << 1023
_MEMBERS: Final = 8
"""Members that a message is taken to have, for the size of the work on it."""
_MAX_READINGS: Final = 16
"""Maximum number of equal answers to one prompt that are followed, the newest."""
_ENCODE: Final = msgspec.json.Encoder(order="deterministic").encode


class CallDigests(NamedTuple):
    """Digests of a call, which is walked once.

    Attributes:
        request: Digest by which a repetition of the request is known. Whether it is streamed does not count.
        tools: Digest of the offered tools.
        messages: Digests of the messages in canonical form.
    """

    request: bytes
    tools: Digest
    messages: tuple[Digest, ...]

    @classmethod
    def of(cls, call: Call) -> "CallDigests":
        """Return the digests of a call. Large pictures take a while: see `digests_of`.

        Raises:
            InputError: A picture has no text or bytes as its source, or a value is nested too deeply.
        """
        messages, answers = [], []
        for position, message in enumerate(call.messages):
            if message.role == "assistant":
                messages.append(_answer_of(message))
                answers.append(message)  # a repetition has equal ids and blanks, too
            else:
                messages.append(_message_digest(message, position))
        tools = sys.intern(digest_of(call.offered or ()))  # equal digests of all steps are one object
        origin = call.origin
        request = (
            (call.protocol, call.model, origin.thread, origin.agent),
            (messages, answers, tools, call.tools is None),
            (call.tool_choice, call.named_tools, call.parallel_tool_calls),
            (call.sampling_params, call.template_arguments, call.thinking, call.n, call.logprobs),
        )
        return cls(bytes.fromhex(digest_of(request)), tools, tuple(messages))


async def digests_of(call: Call) -> CallDigests:
    """Return the digests of a call, without blocking the event loop. Errors are as of `CallDigests.of`."""
    sources = (part.source for message in call.messages for _, part in message.media())
    nbytes = sum(len(source) for source in sources if isinstance(source, str | bytes))
    members = _MEMBERS * len(call.messages)
    return await work.do(CallDigests.of, call, size=nbytes + work.MEMBER_BYTES * members)


class Recorded(msgspec.Struct, frozen=True, omit_defaults=True):
    """Record of a step for matching. It is kept with the step, and `Index.of` reads it.

    Attributes:
        tools: Digest of the offered tools.
        arguments: Digest of the template arguments.
        path: Contexts from the parent's turn on, or from the tools on: one before each message, and one after
            the last. The last is the step's own context.
        parent: The step whose turn the path begins after.
        answer: Digest of the answer that the agent got.
        question: Digest of the last message before the answer.
        call_ids: Ids of the answer's calls, in order.
        speaker: The agent, or the thread, whose call was answered, if its headers say.
        sampled_ids: Ids that the model itself sampled for the calls, in formats that have ids.
    """

    tools: Digest
    arguments: Digest
    path: tuple[Digest, ...]
    answer: Digest
    question: Digest
    parent: int | None = None
    call_ids: tuple[str, ...] = ()
    speaker: str | None = None
    sampled_ids: tuple[str | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a call among the recorded steps.

    Attributes:
        parent: The step whose turn the call continues, or None for a root.
        start: Index of the first message after the parent's turn. 0 for a root.
        sibling: A step with the same prompt, or None.
        borrowed: Steps whose turns are repeated after another conversation, by index of the message.
        why: Why the call does not simply continue its parent, or None.
        rewritten: Steps whose turns the agent repeats with other text or calls.
        path: Contexts of the messages from `start` on, see `Recorded`.
        tools: Digest of the offered tools.
        arguments: Digest of the template arguments.
        question: Digest of the last message.
        speaker: The agent, or the thread, that makes the call, if its headers say.
    """

    parent: int | None
    start: int
    sibling: int | None
    borrowed: Mapping[int, int]
    why: str | None
    rewritten: tuple[int, ...]
    path: tuple[Digest, ...]
    tools: Digest
    arguments: Digest
    question: Digest
    speaker: str | None

    def recorded(self, answer: Answer, sampled_ids: Sequence[str | None] = ()) -> Recorded:
        """Return the record of the step that answers the call. `sampled_ids` are as in `Recorded`."""
        calls = [(call.name, read_arguments(call.arguments, "arguments")) for call in answer.calls]
        return Recorded(
            self.tools,
            self.arguments,
            self.path,
            _answer_digest(answer.content, calls),
            self.question,
            self.parent,
            tuple(call.id for call in answer.calls),
            self.speaker,
            tuple(sampled_ids) if any(sampled_ids) else (),
        )


@dataclass(slots=True)
class _Node:
    """A known context.

    Attributes:
        steps: Steps whose prompt ends here.
        follower: A step whose conversation goes on from here, or None.
    """

    steps: tuple[int, ...] = ()
    follower: int | None = None


@dataclass(slots=True)
class _Walk:
    """One reading of a conversation, up to a message.

    Attributes:
        path: Contexts since the last turn.
        parent: Step of the last turn.
        start: Index of the first message after it.
        known: Number of leading messages that recorded conversations share.
        last_known: Context after them.
        borrowed: As in `Place`.
        rewritten: As in `Place`.
    """

    path: list[Digest]
    parent: int | None
    start: int
    known: int
    last_known: Digest
    borrowed: dict[int, int] = field(default_factory=dict)
    rewritten: tuple[int, ...] = ()


class Index:
    """The recorded steps of one session, by context, by call id and by answer.

    Args:
        strict: Whether a turn whose text or calls the agent changed is another turn, although it shows the
            call ids of a recorded one.

    Attributes:
        sampled_ids: By id of a call, the id that the model itself sampled for it.
        received: Steps whose answers an agent has received. Of equal answers to one prompt, an agent goes on
            from one of these.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.sampled_ids: dict[str, str] = {}
        self.received: set[int] = set()
        self._strict = strict
        self._steps: dict[int, Recorded] = {}
        self._nodes: dict[Digest, _Node] = {}
        self._by_call: dict[str, int] = {}
        self._by_answer: dict[tuple[Digest, Digest], int] = {}

    @classmethod
    def of(cls, steps: Iterable[Step], *, strict: bool = False) -> "Index":
        """Return the index of a session's steps. Steps that no gateway recorded are left out."""
        index = cls(strict=strict)
        for step in steps:
            if (record := step.extra.get(EXTRA, {}).get("matching")) is not None:
                index.add(step.index, msgspec.convert(record, Recorded))
        return index

    def __len__(self) -> int:
        return len(self._steps)

    def place(
        self,
        call: Call,
        digests: CallDigests | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> Place:
        """Find the place of a call. The cost grows with its messages, not with the steps.

        Args:
            call: The call.
            digests: Its digests, if they are known.
            template_arguments: Template variables in force, by default its own.

        Raises:
            InputError: The conversation is empty or ends in an answer.
        """
        if not call.messages or call.messages[-1].role == "assistant":
            raise InputError(
                "the conversation must end in a message to answer",
                where="messages",
                expected="a message of a user, a tool or a system",
                got="an answer" if call.messages else "no messages",
            )
        digests = CallDigests.of(call) if digests is None else digests
        variables = call.template_arguments if template_arguments is None else template_arguments
        arguments = sys.intern(digest_of(variables))
        root = _hash((digests.tools + arguments).encode())
        walks = [_Walk([root], None, 0, 0, root)]
        question = root
        for position, (message, own) in enumerate(zip(call.messages, digests.messages, strict=True)):
            if message.role == "assistant":
                walks = self._after_answer(walks, position, message, own, question)
            else:
                for walk in walks:
                    self._advance(walk, position, own)
            question = own
        speaker = call.origin.agent or call.origin.thread
        best = max(walks, key=lambda walk: self._rank(walk, speaker))
        return Place(
            parent=best.parent,
            start=best.start,
            sibling=self._sibling(best),
            borrowed=best.borrowed,
            why=self._why(best, digests, call.messages),
            rewritten=best.rewritten,
            path=tuple(best.path),
            tools=digests.tools,
            arguments=arguments,
            question=question,
            speaker=speaker,
        )

    def _rank(self, walk: _Walk, speaker: str | None) -> tuple[bool, int, bool, bool, int]:
        """Rank a reading: the longest first, then the speaker's own, then a received one, then the newest."""
        parent = -1 if walk.parent is None else walk.parent
        is_own = parent >= 0 and self._steps[parent].speaker == speaker
        return self._sibling(walk) is not None, walk.start, is_own, parent in self.received, parent

    def add(self, number: int, recorded: Recorded) -> None:
        """Take in a step, under its number in the trajectory."""
        self._steps[number] = recorded
        if recorded.parent is not None:
            self._node(_after_turn(recorded.parent)).follower = number
        for context in recorded.path[:-1]:
            self._node(context).follower = number
        self._node(recorded.path[-1]).steps += (number,)
        self._node(_after_turn(number))
        self._by_call.update(dict.fromkeys(recorded.call_ids, number))
        pairs = zip(recorded.call_ids, recorded.sampled_ids, strict=False)
        self.sampled_ids.update((name, sampled) for name, sampled in pairs if sampled)
        self._by_answer[recorded.answer, recorded.question] = number

    def _node(self, context: Digest) -> _Node:
        return self._nodes.setdefault(context, _Node())

    def _advance(self, walk: _Walk, position: int, own: Digest) -> None:
        """Read a message that is no recorded turn."""
        context = _hash((walk.path[-1] + own).encode())
        walk.path.append(context)
        if walk.known == position and context in self._nodes:
            walk.known, walk.last_known = position + 1, context

    def _after_answer(
        self, walks: list[_Walk], position: int, message: Message, own: Digest, question: Digest
    ) -> list[_Walk]:
        """Read an answer. Equal answers to one prompt are all followed, until a later message decides."""
        shown = [self._by_call[name] for name in _call_ids(message) if name in self._by_call]
        found = [
            self._turned(walk, position, step, own)
            for walk in walks
            for step in self._turns(self._nodes.get(walk.path[-1]), shown, own)
        ]
        if found:
            return found[-_MAX_READINGS:]
        step = shown[-1] if shown else self._by_answer.get((own, question))
        if step is not None and self._strict and self._steps[step].answer != own:
            step = None
        for walk in walks:
            self._advance(walk, position, own)
            if step is not None:
                walk.borrowed[position] = step
        return walks

    def _turns(self, node: _Node | None, shown: Sequence[int], own: Digest) -> Sequence[int]:
        """Return the steps of a context whose turn an answer repeats."""
        steps = () if node is None else node.steps
        if by_id := [step for step in steps if step in shown]:
            return [step for step in by_id if not self._strict or self._steps[step].answer == own]
        return [step for step in steps if self._steps[step].answer == own and not shown]

    def _turned(self, walk: _Walk, position: int, step: int, own: Digest) -> _Walk:
        """Read an answer as the turn of a step."""
        context = _after_turn(step)
        changed = () if self._steps[step].answer == own else (step,)
        rewritten = (*walk.rewritten, *changed)
        return _Walk([context], step, position + 1, position + 1, context, rewritten=rewritten)

    def _sibling(self, walk: _Walk) -> int | None:
        node = self._nodes.get(walk.path[-1])
        return None if node is None or not node.steps else node.steps[-1]

    def _why(self, walk: _Walk, digests: CallDigests, messages: Sequence[Message]) -> str | None:
        """Say why a conversation does not simply continue a turn, by the first message that differs."""
        if not self._steps or self._sibling(walk) is not None:
            return None if self._steps else "the conversation begins"
        node, position = self._nodes.get(walk.last_known), walk.known
        if node is None:
            same_tools = [step for step, known in self._steps.items() if known.tools == digests.tools]
            if same_tools:
                return f"the template arguments differ from step {same_tools[-1]}'s"
            return f"the tools differ from step {max(self._steps)}'s"
        if position == len(messages):
            return f"the conversation ends before step {node.follower}'s"
        here, role = f"messages[{position}]", messages[position].role
        if role == "assistant" and position in walk.borrowed:
            return f"{here} is the turn of step {walk.borrowed[position]} after other messages"
        if role == "assistant" and node.steps:
            return f"{here} is another turn than step {node.steps[-1]} sampled"
        if node.follower is not None:
            subject = "the system message" if role == "system" else here
            return f"{subject} differs from step {node.follower}'s"
        if node.steps:
            return f"{here} comes in place of the turn of step {node.steps[-1]}"
        later = [index for index in range(position, len(messages)) if messages[index].role == "assistant"]
        return f"messages[{later[0]}] was not sampled here" if later else None


def _after_turn(step: int) -> Digest:
    return _hash(b"turn %d" % step)


def _hash(data: bytes) -> Digest:
    return blake3(data).hexdigest(length=16)


def digest_of(value: Any) -> Digest:
    """Digest of plain data, by its JSON with sorted keys."""
    try:
        return _hash(_ENCODE(value))
    except RecursionError:
        raise InputError("a value is nested too deeply", where="messages or tools") from None
    except (UnicodeEncodeError, OverflowError):  # half a surrogate pair, or a number beyond 64 bits
        plain = msgspec.to_builtins(value, str_keys=True)
        return _hash(json.dumps(plain, sort_keys=True).encode("ascii"))


def _as_javascript(value: Any) -> Any:
    """Return plain data in which numbers are equal if JavaScript cannot tell them apart."""
    if isinstance(value, Mapping):
        return {key: _as_javascript(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_as_javascript(entry) for entry in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    if isinstance(value, int) and _EXACT <= abs(value) < _LARGEST:
        return float(value)
    return value


def _message_digest(message: Message, position: int) -> Digest:
    """Digest of the canonical form of a message that is not an answer."""
    parts = _parts(message, position)
    extra = {key: value for key, value in message.extra.items() if value not in (None, "", [], {})}
    return digest_of((message.role, message.name or "", message.tool_call_id or "", parts, extra))


def _parts(message: Message, position: int) -> list[Any]:
    content = message.content
    if not isinstance(content, tuple):
        return [content] if content else []
    parts: list[Any] = []
    for number, part in enumerate(content):
        if isinstance(part, TextPart):
            parts += [part.text] if part.text else []
        elif isinstance(part, MediaPart):
            where = f"messages[{position}].content[{number}]"
            settings = {name: getattr(part, name) for name in part.__struct_fields__ if name != "source"}
            parts.append([part.modality, _source_digest(part.source, where), settings])
    return parts


def _source_digest(source: Any, where: str) -> Digest:
    if isinstance(source, str):
        source = source.encode("utf-8", "surrogatepass")
    if not isinstance(source, bytes):
        raise InputError(
            "the source of a medium must be text or bytes",
            where=where,
            expected="a data: or http(s) URL, or bytes",
            got=type(source).__name__,
        )
    return _hash(source)


def _answer_of(message: Message) -> Digest:
    """Digest of the canonical form of an answer."""
    return _answer_digest(message.text, [(call.name, call.arguments) for call in message.tool_calls])


def _answer_digest(text: str, calls: Iterable[tuple[str, Any]]) -> Digest:
    return digest_of(("answer", folded(text), [(name, _arguments(value)) for name, value in calls]))


def _arguments(value: Any) -> Any:
    """Arguments of a call to compare. Of arguments that are not JSON, which agents wrap, the raw text."""
    if isinstance(value, Mapping) and len(value) == 1:
        [(key, inner)] = value.items()
        if key == "__unparsedToolInput" and isinstance(inner, Mapping):
            inner = inner.get("raw")
        if key.startswith("__unparsed") and isinstance(inner, str):
            return inner
    try:
        return _as_javascript(value)
    except RecursionError:
        raise InputError("a value is nested too deeply", where="messages or tools") from None


def texts_of(message: Message) -> list[str]:
    """Return the texts of a message, one for each part, without reasoning."""
    content = message.content
    if isinstance(content, tuple):
        return [part.text for part in content if isinstance(part, TextPart)]
    return [content or ""]


def folded(text: str) -> str:
    """Return a text without blanks at its ends, and with one space for each run of blanks."""
    return " ".join(text.split())


def _call_ids(message: Message) -> list[str]:
    """Return the ids in an answer: of its calls, or else of calls that the agent writes as text."""
    if message.tool_calls:
        return [call.id for call in message.tool_calls if call.id]
    return _CALL_IDS.findall(message.text[-_MAX_SEARCHED:])
