"""Finds the grammar of a template's tool calls by reading its output back.

Messages with known calls are rendered, and every grammar reads their sampled text. A grammar that returns the
same names, arguments, content and reasoning is proved. If none or several are, that is reported and none is
chosen.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from mmrender.errors import check_option
from mmrender.messages import Message, ToolCall
from mmrender.parsing.grammars import GRAMMARS, Grammar, Section, all_grammars, provided_grammars
from mmrender.parsing.parser import (
    After,
    Before,
    Edge,
    Edges,
    GrammarChoice,
    Outcome,
    ParsedResponse,
    ResponseParser,
    split,
)
from mmrender.parsing.schema import KINDS
from mmrender.template.known import KnownTemplate
from mmrender.template.probes import WORD, assistant, tool_definition, user, with_reasoning
from mmrender.turns.turns import Turns, turns_of

_ARGUMENTS: dict[str, Any] = {
    "text": "two lines,\n\"quoted\" and 'single', ünïcode 日本 \\ </b>",
    "digits": "0123",
    "word": "true",
    "empty": "",
    "count": 7,
    "ratio": -1.5,
    "yes": True,
    "no": False,
    "nothing": None,
    "items": [1, "a", {"b": [None, False]}],
    "deep": {"k": {"n": "x: {y}", "l": []}},
}
_PROPERTIES = {
    key: {"type": KINDS[type(value)], "description": "a probe"} for key, value in _ARGUMENTS.items()
}
_TOOLS = (tool_definition("probe_many", _PROPERTIES), tool_definition("probe_none"))
_PLAIN_TOOLS = (tool_definition("probe_many"), tool_definition("probe_none"))

_Calls: TypeAlias = Sequence[tuple[str, dict[str, Any]]]
_MANY, _NONE = ("probe_many", _ARGUMENTS), ("probe_none", dict[str, Any]())
_ONE = ("probe_one", {"alpha": "bravo"})


class _Texts(NamedTuple):
    """Texts of a set of probes: each group of calls comes with and without content and reasoning."""

    content: str
    reasoning: str
    calls: Sequence[_Calls]


_LEARN = _Texts(f"{WORD}C", f"{WORD}R", ((), (_ONE,), (_ONE, _ONE)))
_PROVE = _Texts(
    "Two words,\n\nthen a second paragraph: 日本.",
    "First this.\n\nThen that.",
    ((_MANY,), (_MANY, _NONE), (_NONE,), (_NONE, _MANY)),
)


class _Probe(NamedTuple):
    """A message, its text in the template or None if refused, and the tokens of prompt and text."""

    message: Message
    text: str | None
    prompt_ids: list[int]
    token_ids: list[int]


class _Finding(NamedTuple):
    """A `GrammarChoice` and the edges for its grammar, as they are kept on disk."""

    outcome: Outcome
    grammar: str | None
    proved: tuple[str, ...]
    reasons: dict[str, str]
    refused: tuple[str, ...]
    edges: list[tuple[Before, After, Edge]]


def build_parser(known: KnownTemplate, *, grammar: str | None = None) -> ResponseParser:
    """Build the parser for one template with one set of template arguments.

    Args:
        known: The template with its findings.
        grammar: Name of the tool-call grammar, for a template that prints no calls or an unknown kind. None
            finds and proves it.

    Raises:
        InputError: The grammar is unknown.
    """
    grammars, turns = all_grammars(grammar), turns_of(known)
    if grammar is not None:
        check_option("grammar", grammar, tuple(grammars))

    def prove(reasons: Mapping[str, str] = MappingProxyType({})) -> _Finding:
        return GrammarProver(known, turns).prove(grammar, grammars, reasons)

    if grammar is None or grammar in GRAMMARS:
        sample = known.tokenizer.encode(repr((_ARGUMENTS, _PROVE)))
        about = ("grammar", grammar, turns.text_of(sample).text)
        finding = known.findings.get_or_find(about, _Finding, prove)
        if finding.outcome == "none" and (others := provided_grammars()):
            # Grammars of other packages are tried if none of ours reads the template back.
            grammars = {**grammars, **others}
            finding = prove(finding.reasons)
    else:
        finding = prove()
    chosen = None if finding.grammar is None else grammars[finding.grammar]
    choice = GrammarChoice(finding.outcome, chosen, finding.proved, finding.reasons, finding.refused)
    return ResponseParser(turns, choice, {(before, after): edge for before, after, edge in finding.edges})


class GrammarProver:
    """Tries grammars on a template's output."""

    def __init__(self, known: KnownTemplate, turns: Turns) -> None:
        self._probes = known.probes
        self._profile = known.profile
        self._turns = turns
        # The richest definitions that the template takes: some fail on a type, others without tools.
        accepted = (tools for tools in (_TOOLS, _PLAIN_TOOLS) if self._probes.render([user()], tools=tools))
        self._tools = next(accepted, None)
        self._rendered: dict[tuple[str, str], list[_Probe]] = {}

    def edges(self, grammar: Grammar | None) -> Edges:
        """Learn the template's text between the parts of a turn."""
        edges: dict[tuple[Before, After], Edge] = {}
        with_content = set()
        format_ = self._profile.reasoning
        for probe in self._probed(grammar, _LEARN):
            if probe.text is None or (grammar is None and probe.message.tool_calls):
                continue
            opening = self._turns.opening(self._turns.text_of(probe.prompt_ids))
            source = self._turns.text_of(probe.token_ids)
            for piece in split(source, grammar, format_, opening).pieces:
                place = (piece.before, piece.after)
                edge = edges.get(place, Edge())
                if _LEARN.content not in piece.text:
                    edges[place] = edge._replace(alone=piece.text)
                elif place not in with_content:
                    with_content.add(place)
                    prefix, _, suffix = piece.text.partition(_LEARN.content)
                    edges[place] = edge._replace(prefix=prefix, suffix=suffix)
        if format_ is not None:
            after = format_.after_end
            before_call = edges.get(("start", "call"), Edge())
            edges.setdefault(("reasoning", "end"), Edge(prefix=after, alone=after))
            edges.setdefault(("reasoning", "call"), before_call._replace(prefix=after, alone=after))
        return edges

    def prove(self, name: str | None, grammars: Mapping[str, Grammar], known: Mapping[str, str]) -> _Finding:
        """Choose a grammar by proof, or take the grammar of a name and say whether it is proved.

        `known` are earlier reasons against some of the grammars.
        """
        named = grammars.get(name or "")
        if not any(_ARGUMENTS["digits"] in (probe.text or "") for probe in self._probed(None, _PROVE)):
            return self._finding("named" if named is not None else "not_printed", named)
        reasons = dict(known)
        for each, grammar in grammars.items():
            difference = None if each in reasons else self._first_difference(grammar)
            if difference is not None:
                reasons[each] = difference
        proved = tuple(each for each in grammars if each not in reasons)
        outcome: Outcome = "ambiguous" if len(proved) > 1 else "proved" if proved else "none"
        chosen = named or (grammars[proved[0]] if len(proved) == 1 else None)
        refused = [_described(probe.message) for probe in self._probed(chosen, _PROVE) if probe.text is None]
        outcome = "named" if named is not None else outcome
        return self._finding(outcome, chosen, proved, reasons, tuple(dict.fromkeys(refused)))

    def _finding(
        self,
        outcome: Outcome,
        chosen: Grammar | None,
        proved: tuple[str, ...] = (),
        reasons: Mapping[str, str] = MappingProxyType({}),
        refused: tuple[str, ...] = (),
    ) -> _Finding:
        edges = [(*place, edge) for place, edge in self.edges(chosen).items()]
        name = chosen.name if chosen is not None else None
        return _Finding(outcome, name, proved, dict(reasons), refused, edges)

    def _probed(self, grammar: Grammar | None, texts: _Texts) -> list[_Probe]:
        """Render a set of probes, with call ids as the grammar writes them."""
        id_format = (grammar.id_format if grammar is not None else None) or "call{index:05}"
        key = (id_format, texts.content)
        if key not in self._rendered:
            encode = self._turns.speller.tokenizer.encode
            self._rendered[key] = probes = []
            for message in self._messages(id_format, texts):
                turn = self._probes.turn(message, self._profile.stop_ids, tools=self._tools)
                if turn is None:
                    probes.append(_Probe(message, None, [], []))
                else:
                    probes.append(_Probe(message, turn.text, encode(turn.header), encode(turn.text)))
        return self._rendered[key]

    def _messages(self, id_format: str, texts: _Texts) -> Iterator[Message]:
        for group in texts.calls:
            calls = tuple(
                ToolCall(name, arguments, id_format.format(name=name, index=index))
                for index, (name, arguments) in enumerate(group)
            )
            for content in (None if calls else "", texts.content):
                message = assistant(content, tool_calls=calls)
                yield message
                if self._profile.reasoning is not None:
                    yield with_reasoning(message, texts.reasoning, self._profile.reasoning.carrier)

    def _first_difference(self, grammar: Grammar) -> str | None:
        """First difference between the rendered messages and the messages read back, or None."""
        edges = self.edges(grammar)
        unexplained = _unexplained(grammar, edges)
        if unexplained is not None:
            return f"next to calls the template writes {unexplained!r}, which is not part of the grammar"
        parser = ResponseParser(self._turns, GrammarChoice("named", grammar), edges)
        read = 0
        for probe in self._probed(grammar, _PROVE):
            if probe.text is None:
                continue
            parsed = parser.parse(probe.token_ids, tools=_TOOLS, prompt_ids=probe.prompt_ids)
            difference = _difference(parsed, probe.message, probe.text)
            if difference is not None:
                return f"{_described(probe.message)}: {difference}"
            read += 1
        return None if read else "the template refuses every probe"


