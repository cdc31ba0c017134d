"""The expansion of a placeholder in token space, and the text at its edges."""

from typing import NamedTuple

from mmrender.errors import PlaceholderError
from mmrender.model.tokenizer import Match, Tokenizer, is_blank
from mmrender.sidecar import Expansion, Repeat


class Piece(NamedTuple):
    """Tokens within an expansion, several times: encoded text, or one added token."""

    ids: list[int]
    times: int
    is_text: bool


class SplitExpansion(NamedTuple):
    """An expansion: a core, and the text at its edges, which joins its neighbours.

    Attributes:
        head: Text before its first token.
        core: The pieces from its first token through its last.
        length: Number of tokens of the core.
        embed_spans: Runs of feature tokens in the core, as in `PlaceholderRange`.
        edges: The texts of the first and of the last token, once if they are the same token.
        text: The expansion as its neighbours meet it, without the inside of the core.
    """

    head: str
    core: tuple[Piece, ...]
    length: int
    embed_spans: tuple[tuple[int, int], ...] | None
    edges: str
    text: str


def split_expansion(tokenizer: Tokenizer, expansion: Expansion) -> SplitExpansion:
    """Find the added tokens of an expansion, in which each repeated token is written once, and encode it.

    Raises:
        PlaceholderError: The expansion has no added token, or the vocabulary lacks one of its tokens.
    """
    text = ""
    repeats: dict[int, Repeat] = {}
    for piece in expansion:
        if isinstance(piece, Repeat):
            repeats[len(text)] = piece
        text += piece.token if isinstance(piece, Repeat) else piece.text
    matches = {match.own_start: match for match in tokenizer.find(text)}
    for start, piece in repeats.items():
        stop = start + len(piece.token)
        matches.setdefault(start, Match(start, stop, piece.token, start, stop))
    tokens = [matches[start] for start in sorted(matches)]
    solid = [
        index for index, match in enumerate(tokens) if match.own_start in repeats or not is_blank(match.token)
    ]
    if not solid:
        raise PlaceholderError(
            "the image processor writes no token for an image",
            expected="at least one added token",
            got=repr(text[:80]),
        )
    first, last = tokens[solid[0]], tokens[solid[-1]]
    core: list[Piece] = []
    embeds: list[tuple[int, int]] = []
    position, length = first.start, 0
    for match in tokens[solid[0] : solid[-1] + 1]:
        if match.start > position:
            run = tokenizer.encode_run(text[position : match.start])
            core.append(Piece(run.ids, 1, True))
            length += len(run.ids)
        repeat = repeats.get(match.own_start) or Repeat(match.token, 1, embeds=False)
        token_id = tokenizer.token_id(repeat.token)
        if token_id is None:
            raise PlaceholderError(
                "the tokenizer does not know a token that the image processor writes",
                expected=f"{repeat.token!r} in the vocabulary",
                got=f"a vocabulary of {tokenizer.vocab_size} tokens without it",
                remedy="Tokenizer and processor settings must be of the same model",
            )
        core.append(Piece([token_id], repeat.count, False))
        if repeat.embeds:
            start = embeds.pop()[0] if embeds and embeds[-1][1] == length else length
            embeds.append((start, length + repeat.count))
        length += repeat.count
        position = match.stop
    edges = first.token if len(core) == 1 else first.token + last.token
    return SplitExpansion(
        head=text[: first.own_start],
        core=tuple(core),
        length=length,
        embed_spans=None if embeds == [(0, length)] else tuple(embeds),
        edges=edges,
        text=text[: first.own_start] + edges + text[last.own_stop :],
    )
