"""Matching: which recorded step a call continues.

A call continues the step whose call ids it shows last: we make them, and they are unique. Agents may also
write them inside a text. Without ids, an answer is known by its digest. Tools and template arguments come
first.

A context is a digest of everything before an answer. The context after a recorded answer depends on the
step, so equal words that were sampled as other tokens lead to other contexts.
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from mmcodecs.structs import ready
from mmrender.errors import InputError
from mmrender.gateway.call import ID_LENGTH, Answer, Call
from mmrender.gateway.digests import CallDigests, Digest, answer_digest, digest_of, hash_of
from mmrender.gateway.reading import read_arguments
from mmrender.messages import Message
from mmrender.trajectory.step import Step

EXTRA: Final = "gateway"
"""Key of a step's `extra` that holds the gateway's record."""

_CALL_IDS: Final = re.compile(rf"(?<![0-9A-Za-z])(?:call|toolu)_[0-9A-Za-z]{{{ID_LENGTH}}}(?![0-9A-Za-z])")
_MAX_SEARCHED: Final = 1 << 18
"""Characters at the end of an answer in which ids are looked for."""
_MAX_READINGS: Final = 16
"""Maximum number of equal answers to one prompt that are followed, the newest."""


class Recorded(msgspec.Struct, frozen=True, omit_defaults=True):
    """Record of a step for matching. It is kept with the step, and `Index.of` reads it.

    Attributes:
        tools: Digest of the tools.
        arguments: Digest of the template arguments.
        path: Contexts from the parent's turn on, or from the tools on: one before each message, and one after
            the last. The last is the step's own context.
        parent: The step whose turn the path begins after.
        answer: Digest of the answer that the agent got.
        question: Digest of the last message before the answer.
        call_ids: Ids of the answer's calls, in order.
        speaker: The agent, or the thread, whose call was answered, if its headers say.
        sampled_ids: Ids that the model itself sampled for the calls, in formats that have ids.
        instructions: Digest of the instructions, empty without them.
    """

    tools: Digest
    arguments: Digest
    path: tuple[Digest, ...]
    question: Digest
    parent: int | None = None
    answer: Digest = ""
    call_ids: tuple[str, ...] = ()
    speaker: str | None = None
    sampled_ids: tuple[str | None, ...] = ()
    instructions: Digest = ""


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a call among the recorded steps.

    Attributes:
        parent: The step whose turn the call continues, or None for a root.
        start: Index of the first message after the parent's turn. 0 for a root, and after a response that the
            call names.
        sibling: A step with the same prompt, or None.
        borrowed: Steps whose turns are repeated after another conversation, by index of the message.
        why: Why the call does not simply continue its parent, or None.
        rewritten: Steps whose turns the agent repeats with other text or calls.
        record: Record of a step that answers the call, without the answer.
    """

    parent: int | None
    start: int
    sibling: int | None
    borrowed: Mapping[int, int]
    why: str | None
    rewritten: tuple[int, ...]
    record: Recorded

    def recorded(self, answer: Answer, sampled_ids: Sequence[str | None] = ()) -> Recorded:
        """Return the record of the step that answers the call. `sampled_ids` are as in `Recorded`."""
        calls = [(call.name, read_arguments(call.arguments, "arguments")) for call in answer.calls]
        return msgspec.structs.replace(
            self.record,
            answer=answer_digest(answer.content, calls),
            call_ids=tuple(call.id for call in answer.calls),
            sampled_ids=tuple(sampled_ids) if any(sampled_ids) else (),
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
                index.add(step.index, msgspec.convert(record, ready(Recorded)))
        return index

    def __len__(self) -> int:
        return len(self._steps)

    def place(
        self,
        call: Call,
        template_arguments: Mapping[str, Any] | None = None,
        *,
        previous: int | None = None,
    ) -> Place:
        """Find the place of a call. The cost grows with its messages, not with the steps.

        Args:
            call: The call.
            template_arguments: Template variables in force, by default its own.
            previous: The step whose turn the messages come after, if they are not all of the conversation.

        Raises:
            InputError: The conversation is empty or ends in an answer, or the prompt of `previous` begins in
                another way.
        """
        if not call.messages or call.messages[-1].role == "assistant":
            raise InputError(
                "the conversation must end in a message to answer",
                where="messages",
                expected="a message of a user, a tool or a system",
                got="an answer" if call.messages else "no messages",
            )
        digests = call.digests
        variables = call.template_arguments if template_arguments is None else template_arguments
        arguments = sys.intern(digest_of(variables))
        root = hash_of((digests.tools + arguments).encode())
        if previous is not None:
            self._check_previous(self._steps[previous], digests, arguments)
            root = _after_turn(previous)
        walks = [_Walk([root], previous, 0, 0, root)]
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
            record=Recorded(
                tools=digests.tools,
                arguments=arguments,
                path=tuple(best.path),
                question=question,
                parent=best.parent,
                speaker=speaker,
                instructions=digests.instructions,
            ),
        )

    def _check_previous(self, step: Recorded, digests: CallDigests, arguments: Digest) -> None:
        """Check that the prompt of a step begins as a call asks that goes on from it."""
        parts = {
            "instructions": (step.instructions, digests.instructions),
            "tools": (step.tools, digests.tools),
            "template arguments": (step.arguments, arguments),
        }
        if changed := [name for name, (earlier, own) in parts.items() if earlier != own]:
            raise InputError(
                f"the {changed[0]} of this response were others",
                where="previous_response_id",
                remedy="Send the same ones again, or the whole conversation in input",
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
        context = hash_of((walk.path[-1] + own).encode())
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
    return hash_of(b"turn %d" % step)


def _call_ids(message: Message) -> list[str]:
    """Return the ids in an answer: of its calls, or else of calls that the agent writes as text."""
    if message.tool_calls:
        return [call.id for call in message.tool_calls if call.id]
    return _CALL_IDS.findall(message.text[-_MAX_SEARCHED:])
