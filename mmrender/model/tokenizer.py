"""A model's tokenizer, able to encode text literally.

`tokenizers` finds added tokens in any text, and its option to skip special ones still matches added tokens
that are not special. So added tokens are found here, by its rules (`added_vocabulary.rs`) but under the
caller's control, and the runs between them are encoded by a copy of the tokenizer without added tokens. If
merges or the normalizer still produce one, a second copy without that word encodes the run. Runs are
memoised, so a long system prompt is encoded once per process.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from sys import getsizeof
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Engine

from mmrender.caching import LRUCache, cached_property
from mmrender.errors import TokenizerError
from mmrender.model.fast import EngineChoice
from mmrender.model.files import ModelDir
from mmrender.sidecar import common_prefix

_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_WORD_START = "\u2581"

Before: TypeAlias = Literal["nothing", "token", "text"]
"""Kind of text before a run: nothing, an added token, or text that it continues.

Some tokenizers prefix a space to the first run alone, and some to every run, but not within a text.
"""


class Run(NamedTuple):
    """An encoded run.

    Attributes:
        ids: Its tokens.
        starts: Index of the first character of each token, int32 of shape `(n,)`, or None if not requested.
        syntax: Ids of added tokens, except blank ones, that the vocabulary spells in it.
        nbytes: Approximate memory.
    """

    ids: list[int]
    starts: npt.NDArray[np.int32] | None
    syntax: frozenset[int]
    nbytes: int


class Match(NamedTuple):
    """An added token in a text: characters `[start, stop)` with the white space that it includes.

    Its own characters are `[own_start, own_stop)`.
    """

    start: int
    stop: int
    token: str
    own_start: int
    own_stop: int


@dataclass(frozen=True, slots=True)
class _Flags:
    lstrip: bool
    rstrip: bool
    single_word: bool


class Tokenizer:
    """Encodes runs without syntax, and finds syntax.

    Args:
        engine: The model's tokenizer with all of its added tokens.
        memo_bytes: Bound of the memo of runs.

    Attributes:
        choice: Chooses the engine that encodes runs.
    """

    def __init__(self, engine: Engine, *, memo_bytes: int = 48 << 20) -> None:
        self._engine = engine
        engine.no_padding()
        engine.no_truncation()
        added = dict(engine.get_added_tokens_decoder())
        self.added_ids: dict[str, int] = {token.content: token_id for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.syntax_ids = frozenset(
            token_id for token, token_id in self.added_ids.items() if not is_blank(token)
        )
        """Ids of added tokens other than white space."""
        self.all_added_ids = frozenset(added)
        """Ids of all added tokens."""
        self._flags = {
            token.content: _Flags(token.lstrip, token.rstrip, token.single_word)
            for token in added.values()
            if token.lstrip or token.rstrip or token.single_word
        }
        normalized = [token for token in added.values() if token.normalized]
        self._looked_for_later = [token.content for token in normalized]
        self._pattern = _longest_of(self.added_ids.keys() - set(self._looked_for_later))
        self._normalized = _finder(normalized, engine.normalizer) if normalized else None
        self._within: LRUCache[str, _Matches] = LRUCache(8 << 20, size_of=lambda entry: entry.nbytes)
        self._engines = _without_added(engine, engine.model)
        self.choice = EngineChoice(self._engines["token"], self.added_ids)
        self._memo: LRUCache[tuple[Engine, str], Run] = LRUCache(memo_bytes, size_of=lambda run: run.nbytes)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy elsewhere fills its own memo.
        return partial(type(self), memo_bytes=self._memo.max_size), (self._engine,)

    @classmethod
    def load(cls, model: ModelDir) -> "Tokenizer":
        """Load `tokenizer.json` and the added tokens that `tokenizer_config.json` declares.

        Raises:
            TokenizerError: `tokenizer.json` does not exist or cannot be read.
        """
        file = model.path / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(
                "the model has no fast tokenizer",
                where=str(model.path),
                expected="tokenizer.json",
                remedy="Save one with: AutoTokenizer.from_pretrained(...).save_pretrained(...)",
            )
        try:
            engine = Engine.from_file(str(file))
        except Exception as error:
            raise TokenizerError("cannot read tokenizer.json", where=str(file), got=str(error)) from error
        if model.tokenizer_config.get("split_special_tokens"):
            raise TokenizerError(
                "the tokenizer is set to read special tokens as text",
                where=str(model.path / "tokenizer_config.json"),
                expected="split_special_tokens: false",
                got="true, with which no chat template can write a turn",
                remedy="Remove the setting",
            )
        _declare(engine, model)
        return cls(engine)

    def token_id(self, token: str) -> int | None:
        """Id of a whole token, or None."""
        return self._engine.token_to_id(token)

    def token(self, token_id: int) -> str | None:
        """Text of a token as the vocabulary spells it, or None outside the vocabulary."""
        return self._engine.id_to_token(token_id)

    def decode(self, ids: Sequence[int], *, before: Sequence[int] = ()) -> str:
        """Text of tokens, special ones included. Some decoders strip a first space without `before`."""
        text = self._engine.decode([*before, *ids], skip_special_tokens=False)
        if not before:
            return text
        left = self._engine.decode(list(before), skip_special_tokens=False)
        # Half of a character changes once it is whole.
        return text[len(left) :] if text.startswith(left) else self.decode(ids)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._engine.get_vocab_size(with_added_tokens=True)

    @cached_property
    def affixes(self) -> tuple[list[int], list[int]]:
        """Tokens that the post-processor puts before and after a text, such as `<s>`.

        Raises:
            TokenizerError: It changes the tokens of the text itself.
        """
        plain, full = (self._engine.encode("a", add_special_tokens=adds) for adds in (False, True))
        runs = [(is_special, len(list(run))) for is_special, run in groupby(full.special_tokens_mask)]
        before = runs[0][1] if runs[0][0] else 0
        after = len(full.ids) - before - len(plain.ids)
        if full.ids[before : before + len(plain.ids)] != plain.ids:
            raise TokenizerError(
                "the tokenizer's post-processor changes the tokens of a text",
                expected="tokens before and after it",
                got=f"{full.tokens} for 'a', which is {plain.tokens}",
            )
        return full.ids[:before], full.ids[len(full.ids) - after :]

    @cached_property
    def dependent_token(self) -> str | None:
        """An added token next to which a run is encoded differently than in the whole text, or None.

        One token of each kind is tried in a probe.
        """
        kinds: dict[tuple[bool, ...], str] = {}
        for token in self._engine.get_added_tokens_decoder().values():
            kind = (token.lstrip, token.rstrip, token.single_word, token.normalized, is_blank(token.content))
            kinds.setdefault(kind, token.content)
        for text in kinds.values():
            probe = text.join(_PROBE)
            if self.encode(probe) != self._engine.encode(probe, add_special_tokens=False).ids:
                return text
        return None

    def encode(self, text: str) -> list[int]:
        """Encode text in which every added token is syntax, as the reference tokenizer does."""
        ids: list[int] = []
        position = 0
        for match in self.find(text):
            if match.start > position:
                ids += self.encode_run(text[position : match.start], before="token" if ids else "nothing").ids
            ids.append(self.added_ids[match.token])
            position = match.stop
        if position < len(text):
            ids += self.encode_run(text[position:], before="token" if ids else "nothing").ids
        return ids

    def encode_run(
        self,
        text: str,
        *,
        before: Before = "token",
        forbidden: Collection[int] = frozenset(),
        with_starts: bool = False,
    ) -> Run:
        """Encode text in which no added token is looked for.

        Args:
            text: A run between added tokens.
            before: Kind of text before the run.
            forbidden: Ids of added tokens that must not be produced. A vocabulary can spell them by its
                merges or after its normalizer.
            with_starts: Whether `starts` are needed.

        Raises:
            TokenizerError: It spells one of `forbidden` in every way.
        """
        run = self._encoded(text, self._engines[before], with_starts)
        if run.syntax and not run.syntax.isdisjoint(forbidden):
            engines, unknown_id = self._literal
            run = self._encoded(text, engines[before], with_starts)
            spelled = (run.syntax & set(forbidden)) - {unknown_id}
            if spelled:
                raise TokenizerError(
                    "the vocabulary spells an added token within text",
                    expected="ordinary tokens",
                    got=f"{self.token(min(spelled))!r} in {text[:80]!r}",
                    remedy='Set content_special_tokens="error" to refuse this content',
                )
        return run

    def _encoded(self, text: str, engine: Engine, with_starts: bool) -> Run:
        key = (engine, text)
        run = self._memo.get(key)
        if run is None or (with_starts and run.starts is None):
            ids, starts = None, None
            fast = self.choice.fast
            if fast is not None and engine is self._engines["token"]:
                ids = fast.ids(text)
                starts = fast.starts(text, ids) if with_starts and ids is not None else None
            if ids is None or (with_starts and starts is None):
                self.choice.spend(len(text))
                encoding = engine.encode(text, add_special_tokens=False)
                ids = encoding.ids
                starts = np.fromiter((start for start, _ in encoding.offsets), np.int32, len(ids))
            nbytes = _RUN_BYTES + _TOKEN_BYTES * len(ids) + getsizeof(text)
            run = Run(ids, starts, self.syntax_ids.intersection(ids), nbytes)
            self._memo.put(key, run)
        return run

    @cached_property
    def _literal(self) -> tuple[dict[Before, Engine], int | None]:
        return _literal(self._engine, self.syntax_ids)

    def find(self, text: str, refuse: Callable[[Match], int | None] | None = None) -> list[Match]:
        """Find added tokens as `tokenizers` does, unless they are refused.

        Args:
            text: Any text.
            refuse: Returns the position of a character that must stay literal in a match, or None to accept
                the match.

        Returns:
            Matches from left to right. They overlap if one includes the other's white space.
        """
        masked = text
        while True:
            matches = self._search(masked)
            places = map(refuse, matches) if refuse is not None else ()
            refused = {place for place in places if place is not None}
            if not refused:
                return matches
            # Masking one character of a refused match shows the matches that it hid.
            pieces, position = [], 0
            for place in sorted(refused):
                pieces += [masked[position:place], self._masks[_is_word(masked[place])]]
                position = place + 1
            masked = "".join([*pieces, masked[position:]])

    @cached_property
    def _masks(self) -> tuple[str, str]:
        """A symbol and a letter that are in no added token."""
        used = set().union(*self.added_ids)
        symbols, letters = range(0x2190, 0x2400), range(0x4E00, 0x9FFF)
        symbol, letter = (
            next(chr(code) for code in codes if chr(code) not in used) for codes in (symbols, letters)
        )
        return symbol, letter

    def _search(self, text: str) -> list[Match]:
        if not self._flags:
            plain = [
                Match(match.start(), match.end(), match.group(), match.start(), match.end())
                for match in self._pattern.finditer(text)
            ]
        else:
            plain = list(self._flagged(text))
        if self._normalized is None:
            return plain
        # Tokens of normalized text are found between the plain matches.
        matches: list[Match] = []
        position = 0
        for match in [*plain, None]:
            stop = len(text) if match is None else match.start
            if position < stop:
                matches += [
                    Match(start + position, end + position, token, own + position, own_end + position)
                    for start, end, token, own, own_end in self._in_normalized(text[position:stop])
                ]
            if match is not None:
                matches.append(match)
                position = match.stop
        return matches

    def _flagged(self, text: str) -> Iterator[Match]:
        """Find tokens, some of which include white space (`lstrip`, `rstrip`) or need word bounds."""
        floor = 0
        for match in self._pattern.finditer(text):
            token, (own_start, own_stop) = match.group(), match.span()
            start, stop = own_start, own_stop
            flags = self._flags.get(token)
            if flags is not None:
                before, after = text[start - 1 : start], text[stop : stop + 1]
                if flags.single_word and (_is_word(before) or _is_word(after)):
                    continue
                while flags.lstrip and start > floor and _is_space(text[start - 1]):
                    start -= 1
                while flags.rstrip and stop < len(text) and _is_space(text[stop]):
                    stop += 1
            yield Match(start, stop, token, own_start, own_stop)
            floor = stop

    def _in_normalized(self, text: str) -> list[Match]:
        """Find the added tokens of normalized text."""
        known = self._within.get(text)
        if known is not None or self._normalized is None:
            return known.matches if known is not None else []
        encoding = self._normalized.encode(text, add_special_tokens=False)
        matches = []
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id:
                token = self._looked_for_later[token_id - 1]
                own = text.find(token, start, stop)
                own, end = (start, stop) if own < 0 else (own, own + len(token))
                matches.append(Match(start, stop, token, own, end))
        self._within.put(text, _Matches(matches, _RUN_BYTES * (1 + len(matches)) + getsizeof(text)))
        return matches


class _Matches(NamedTuple):
    """Added tokens of a text, and their approximate memory."""

    matches: list[Match]
    nbytes: int


_RUN_BYTES = 400
"""Memory of an entry of a memo, without its text and tokens."""
_TOKEN_BYTES = 40
"""Memory of a token: its id, a pointer to it, and its start."""

_PROBE = (
    "Hello world",
    " leading and trailing ",
    "\n\nnew\n",
    "\u00e9\u0301\u00fc 12345",
    "{}();",
    " ",
    "\u65e5\u672c\u8a9e",
    "a",
    "end",
)


def is_blank(token: str) -> bool:
    """Whether a token is white space, in plain or SentencePiece spelling."""
    return token.replace(_WORD_START, " ").isspace()


def _is_space(char: str) -> bool:
    """Whether it is white space in Unicode and Rust. Python adds the information separators."""
    return char.isspace() and not "\x1c" <= char <= "\x1f"


def _is_word(char: str) -> bool:
    """Whether it is part of a word in Rust's regular expressions."""
    if char.isascii():
        return char == "_" or char.isalnum()
    category = unicodedata.category(char)
    is_joiner = char in "\u200c\u200d"
    return is_joiner or char.isalpha() or category[0] == "M" or category in ("Nd", "Nl", "Pc")


