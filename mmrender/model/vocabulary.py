"""Vocabularies in formats other than `tokenizer.json`: found, read within bounds, and checked.

| format | files | library that reads it |
|---|---|---|
| `tekken` | `tekken.json` | mistral-common |
| `tiktoken` | `tiktoken.model`, `*.tiktoken`, or `tokenizer.model` with base64 lines | tiktoken |
| `sentencepiece` | `tokenizer.model`, `spiece.model` and the like | sentencepiece |
| `merges` | `vocab.json` with `merges.txt` | Transformers |

The libraries accept much that is damaged, and answer the rest with an assertion. So everything that they take
for granted is checked here, and each error names the file and its line or entry.
"""

import base64
import binascii
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from mmcodecs.structs import ready
from mmrender.errors import TokenizerError
from mmrender.model.files import ModelDir

Format: TypeAlias = Literal["tekken", "tiktoken", "sentencepiece", "merges"]

BLANK = "\u2581"
"""SentencePiece's blank."""
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>\Z")
"""A token of SentencePiece that stands for a byte."""
EXPECTED = "tokenizer.json, tekken.json, tiktoken.model, tokenizer.model, or vocab.json with merges.txt"
"""Files of which a model directory has one, in the order of precedence."""

_MAX_BYTES = 64 << 20
"""Maximum size of a file. The largest published one has 20 MB."""
_MAX_TOKENS = 1 << 20
_MAX_TOKEN_BYTES = 4096
_MAX_WORK = 1 << 28
"""Maximum sum of the squared lengths of tokens. The merges of a token are derived from all of its cuts."""
_MAX_PATTERN = 1 << 16
_MAX_SPECIAL = 1 << 16
_RANKED = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?(?:\n|\Z)")
_SENTENCE_PIECES = ("tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model")
_UNMADE_SHARE = 10
"""One token in so many may lack a merge. Vocabularies list added tokens and unused words, too."""


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary of a model directory. `files` are its one file, or `vocab.json` and `merges.txt`."""

    format: Format
    files: tuple[Path, ...]

    @property
    def name(self) -> str:
        """Names of the files."""
        return " and ".join(file.name for file in self.files)


def find_vocabulary(model: ModelDir) -> Vocabulary | None:
    """Return the first vocabulary of a directory, or None.

    Raises:
        TokenizerError: `vocab.json` or `merges.txt` is there without the other, or a file cannot be read.
    """
    folder = model.path
    if (folder / "tekken.json").is_file():
        return Vocabulary("tekken", (folder / "tekken.json",))
    ranked = [folder / "tiktoken.model", *sorted(folder.glob("*.tiktoken"))]
    if file := next(filter(Path.is_file, ranked), None):
        return Vocabulary("tiktoken", (file,))
    pieces = (folder / name for name in _SENTENCE_PIECES)
    if file := next(filter(Path.is_file, pieces), None):
        return Vocabulary("tiktoken" if _RANKED.match(read_bounded(file)) else "sentencepiece", (file,))
    pair = folder / "vocab.json", folder / "merges.txt"
    missing = [file for file in pair if not file.is_file()]
    if len(missing) == len(pair):
        return None
    if missing:
        raise TokenizerError(
            "the vocabulary is not complete", where=str(folder), expected="vocab.json with merges.txt",
            got=f"no {missing[0].name}",
        )  # fmt: skip
    return Vocabulary("merges", pair)


def read_bounded(file: Path) -> bytes:
    """Return the content of a file.

    Raises:
        TokenizerError: It is too large, or cannot be read.
    """
    try:
        size = file.stat().st_size
        if size > _MAX_BYTES:
            raise _unreadable(file, f"at most {_MAX_BYTES:,} bytes", f"{size:,} bytes")
        return file.read_bytes()
    except OSError as error:
        raise _unreadable(file, "a readable file", error.strerror or str(error)) from error


def _unreadable(file: Path, expected: str, got: str, place: str = "") -> TokenizerError:
    where = f"{file}, {place}" if place else str(file)
    return TokenizerError(f"cannot read {file.name}", where=where, expected=expected, got=got)


def read_ranks(file: Path) -> dict[bytes, int]:
    """Return the tokens of a tiktoken file with their ranks, which are their ids.

    Raises:
        TokenizerError: A line is damaged, or a token or a rank comes twice.
    """
    content = read_bounded(file)
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line:
            continue
        place = f"line {number}"
        token, _, rank = line.partition(b" ")
        if not rank.isdigit():
            raise _unreadable(file, "a token in base64 and its rank", repr(line[:60])[1:], place)
        _add(ranks, _from_base64(token, file, place), int(rank), file, place)
    return _checked(ranks, file)


def _from_base64(text: str | bytes, file: Path, place: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _unreadable(file, "a token in base64", str(error), place) from error


def _add(ranks: dict[bytes, int], token: bytes, rank: int, file: Path, place: str) -> None:
    if not 0 < len(token) <= _MAX_TOKEN_BYTES:
        raise _unreadable(file, f"a token of 1 to {_MAX_TOKEN_BYTES} bytes", f"{len(token)} bytes", place)
    if token in ranks:
        raise _unreadable(file, "each token once", f"{token[:40]!r} again", place)
    ranks[token] = rank


def _checked(ranks: dict[bytes, int], file: Path) -> dict[bytes, int]:
    check_work(ranks, file)
    for rank, known in zip(sorted(ranks.values()), range(len(ranks)), strict=True):
        if rank != known:
            problem = f"rank {rank} twice" if rank < known else f"no rank {known}"
            raise _unreadable(file, "the ranks 0, 1, 2 and so on, each once", problem)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise _unreadable(file, "a token for each byte", f"none for byte {missing[0]}")
    return ranks


def check_work(tokens: Iterable[bytes | str], file: Path) -> None:
    """Check that a vocabulary can be converted in bounded time.

    Raises:
        TokenizerError: It has too many tokens, or too long tokens.
    """
    lengths = [*map(len, tokens)]
    if len(lengths) > _MAX_TOKENS:
        raise _unreadable(file, f"at most {_MAX_TOKENS:,} tokens", f"{len(lengths):,}")
    if sum(length * length for length in lengths) > _MAX_WORK:
        raise _unreadable(file, "tokens of usual lengths", f"tokens of up to {max(lengths)} characters")


def special_tokens(model: ModelDir, file: Path, base: int) -> dict[str, int]:
    """Return the special tokens that `tokenizer_config.json` lists for a tiktoken file.

    They follow the `base` tokens of the file. Tokens in a gap are reserved, under the name that the models'
    own code and Transformers use.

    Raises:
        TokenizerError: None are listed, or the list is damaged.
    """
    listed = model.tokenizer_config.get("added_tokens_decoder")
    entries = listed.items() if isinstance(listed, Mapping) else ()
    try:
        texts = {
            int(key): str(entry["content"] if isinstance(entry, Mapping) else entry) for key, entry in entries
        }
    except (ValueError, KeyError) as error:
        where = str(model.path / "tokenizer_config.json")
        raise TokenizerError("cannot read added_tokens_decoder", where=where, got=str(error)) from error
    first, last = min(texts, default=-1), max(texts, default=-1)
    if first != base or last >= base + _MAX_SPECIAL:
        raise TokenizerError(
            f"the special tokens do not follow the {base} tokens of {file.name}",
            where=str(model.path),
            expected=f"added_tokens_decoder in tokenizer_config.json, with ids from {base}",
            got=f"ids from {first} to {last}" if texts else "none",
            remedy="Pass trust_remote_code=True to run the model's own tokenizer, or save a tokenizer.json",
        )
    return {texts.get(index, f"<|reserved_token_{index}|>"): index for index in range(base, last + 1)}


class _Token(msgspec.Struct):
    rank: int
    token_bytes: str


class _Special(msgspec.Struct):
    rank: int
    token_str: str


class _Settings(msgspec.Struct):
    pattern: str
    version: str
    default_vocab_size: int
    default_num_special_tokens: int


class _Tekken(msgspec.Struct):
    config: _Settings
    vocab: list[_Token]
    special_tokens: list[_Special] | None = None


def check_tekken(file: Path) -> None:
    """Check a `tekken.json`.

    Raises:
        TokenizerError: It is damaged, or its tokens, ranks and sizes contradict each other.
    """
    try:
        content = msgspec.json.decode(read_bounded(file), type=ready(_Tekken))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(file, "a tokenizer of mistral-common", str(error)) from error
    settings, vocab = content.config, content.vocab
    if not 0 < (length := len(settings.pattern)) <= _MAX_PATTERN:
        raise _unreadable(file, f"a pattern of up to {_MAX_PATTERN} characters", f"{length} characters")
    special, size = settings.default_num_special_tokens, settings.default_vocab_size
    if not 0 <= special <= size <= special + len(vocab) or size > _MAX_TOKENS:
        raise _unreadable(
            file, f"a vocabulary of {special} special and up to {len(vocab)} other tokens", str(size)
        )
    ranks: dict[bytes, int] = {}
    for index, token in enumerate(vocab[: size - special]):
        place = f"vocab[{index}]"
        if token.rank != index:
            raise _unreadable(file, f"rank {index}", f"rank {token.rank}", place)
        text = _from_base64(token.token_bytes, file, place)
        if index < 256 and text != bytes([index]):
            raise _unreadable(file, f"byte {index}", repr(text[:40])[1:], place)
        _add(ranks, text, index, file, place)
    _checked(ranks, file)
    listed = content.special_tokens or []
    if len(listed) > special:
        raise _unreadable(file, f"at most {special} special tokens", str(len(listed)))
    texts: set[str] = set()
    for index, entry in enumerate(sorted(listed, key=lambda entry: entry.rank)):
        if entry.rank != index or entry.token_str in texts or not entry.token_str:
            expected = "special tokens with the ranks 0, 1, 2 and so on, each once"
            raise _unreadable(file, expected, f"{entry.token_str!r} with rank {entry.rank}")
        texts.add(entry.token_str)


def check_merges(vocab_file: Path, merges_file: Path, added: Collection[str]) -> None:
    """Check a `vocab.json` and its `merges.txt`.

    Args:
        vocab_file: Ids of tokens.
        merges_file: Pairs of tokens, the most frequent first.
        added: Added tokens, which no merge makes.

    Raises:
        TokenizerError: A file is damaged, or they contradict each other.
    """
    try:
        vocab = msgspec.json.decode(read_bounded(vocab_file), type=dict[str, int])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _unreadable(vocab_file, "ids of tokens", str(error)) from error
    check_work(vocab, vocab_file)
    tokens: dict[int, str] = {}
    for token, token_id in vocab.items():
        if not 0 <= token_id < 1 << 31 or token_id in tokens:
            other = f" and {tokens[token_id]!r}" if token_id in tokens else ""
            raise _unreadable(vocab_file, "a separate id for each token", f"{token_id} for {token!r}{other}")
        tokens[token_id] = token
    try:
        lines = read_bounded(merges_file).decode().split("\n")
    except UnicodeDecodeError as error:
        raise _unreadable(merges_file, "UTF-8 text", str(error)) from error
    made = {
        _made(line.removesuffix("\r"), vocab, merges_file, f"line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.startswith("#version")
    }
    unmade = [
        token
        for token in vocab
        if len(token.removesuffix("</w>")) > 1 and token not in made and token not in added
    ]
    if len(unmade) * _UNMADE_SHARE > len(vocab):
        got = f"none for {len(unmade):,} tokens such as {unmade[-1]!r}"
        raise _unreadable(merges_file, "merges for all tokens of vocab.json", got)


def _made(line: str, vocab: Mapping[str, int], file: Path, place: str) -> str:
    left, _, right = line.partition(" ")
    for piece in (left, right, left + right):
        if not piece or piece not in vocab:
            raise _unreadable(file, "two tokens of vocab.json that make a third", repr(line[:60]), place)
    return left + right
