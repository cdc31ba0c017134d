"""Which grammar a template writes tool calls in, found by reading back what it prints.

Messages with known calls are rendered, their sampled text is taken, and every grammar reads it. The one that
gives back the same names, arguments, content and reasoning is proved. None, or two, is said, and not chosen.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from mmrender.messages import Message, ToolCall
from mmrender.parsing.choice import GrammarChoice, Outcome
from mmrender.parsing.grammar import Grammar, Section
from mmrender.parsing.grammars import GRAMMARS, find_grammar
from mmrender.parsing.layout import Layout, Piece, learn_layout
from mmrender.parsing.parts import split
from mmrender.parsing.probes import QUESTION, SampledTurn, TurnProber
from mmrender.parsing.reasoning import Opening, ReasoningFormat, opening_by_text
from mmrender.parsing.reasoning_probe import with_reasoning
from mmrender.parsing.response import ParsedResponse, ResponseParser
from mmrender.parsing.token_text import TokenSpeller, TokenText

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


_KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
PROBE_TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "probe_many",
            "description": "takes one argument of each kind",
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": _KINDS.get(type(value), "null"), "description": "a probe"}
                    for key, value in _ARGUMENTS.items()
                },
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "probe_none",
            "description": "takes no arguments",
            "parameters": {"type": "object", "properties": {}},
        },
    },
)
_PLAIN_TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {"name": name, "description": "a probe", "parameters": {"properties": {}}},
    }
    for name in ("probe_many", "probe_none")
)


def tools_for_probes(prober: TurnProber) -> Sequence[Mapping[str, Any]] | None:
    """The richest tool definitions that a template takes: some fail on a type, others without tools."""
    for tools in (PROBE_TOOLS, _PLAIN_TOOLS):
        if prober.render([QUESTION], tools) is not None:
            return tools
    return None


_Calls: TypeAlias = Sequence[tuple[str, dict[str, Any]]]
_MANY, _NONE = ("probe_many", _ARGUMENTS), ("probe_none", dict[str, Any]())
_ONE = ("probe_one", {"alpha": "bravo"})


class _Texts(NamedTuple):
    """What a set of probes says, with and without content and reasoning, beside each group of calls."""

    content: str
    reasoning: str
    calls: Sequence[_Calls]


_LEARN = _Texts("qwertzC", "qwertzR", ((), (_ONE,), (_ONE, _ONE)))
_PROVE = _Texts(
    "Two words,\n\nthen a second paragraph: 日本.",
    "First this.\n\nThen that.",
    ((_MANY,), (_MANY, _NONE), (_NONE,), (_NONE, _MANY)),
)


class _Probe(NamedTuple):
    """A message, the turn that the template printed for it, if it did, and the tokens of that."""

    message: Message
    turn: SampledTurn | None
    prompt_ids: list[int]
    token_ids: list[int]


class Prover:
    """Tries grammars on what a template prints.

    Args:
        prober: Renders turns.
        reasoning: How the template writes reasoning.
    """

    def __init__(self, prober: TurnProber, reasoning: ReasoningFormat | None) -> None:
        self._prober = prober
        self._reasoning = reasoning
        self._speller = TokenSpeller(prober.tokenizer)
        self._rendered: dict[tuple[str | None, str], list[_Probe]] = {}

    def layout(self, grammar: Grammar | None) -> Layout:
        """Learn the scaffold that stands between the parts of a turn."""
        probes = [
            self._pieces(probe, grammar)
            for probe in self._probes(grammar, _LEARN)
            if probe.turn is not None and (grammar is not None or not probe.message.tool_calls)
        ]
        learned = learn_layout(probes, _LEARN.content)
        return learned if self._reasoning is None else learned.after_reasoning(self._reasoning.after_end)

    def choose(self, name: str | None = None) -> GrammarChoice:
        """Choose a grammar by proof, or take the one that is named and say whether it is proved.

        Raises:
            InputError: There is no grammar of that name.
        """
        named = find_grammar(name) if name is not None else None
        if not self._prints_calls():
            return GrammarChoice("named" if named is not None else "not_printed", named)
        differences = {grammar.name: self._first_difference(grammar) for grammar in GRAMMARS.values()}
        proved = tuple([name for name, difference in differences.items() if difference is None])
        outcome: Outcome = "ambiguous" if len(proved) > 1 else "proved" if proved else "none"
        chosen = named or (GRAMMARS[proved[0]] if len(proved) == 1 else None)
        return GrammarChoice(
            "named" if named is not None else outcome,
            chosen,
            proved,
            {name: difference for name, difference in differences.items() if difference is not None},
            self._refused(chosen),
        )

    def _prints_calls(self) -> bool:
        digits = _ARGUMENTS["digits"]
        return any(
            probe.turn is not None and digits in probe.turn.text for probe in self._probes(None, _PROVE)
        )

    def _refused(self, grammar: Grammar | None) -> tuple[str, ...]:
        refused = [_described(probe.message) for probe in self._probes(grammar, _PROVE) if probe.turn is None]
        return tuple(dict.fromkeys(refused))

    def _probes(self, grammar: Grammar | None, texts: _Texts) -> list[_Probe]:
        """Render a set of probes, with call ids as the grammar writes them."""
        id_format = grammar.id_format if grammar is not None else None
        key = (id_format, texts.content)
        if key not in self._rendered:
            self._rendered[key] = [self._probe(message) for message in self._messages(id_format, texts)]
        return self._rendered[key]

    def _messages(self, id_format: str | None, texts: _Texts) -> Iterator[Message]:
        for group in texts.calls:
            calls = [
                ToolCall(name=name, arguments=arguments, id=_call_id(id_format, name, index))
                for index, (name, arguments) in enumerate(group)
            ]
            for content in (None if calls else "", texts.content):
                message = Message(role="assistant", content=content, tool_calls=tuple(calls))
                yield message
                if self._reasoning is not None:
                    yield with_reasoning(message, texts.reasoning, self._reasoning.carrier)

    def _probe(self, message: Message) -> _Probe:
        turn = self._prober.turn(message)
        if turn is None:
            return _Probe(message, None, [], [])
        encode = self._prober.tokenizer.encode
        return _Probe(message, turn, encode(turn.header), encode(turn.text))

    def _pieces(self, probe: _Probe, grammar: Grammar | None) -> list[Piece]:
        source = TokenText(probe.token_ids, self._speller)
        format_, opening = self._reasoning, Opening(inside=False)
        if format_ is not None and probe.turn is not None:
            opening = opening_by_text(format_, probe.turn.header)
        return split(source, grammar, format_, opening).pieces

    def _first_difference(self, grammar: Grammar) -> str | None:
        """How what a grammar reads differs from what was rendered; None where nothing does."""
        layout = self.layout(grammar)
        unexplained = _unexplained(grammar, layout)
        if unexplained is not None:
            return f"beside calls the template writes {unexplained!r}, which is no part of the grammar"
        parser = ResponseParser(
            self._prober.tokenizer, grammar, self._reasoning, self._prober.stop_ids, layout
        )
        read = 0
        for probe in self._probes(grammar, _PROVE):
            if probe.turn is None:
                continue
            parsed = parser.parse(probe.token_ids, tools=PROBE_TOOLS, prompt_ids=probe.prompt_ids)
            difference = _difference(parsed, probe.message, probe.turn.text)
            if difference is not None:
                return f"{_described(probe.message)}: {difference}"
            read += 1
        return None if read else "the template refuses every probe"


def _unexplained(grammar: Grammar, layout: Layout) -> str | None:
    """Text beside calls that is neither white space nor a delimiter of the grammar."""
    section = grammar.section or Section()
    known = [*section.opens, section.end or ""]
    for (before, after), edge in layout.edges.items():
        for text in edge if "call" in (before, after) else ():
            rest = text
            for delimiter in known:
                rest = rest.replace(delimiter, "")
            if rest.strip():
                return text
    return None


def _call_id(id_format: str | None, name: str, index: int) -> str:
    # Mistral's templates take ids of nine letters or digits only.
    return f"call{index:05}" if id_format is None else id_format.format(name=name, index=index)


def _difference(parsed: ParsedResponse, message: Message, text: str) -> str | None:
    """First difference between a message and what was read; what the template left out is not missed."""
    statuses = [attempt.status for attempt in parsed.tool_calls]
    if len(statuses) != len(message.tool_calls) or set(statuses) - {"ok"}:
        return f"{len(message.tool_calls)} calls read as {', '.join(statuses) or 'none'}"
    for attempt, call in zip(parsed.tool_calls, message.tool_calls, strict=True):
        if attempt.name != call.name:
            return f"name {call.name!r} read as {attempt.name!r}"
        if _exact(attempt.arguments) != _exact(call.arguments):
            return f"arguments of {call.name} read as {attempt.arguments!r}"
        if attempt.id is not None and attempt.id != call.id:
            return f"id {call.id!r} read as {attempt.id!r}"
    content = _PROVE.content if _PROVE.content[:9] in text else ""
    if parsed.content != content:
        return f"content {content!r} read as {parsed.content!r}"
    reasoning = _PROVE.reasoning if _PROVE.reasoning[:9] in text else None
    if parsed.reasoning_content != reasoning:
        return f"reasoning {reasoning!r} read as {parsed.reasoning_content!r}"
    return None


def _exact(value: Any) -> str:
    # In Python 1 equals 1.0 and True; here they differ.
    return json.dumps(value, sort_keys=True)


def _described(message: Message) -> str:
    count = len(message.tool_calls)
    return f"{count} call{'s' * (count != 1)} {'beside' if message.content else 'without'} content"