def _longest_of(texts: Collection[str]) -> re.Pattern[str]:
    """Return a pattern of the longest text at a position, as the Aho-Corasick search of `tokenizers`."""
    return re.compile(_branches(list(texts), depth=8) if texts else r"(?!)")


def _branches(texts: list[str], depth: int) -> str:
    """Return an alternation with common prefixes written once, for thousands of added tokens."""
    if depth == 0 or len(texts) == 1:
        return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    branches = []
    for first, group in groupby(sorted(texts, reverse=True), lambda text: text[:1]):
        if first:
            members = list(group)
            shared = common_prefix(members[0], members[-1])
            rest = _branches([text[shared:] for text in members], depth - 1)
            branches.append(f"{re.escape(members[0][:shared])}(?:{rest})")
        else:
            branches.append("")
    return "|".join(branches)


def _finder(added: Sequence[AddedToken], normalizer: Any) -> Engine:
    """Return an engine that encodes text between these added tokens as 0."""
    finder = Engine(models.WordLevel({"": 0}, unk_token=""))
    if normalizer is not None:
        finder.normalizer = normalizer
    finder.add_tokens(list(added))
    return finder


def _without_added(engine: Engine, model: models.Model) -> dict[Before, Engine]:
    """Return an engine without added tokens for each kind of text before a run."""
    parts = {
        name: None if part is None else json.loads(part.__getstate__())
        for name, part in (("normalizer", engine.normalizer), ("pre_tokenizer", engine.pre_tokenizer))
    }

    def build(parts: Mapping[str, Any]) -> Engine:
        built = Engine.from_str(json.dumps(json.loads(Engine(models.BPE()).to_str()) | parts))
        # Sharing the model costs nothing, and reading the vocabulary again would take a second.
        built.model = model
        return built

    whole = build(parts)
    engines: dict[Before, Engine] = {"nothing": whole, "token": whole, "text": whole}
    for before in ("token", "text"):
        within = {name: _within(part, before) for name, part in parts.items()}
        if within != parts:
            engines[before] = build(within)
    return engines


