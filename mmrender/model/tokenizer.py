"""A model's tokenizer, able to encode text as text.

`tokenizers` finds added tokens in whatever it encodes, and an option to skip special ones still matches those
that are not marked special. So added tokens are found here, under the caller's control, and the runs between
them are encoded by a twin of the tokenizer that has no added tokens: what it gives can never be syntax.
Runs are memoised, so a long system prompt is encoded once per process.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken
from tokenizers import Tokenizer as Engine

from mmrender.caching import LRUCache
from mmrender.errors import TokenizerError
from mmrender.model.files import ModelDir


class Run(NamedTuple):
    """An encoded run: token ids, and for each the index of its first character, int32 of shape `(n,)`."""

    ids: list[int]
    starts: npt.NDArray[np.int32]


class Match(NamedTuple):
    """An added token found in text: characters `[start, stop)`."""

    start: int
    stop: int
    token: str


@dataclass(frozen=True, slots=True)
class _Flags:
    lstrip: bool
    rstrip: bool
    single_word: bool


class Tokenizer:
    """Encodes runs without syntax, and finds syntax.

    Args:
        engine: The model's tokenizer with all of its added tokens.
        memo_tokens: Bound of the memo of runs, in tokens.
    """

    def __init__(self, engine: Engine, *, memo_tokens: int = 1_000_000) -> None:
        self._engine = engine
        engine.no_padding()
        engine.no_truncation()
        added = dict(engine.get_added_tokens_decoder())
        self.added_ids: dict[str, int] = {token.content: token_id for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added_id_set = frozenset(added)
        self._flags = {
            token.content: _Flags(token.lstrip, token.rstrip, token.single_word)
            for token in added.values()
            if token.lstrip or token.rstrip or token.single_word
        }
        self._first, self._rest = _twins(engine)
        self._memo: LRUCache[tuple[bool, str], Run] = LRUCache(memo_tokens, size_of=lambda run: len(run.ids))

    def __reduce__(self) -> tuple[Any, ...]:
        # The memo is filled anew where it arrives.
        return partial(type(self), memo_tokens=self._memo.max_size), (self._engine,)

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
        _declare(engine, model.tokenizer_config)
        return cls(engine)

    def token_id(self, token: str) -> int | None:
        """Id of a whole token, or None."""
        return self._engine.token_to_id(token)

    def token(self, token_id: int) -> str | None:
        """Text of a token as the vocabulary spells it, or None outside the vocabulary."""
        return self._engine.id_to_token(token_id)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        return self._engine.decode(list(ids), skip_special_tokens=False)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._engine.get_vocab_size(with_added_tokens=True)

    @cached_property
    def runs_are_independent(self) -> bool:
        """Whether encoding between added tokens gives the ids of the whole text, shown by a probe."""
        specials = [token for token in self.added_ids if token not in self._flags][:2] or list(
            self.added_ids
        )[:2]
        if not specials:
            return True
        texts = (
            "Hello world",
            " leading and trailing ",
            "\n\nnew\n",
            "é\u0301ü 12345",
            "{}();",
            " ",
            "日本語",
            "a",
        )
        text = "".join(piece + specials[index % len(specials)] for index, piece in enumerate(texts)) + "end"
        return self.encode(text) == self._engine.encode(text, add_special_tokens=False).ids

    def encode(self, text: str) -> list[int]:
        """Encode text in which every added token is syntax, as the reference tokenizer does."""
        ids: list[int] = []
        position = 0
        for match in self.find(text, lambda _: True):
            if match.start > position:
                ids += self.encode_run(text[position : match.start], first=position == 0).ids
            ids.append(self.added_ids[match.token])
            position = match.stop
        if position < len(text):
            ids += self.encode_run(text[position:], first=position == 0).ids
        return ids

    def encode_run(self, text: str, *, first: bool = False) -> Run:
        """Encode text in which nothing is syntax.

        Args:
            text: A run between added tokens.
            first: Whether the run begins the prompt; some tokenizers prefix a space there.

        Raises:
            TokenizerError: The vocabulary spells an added token even without matching it.
        """
        key = (first and self._first is not self._rest, text)
        run = self._memo.get(key)
        if run is None:
            engine = self._first if first else self._rest
            encoding = engine.encode(text, add_special_tokens=False)
            ids = encoding.ids
            if not self._added_id_set.isdisjoint(ids) and self._pattern.search(text) is not None:
                run = self._broken_up(text, engine)
            else:
                run = Run(ids, np.fromiter((start for start, _ in encoding.offsets), np.int32, len(ids)))
            self._memo.put(key, run)
        return run

    def _broken_up(self, text: str, engine: Engine) -> Run:
        """Encode text whose vocabulary would spell an added token: cut each one after its first character."""
        cuts = [0, *(match.start() + 1 for match in self._pattern.finditer(text)), len(text)]
        ids: list[int] = []
        starts: list[int] = []
        for begin, end in pairwise(cuts):
            encoding = engine.encode(text[begin:end], add_special_tokens=False)
            ids += encoding.ids
            starts += [begin + start for start, _ in encoding.offsets]
        if not self._added_id_set.isdisjoint(ids):
            raise TokenizerError(
                "the vocabulary spells an added token even where it is only text",
                got=repr(text[:80]),
                remedy='Set content_special_tokens="error" to refuse such content',
            )
        return Run(ids, np.array(starts, np.int32))

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """All added tokens; at one place the longest wins, as in the Aho-Corasick search of `tokenizers`."""
        return re.compile("|".join(map(re.escape, sorted(self.added_ids, key=len, reverse=True))) or r"(?!)")

    def find(self, text: str, accept: Callable[[Match], bool]) -> Iterator[Match]:
        """Yield the added tokens of `text` that `accept` takes, from left to right, without overlap.

        Tokens that swallow white space (`lstrip`, `rstrip`) or need word bounds (`single_word`) are matched
        by the rules of `tokenizers` (`added_vocabulary.rs`).
        """
        search = self._pattern.search
        position = floor = 0
        while (found := search(text, position)) is not None:
            match: Match | None = Match(found.start(), found.end(), found.group())
            if self._flags and match is not None and match.token in self._flags:
                match = _flagged(match, text, floor, self._flags[match.token])
            if match is None or not accept(match):
                position = found.start() + 1
                continue
            yield match
            position = floor = match.stop


def _flagged(match: Match, text: str, floor: int, flags: _Flags) -> Match | None:
    start, stop = match.start, match.stop
    if flags.single_word and (
        (start > 0 and _is_word(text[start - 1])) or (stop < len(text) and _is_word(text[stop]))
    ):
        return None
    while flags.lstrip and start > floor and text[start - 1].isspace():
        start -= 1
    while flags.rstrip and stop < len(text) and text[stop].isspace():
        stop += 1
    return Match(start, stop, match.token)


def _is_word(char: str) -> bool:
    return char == "_" or char.isalnum()


def _twins(engine: Engine) -> tuple[Engine, Engine]:
    """The tokenizer without added tokens: for the run that begins a prompt, and for any other."""
    # Sharing the model costs nothing; reading the vocabulary again would take a second.
    first = Engine(engine.model)
    if engine.normalizer is not None:
        first.normalizer = engine.normalizer
    if engine.pre_tokenizer is not None:
        first.pre_tokenizer = engine.pre_tokenizer
    if engine.pre_tokenizer is None or b'"prepend_scheme":"first"' not in engine.pre_tokenizer.__getstate__():
        return first, first
    definition = json.loads(engine.to_str())
    definition["added_tokens"] = []
    definition["post_processor"] = None
    _never_prepend(definition["pre_tokenizer"])
    return first, Engine.from_str(json.dumps(definition))


def _never_prepend(definition: Any) -> None:
    if isinstance(definition, dict):
        if definition.get("prepend_scheme") == "first":
            definition["prepend_scheme"] = "never"
        for value in definition.values():
            _never_prepend(value)
    elif isinstance(definition, list):
        for value in definition:
            _never_prepend(value)


def _declare(engine: Engine, config: Mapping[str, Any]) -> None:
    """Add the tokens that only `tokenizer_config.json` knows, as Transformers does when it loads."""
    known = {token.content for token in engine.get_added_tokens_decoder().values()}
    declared: list[AddedToken] = []
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, Mapping):
        entries = sorted(decoder.items(), key=lambda pair: int(pair[0]))
        declared.extend(_added_token(entry) for _, entry in entries)
    extra = config.get("extra_special_tokens")
    named = extra.values() if isinstance(extra, Mapping) else extra if isinstance(extra, list) else ()
    by_key = (value for key, value in config.items() if key.endswith("_token"))
    values = (*by_key, *named)
    declared.extend(_added_token(value) for value in values if isinstance(value, str | Mapping) and value)
    fresh = {str(token.content): token for token in declared if token.content not in known}
    for token in fresh.values():
        (engine.add_special_tokens if token.special else engine.add_tokens)([token])


def _added_token(entry: str | Mapping[str, Any]) -> AddedToken:
    if isinstance(entry, str):
        return AddedToken(entry, special=True, normalized=False)
    return AddedToken(
        str(entry.get("content", "")),
        lstrip=bool(entry.get("lstrip", False)),
        rstrip=bool(entry.get("rstrip", False)),
        single_word=bool(entry.get("single_word", False)),
        normalized=bool(entry.get("normalized", False)),
        special=bool(entry.get("special", True)),
    )
