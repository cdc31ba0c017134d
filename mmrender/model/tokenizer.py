"""A model's tokenizer, able to encode text as text.

`tokenizers` finds added tokens in whatever it encodes, and an option to skip special ones still matches
those that are not marked special. So added tokens are found here, by its rules (`added_vocabulary.rs`) but
under the caller's control, and the runs between them are encoded by a twin of the tokenizer without any.
Where the vocabulary spells one even so, by its merges or after its normalizer, another twin lacks the word.
Runs are memoised, so a long system prompt is encoded once per process.
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

_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_WORD_START = "\u2581"

Before: TypeAlias = Literal["nothing", "token", "text"]
"""What a run follows: nothing, an added token, or text that it continues.

Some tokenizers prefix a space to the first run alone, some to every run, none within a text.
"""


class Run(NamedTuple):
    """An encoded run.

    Attributes:
        ids: Its tokens.
        starts: For each token the index of its first character, int32 of shape `(n,)`; None where nobody
            asked.
        syntax: Ids of added tokens, blank ones aside, that the vocabulary spells in it.
        nbytes: Memory that it takes, about.
    """

    ids: list[int]
    starts: npt.NDArray[np.int32] | None
    syntax: frozenset[int]
    nbytes: int


class Match(NamedTuple):
    """An added token found in text: characters `[start, stop)` with the white space that it swallows.

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
        choice: Which engine encodes runs, and why.
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
        self._added = frozenset(added)
        self._flags = {
            token.content: _Flags(token.lstrip, token.rstrip, token.single_word)
            for token in added.values()
            if token.lstrip or token.rstrip or token.single_word
        }
        normalized = [token for token in added.values() if token.normalized]
        self._looked_for_later = [token.content for token in normalized]
        self._pattern = _longest_of(self.added_ids.keys() - set(self._looked_for_later))
        self._normalized = _finder(normalized, engine.normalizer) if normalized else None
        self._within: LRUCache[str, _Found] = LRUCache(8 << 20, size_of=lambda found: found.nbytes)
        self._twins = _without_added(engine, engine.model)
        self.choice = EngineChoice(self._twins["token"], self.added_ids)
        self._memo: LRUCache[tuple[Engine, str], Run] = LRUCache(memo_bytes, size_of=lambda run: run.nbytes)

    def __reduce__(self) -> tuple[Any, ...]:
        # The memo is filled anew where it arrives.
        return partial(type(self), memo_bytes=self._memo.max_size), (self._engine,)

    @classmethod
    def load(cls, model: ModelDir) -> "Tokenizer":
        """Load `tokenizer.json` and the added tokens that `tokenizer_config.json` declares beside it.

        Raises:
            TokenizerError: There is no `tokenizer.json`, or it cannot be read.
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
                "the tokenizer is set to take special tokens for text",
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
        """Text of tokens, special ones included; some decoders strip a space where none are `before`."""
        text = self._engine.decode([*before, *ids], skip_special_tokens=False)
        if not before:
            return text
        left = self._engine.decode(list(before), skip_special_tokens=False)
        # Half of a character is written otherwise once it is whole.
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
        written = [is_special for is_special, _ in groupby(full.special_tokens_mask)]
        runs = [len(list(run)) for _, run in groupby(full.special_tokens_mask)]
        before = runs[0] if written[0] else 0
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
        """An added token beside which a run is encoded differently than in the whole text, shown by a probe.

        One token of each kind is tried. None if all runs are independent.
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

    def before(self, ids: Sequence[int]) -> Before:
        """Say what a run follows that is appended to these tokens."""
        if not ids:
            return "nothing"
        return "token" if ids[-1] in self._added else "text"

    def encode_run(
        self,
        text: str,
        *,
        before: Before = "token",
        barred: Collection[int] = frozenset(),
        placed: bool = False,
    ) -> Run:
        """Encode text in which no added token is looked for.

        Args:
            text: A run between added tokens.
            before: What the run follows.
            barred: Ids of added tokens that may not come out; a vocabulary can spell them by its merges or
                after its normalizer.
            placed: Whether `starts` are wanted.

        Raises:
            TokenizerError: It spells one of `barred` in every way.
        """
        run = self._encoded(text, self._twins[before], placed)
        if run.syntax and not run.syntax.isdisjoint(barred):
            twins, unknown_id = self._literal
            run = self._encoded(text, twins[before], placed)
            spelled = (run.syntax & set(barred)) - {unknown_id}
            if spelled:
                raise TokenizerError(
                    "the vocabulary spells an added token where it is only text",
                    expected="ordinary tokens",
                    got=f"{self.token(min(spelled))!r} in {text[:80]!r}",
                    remedy='Set content_special_tokens="error" to refuse such content',
                )
        return run

    def _encoded(self, text: str, twin: Engine, placed: bool) -> Run:
        key = (twin, text)
        run = self._memo.get(key)
        if run is None or (placed and run.starts is None):
            ids, starts = None, None
            fast = self.choice.fast
            if fast is not None and twin is self._twins["token"]:
                ids = fast.ids(text)
                starts = fast.starts(text, ids) if placed and ids is not None else None
            if ids is None or (placed and starts is None):
                self.choice.spend(len(text))
                encoding = twin.encode(text, add_special_tokens=False)
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
        """Find added tokens as `tokenizers` does, except where they are refused.

        Args:
            text: Any text.
            refuse: Gives the position of a character that is not to be part of a token, for a match that
                holds one, else None.

        Returns:
            Matches from left to right. One whose white space another has swallowed overlaps with it.
        """
        masked = text
        while True:
            matches = self._search(masked)
            places = map(refuse, matches) if refuse is not None else ()
            refused = {place for place in places if place is not None}
            if not refused:
                return matches
            # What a refused match has hidden is found with one of its characters out of the way.
            pieces, position = [], 0
            for place in sorted(refused):
                pieces += [masked[position:place], self._masks[_is_word(masked[place])]]
                position = place + 1
            masked = "".join([*pieces, masked[position:]])

    @cached_property
    def _masks(self) -> tuple[str, str]:
        """Characters that no added token holds: a symbol and a letter."""
        used = set().union(*self.added_ids)
        symbols, letters = range(0x2190, 0x2400), range(0x4E00, 0x9FFF)
        symbol, letter = (
            next(chr(code) for code in codes if chr(code) not in used) for codes in (symbols, letters)
        )
        return symbol, letter

    def _search(self, text: str) -> list[Match]:
        if not self._flags:
            found = [
                Match(match.start(), match.end(), match.group(), match.start(), match.end())
                for match in self._pattern.finditer(text)
            ]
        else:
            found = list(self._flagged(text))
        if self._normalized is None:
            return found
        # Those that are looked for in normalized text are looked for between the others.
        matches: list[Match] = []
        position = 0
        for match in [*found, None]:
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
        """Find tokens of which some swallow white space (`lstrip`, `rstrip`) or need word bounds."""
        floor = 0
        for found in self._pattern.finditer(text):
            token, (own_start, own_stop) = found.group(), found.span()
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
        """Find the added tokens that `tokenizers` looks for in normalized text."""
        known = self._within.get(text)
        if known is not None or self._normalized is None:
            return known.matches if known is not None else []
        encoding = self._normalized.encode(text, add_special_tokens=False)
        found = []
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id:
                token = self._looked_for_later[token_id - 1]
                own = text.find(token, start, stop)
                own, end = (start, stop) if own < 0 else (own, own + len(token))
                found.append(Match(start, stop, token, own, end))
        self._within.put(text, _Found(found, _RUN_BYTES * (1 + len(found)) + getsizeof(text)))
        return found