_AT_START = {"prepend_scheme": "never", "add_prefix_space": False, "strip_left": False}
"""Settings of normalizers and pre-tokenizers that change how a text begins, turned off."""


def _within(part: Any, before: Before, *, leads: bool = True) -> Any:
    """Return the definition of a normalizer or pre-tokenizer for a run within a prompt.

    A part that does not lead works on pieces of a run, each with its own beginning.
    """
    if part is None or (before == "text" and part["type"] == "Prepend"):
        return None
    changed = dict(part)
    for key in ("normalizers", "pretokenizers"):
        if key in part:
            ahead = [leads and (key == "normalizers" or not index) for index in range(len(part[key]))]
            inner = [_within(item, before, leads=at) for item, at in zip(part[key], ahead, strict=True)]
            changed[key] = [item for item in inner if item is not None]
    if (before == "text" and leads) or part.get("prepend_scheme") == "first":
        changed |= {key: off for key, off in _AT_START.items() if key in part}
    return changed


def _literal(engine: Engine, lacking: Collection[int]) -> tuple[dict[Before, Engine], int | None]:
    """Return engines whose vocabulary lacks the words of added tokens, and their id of unknown characters."""
    definition = {**msgspec.json.decode(engine.to_str()), "added_tokens": [], "post_processor": None}
    model = definition["model"]
    unknown_id = model.get("unk_id")
    if isinstance(model["vocab"], list):
        model["vocab"] = [
            [_unspelled(token_id) if token_id in lacking else word, score]
            for token_id, (word, score) in enumerate(model["vocab"])
        ]
    else:
        names = {
            word: _unspelled(token_id) for word, token_id in model["vocab"].items() if token_id in lacking
        }
        unknown_id = model["vocab"].get(model.get("unk_token"))
        model["unk_token"] = names.get(model.get("unk_token"), model.get("unk_token"))
        model["vocab"] = {names.get(word, word): token_id for word, token_id in model["vocab"].items()}
        if "merges" in model:
            prefix = len(model.get("continuing_subword_prefix") or "")
            model["merges"] = [
                (left, right)
                for left, right in model["merges"]
                if names.keys().isdisjoint((left, right, left + right[prefix:]))
            ]
    return _without_added(engine, Engine.from_buffer(msgspec.json.encode(definition)).model), unknown_id


