"""Sampled tokens as text in which every character knows its token.

A byte-level token may end inside a character, so tokens are spelled as bytes. The text of a completion is
those bytes as UTF-8, with each invalid byte as one lone surrogate (`surrogateescape`), so that characters map
to bytes and bytes to tokens exactly. `readable` returns the text that a decoder prints.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from typing import cast

from mmrender.caching import cached_property
from mmrender.model.tokenizer import Match, Tokenizer
from mmrender.model.vocabulary import BLANK, BYTE_TOKEN

_BLOCK = 128
"""Characters whose bytes are counted together."""
_SAMPLES = ("Hello  world\n\nnext", "naïve 日本語 🙂 \u00ff", '{"k": [1, -2.5e3]}\t<a href="x">')


_SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = sorted({*range(256)} - {*_SHOWN})
_BYTES = {chr(byte): byte for byte in _SHOWN} | {chr(256 + index): byte for index, byte in enumerate(_HIDDEN)}
"""The byte that each character of a byte-level vocabulary encodes."""


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTES[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    if BYTE_TOKEN.match(token):
        return bytes.fromhex(token[3:5])
    return token.replace(BLANK, " ").encode()


class TokenSpeller:
    """Spells tokens as bytes.

    Two spellings are known: byte-level (each byte is one printable character, as in GPT-2) and SentencePiece
    with byte fallback (`▁` for a space, `<0x0A>` for a byte). The spelling that agrees with the decoder on
    sample texts is used. Tokenizers of any other kind are decoded token by token. `added` holds the text of
    each added token, by id.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.added = {token_id: token for token, token_id in tokenizer.added_ids.items()}
        self._spelled = {token_id: token.encode() for token_id, token in self.added.items()}
        self._within: dict[str, tuple[Match, ...]] = {}
        self._spell = next((spell for spell in (_byte_level, _byte_fallback) if self._is_true(spell)), None)

    def _is_true(self, spell: Callable[[str], bytes]) -> bool:
        for sample in _SAMPLES:
            ids = self.tokenizer.encode_run(sample).ids
            spelled = b"".join([spell(self.tokenizer.token(token_id) or "") for token_id in ids])
            # A decoder may take away the space that SentencePiece puts before the first word.
            if spelled.removeprefix(b" ") != self.tokenizer.decode(ids).encode().removeprefix(b" "):
                return False
        return True

    def added_within(self, text: str) -> tuple[Match, ...]:
        """Added tokens that a text spells."""
        known = self._within.get(text)
        if known is None:
            known = self._within[text] = tuple(self.tokenizer.find(text))
        return known

    def spell(self, token_id: int) -> bytes:
        """Bytes of a token, or no bytes for an id outside the vocabulary."""
        known = self._spelled.get(token_id)
        if known is None:
            token = self.tokenizer.token(token_id) if 0 <= token_id < 1 << 32 else None
            if token is None:
                known = b""
            elif self._spell is None:
                known = self.tokenizer.decode([token_id]).encode("utf-8", "surrogatepass")
            else:
                known = self._spell(token)
            self._spelled[token_id] = known
        return known

    def spell_all(self, token_ids: list[int]) -> list[bytes]:
        """Bytes of each of some tokens."""
        spelled = list(map(self._spelled.get, token_ids))
        if None in spelled:
            return [self.spell(token_id) for token_id in token_ids]
        return cast(list[bytes], spelled)


def readable(text: str) -> str:
    """Text with U+FFFD in place of bytes that are not UTF-8, as decoders print it.

    Raises:
        ValueError: The text contains half of a surrogate pair, which is neither text nor bytes.
    """
    return text if text.isascii() else text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))


class TokenText:
    """The text of some tokens, as `text`."""

    def __init__(self, token_ids: Sequence[int], speller: TokenSpeller) -> None:
        self._speller = speller
        self._added: dict[int, str] = {}
        """Added tokens by their first character."""
        pieces: list[str] = []
        sizes: list[int] = []
        length = 0
        # Added tokens part characters: bytes on either side of one are never halves of the same.
        for token, run in groupby(token_ids, speller.added.get):
            spelled = speller.spell_all(list(run))
            piece = b"".join(spelled).decode("utf-8", "surrogateescape")
            if token is not None:
                self._added |= dict.fromkeys(range(length, length + len(piece), len(token)), token)
            sizes += map(len, spelled)
            pieces.append(piece)
            length += len(piece)
        self.text = "".join(pieces)
        self._is_ascii = self.text.isascii()
        self._starts = list(accumulate(sizes, initial=0))
        self._found: dict[str, tuple[int, int]] = {}
        """Start and result of the last search for each delimiter. Without a match, it is the length."""
        self._added_ends = {start + len(token) for start, token in self._added.items()}

    def tokens_of(self, start: int, stop: int) -> tuple[int, int]:
        """Tokens `[first, last)` that hold any byte of the non-empty characters `[start, stop)`."""
        first = bisect_right(self._starts, self._byte(start)) - 1
        return first, bisect_left(self._starts, self._byte(stop))

    def _byte(self, char: int) -> int:
        if self._is_ascii:
            return char
        block, rest = divmod(char, _BLOCK)
        return self._block_starts[block] + _size(self.text[char - rest : char])

    @cached_property
    def _block_starts(self) -> list[int]:
        """The byte at which each block of characters begins."""
        blocks = (self.text[start : start + _BLOCK] for start in range(0, len(self.text), _BLOCK))
        return list(accumulate(map(_size, blocks), initial=0))

    def find(self, delimiter: str, start: int, stop: int) -> int:
        """First character of a delimiter that lies within `[start, stop)`, or -1.

        The text is searched once, however often a delimiter is searched from rising characters.

        If the delimiter contains an added token of the vocabulary, only that token counts: the same
        characters spelled by ordinary tokens are text. Any other delimiter is found as text.
        """
        since, position = self._found.get(delimiter, (0, -1))
        if not since <= start <= position:
            position = self.text.find(delimiter, start)
            while position >= 0 and not self._is_spelled(delimiter, position):
                position = self.text.find(delimiter, position + 1)
            position = len(self.text) if position < 0 else position
            self._found[delimiter] = start, position
        return position if position + len(delimiter) <= stop else -1

    def find_last(self, delimiter: str) -> int:
        """First character of the last match of a delimiter, by the rule of `find`, or -1."""
        position = self.text.rfind(delimiter)
        while position >= 0 and not self._is_spelled(delimiter, position):
            position = self.text.rfind(delimiter, 0, position + len(delimiter) - 1)
        return position

    def at(self, delimiter: str, position: int, stop: int) -> bool:
        """Whether a delimiter begins at a character, by the rule of `find`."""
        return self.text.startswith(delimiter, position, stop) and self._is_spelled(delimiter, position)

    def ends_inside(self, delimiter: str) -> bool:
        """Whether the text is the beginning of a delimiter that contains added tokens."""
        within, length = self._speller.added_within(delimiter), len(self.text)
        return (
            bool(within)
            and delimiter.startswith(self.text)
            and all(
                match.own_start >= length or self._added.get(match.own_start) == match.token
                for match in within
            )
        )

    def _is_spelled(self, delimiter: str, position: int) -> bool:
        within = self._speller.added_within(delimiter)
        return all(self._added.get(position + match.own_start) == match.token for match in within)

    def added_before(self, char: int) -> bool:
        """Whether an added token ends directly before a character."""
        return char in self._added_ends
