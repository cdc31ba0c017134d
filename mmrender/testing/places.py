"""Content is never syntax (law 7): every added token of a vocabulary, written in every place of a rendering.

`python -m mmrender.testing.places MODEL...` checks model directories.

What the template wrote is known from provenance: with each character of content masked, only the template's
own tokens are left to find. A rendering may have no others, and a masked text no trace of the content.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from mmrender.errors import MMRenderError
from mmrender.model.tokenizer import is_blank
from mmrender.renderer import Renderer
from mmrender.template.text import Author, TracedStr, plain
from mmrender.tokens.encode import DEFAULT_RULES, SpecialTokenRule

Case: TypeAlias = tuple[list[dict[str, Any]], dict[str, Any]]
"""Messages, and options of `render`."""

_WORD = "qwertz"
_MASK = "\x00"
_USER = {"role": "user", "content": "hi"}
_CALL_ID = "call00001"


def _calling(arguments: dict[str, Any], name: str = "probe", call_id: str = _CALL_ID) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _answered(content: Any = "done", name: str = "probe", call_id: str = _CALL_ID) -> Case:
    result = {"role": "tool", "content": content, "name": name, "tool_call_id": call_id}
    return [_USER, _calling({}, name, call_id), result], {}


def _with_tool(name: str = "probe", description: str = "a probe", **parameter: Any) -> Case:
    key = parameter.pop("key", "x")
    parameters = {"type": "object", "properties": {key: {"type": "string", **parameter}}}
    function = {"name": name, "description": description, "parameters": parameters}
    return [_USER], {"tools": [{"type": "function", "function": function}]}


def _with_argument(name: str, text: str) -> Case:
    return [_USER], {"chat_template_kwargs": {name: text}}


def _parts(text: str, kind: str = "text") -> list[dict[str, str]]:
    return [{"type": kind, kind: text}]


PLACES: Mapping[str, Callable[[str], Case]] = {
    "user text": lambda text: ([{**_USER, "content": text}], {}),
    "user text part": lambda text: ([{**_USER, "content": _parts(text)}], {}),
    "user name": lambda text: ([{**_USER, "name": text}], {}),
    "user key of no standard": lambda text: ([{**_USER, "note": text}], {}),
    "system text": lambda text: ([{"role": "system", "content": text}, _USER], {}),
    "system text part": lambda text: ([{"role": "system", "content": _parts(text)}, _USER], {}),
    "developer text": lambda text: ([{"role": "developer", "content": text}, _USER], {}),
    "assistant text": lambda text: ([_USER, {"role": "assistant", "content": text}, _USER], {}),
    "assistant text part": lambda text: ([_USER, {"role": "assistant", "content": _parts(text)}, _USER], {}),
    "reasoning": lambda text: ([_USER, {"role": "assistant", "content": "a", "reasoning_content": text}], {}),
    "reasoning part": lambda text: (
        [_USER, {"role": "assistant", "content": [*_parts(text, "thinking"), *_parts("a")]}],
        {},
    ),
    "call name": lambda text: ([_USER, _calling({}, text)], {}),
    "call id": lambda text: ([_USER, _calling({}, call_id=text)], {}),
    "argument key": lambda text: ([_USER, _calling({text: 1})], {}),
    "argument value": lambda text: ([_USER, _calling({"x": text})], {}),
    "nested argument": lambda text: ([_USER, _calling({"x": [{"y": text}, {text: [text]}]})], {}),
    "tool text": _answered,
    "tool text part": lambda text: _answered(_parts(text)),
    "tool name": lambda text: _answered(name=text),
    "id of the answered call": lambda text: _answered(call_id=text),
    "schema name": _with_tool,
    "schema description": lambda text: _with_tool(description=text),
    "schema key": lambda text: _with_tool(key=text),
    "schema parameter's text": lambda text: _with_tool(title=text),
    "schema enum": lambda text: _with_tool(enum=[text, "b"]),
    "schema value of a foreign type": lambda text: _with_tool(default=_foreign(text)),
    "document title": lambda text: ([_USER], {"documents": [{"title": text, "text": "x"}]}),
    "document text": lambda text: ([_USER], {"documents": [{"title": "x", "text": text}]}),
    "document key": lambda text: ([_USER], {"documents": [{"title": "x", "text": "x", text: text}]}),
}
"""By the name of a place a conversation that holds a text there; template arguments join them."""

_TRUSTED: Mapping[str, Author] = {
    "system text": "system",
    "system text part": "system",
    "developer text": "developer",
    "assistant text": "assistant",
    "assistant text part": "assistant",
    "reasoning": "assistant",
    "reasoning part": "assistant",
}
"""Author of the places whose special tokens, other than those of media, are syntax by default."""


def _foreign(text: str) -> StrEnum:
    """A string of a class of its own."""
    return StrEnum("Foreign", {"VALUE": text}).VALUE  # type: ignore[attr-defined, no-any-return]


class Leak(NamedTuple):
    """Content that became syntax: where, which token, under which rule, and how it shows."""

    place: str
    token: str
    rule: str
    problem: str


@dataclass
class PlacesReport:
    """Outcome for one model.

    Attributes:
        model: Its name.
        renderings: Number of renderings compared.
        leaks: What became syntax.
        unprinted: Places that the template does not print.
        refused: Places that it refuses, with the reason.
    """

    model: str
    renderings: int = 0
    leaks: list[Leak] = field(default_factory=list)
    unprinted: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    def check(
        self,
        renderer: Renderer,
        place: str,
        case: Callable[[str], Case],
        *,
        rule: str,
        tokens: Iterable[str],
    ) -> None:
        """Write each token into one place."""
        try:
            neutral = _Shown.of(renderer, case(f"{_WORD}x{_WORD}"))
        except MMRenderError as error:
            self.refused[place] = str(error)
            return
        if _WORD not in neutral.text:
            if place not in self.unprinted:
                self.unprinted.append(place)
            return
        for token in tokens:
            try:
                shown = _Shown.of(renderer, case(f"{_WORD}{token}{_WORD}"))
            except MMRenderError:
                continue  # a template may refuse such a text
            self.renderings += 1
            # What the post-processor adds is in both.
            expected = Counter(neutral.counts)
            expected.update(shown.own)
            expected.subtract(neutral.own)
            if _WORD in shown.masked:
                self.leaks.append(
                    Leak(place, token, rule, "the template's text holds content without its origin")
                )
            elif shown.counts != expected:
                self.leaks.append(Leak(place, token, rule, f"{+expected} expected, got {+shown.counts}"))


def check_places(renderer: Renderer, model: str = "", *, tokens: Iterable[str] | None = None) -> PlacesReport:
    """Write each token into each place, under the default rules and under `"text"` for all.

    Args:
        renderer: The model's renderer; its own rules do not matter.
        model: Its name, for the report.
        tokens: Added tokens to write; by default all that are no blanks.
    """
    report = PlacesReport(model)
    places = dict(PLACES)
    for name in renderer.profile.arguments:
        places[f"argument {name}"] = partial(_with_argument, name)
    given = sorted(renderer.tokenizer.added_ids) if tokens is None else tokens
    added = [token for token in given if not is_blank(token)]
    media = renderer.media.processor.placeholder_tokens if renderer.media is not None else ()
    rules: dict[str, Mapping[Author, SpecialTokenRule]] = {
        "default": DEFAULT_RULES,
        "text": dict.fromkeys(DEFAULT_RULES, "text"),
    }
    for rule, by_author in rules.items():
        ruled = Renderer(
            renderer.templates,
            renderer.tokenizer,
            renderer.media,
            content_special_tokens=by_author,
            unprinted="allow",
            memo_bytes=0,
        )
        for place, case in places.items():
            is_parsed = by_author[_TRUSTED.get(place, "user")] == "parse"
            written = [token for token in added if token in media or not is_parsed]
            report.check(ruled, place, case, rule=rule, tokens=written)
    return report


class _Shown(NamedTuple):
    """A rendering: its text, the same with content masked, and the added tokens of ids and masked text."""

    text: str
    masked: str
    counts: Counter[str]
    own: Counter[str]

    @classmethod
    def of(cls, renderer: Renderer, case: Case) -> "_Shown":
        """Render a case, which holds no media."""
        messages, options = case
        text = renderer.render_text(messages, **options)
        ids = renderer.render(messages, **options).token_ids
        masked, tokenizer = _masked(text), renderer.tokenizer
        names = {token_id: token for token, token_id in tokenizer.added_ids.items() if not is_blank(token)}
        found = Counter(match.token for match in tokenizer.find(masked))
        counts = Counter(names[token_id] for token_id in ids if token_id in names)
        return cls(
            plain(text), masked, counts, Counter({key: found[key] for key in found if not is_blank(key)})
        )


def _masked(text: TracedStr) -> str:
    pieces, position = [], 0
    for start, stop, origin in text.spans:
        if origin.is_content:
            pieces += [plain(text)[position:start], _MASK * (stop - start)]
            position = stop
    return "".join([*pieces, plain(text)[position:]])


def main(directories: Iterable[str]) -> int:
    """Check model directories and print what was found; return the exit status."""
    leaks = 0
    for directory in directories:
        report = check_places(Renderer.from_pretrained(directory), Path(directory).name)
        leaks += len(report.leaks)
        print(f"{report.model}: {report.renderings:,} renderings, {len(report.leaks)} leaks")
        print(f"  not printed: {', '.join(report.unprinted) or 'none'}")
        for place, reason in report.refused.items():
            print(f"  refused: {place}: {reason[:120]}")
        for leak in report.leaks[:20]:
            print(f"  LEAK in {leak.place} ({leak.rule}): {leak.token!r}: {leak.problem}")
    return 1 if leaks else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
