"""A model's tokenizer, able to encode text literally.

`tokenizers` finds added tokens in any text, and its option to skip special ones still matches added tokens
that are not special. So added tokens are found here, by its rules (`added_vocabulary.rs`) but under the
caller's control, and the runs between them are encoded by a copy of the tokenizer without added tokens. If
merges or the normalizer still produce one, a second copy without that word encodes the run. Runs are
memoised, so a long system prompt is encoded once per process.
"""

import re
import unicodedata
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import groupby
from sys import getsizeof
from typing import Any, NamedTuple

import msgspec
from tokenizers import Tokenizer as Engine

from mmrender.caching import LRUCache, cached_property
from mmrender.errors import TokenizerError
from mmrender.model.engines import Before, declare_added, finder_of, literal_engines, without_added
from mmrender.model.fast import EngineChoice
from mmrender.model.files import Conversion, ModelDir
from mmrender.model.vocabulary import BLANK, EXPECTED
from mmrender.sidecar import common_prefix


class Run(NamedTuple):
    """An encoded run.

    Attributes:
        ids: Its tokens.
        starts: Index of the first character of each token, or of the first tokens, or None.
        starts_to: Character up to which `starts` has the tokens, and the next one if any; -1 without.
        syntax: Ids of added tokens, except blank ones, that the vocabulary spells in it.
        nbytes: Approximate memory.
    """

    ids: list[int]
    starts: "array[int] | None"
    starts_to: int
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


class Tokenizer:
    """Encodes runs without syntax, and finds syntax.

    Args:
        engine: The model's tokenizer with all of its added tokens.
        memo_bytes: Bound of the memo of runs.
        conversion: Says how the engine was made from a vocabulary in another format, or None.

    Attributes:
        choice: Chooses the engine that encodes runs.
        conversion: The same, without the texts of files.
    """

    def __init__(
        self, engine: Engine, *, memo_bytes: int = 48 << 20, conversion: Conversion | None = None
    ) -> None:
        self._engine = engine
        self.conversion = conversion and msgspec.structs.replace(conversion, files={})
        engine.no_padding()
        engine.no_truncation()
        added = dict(engine.get_added_tokens_decoder())
        self.added_ids: dict[str, int] = {token.content: token_id for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.syntax_ids = frozenset(
            token_id for token, token_id in self.added_ids.items() if not is_blank(token)
        )
        """Ids of added tokens other than white space."""
        self._first_syntax = min(self.syntax_ids, default=0)
        self.all_added_ids = frozenset(added)
        """Ids of all added tokens."""
        self._flags = {
            token.content: token
            for token in added.values()
            if token.lstrip or token.rstrip or token.single_word
        }
        normalized = [token for token in added.values() if token.normalized]
        self._looked_for_later = [token.content for token in normalized]
        # The longest token at a position, as the Aho-Corasick search of `tokenizers`.
        texts = [*(self.added_ids.keys() - set(self._looked_for_later))]
        self._pattern = re.compile(_branches(texts, depth=8) if texts else r"(?!)")
        self._normalized = finder_of(normalized, engine.normalizer) if normalized else None
        self._within: LRUCache[str, _Matches] = LRUCache(8 << 20, size_of=lambda entry: entry.nbytes)
        self._engines = without_added(engine, engine.model)
        self.choice = EngineChoice(self._engines["token"], self.added_ids)
        self._memo: LRUCache[tuple[Engine, str], Run] = LRUCache(memo_bytes, size_of=lambda run: run.nbytes)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy elsewhere fills its own memo.
        options: dict[str, Any] = {"memo_bytes": self._memo.max_size, "conversion": self.conversion}
        return partial(type(self), **options), (self._engine,)

    @classmethod
    def load(cls, model: ModelDir) -> "Tokenizer":
        """Load `tokenizer.json` and the added tokens that `tokenizer_config.json` declares.

        `open_model` adds a `tokenizer.json` to directories with a vocabulary in another format.

        Raises:
            TokenizerError: `tokenizer.json` does not exist or cannot be read.
        """
        file = model.path / "tokenizer.json"
        converted = model.conversion and model.conversion.files.get(file.name)
        if not converted and not file.is_file():
            raise TokenizerError(
                "the model has no tokenizer",
                where=str(model.path),
                expected=EXPECTED,
                remedy="Save one with: AutoTokenizer.from_pretrained(...).save_pretrained(...)",
            )
        try:
            engine = Engine.from_str(converted) if converted else Engine.from_file(str(file))
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
        declare_added(engine, model)
        return cls(engine, conversion=model.conversion)

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
        starts_to: int = -1,
    ) -> Run:
        """Encode text in which no added token is looked for.

        Args:
            text: A run between added tokens.
            before: Kind of text before the run.
            forbidden: Ids of added tokens that must not be produced. A vocabulary can spell them by its
                merges or after its normalizer.
            starts_to: Character up to which `starts` are needed, to the first token that begins there or
                later. -1 for none.

        Raises:
            TokenizerError: It spells one of `forbidden` in every way.
        """
        engine = self._engines[before]
        run = self._memo.get((engine, text))
        if run is None or run.starts_to < starts_to:
            run = self._encoded(text, engine, starts_to)
        if run.syntax.isdisjoint(forbidden):
            return run
        engines, unknown_id = self._literal
        run = self._memo.get((engines[before], text)) or self._encoded(text, engines[before], len(text))
        spelled = run.syntax.intersection(forbidden) - {unknown_id}
        if spelled:
            raise TokenizerError(
                "the vocabulary spells an added token within text",
                expected="ordinary tokens",
                got=f"{self.token(min(spelled))!r} in {text[:80]!r}",
                remedy='Set content_special_tokens="error" to refuse this content',
            )
        return run

    def _encoded(self, text: str, engine: Engine, starts_to: int) -> Run:
        ids, starts = None, None
        fast = self.choice.fast
        if fast is not None and engine is self._engines["token"]:
            ids = fast.ids(text)
            starts = fast.starts(text, ids, starts_to) if starts_to >= 0 and ids is not None else None
        if ids is None or (starts_to >= 0 and starts is None):
            self.choice.spend(len(text))
            encoding = engine.encode(text, add_special_tokens=False)
            ids = encoding.ids
            starts = array("i", [start for start, _ in encoding.offsets])
        nbytes = _RUN_BYTES + _TOKEN_BYTES * len(ids) + getsizeof(text)
        is_text = max(ids, default=-1) < self._first_syntax  # twice as fast as a look at each token
        syntax = _NO_IDS if is_text else self.syntax_ids.intersection(ids)
        known_to = -1
        if starts is not None:
            known_to = len(text) if len(starts) == len(ids) else starts[-1]
        return self._memo.put((engine, text), Run(ids, starts, known_to, syntax, nbytes))

    @cached_property
    def _literal(self) -> tuple[dict[Before, Engine], int | None]:
        return literal_engines(self._engine, self.syntax_ids)

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


_NO_IDS: frozenset[int] = frozenset()
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
    return token.replace(BLANK, " ").isspace()


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