def _unexplained(grammar: Grammar, edges: Edges) -> str | None:
    """Text next to calls that is neither white space nor a delimiter of the grammar."""
    section = grammar.section or Section()
    known = re.compile("|".join(map(re.escape, (*section.opens, section.end or ""))))
    texts = (text for place, edge in edges.items() if "call" in place for text in edge)
    return next((text for text in texts if known.sub("", text).strip()), None)


def _difference(parsed: ParsedResponse, message: Message, text: str) -> str | None:
    """First difference between a message, as far as the template printed it, and a parsed response."""
    statuses = [attempt.status for attempt in parsed.tool_calls]
    if len(statuses) != len(message.tool_calls) or set(statuses) - {"ok"}:
        return f"{len(message.tool_calls)} calls read as {', '.join(statuses) or 'none'}"
    pairs: list[tuple[str, Any, Any]] = []
    for attempt, call in zip(parsed.tool_calls, message.tool_calls, strict=True):
        pairs.append((f"name {call.name!r}", call.name, attempt.name))
        pairs.append((f"arguments of {call.name}", call.arguments, attempt.arguments))
        pairs.append((f"id {call.id!r}", attempt.id and call.id, attempt.id))
    content = _PROVE.content if _PROVE.content[:9] in text else ""
    pairs.append((f"content {content!r}", content, parsed.content))
    reasoning = _PROVE.reasoning if _PROVE.reasoning[:9] in text else None
    pairs.append((f"reasoning {reasoning!r}", reasoning, parsed.reasoning_content))
    for name, expected, read in pairs:
        # In Python 1 equals 1.0 and True, but as JSON they differ.
        if json.dumps(expected, sort_keys=True) != json.dumps(read, sort_keys=True):
            return f"{name} read as {read!r}"
    return None


def _described(message: Message) -> str:
    count = len(message.tool_calls)
    return f"{count} call{'s' * (count != 1)} {'beside' if message.content else 'without'} content"
