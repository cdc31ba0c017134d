"""`Player`: the calls of a recorded agent, as it would have made them with the answers that it gets now.

An agent repeats its history with every call. The player puts the answers of the present gateway in place of
the recorded ones, in the form in which the agent repeated them: ids of calls and items, signatures, texts
whole or without blanks at their ends, arguments as they came or written anew.
"""

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrender.gateway.call import AnswerCall
from mmrender.gateway.digests import folded
from mmrender.testing.agents.recordings import AgentAnswer, RecordedCall

_ITEMS = ("message", "reasoning", "function_call")
"""Types of the items that have an id of their own in responses."""
_CALLS = ('"tool_calls"', '"function_call"', '"tool_use"')
"""Signs of a call in the JSON of a turn."""


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A call with its present answer."""

    call: RecordedCall
    answer: AgentAnswer


class Player:
    """Plays one recording. For each call in order: `body`, then `note` the answer."""

    def __init__(self) -> None:
        self._answered: list[AnsweredCall] = []
        self._by_id: dict[str, AnsweredCall] = {}
        self._ids: dict[str, str] = {}
        self._ids_with_tools: dict[tuple[str, str], str] = {}

    def note(self, call: RecordedCall, answer: AgentAnswer) -> None:
        """Take the present answer to a call, which later calls repeat."""
        answered = AnsweredCall(call, answer)
        self._answered.append(answered)
        tools = _tools_of(call.body)
        for recorded, made in zip(call.answer.calls, answer.calls, strict=False):
            self._by_id[recorded.id] = self._by_id[made.id] = answered
            self._ids[recorded.id] = self._ids_with_tools[tools, recorded.id] = made.id

    def body(self, call: RecordedCall) -> tuple[dict[str, Any], AnsweredCall | None]:
        """Return the body of a call, and the answered call whose answer it repeats last, or None."""
        body = self._with_own_ids(call.body)
        last = None
        for turn in _turns(body):
            answered = self._repeated(turn)
            if answered is not None:
                last = answered
                _Repeated(answered).write(turn)
        return body, last

    def _with_own_ids(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy with the present ids of calls. Conversations with other tools may share an id."""
        tools = _tools_of(body)
        own = {recorded: made for (by, recorded), made in self._ids_with_tools.items() if by == tools}
        ids = self._ids | own
        if not ids:
            return copy.deepcopy(dict(body))
        names = "|".join(sorted(map(re.escape, ids), key=len, reverse=True))
        text = re.sub(rf"(?<!\w)({names})(?!\w)", lambda match: ids[match[0]], json.dumps(body))
        replaced: dict[str, Any] = json.loads(text)
        return replaced

    def _repeated(self, turn: Sequence[Mapping[str, Any]]) -> AnsweredCall | None:
        """Return the call whose answer a turn repeats: by call ids, or by its text if it has no calls."""
        text = json.dumps(turn)
        places = [(text.rfind(name), each) for name, each in self._by_id.items() if name in text]
        if places:
            return max(places, key=lambda place: place[0])[1]
        if any(call in text for call in _CALLS):
            return None
        texts = folded("".join(_texts(turn)))
        equal = [each for each in self._answered if folded(each.call.answer.content) == texts]
        return equal[-1] if texts and equal else None


def _tools_of(body: Mapping[str, Any]) -> str:
    return json.dumps(body.get("tools"))


def _turns(body: Mapping[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Yield the assistant's turns of a body: a message, or the items of a response that follow each other."""
    if isinstance(body.get("messages"), list):
        for message in body["messages"]:
            if message.get("role") == "assistant":
                yield [message]
        return
    turn: list[dict[str, Any]] = []
    items = body.get("input")
    for item in items if isinstance(items, list) else ():
        if item.get("role") == "assistant" or item.get("type") in ("reasoning", "function_call"):
            turn.append(item)
        elif turn:
            yield turn
            turn = []
    if turn:
        yield turn


def _texts(value: Any, key: str = "") -> Iterator[str]:
    """Yield the texts of a turn, without reasoning."""
    if isinstance(value, str):
        if key in ("text", "content"):
            yield value
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _texts(entry, name)
    elif isinstance(value, list):
        for entry in value:
            yield from _texts(entry, key)


class _Repeated:
    """Writes one present answer in place of the recorded one, in the agent's own form."""

    def __init__(self, answered: AnsweredCall) -> None:
        self._recorded, self._own = answered.call.answer, answered.answer
        pairs = zip(self._recorded.calls, self._own.calls, strict=False)
        self._calls = {own.id: (recorded, own) for recorded, own in pairs}

    def write(self, turn: Sequence[dict[str, Any]]) -> None:
        """Replace texts, arguments, signatures and ids of items in place."""
        for item in turn:
            self._object(item, None)

    def _object(self, value: dict[str, Any], call: tuple[AnswerCall, AnswerCall] | None) -> None:
        kind, name = value.get("type"), value.get("call_id", value.get("id"))
        call = self._calls.get(name, call) if isinstance(name, str) else call
        for key, entry in value.items():
            if isinstance(entry, dict) and key != "input":
                self._object(entry, call)
            elif isinstance(entry, list):
                for part in entry:
                    if isinstance(part, dict):
                        self._object(part, call)
            elif isinstance(entry, str) and key in ("content", "text", "thinking", "reasoning_content"):
                value[key] = self._text(entry)
            elif isinstance(entry, str) and key in ("signature", "encrypted_content"):
                value[key] = self._own.signature or entry
            elif key == "id" and kind in _ITEMS:
                value[key] = self._own.item_ids.get(str(name) if kind == "function_call" else kind, entry)
            elif key in ("arguments", "input") and call is not None:
                value[key] = _arguments(entry, *(each.arguments for each in call))

    def _text(self, text: str) -> str:
        pairs = (
            (self._recorded.content, self._own.content),
            (self._recorded.reasoning, self._own.reasoning),
        )
        for recorded, own in pairs:
            if text == recorded:
                return own
            if text == recorded.strip():
                return own.strip()
        return text  # the agent's own words


def _arguments(repeated: Any, recorded: str, own: str) -> Any:
    """Return arguments as an agent repeats them: as they came, or written anew if their values differ."""
    if repeated == recorded:
        return own
    is_text = isinstance(repeated, str)
    values = [_loaded(each) for each in (repeated if is_text else json.dumps(repeated), recorded, own)]
    if values[0] != values[1] or values[0] == values[2]:
        return repeated
    return json.dumps(values[2]) if is_text else values[2]


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