class _Found(NamedTuple):
    """Added tokens found in a text, and the memory that it all takes, about."""

    matches: list[Match]
    nbytes: int


_RUN_BYTES = 400
"""Memory of an entry of a memo without its text and tokens."""
_TOKEN_BYTES = 40
"""Memory of a token: its number, a pointer to it, and its start."""

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
    """Whether a token is nothing but white space, as text or as SentencePiece spells it."""
    return token.replace(_WORD_START, " ").isspace()


def _is_space(char: str) -> bool:
    """Whether Unicode calls it white space, as Rust does; Python adds the information separators."""
    return char.isspace() and not "\x1c" <= char <= "\x1f"


def _is_word(char: str) -> bool:
    """Whether Rust's regular expressions take it for part of a word."""
    if char.isascii():
        return char == "_" or char.isalnum()
    category = unicodedata.category(char)
    is_joiner = char in "\u200c\u200d"
    return is_joiner or char.isalpha() or category[0] == "M" or category in ("Nd", "Nl", "Pc")


def _longest_of(texts: Collection[str]) -> re.Pattern[str]:
    """A pattern of the longest of some texts at a place, as the Aho-Corasick search of `tokenizers`."""
    return re.compile(_branches(list(texts), depth=8) if texts else r"(?!)")


def _branches(texts: list[str], depth: int) -> str:
    """An alternation with common beginnings written once: a vocabulary may have thousands of added tokens."""
    if depth == 0 or len(texts) == 1:
        return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    found = []
    for first, group in groupby(sorted(texts, reverse=True), lambda text: text[:1]):
        if first:
            alike = list(group)
            most, least = alike[0], alike[-1]
            shared = next((at for at, char in enumerate(least) if most[at : at + 1] != char), len(least))
            rest = _branches([text[shared:] for text in alike], depth - 1)
            found.append(f"{re.escape(least[:shared])}(?:{rest})")
        else:
            found.append("")
    return "|".join(found)


