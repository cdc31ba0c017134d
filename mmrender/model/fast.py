"""A faster engine than `tokenizers`, used only after a proof that both are equal.

`fastokens` encodes byte-pair vocabularies about ten times as fast as `tokenizers`, and takes seconds to load.
So a thread loads it once a process has encoded enough text to pay for that, and compares it with `tokenizers`
over texts that distinguish tokenizers. If it refuses the vocabulary or differs anywhere, `tokenizers` stays
in use. `EngineChoice.reason` names the engine and the reason.

It returns no offsets. They follow from the bytes of each token if the normalizer changes only blanks, which
is proved in the same comparison, and checked against the length of every text.
"""

import json
import random
import threading
from array import array
from collections.abc import Collection, Iterable, Iterator
from operator import itemgetter

import numpy as np
import tokenizers
from tokenizers import Tokenizer as Engine
from tokenizers import models

from mmcodecs.forks import watch_forks
from mmrender.model.vocabulary import BLANK, BYTE_TOKEN

_NAME = "fastokens"
_SERVED = f"tokenizers {tokenizers.__version__}"
_WORTH = 1 << 20
"""Characters that `tokenizers` encodes before the fast engine is loaded. Loading takes as long."""
_NEAR = 256
"""Characters up to which the places of tokens are counted one by one, rather than all at once."""
_UNCOUNTABLE = -(1 << 40)
"""Length of a token with unknown text. No sum with it is the length of a text."""


class DiffersError(Exception):
    """The fast engine differs from `tokenizers` for the text in the message."""


class FastEngine:
    """`fastokens` in place of an engine without added tokens.

    Args:
        engine: The engine.

    Raises:
        ImportError: `fastokens` is not installed.
        ValueError: It does not support this tokenizer.
    """

    def __init__(self, engine: Engine) -> None:
        from fastokens import Tokenizer

        fast = Tokenizer.from_json_str(engine.to_str())
        fast.no_truncation()
        fast.no_padding()
        self._engine = engine
        self._encode = fast.encode_ordinary
        self._inside: set[int] = set()
        self._normalizer = normalizer = engine.normalizer
        self._keeps_ascii = normalizer is None or json.loads(normalizer.__getstate__())["type"] == "NFC"
        self._lengths = _byte_lengths(engine) if isinstance(engine.model, models.BPE) else None

    def ids(self, text: str) -> list[int] | None:
        """Return the tokens of a text, or None if `fastokens` cannot encode it, such as a lone surrogate."""
        thread = threading.get_ident()
        self._inside.add(thread)
        try:
            ids: list[int] = self._encode(text).ids
        except Exception:  # noqa: BLE001 - its regular expressions raise any error
            return None
        finally:
            self._inside.discard(thread)
        return ids

    @property
    def is_interrupted(self) -> bool:
        """Whether another thread is encoding. A fork would leave its locks locked."""
        return bool(self._inside - {threading.get_ident()})

    def starts(self, text: str, ids: list[int], to: int | None = None) -> "array[int] | None":
        """Return the index of the first character of each token, or None if it is unknown.

        With `to`, the tokens after the first that begins at this character or later may be left out.
        """
        if self._lengths is None:
            return None
        normalized, shift = text, 0
        if self._normalizer is not None and not (self._keeps_ascii and text.isascii()):
            normalized = self._normalizer.normalize_str(text)
            shift = len(normalized) - len(text)
            if shift not in (0, 1) or normalized[shift:].replace(BLANK, " ") != text.replace(BLANK, " "):
                return None
        data = b"" if normalized.isascii() else normalized.encode()
        lengths = itemgetter(*ids, 0, 0)(self._lengths)[:-2]  # of one index alone it returns no tuple
        if sum(lengths) != (len(data) or len(normalized)):
            return None
        if to is not None and to < _NEAR and not data and not shift:
            starts, start = array("i"), 0
            for length in lengths:
                starts.append(start)
                if start >= to:
                    break
                start += length
            return starts
        places = np.array(lengths, np.int64)
        places = places.cumsum() - places
        if data:
            begins = (np.frombuffer(data, np.uint8) & 0xC0) != 0x80
            places = (begins.cumsum() - 1)[places]
        return array("i", np.maximum(places - shift, 0).tolist())

    def prove(self, added: Iterable[str]) -> int:
        """Compare with the engine over texts that contain the added tokens, and return their number.

        If only offsets differ, `starts` returns None from then on.

        Raises:
            DiffersError: The tokens of a text differ.
        """
        count = 0
        for count, text in enumerate(proof_texts(added), 1):  # noqa: B007 - the last number is returned
            encoding = self._engine.encode(text, add_special_tokens=False)
            ids = self.ids(text)
            if ids != encoding.ids:
                raise DiffersError(f"other tokens for {text[:60]!r}")
            starts = self.starts(text, ids)
            if starts is not None and starts.tolist() != [start for start, _ in encoding.offsets]:
                self._lengths = None
        return count


