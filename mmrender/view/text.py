"""Text of single tokens, without characters that a terminal or a page would act on."""

from collections.abc import Callable, Sequence
from typing import Final

Decode = Callable[[Sequence[int]], str]

_NAMED: Final = {"\n": "⏎", "\t": "⇥", "\x7f": "␡"}
_HALF: Final = "\ufffd"
_MAX_SHARED: Final = 8
"""Maximum number of tokens that share a character: one per byte, and as many for a combining neighbour."""


def visible(text: str) -> str:
    """Return text with controls, bidirectional marks and other invisible characters made visible."""
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(char: str) -> str:
    if char.isprintable():
        return char
    if char in _NAMED:
        return _NAMED[char]
    code = ord(char)
    return chr(0x2400 + code) if code < 0x20 else f"⟨U+{code:04X}⟩"


def token_texts(token_ids: Sequence[int], decode: Decode) -> list[str]:
    """Return the text of each token within its sequence, special tokens included.

    If tokens share a character, the first has its text and the rest are empty.

    Args:
        token_ids: The sequence.
        decode: Text of token ids, such as `renderer.decode`.
    """
    if not len(token_ids):
        return []
    anchor = [int(token_ids[0])]
    left = decode(anchor)
    known: dict[int, str] = {}

    def decoded(ids: list[int]) -> str:
        # SentencePiece decoders drop a leading space.
        whole = decode(anchor + ids)
        return whole[len(left) :] if whole.startswith(left) else decode(ids)

    texts = []
    ids = [int(token_id) for token_id in token_ids]
    start = 0
    while start < len(ids):
        token_id = ids[start]
        if token_id not in known:
            known[token_id] = decoded([token_id])
        text, stop = known[token_id], start + 1
        if _HALF in text:
            for end in range(start + 2, min(len(ids), start + _MAX_SHARED) + 1):
                if _HALF not in (whole := decoded(ids[start:end])):
                    text, stop = whole, end
                    break
        texts += [text, *[""] * (stop - start - 1)]
        start = stop
    return texts
