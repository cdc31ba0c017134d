"""A faster engine beside `tokenizers`, which serves only after it was proved equal.

`fastokens` encodes byte-pair vocabularies some ten times as fast as `tokenizers`, and takes seconds to load.
So it is loaded in a thread, once a process has encoded enough to make that worth while, and compared with
`tokenizers` over texts that are made to tell the two apart. Where it refuses the vocabulary or differs
anywhere, `tokenizers` goes on serving; `EngineChoice.reason` says which one does, and why.

It gives no offsets. They follow from the bytes of each token, as long as the normalizer changes no character
but blanks; that is proved in the same comparison, and checked against the length of every text.
"""

import json
import random
import re
import threading
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import Tokenizer as Engine
from tokenizers import models

from mmcodecs.forks import watch_forks

_NAME = "fastokens"
_SERVED = f"tokenizers {tokenizers.__version__}"
_WORTH = 1 << 20
"""Characters that `tokenizers` encodes before the fast engine is loaded, which costs as much as they do."""
_BLANK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>\Z")
_UNCOUNTABLE = -(1 << 40)
"""Length of a token that may stand for any text: no sum with it is that of a text."""


class DiffersError(Exception):
    """The fast engine is not equal to `tokenizers`; the message says where."""


class FastEngine:
    """`fastokens` in place of an engine without added tokens.

    Args:
        twin: The engine.

    Raises:
        ImportError: `fastokens` is not installed.
        ValueError: It does not take this tokenizer.
    """

    def __init__(self, twin: Engine) -> None:
        from fastokens import Tokenizer

        fast = Tokenizer.from_json_str(twin.to_str())
        fast.no_truncation()
        fast.no_padding()
        self._twin = twin
        self._encode = fast.encode_ordinary
        self._inside: set[int] = set()
        self._normalizer = twin.normalizer
        self._keeps_ascii = twin.normalizer is None or _state(twin.normalizer)["type"] == "NFC"
        self._lengths = _byte_lengths(twin) if isinstance(twin.model, models.BPE) else None

    def ids(self, text: str) -> list[int] | None:
        """Tokens of a text; None where `fastokens` gives up on it, as on a lone surrogate."""
        thread = threading.get_ident()
        self._inside.add(thread)
        try:
            ids: list[int] = self._encode(text).ids
        except Exception:  # noqa: BLE001 - it raises what its regular expressions raise
            return None
        finally:
            self._inside.discard(thread)
        return ids

    @property
    def is_interrupted(self) -> bool:
        """Whether another thread is encoding, and may hold locks that a fork leaves locked."""
        return bool(self._inside - {threading.get_ident()})

    def starts(self, text: str, ids: list[int]) -> npt.NDArray[np.int32] | None:
        """Index of the first character of each token, int32; None where the bytes do not say."""
        if self._lengths is None:
            return None
        written, shift = text, 0
        if self._normalizer is not None and not (self._keeps_ascii and text.isascii()):
            written = self._normalizer.normalize_str(text)
            shift = len(written) - len(text)
            if shift not in (0, 1) or written[shift:].replace(_BLANK, " ") != text.replace(_BLANK, " "):
                return None
        lengths = self._lengths[np.array(ids, np.int64)]
        stops = lengths.cumsum()
        data = b"" if written.isascii() else written.encode()
        if (int(stops[-1]) if len(ids) else 0) != (len(data) or len(written)):
            return None
        starts = stops - lengths
        if data:
            begins = (np.frombuffer(data, np.uint8) & 0xC0) != 0x80
            starts = (begins.cumsum() - 1)[starts]
        if shift:
            starts = np.maximum(starts - shift, 0)
        return starts.astype(np.int32)

    def prove(self, added: Iterable[str]) -> int:
        """Compare with the engine over texts, the added tokens amid them; return the number of texts.

        Where only offsets differ, `starts` gives None from then on.

        Raises:
            DiffersError: Some text gives other tokens.
        """
        count = 0
        for count, text in enumerate(proof_texts(added), 1):  # noqa: B007 - the last number is returned
            encoding = self._twin.encode(text, add_special_tokens=False)
            ids = self.ids(text)
            if ids != encoding.ids:
                raise DiffersError(f"other tokens for {text[:60]!r}")
            starts = self.starts(text, ids)
            if starts is not None and starts.tolist() != [start for start, _ in encoding.offsets]:
                self._lengths = None
        return count


