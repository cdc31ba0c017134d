"""Traced text in, `RenderedTokens` out.

The text is cut at the special tokens that count as syntax: those that the template wrote, and those in
content whose role is set to `parse`. Between two cuts one run is encoded whole, so that byte-pair merges fall
as they do in the whole text. A placeholder that the template wrote becomes the expansion of its media item,
in token space. Every token belongs to the origin of its first character.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mmrender.errors import SpecialTokenError, TokenizerError
from mmrender.messages import Modality, Role
from mmrender.model.tokenizer import Match, Tokenizer
from mmrender.spans import Expansion, MediaItem, Repeat
from mmrender.template.origin import Origin, Span
from mmrender.template.traced import TracedStr, plain
from mmrender.tokens.stream import Encoded, TokenStream

SpecialTokenRule: TypeAlias = Literal["text", "parse", "error"]
"""What a special token in content is: text, syntax, or an error."""

DEFAULT_RULES: Mapping[Role, SpecialTokenRule] = {
    "system": "parse",
    "developer": "parse",
    "user": "text",
    "assistant": "parse",
    "tool": "text",
}


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A placeholder that the template wrote: characters `[start, stop)`, and its message or -1."""

    start: int
    stop: int
    modality: Modality
    message: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A rendered text with its syntax: special tokens and placeholders, in order."""

    text: TracedStr
    matches: tuple[Match, ...]
    placeholders: tuple[Placeholder, ...]


class _Origins:
    """Looks up the origin of rising character positions."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._index = 0

    def overlapping(self, start: int, stop: int) -> Iterable[Origin]:
        """Origins of the characters `[start, stop)`; between calls `start` falls by a token at most."""
        while self._index and self._spans[self._index - 1][1] > start:
            self._index -= 1
        while self._index < len(self._spans) and self._spans[self._index][1] <= start:
            self._index += 1
        index = self._index
        while index < len(self._spans) and self._spans[index][0] < stop:
            yield self._spans[index][2]
            index += 1


class TokenWriter:
    """Turns traced text into tokens.

    Args:
        tokenizer: The model's tokenizer.
        placeholders: Text that the template writes for one item of each modality.
        placeholder_tokens: Every token that stands for media; in content it is text whatever the rules say.
        rules: What a special token in the content of each role is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        placeholders: Mapping[Modality, str],
        placeholder_tokens: Iterable[str],
        rules: Mapping[Role, SpecialTokenRule],
    ) -> None:
        self.tokenizer = tokenizer
        self.rules = rules
        self._modality: dict[str, Modality] = {text: modality for modality, text in placeholders.items()}
        self.media_tokens = frozenset(placeholder_tokens) | set(self._modality)
        known = (tokenizer.token_id(token) for token in self.media_tokens)
        self.media_ids = frozenset(token_id for token_id in known if token_id is not None)

    def lay_out(self, text: TracedStr) -> Layout:
        """Find the syntax of a rendered text.

        Raises:
            SpecialTokenError: Content holds a special token, and its role is set to `error`.
        """
        origins = _Origins(text._spans)

        def accept(match: Match) -> bool:
            found = list(origins.overlapping(match.start, match.stop))
            return all(self._is_syntax(match, origin) for origin in found if origin.is_content)

        matches = tuple(self.tokenizer.find(plain(text), accept))
        placeholders = tuple(
            Placeholder(
                match.start,
                match.stop,
                self._modality[match.token],
                next((origin.message for origin in origins.overlapping(match.start, match.stop)), -1),
            )
            for match in matches
            if match.token in self._modality
        )
        return Layout(text, matches, placeholders)

    def _is_syntax(self, match: Match, origin: Origin) -> bool:
        if match.token in self.media_tokens:
            return False
        rule = "parse" if origin.role is None else self.rules[origin.role]
        if rule == "error":
            raise SpecialTokenError(
                "the content holds a special token",
                where=origin.path,
                expected=f"no special tokens in {origin.role} content",
                got=repr(match.token),
                remedy='Escape it, or set content_special_tokens="text" to encode it as text',
            )
        return rule == "parse"

    def write(
        self,
        layout: Layout,
        items: Sequence[MediaItem | None],
        cuts: Sequence[int] = (),
        *,
        begins: bool = True,
    ) -> Encoded:
        """Encode a text.

        Args:
            layout: The text and its syntax.
            items: What stands in place of each placeholder; None leaves it as one token.
            cuts: Rising character positions whose token index is wanted.
            begins: Whether the text begins the prompt.

        Raises:
            TokenizerError: Runs of this tokenizer are not independent.
            PlaceholderError: The vocabulary lacks a token of an expansion.
        """
        if not self.tokenizer.runs_are_independent:
            raise TokenizerError(
                "this tokenizer encodes a run differently when other text stands before it",
                expected="an encoding between special tokens that depends on nothing outside",
                remedy="Its pre-tokenizer is of a kind that mmrender does not know; please report the model",
            )
        stream = TokenStream(self.tokenizer, layout.text, cuts, begins=begins)
        queue = iter(zip(layout.placeholders, items, strict=True))
        for match in layout.matches:
            if match.token not in self._modality:
                stream.special(match)
                continue
            placeholder, item = next(queue)
            expansion: Expansion = (Repeat(match.token, 1),) if item is None else item.expansion
            stream.media(match, expansion, placeholder.message, placeholder.modality)
        return stream.finish()
