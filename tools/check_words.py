"""Check docstrings, comments, messages and guides for words that make a sentence harder to read.

    python tools/check_words.py [--list]

Counts the habits of `HABITS` in each room of the code and in the guides. A few are natural, so a room fails
only if it has more than `MAX_PER_THOUSAND` of them in a thousand words. `--list` prints every place.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
MAX_PER_THOUSAND: Final = 5.0
"""Habits per thousand words that a room may have."""
_MIN_WORDS: Final = 300
"""Words below which a room is not judged, since one habit would decide."""
HABITS: Final = {
    "if or when, not where": (
        r"\b[Ww]here (?:an?|all|both|it|its|no|nobody|none|nothing|one|several|some\w*)\b"
        r"|\b[Ww]here (?:that|the|there|they|this|we|you)\b"
    ),
    "a noun, not what": r"\b[Ww]hat (?!['\"])",
    "the noun again, not that of": (
        r"\b(?:[Tt]hat|[Tt]hose) of\b|\bthe ones?\b|\bthe others?\b|\b[Ss]o (?:many|much)\b|\bsuch (?!as\b)"
    ),
    "without, not is no": r"\b(?:is|are|has|have|holds?|gives?|needs?|takes?|knows?) (?:no|none|nothing)\b",
    "maximum or minimum, not most": r"(?<!at )(?<!At )\b(?:[Mm]ost|[Ll]east)\b(?! recent| likely| often)",
    "return, not give": r"\b[Gg]ives?\b",
    "plain words": r"\b(?:beside|anew|alike|amid|nobody|whoever|heed\w*|thereby|borne)\b",
    "no metaphors": (
        r"\b(?:stands?|strangers?|twins?|vouch\w*|judges?|told|kindred|company|departs?|parted)\b"
        r"|\btells? (?:how|of)\b"
    ),
    "two sentences, not a semicolon": r"; [a-z]",
}


class Prose(NamedTuple):
    """A text in a file, and the line where it begins."""

    path: Path
    line: int
    text: str


def code_prose(path: Path) -> Iterator[Prose]:
    """Yield the comments of a module, and its strings of three words or more."""
    source = path.read_text("utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 1:
            yield Prose(path, node.lineno, node.value)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Prose(path, token.start[0], token.string)


def page_prose(path: Path) -> Iterator[Prose]:
    """Yield the lines of a page."""
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        yield Prose(path, number, line)


def rooms() -> dict[str, list[Prose]]:
    """Return the prose of each room, and of the guides."""
    prose: dict[str, list[Prose]] = defaultdict(list)
    for package in ("mmrender", "codecs/mmcodecs"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).parts
            name = "codecs" if parts[0] == "codecs" else parts[1] if len(parts) > 2 else "mmrender"
            prose[name] += code_prose(path)
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        prose["guides"] += page_prose(path)
    return prose


def places(prose: Iterable[Prose]) -> Iterator[str]:
    """Yield a line for each habit in some texts."""
    for path, line, text in prose:
        for habit, pattern in HABITS.items():
            for match in re.finditer(pattern, text):
                around = " ".join(text[max(0, match.start() - 40) : match.end() + 40].split())
                yield f"{path.relative_to(ROOT)}:{line}: {habit}: ...{around}..."


def main() -> int:
    """Print the rate of each room, and the places of rooms with too many habits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every place")
    options = parser.parse_args()
    failed = False
    for name, prose in rooms().items():
        words = sum(len(text.split()) for _, _, text in prose)
        lines = list(places(prose))
        rate = 1000 * len(lines) / max(words, 1)
        too_many = rate > MAX_PER_THOUSAND and words >= _MIN_WORDS
        verdict = " (too many)" if too_many else ""
        print(f"{name:14} {len(lines):5} in {words:6,} words: {rate:4.1f} per 1,000{verdict}")
        if too_many or options.list:
            print(*(f"    {line}" for line in lines), sep="\n")
        failed |= too_many
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
