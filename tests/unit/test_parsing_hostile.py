"""Completions made to be slow to read: what it takes to read one grows with its length and no faster."""

import sys
from collections.abc import Callable, Iterator
from itertools import combinations_with_replacement, product
from typing import Any

import pytest

from mmrender.model.spelling import TokenText
from mmrender.parsing.grammars import Grammar
from parsing_cases import BODIES, Case, written_case

FEW, MANY = 15, 75
# What begins a value, a text or reasoning, and a character of several bytes.
PIECES = ("🙂", "<think>", "</think>", '{"name":"', "[f(a='", "call:{x:1,", "[", " ")


class CountedText(str):
    """Text that counts the characters which a search or a slice of it passes over."""

    passed = 0

    def find(self, text: str, start: int = 0, stop: int = sys.maxsize) -> int:
        place = str.find(self, text, start, stop)
        CountedText.passed += (min(stop, len(self)) if place < 0 else place) - start
        return place

    def __getitem__(self, key: Any) -> str:
        piece = str.__getitem__(self, key)
        CountedText.passed += len(piece)
        return piece


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(self: TokenText, *arguments: Any) -> None:
        original(self, *arguments)
        self.text = CountedText(self.text)

    original = TokenText.__init__
    monkeypatch.setattr(TokenText, "__init__", build)


def steps(run: Callable[[], object]) -> int:
    """Number of calls of functions that `run` makes, and of characters that it passes over."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    CountedText.passed = 0
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls + CountedText.passed


def delimiters(grammar: Grammar) -> Iterator[str]:
    yield from (part for part in (*grammar.call, *grammar.argument) if isinstance(part, str))
    if (section := grammar.section) is not None:
        yield from filter(None, (section.begin, section.end, section.separator, *section.opens))


def growth(case: Case, unit: str) -> float:
    """Steps that a long completion takes, beside those of a short one, for each character."""
    few, many = (case.tokenizer.encode(unit * count) for count in (FEW, MANY))
    case.parser.parse(few)
    return steps(lambda: case.parser.parse(many)) / steps(lambda: case.parser.parse(few)) * FEW / MANY


@pytest.mark.parametrize("added_tokens", [True, False])
@pytest.mark.parametrize("name", BODIES)
def test_reading_takes_steps_in_proportion_to_the_length(name: str, added_tokens: bool) -> None:
    case = written_case(name, added_tokens=added_tokens)
    assert case.parser.choice.grammar is not None
    marks = dict.fromkeys(delimiters(case.parser.choice.grammar))
    # Of two marks one order is enough: in a long completion they follow each other both ways.
    units = ["".join(pair) for pair in combinations_with_replacement(marks, 2)]
    units += ["".join(pair) for pair in product(marks, (*PIECES, ""))]
    units += ["".join(pair) for pair in product(("<think>", "</think>"), ("", *marks, *PIECES))]
    found = {unit: growth(case, unit) for unit in dict.fromkeys(units)}
    assert {unit: rate for unit, rate in found.items() if rate > 1.5} == {}
