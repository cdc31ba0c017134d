"""Sampled tokens as text in which every character knows its token.

A byte-level token may end inside a character, so tokens are spelled as bytes. The text of a completion is
those bytes as UTF-8, with each invalid byte as one lone surrogate (`surrogateescape`), so that characters map
to bytes and bytes to tokens exactly. `readable` gives the text that a decoder prints.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from mmrender.model.tokenizer import Match, Tokenizer

_WORD_START = "\u2581"
_SAMPLES = ("Hello  world\n\nnext", "naïve 日本語 🙂 \u00ff", '{"k": [1, -2.5e3]}\t<a href="x">')


def _byte_table() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary encodes."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


_BYTES = _byte_table()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTES[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace(_WORD_START, " ").encode()


class TokenSpeller:
    """Spells tokens as bytes.

    Two spellings are known: byte-level (each byte is one printable character, as in GPT-2) and SentencePiece
    with byte fallback (`▁` for a space, `<0x0A>` for a byte). The one that agrees with the decoder on sample
    texts is used; a tokenizer of any other kind is decoded token by token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token for token, token_id in tokenizer.added_ids.items()}
        self._spelled: dict[int, bytes] = {}
        self._within: dict[str, tuple[Match, ...]] = {}
        self._spell = next((spell for spell in (_byte_level, _byte_fallback) if self._is_true(spell)), None)

    def _is_true(self, spell: Callable[[str], bytes]) -> bool:
        for sample in _SAMPLES:
            ids = self._tokenizer.encode_run(sample).ids
            spelled = b"".join([spell(self._tokenizer.token(token_id) or "") for token_id in ids])
            # A decoder may take away the space that SentencePiece puts before the first word.
            if spelled.removeprefix(b" ") != self._tokenizer.decode(ids).encode().removeprefix(b" "):
                return False
        return True

    def added(self, token_id: int) -> str | None:
        """Text of an added token; None for any other."""
        return self._added.get(token_id)

    def added_within(self, text: str) -> tuple[Match, ...]:
        """Added tokens that a text spells."""
        known = self._within.get(text)
        if known is None:
            known = self._within[text] = tuple(self._tokenizer.find(text, lambda _: True))
        return known

    def spell(self, token_id: int) -> bytes:
        """Bytes of a token that is not an added one; none for an id outside the vocabulary."""
        known = self._spelled.get(token_id)
        if known is None:
            token = self._tokenizer.token(token_id) if 0 <= token_id < 1 << 32 else None
            if token is None:
                known = b""
            elif self._spell is None:
                known = self._tokenizer.decode([token_id]).encode("utf-8", "surrogatepass")
            else:
                known = self._spell(token)
            self._spelled[token_id] = known
        return known


def readable(text: str) -> str:
    """Text with U+FFFD where it held bytes that are no UTF-8, as decoders print it."""
    if text.isascii():
        return text
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


class TokenText:
    """The text of some tokens.

    Args:
        token_ids: The tokens.
        speller: Spells them.

    Attributes:
        text: All characters.
        count: Number of tokens.
    """

    def __init__(self, token_ids: Sequence[int], speller: TokenSpeller) -> None:
        self.count = len(token_ids)
        self._speller = speller
        pieces: list[str] = []
        # First character, first token and, for a run, the byte position where each of its tokens begins.
        self._run_chars: list[int] = []
        self._runs: list[tuple[int, list[int]]] = []
        self._added: dict[int, str] = {}
        position = index = 0
        while index < self.count:
            token, starts = speller.added(token_ids[index]), [0]
            if token is not None:
                self._added[position] = piece = token
            else:
                piece, starts = _run(token_ids, index, speller)
            self._run_chars.append(position)
            self._runs.append((index, starts))
            pieces.append(piece)
            index += len(starts)
            position += len(piece)
        self.text = "".join(pieces)

    def token_of(self, char: int) -> int:
        """Index of the token that holds the first byte of a character."""
        run = bisect_right(self._run_chars, char) - 1
        first, starts = self._runs[run]
        if len(starts) == 1:
            return first
        before = self.text[self._run_chars[run] : char].encode("utf-8", "surrogateescape")
        return first + bisect_right(starts, len(before)) - 1

    def tokens_of(self, start: int, stop: int) -> tuple[int, int]:
        """Tokens `[first, last)` that hold any byte of the non-empty characters `[start, stop)`."""
        run = bisect_left(self._run_chars, stop) - 1
        first, starts = self._runs[run]
        before = self.text[self._run_chars[run] : stop].encode("utf-8", "surrogateescape")
        return self.token_of(start), first + bisect_left(starts, len(before))

    def find(self, delimiter: str, start: int, stop: int) -> int:
        """First character of a delimiter that lies within `[start, stop)`, or -1.

        Where the delimiter is or holds an added token of the vocabulary, only that token counts: the same
        characters spelled by ordinary tokens are text. Any other delimiter is found as text.
        """
        position = self.text.find(delimiter, start, stop)
        while position >= 0 and not self._is_spelled(delimiter, position):
            position = self.text.find(delimiter, position + 1, stop)
        return position

    def at(self, delimiter: str, position: int, stop: int) -> bool:
        """Whether a delimiter begins at a character, by the rule of `find`."""
        if position + len(delimiter) > stop or not self.text.startswith(delimiter, position):
            return False
        return self._is_spelled(delimiter, position)

    def _is_spelled(self, delimiter: str, position: int) -> bool:
        within = self._speller.added_within(delimiter)
        return all(self._added.get(position + match.start) == match.token for match in within)

    def added_before(self, char: int) -> bool:
        """Whether an added token ends right before a character."""
        run = bisect_left(self._run_chars, char) - 1
        if run < 0 or self._run_chars[run] not in self._added:
            return False
        return self._run_chars[run] + len(self._added[self._run_chars[run]]) == char


def _run(token_ids: Sequence[int], first: int, speller: TokenSpeller) -> tuple[str, list[int]]:
    """Text of the ordinary tokens from `first` on, and the byte position where each begins."""
    spelled = bytearray()
    starts = []
    for index in range(first, len(token_ids)):
        if speller.added(token_ids[index]) is not None:
            break
        starts.append(len(spelled))
        spelled += speller.spell(token_ids[index])
    return spelled.decode("utf-8", "surrogateescape"), starts