def _finder(added: Sequence[AddedToken], normalizer: Any) -> Engine:
    """An engine that gives 0 for any text between these added tokens."""
    finder = Engine(models.WordLevel({"": 0}, unk_token=""))
    if normalizer is not None:
        finder.normalizer = normalizer
    finder.add_tokens(list(added))
    return finder


def _without_added(engine: Engine, model: models.Model) -> dict[Before, Engine]:
    """A tokenizer without added tokens, for each place of a run."""
    parts = {
        name: None if part is None else json.loads(part.__getstate__())
        for name, part in (("normalizer", engine.normalizer), ("pre_tokenizer", engine.pre_tokenizer))
    }
    twins: dict[Before, Engine] = {"nothing": _with_parts(engine, model)}
    twins["token"] = twins["text"] = twins["nothing"]
    for before in ("token", "text"):
        within = {name: _within(part, before) for name, part in parts.items()}
        if within != parts:
            bare = json.loads(Engine(models.BPE()).to_str()) | within
            twins[before] = _with_parts(Engine.from_str(json.dumps(bare)), model)
    return twins


def _with_parts(engine: Engine, model: models.Model) -> Engine:
    """An engine with this one's normalizer and pre-tokenizer."""
    # Sharing the model costs nothing; reading the vocabulary again would take a second.
    twin = Engine(model)
    if engine.normalizer is not None:
        twin.normalizer = engine.normalizer
    if engine.pre_tokenizer is not None:
        twin.pre_tokenizer = engine.pre_tokenizer
    return twin


_AT_START = {"prepend_scheme": "never", "add_prefix_space": False, "strip_left": False}
"""Settings of normalizers and pre-tokenizers that change how a text begins, and what turns them off."""


def _within(part: Any, before: Before, *, leads: bool = True) -> Any:
    """The definition of a normalizer or pre-tokenizer for a run that does not begin the prompt.

    What does not lead works on pieces of a run, each with a beginning of its own.
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
    """Twins whose vocabulary lacks the words of added tokens, and what they give for unknown characters."""
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
    """A word of the vocabulary that stands in no text."""
    return f"\U0010ffff{token_id}"


def _declare(engine: Engine, model: ModelDir) -> None:
    """Add the tokens that stand beside `tokenizer.json`, in the order in which Transformers adds them."""
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