def _unspelled(token_id: int) -> str:
    """Return a word of the vocabulary that occurs in no text."""
    return f"\U0010ffff{token_id}"


def _declare(engine: Engine, model: ModelDir) -> None:
    """Add the tokens of files other than `tokenizer.json`, in the order of Transformers."""
    known = engine.get_added_tokens_decoder().values()
    spelled = {repr(token) for token in known}
    texts = {token.content for token in known}
    named = {_added_token(entry).content for entry in model.named_tokens.values()}
    listed = model.token_settings.get("added_tokens_decoder")
    declared: list[AddedToken] = []
    if isinstance(listed, Mapping):
        # A token that is listed with other flags than it has gets these.
        entries = [_added_token(entry) for _, entry in sorted(listed.items(), key=lambda item: int(item[0]))]
        declared = [token for token in entries if repr(token) not in spelled]
    else:
        numbered = sorted(model.read_json("added_tokens.json").items(), key=lambda item: int(item[1]))
        declared = [
            AddedToken(text, normalized=text not in named, special=text in named)
            for text, _ in numbered
            if text not in texts
        ]
    texts.update(token.content for token in declared)
    extra = model.token_settings.get("extra_special_tokens")
    for entry in [*model.named_tokens.values(), *(extra if isinstance(extra, list) else ())]:
        token = _added_token(entry)
        if token.content and token.content not in texts:
            declared.append(token)
    for token in declared:
        token.special = token.special or token.content in named
        (engine.add_special_tokens if token.special else engine.add_tokens)([token])


def _added_token(entry: str | Mapping[str, Any]) -> AddedToken:
    if isinstance(entry, str):
        return AddedToken(entry, special=True)
    flags = {key: bool(value) for key, value in entry.items() if key in _FLAGS}
    return AddedToken(str(entry.get("content", "")), **flags)