class EngineChoice:
    """Chooses the engine that encodes.

    Args:
        engine: The engine of `tokenizers`, without added tokens.
        added: The added tokens, which the proof puts into texts.

    Attributes:
        fast: The fast engine once it is loaded and proved, else None.
        reason: The engine in use, and the reason.
    """

    def __init__(self, engine: Engine, added: Collection[str]) -> None:
        self.fast: FastEngine | None = None
        self.reason = f"{_SERVED}: {_NAME} is loaded after {_WORTH:,} characters"
        self._engine = engine
        self._added = added
        self._left = _WORTH
        self._is_settled = False
        self.renew_after_fork()
        watch_forks(self)

    def renew_after_fork(self) -> None:
        """Forget the fast engine if another thread was inside it, and load it again later."""
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        if self.fast is not None and self.fast.is_interrupted:
            self.fast, self._left, self._is_settled = None, _WORTH, False
            self.reason = f"{_SERVED}: {_NAME} is loaded again after a fork"

    def spend(self, characters: int) -> None:
        """Count characters that `tokenizers` encodes, and load the fast engine once they pay for it."""
        self._left -= characters
        if self._left < 0 and not self._is_settled:
            with self._starting:
                if self._thread is None:
                    # Not a daemon: returning from compiled code while Python ends would abort the process.
                    self._thread = threading.Thread(
                        target=self._load, name="mmrender-tokenizer", daemon=False
                    )
                    self._thread.start()

    def settle(self) -> str:
        """Make the choice, or wait for it, and return the reason."""
        if self._thread is not None:
            self._thread.join()
        if not self._is_settled:
            self._load()
        return self.reason

    def _load(self) -> None:
        from importlib.metadata import version

        try:
            fast = FastEngine(self._engine)
            count = fast.prove(self._added)
        except ImportError:
            self.reason = f"{_SERVED}: {_NAME} is not installed"
        except DiffersError as error:
            self.reason = f"{_SERVED}: {_NAME} {version(_NAME)} returns {error}"
        except Exception as error:  # noqa: BLE001 - it refuses unsupported tokenizers with any error
            self.reason = f"{_SERVED}: {_NAME} {version(_NAME)} does not support it: {error}"
        else:
            self.reason = f"{_NAME} {version(_NAME)}: equal to {_SERVED} over {count} texts"
            self.fast = fast
        finally:
            self._is_settled = True


def _byte_lengths(engine: Engine) -> list[int]:
    """Return for each id the number of bytes of its text."""
    vocabulary = engine.get_vocab(with_added_tokens=False)
    is_byte_level = engine.pre_tokenizer is not None and b"ByteLevel" in engine.pre_tokenizer.__getstate__()
    lengths = [_UNCOUNTABLE] * (max(vocabulary.values(), default=0) + 1)
    length = len if is_byte_level else _utf8_length
    for token, token_id in vocabulary.items():
        lengths[token_id] = length(token)
    unknown = engine.model.unk_token
    if unknown in vocabulary:
        lengths[vocabulary[unknown]] = _UNCOUNTABLE
    return lengths


def _utf8_length(token: str) -> int:
    return 1 if BYTE_TOKEN.match(token) else len(token.encode("utf-8", "surrogatepass"))


_SAMPLE = (
    "the quick Brown FOX jumps over naïve café Straße İstanbul don't I'll WE'VE they'd x86_64 "
    "camelCase HTTPServer snake_case self.assertEqual(a, b) https://example.org/a?b=c&d=%20#e "
    "日本語のテキスト 中文字符测试 한국어 텍스트 العربية עברית हिन्दी ไทย ελληνικά русский "
    "e\u0301 \u1112\u1161\u11ab \ufb01 \u212b \u1e9b\u0323 \uff21 \u00bd \u0661\u0662 "
    "\U0001f600 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd "
    "\u2764\ufe0f 0 12 123 1234 12345678901234567890 3.14159 1,000,000 $99.99 -7 1e-9 0xFF"
)
_WORDS = _SAMPLE.split()
_SPACES = (
    *(" ", "  ", "   ", "\n", "\n\n", "\n \n", "\t", "\t\t", "\r\n"),
    *("\u00a0", "\u3000", "\u2028", "\x85", "\x1c"),
)
_MARKS = (
    *("", ".", ", ", "!?", "...", "'s", "'\u017f", "\u2019s", "()", "{}", "[];", "<|", "|>", "</", "_"),
    *(BLANK, "<0x0A>"),
)
_RANGES = (
    *((0x20, 0x250), (0x250, 0x3000), (0x3000, 0xD800)),
    *((0xE000, 0x10000), (0x10000, 0x20000), (0xE0000, 0xE0200)),
)
"""Ranges of code points from which random characters are drawn."""


def proof_texts(added: Iterable[str]) -> Iterator[str]:
    """Yield texts that distinguish tokenizers.

    White space in runs, digits, scripts, emoji, contractions, characters that normalizers change, words
    too long for caches, random characters and bytes, and each added token within text.
    """
    source = random.Random(0)  # noqa: S311 - the same texts everywhere
    yield ""
    for space in _SPACES:
        yield from (space, space * 2, f"a{space}b", f"{space}a{space * 3}", f"1{space * 7}2")
    yield " ".join(_WORDS)
    yield from _WORDS
    for unit in ("a", " ", "\n", "7", "\u65e5", "\U0001f600", "!", "ab", "e\u0301"):
        yield unit * 300
    yield "x" * 70_000 + " x"
    for _ in range(60):
        pieces = [
            source.choice((
                source.choice(_WORDS),
                "".join(source.choices("etaoinshrdlucmfwypvbgkjqxz", k=source.randint(1, 12))),
                chr(source.randrange(*source.choice(_RANGES))),
                str(source.getrandbits(20)),
            ))
            + source.choice(_MARKS)
            + source.choice((" ", " ", " ", source.choice(_SPACES), ""))
            for _ in range(60)
        ]  # fmt: skip
        yield "".join(pieces)
    for _ in range(20):
        yield source.randbytes(80).decode("utf-8", "replace")
    tokens = sorted(added)
    for start in range(0, len(tokens), 50):
        group = tokens[start : start + 50]
        yield "".join(f"a{token} b{token}" for token in group) + " ".join(group)