class EngineChoice:
    """Which of the two encodes.

    Args:
        twin: The engine of `tokenizers`, without added tokens.
        added: The added tokens, to be proved amid text.

    Attributes:
        fast: The fast engine once it is loaded and proved, else None.
        reason: Which one serves, and why.
    """

    def __init__(self, twin: Engine, added: Collection[str]) -> None:
        self.fast: FastEngine | None = None
        self.reason = f"{_SERVED}: {_NAME} is loaded after {_WORTH:,} characters"
        self._twin = twin
        self._added = added
        self._left = _WORTH
        self._is_settled = False
        self.renew_after_fork()
        watch_forks(self)

    def renew_after_fork(self) -> None:
        """Load the fast engine again, in time, if another thread was inside it."""
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        if self.fast is not None and self.fast.is_interrupted:
            self.fast, self._left, self._is_settled = None, _WORTH, False
            self.reason = f"{_SERVED}: {_NAME} is loaded again after a fork"

    def spend(self, characters: int) -> None:
        """Count what `tokenizers` encodes; beyond what loading is worth, the fast engine is loaded."""
        self._left -= characters
        if self._left < 0 and not self._is_settled:
            with self._starting:
                if self._thread is None:
                    # No daemon: returning from compiled code while Python ends would abort the process.
                    self._thread = threading.Thread(
                        target=self._load, name="mmrender-tokenizer", daemon=False
                    )
                    self._thread.start()

    def settle(self) -> str:
        """Wait until the choice is made, and return the reason."""
        if self._thread is not None:
            self._thread.join()
        if not self._is_settled:
            self._load()
        return self.reason

    def _load(self) -> None:
        from importlib.metadata import version

        try:
            fast = FastEngine(self._twin)
            count = fast.prove(self._added)
        except ImportError:
            self.reason = f"{_SERVED}: {_NAME} is not installed"
        except DiffersError as error:
            self.reason = f"{_SERVED}: {_NAME} {version(_NAME)} gives {error}"
        except Exception as error:  # noqa: BLE001 - it refuses what it does not take with any error
            self.reason = f"{_SERVED}: {_NAME} {version(_NAME)} does not take it: {error}"
        else:
            self.reason = f"{_NAME} {version(_NAME)}: equal to {_SERVED} over {count} texts"
            self.fast = fast
        finally:
            self._is_settled = True


def _state(part: Any) -> Any:
    """The definition of a part of a tokenizer."""
    return json.loads(part.__getstate__())


def _byte_lengths(twin: Engine) -> npt.NDArray[np.int64]:
    """For each id the number of bytes of text that it stands for."""
    vocabulary = twin.get_vocab(with_added_tokens=False)
    is_byte_level = twin.pre_tokenizer is not None and b"ByteLevel" in twin.pre_tokenizer.__getstate__()
    lengths = np.full(max(vocabulary.values(), default=0) + 1, _UNCOUNTABLE, np.int64)
    length = len if is_byte_level else _utf8_length
    lengths[list(vocabulary.values())] = list(map(length, vocabulary))
    unknown = twin.model.unk_token
    if unknown in vocabulary:
        lengths[vocabulary[unknown]] = _UNCOUNTABLE
    return lengths


def _utf8_length(token: str) -> int:
    return 1 if _BYTE_TOKEN.match(token) else len(token.encode("utf-8", "surrogatepass"))


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
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\n \n",
    "\t",
    "\t\t",
    "\r\n",
    "\u00a0",
    "\u3000",
    "\u2028",
    "\x85",
    "\x1c",
)
_MARKS = (
    "",
    ".",
    ", ",
    "!?",
    "...",
    "'s",
    "'\u017f",
    "\u2019s",
    "()",
    "{}",
    "[];",
    "<|",
    "|>",
    "</",
    "_",
    "\u2581",
    "<0x0A>",
)
_REACH = (
    (0x20, 0x250),
    (0x250, 0x3000),
    (0x3000, 0xD800),
    (0xE000, 0x10000),
    (0x10000, 0x20000),
    (0xE0000, 0xE0200),
)


def proof_texts(added: Iterable[str]) -> Iterator[str]:
    """Yield texts that tell tokenizers apart.

    White space in runs, digits, scripts, emoji, contractions, characters that normalizers change, words
    longer than caches keep, random characters and bytes, and each added token amid text.
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
            source.choice(
                (source.choice(_WORDS), _letters(source), _character(source), str(source.getrandbits(20)))
            )
            + source.choice(_MARKS)
            + source.choice((" ", " ", " ", source.choice(_SPACES), ""))
            for _ in range(60)
        ]
        yield "".join(pieces)
    for _ in range(20):
        yield source.randbytes(80).decode("utf-8", "replace")
    tokens = sorted(added)
    for start in range(0, len(tokens), 50):
        group = tokens[start : start + 50]
        yield "".join(f"a{token} b{token}" for token in group) + " ".join(group)


def _letters(source: random.Random) -> str:
    return "".join(source.choices("etaoinshrdlucmfwypvbgkjqxz", k=source.randint(1, 12)))


def _character(source: random.Random) -> str:
    return chr(source.randrange(*source.choice(_REACH)))
