"""Content is never syntax (law 7): every added token of a vocabulary, written in every place of a rendering.

`python -m mmrender.testing.places MODEL...` checks model directories.

Provenance shows the template's own text: with each character of content masked, only the template's tokens
are left to find. A rendering may have only these, and a masked text must not hold any of the content.
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
from mmrender.template.text import Author, plain
from mmrender.tokens.encode import DEFAULT_RULES, SpecialTokenRule

Case: TypeAlias = tuple[list[dict[str, Any]], dict[str, Any]]
"""Messages, and options of `render`."""

_WORD = "qwertz"
_MASK = "\x00"
_USER = {"role": "user", "content": "hi"}
_CALL_ID = "call00001"


def _user(**fields: Any) -> Case:
    return [{**_USER, **fields}], {}


def _system(content: Any, role: str = "system") -> Case:
    return [{"role": role, "content": content}, _USER], {}


def _assistant(content: Any, *following: Any, **fields: Any) -> Case:
    return [_USER, {"role": "assistant", "content": content, **fields}, *following], {}


def _calling(
    arguments: dict[str, Any], name: str = "probe", call_id: str = _CALL_ID, *following: Any
) -> Case:
    function = {"name": name, "arguments": arguments}
    return _assistant("", *following, tool_calls=[{"id": call_id, "type": "function", "function": function}])


def _answered(content: Any = "done", name: str = "probe", call_id: str = _CALL_ID) -> Case:
    result = {"role": "tool", "content": content, "name": name, "tool_call_id": call_id}
    return _calling({}, name, call_id, result)


def _with_tool(description: str = "a probe", key: str = "x", **parameter: Any) -> Case:
    parameters = {"type": "object", "properties": {key: {"type": "string", **parameter}}}
    function = {"name": "probe", "description": description, "parameters": parameters}
    return [_USER], {"tools": [{"type": "function", "function": function}]}


def _with_document(**document: str) -> Case:
    return [_USER], {"documents": [{"title": "x", "text": "x", **document}]}


def _with_argument(name: str, text: str) -> Case:
    return [_USER], {"chat_template_kwargs": {name: text}}


def _parts(text: str, kind: str = "text") -> list[dict[str, str]]:
    return [{"type": kind, kind: text}]


def _foreign(text: str) -> StrEnum:
    """A string of a class of its own."""
    return StrEnum("Foreign", {"VALUE": text}).VALUE  # type: ignore[attr-defined, no-any-return]


PLACES: Mapping[str, Callable[[str], Case]] = {
    "user text": lambda text: _user(content=text),
    "user text part": lambda text: _user(content=_parts(text)),
    "user name": lambda text: _user(name=text),
    "user key of no standard": lambda text: _user(note=text),
    "system text": _system,
    "system text part": lambda text: _system(_parts(text)),
    "developer text": lambda text: _system(text, "developer"),
    "assistant text": lambda text: _assistant(text, _USER),
    "assistant text part": lambda text: _assistant(_parts(text), _USER),
    "reasoning": lambda text: _assistant("a", reasoning_content=text),
    "reasoning part": lambda text: _assistant([*_parts(text, "thinking"), *_parts("a")]),
    "call name": lambda text: _calling({}, text),
    "call id": lambda text: _calling({}, call_id=text),
    "argument key": lambda text: _calling({text: 1}),
    "argument value": lambda text: _calling({"x": text}),
    "nested argument": lambda text: _calling({"x": [{"y": text}, {text: [text]}]}),
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
    "document title": lambda text: _with_document(title=text),
    "document text": lambda text: _with_document(text=text),
    "document key": lambda text: _with_document(**{text: text}),
}
"""By the name of a place, a conversation with a text there. The template's arguments are added."""

_TRUSTED: Mapping[str, Author] = {
    **dict.fromkeys(("system text", "system text part"), "system"),
    "developer text": "developer",
    **dict.fromkeys(("assistant text", "assistant text part", "reasoning", "reasoning part"), "assistant"),
}
"""Author of the places whose special tokens, except media tokens, are syntax by default."""


class Leak(NamedTuple):
    """Content that became syntax: the place, the token, the rule, and how it shows."""

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
        leaks: Content that became syntax.
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
                continue  # a template may refuse the token
            self.renderings += 1
            # The template may write other tokens for another text. The post-processor adds the same to both.
            expected = neutral.counts + shown.own
            expected.subtract(neutral.own)
            if _WORD in shown.masked:
                problem = "the template's text holds content without its origin"
                self.leaks.append(Leak(place, token, rule, problem))
            elif shown.counts != expected:
                self.leaks.append(Leak(place, token, rule, f"{+expected} expected, got {+shown.counts}"))

    def lines(self) -> list[str]:
        """Return the outcome for a person to read."""
        lines = [f"{self.model}: {self.renderings:,} renderings, {len(self.leaks)} leaks"]
        lines.append(f"  not printed: {', '.join(self.unprinted) or 'none'}")
        lines += [f"  refused: {place}: {reason[:120]}" for place, reason in self.refused.items()]
        return lines + [
            f"  LEAK in {leak.place} ({leak.rule}): {leak.token!r}: {leak.problem}"
            for leak in self.leaks[:20]
        ]


def check_places(renderer: Renderer, model: str = "", *, tokens: Iterable[str] | None = None) -> PlacesReport:
    """Write each token into each place, under the default rules and under `"text"` for all.

    Args:
        renderer: The model's renderer. Its own rules do not matter.
        model: Its name, for the report.
        tokens: Added tokens to write. By default all except blanks.
    """
    report = PlacesReport(model)
    names = renderer.profile.arguments
    places = dict(PLACES)
    places.update({f"argument {name}": partial(_with_argument, name) for name in names})
    written = sorted(renderer.tokenizer.added_ids) if tokens is None else tokens
    added = [token for token in written if not is_blank(token)]
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
            tokens = [token for token in added if token in media or not is_parsed]
            report.check(ruled, place, case, rule=rule, tokens=tokens)
    return report


class _Shown(NamedTuple):
    """A rendering: its text, the same with content masked, and the added tokens of ids and masked text."""

    text: str
    masked: str
    counts: Counter[str]
    own: Counter[str]

    @classmethod
    def of(cls, renderer: Renderer, case: Case) -> "_Shown":
        """Render a case without media."""
        messages, options = case
        text, tokenizer = renderer.render_text(messages, **options), renderer.tokenizer
        ids = renderer.render(messages, **options).token_ids
        masked = plain(text)
        for start, stop, origin in text.spans:
            if origin.is_content:
                masked = masked[:start] + _MASK * (stop - start) + masked[stop:]
        names = {token_id: token for token, token_id in tokenizer.added_ids.items() if not is_blank(token)}
        own = Counter(match.token for match in tokenizer.find(masked) if not is_blank(match.token))
        return cls(plain(text), masked, Counter(names[each] for each in ids if each in names), own)


def main(directories: Iterable[str]) -> int:
    """Check model directories, print the outcome and return the exit status."""
    reports = []
    for directory in directories:
        reports.append(check_places(Renderer.from_pretrained(directory), Path(directory).name))
        print("\n".join(reports[-1].lines()), flush=True)
    return 1 if any(report.leaks for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
