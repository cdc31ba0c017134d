"""Small model directories whose vocabulary is not a `tokenizer.json`, trained on the shipped text.

Each is the demonstration's model with another vocabulary: the template, settings and processor stay.
"""

import base64
import io
import json
import random
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers

from mmrender.testing.tiny_model import (
    _DATA,
    ADDED_TOKENS,
    PRE_TOKENIZER,
    SPECIAL_TOKENS,
    build_tiny_model,
    train_byte_pairs,
)

NOUNS = (
    *(
        "naïve",
        "café",
        "日本語",
        "中文字符",
        "한국어",
        "العربية",
        "हिन्दी",
        "русский",
        "e\u0301",
        "\ufb01",
        "\u212b",
        "½",
    ),
    *("😀", "👩\u200d👩\u200d👧", "🇩🇪", "❤\ufe0f", "x86_64", "don't", "IT'S", "3.14", "1,000", "0xFF"),
)
MARKS = (
    "",
    " ",
    " ",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    ", ",
    "...",
    "();",
    "{}",
    "</",
    "<|",
    "\r\n",
    "\u3000",
    "\u00a0",
)
CODE = (
    "def f(x):\n    return x  # twice\n",
    '{"k": [1, -2.5e3]}',
    "for i in range(10):\n\tprint(i)\n",
    "a_b = c.d[0]",
)

HAN_PATTERN = (
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
"""Cuts runs of Han characters from other letters, by an intersection of classes that not every engine knows."""

RANKS_CODE = """
import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers import PreTrainedTokenizer

RESERVED = 8


class SmallTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]
    pat_str = "|".join(PIECES)

    def __init__(self, vocab_file, added_tokens_decoder=None, **kwargs):
        with open(vocab_file, "rb") as file:
            lines = [line.split() for line in file]
        import base64
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        listed = {int(index): str(token) for index, token in (added_tokens_decoder or {}).items()}
        last = max(listed) + 1
        self.special = {listed.get(i, f"<|reserved_token_{i}|>"): i for i in range(len(ranks), last)}
        self.model = tiktoken.Encoding(
            name="small", pat_str=self.pat_str, mergeable_ranks=ranks, special_tokens=self.special
        )
        super().__init__(added_tokens_decoder=added_tokens_decoder, **kwargs)

    @property
    def vocab_size(self):
        return self.model.n_vocab

    def get_vocab(self):
        return {**{self._convert_id_to_token(i): i for i in range(self.vocab_size)}, **self.added_tokens_encoder}

    def _tokenize(self, text, **kwargs):
        return [self._convert_id_to_token(i) for i in self.model.encode(text, allowed_special="all")]

    def _convert_token_to_id(self, token):
        return self.model.encode_single_token(token.encode("latin-1"))

    def _convert_id_to_token(self, index):
        return self.model.decode_single_token_bytes(index).decode("latin-1")
"""


PIECES_CODE = """
import sentencepiece
from transformers import PreTrainedTokenizer


class SmallPieces(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tokenizer.model"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, **kwargs):
        self.sp_model = sentencepiece.SentencePieceProcessor(vocab_file)
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return self.sp_model.get_piece_size()

    def get_vocab(self):
        return {**{self.sp_model.id_to_piece(i): i for i in range(self.vocab_size)}, **self.added_tokens_encoder}

    def _tokenize(self, text, **kwargs):
        return self.sp_model.encode(text, out_type=str)

    def _convert_token_to_id(self, token):
        return self.sp_model.piece_to_id(token)

    def _convert_id_to_token(self, index):
        return self.sp_model.id_to_piece(index)
"""
"""A slow class, as InternLM2's: each text between added tokens goes to SentencePiece as it is."""


def needs(*packages: str) -> None:
    """Skip a test if a library of a format is not installed."""
    for package in packages:
        pytest.importorskip(package, reason=f"needs {package}, of the extras convert and mistral")


@cache
def _trained(size: int = 600) -> str:
    return train_byte_pairs(size).to_str()


def byte_pairs() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a byte-level vocabulary."""
    model = json.loads(_trained())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def ranks() -> list[bytes]:
    """Tokens of the same vocabulary as bytes, by rank."""
    from mmrender.model.spelling import _BYTES

    vocab, _ = byte_pairs()
    tokens = [bytes(_BYTES[char] for char in token) for token in sorted(vocab, key=vocab.__getitem__)]
    return sorted(tokens[:256]) + tokens[256:]


def added_tokens(first: int, *, gap: int = 0) -> dict[str, dict[str, Any]]:
    """Added tokens of the demonstration's model by their ids, with unused ids before the last one."""
    tokens = [*SPECIAL_TOKENS, *ADDED_TOKENS]
    ids = {token: first + index for index, token in enumerate(tokens)}
    return _listed({**ids, tokens[-1]: ids[tokens[-1]] + gap})


def _listed(ids: dict[str, int]) -> dict[str, dict[str, Any]]:
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    return {
        str(place): {"content": token, "special": token in SPECIAL_TOKENS, **flags}
        for token, place in ids.items()
    }


def _directory(folder: Path, config: dict[str, Any]) -> Path:
    build_tiny_model(folder, weights=False)
    (folder / "tokenizer.json").unlink()
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    for name in ("add_prefix_space", "unk_token", "bos_token"):
        del settings[name]
    file.write_text(json.dumps({**settings, **config}))
    ids = {entry["content"]: int(index) for index, entry in config["added_tokens_decoder"].items()}
    model = json.loads((folder / "config.json").read_text())
    for name, token in (("image_token_id", "<|image_pad|>"), ("video_token_id", "<|video_pad|>"),
                        ("vision_start_token_id", "<|vision_start|>"), ("vision_end_token_id", "<|vision_end|>")):  # fmt: skip
        model[name] = ids[token]
    ends = {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"], "bos_token_id": None}
    model["text_config"] = {**model["text_config"], "vocab_size": max(ids.values()) + 1, **ends}
    (folder / "config.json").write_text(json.dumps(model))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids["<|im_end|>"]}))
    return folder


def with_merges(folder: Path) -> Path:
    """`vocab.json` and `merges.txt`."""
    vocab, merges = byte_pairs()
    _directory(folder, {"added_tokens_decoder": added_tokens(len(vocab))})
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False))
    lines = ["#version: 0.2", *(" ".join(merge) for merge in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n")
    return folder


def with_ranks(folder: Path) -> Path:
    """`tiktoken.model`, and the pattern in Python code."""
    tokens = ranks()
    listed = added_tokens(len(tokens), gap=3)
    config = {
        "added_tokens_decoder": listed,
        "extra_special_tokens": list(SPECIAL_TOKENS[1:]),
        "tokenizer_class": "SmallTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_small.SmallTokenizer", None]},
    }
    _directory(folder, config)
    lines = [base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    code = RANKS_CODE.replace("PIECES", repr(list(HAN_PATTERN)))
    (folder / "tokenization_small.py").write_text(code)
    return folder


def with_pieces(folder: Path, *, kind: str = "LlamaTokenizer", **options: Any) -> Path:
    """`tokenizer.model` of SentencePiece."""
    import sentencepiece

    settings: dict[str, Any] = {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "vocab_size": 900,
        "control_symbols": [*SPECIAL_TOKENS],
        "user_defined_symbols": [*ADDED_TOKENS],
        "hard_vocab_limit": False,
        "minloglevel": 2,
        **options,
    }
    model = io.BytesIO()
    corpus = [line for line in _DATA.joinpath("corpus.txt").read_text(encoding="utf-8").splitlines() if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*corpus, " ".join(NOUNS)]), model_writer=model, **settings
    )
    source = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = {token: source.piece_to_id(token) for token in (*SPECIAL_TOKENS, *ADDED_TOKENS)}
    config = {"tokenizer_class": kind, "bos_token": None, "unk_token": "<unk>", "add_bos_token": False}
    _directory(folder, {**config, "added_tokens_decoder": _listed(ids)})
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return folder


def with_code_of_pieces(folder: Path, **options: Any) -> Path:
    """`tokenizer.model` of SentencePiece with a slow class of the directory's own."""
    file = with_pieces(folder, kind="SmallPieces", **options) / "tokenizer_config.json"
    auto_map = {"AutoTokenizer": ["tokenization_pieces.SmallPieces", None]}
    file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": auto_map}))
    (folder / "tokenization_pieces.py").write_text(PIECES_CODE)
    return folder


def write_tekken(folder: Path, *, version: str = "v7", **changes: Any) -> Path:
    """`tekken.json` alone, as in directories of Mistral's own format."""
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    tokens = ranks()
    special = [
        {"rank": entry["rank"], "token_str": str(getattr(entry["token_str"], "value", entry["token_str"])), "is_control": True}
        for entry in Tekkenizer.DEPRECATED_SPECIAL_TOKENS
    ]  # fmt: skip
    count = len(special) + 12
    content = {
        "config": {
            "pattern": PRE_TOKENIZER,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": len(tokens) + count,
            "default_num_special_tokens": count,
            "version": version,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": special,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tekken.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "mistral", "vocab_size": len(tokens) + count})
    )
    return folder


def sample_texts(count: int, added: Sequence[str] = (), seed: int = 0) -> Iterator[str]:
    """Texts of scripts, digits, blanks, emoji and code, some with added tokens whole and torn."""
    source = random.Random(seed)
    lines = _DATA.joinpath("corpus.txt").read_text(encoding="utf-8").splitlines()
    torn = [token[:-1] for token in added]
    for _ in range(count):
        pieces = []
        for _ in range(source.randrange(1, 7)):
            kinds = [
                source.choice(NOUNS),
                source.choice(lines)[source.randrange(20) :][: source.randrange(40)],
                str(source.getrandbits(source.randrange(1, 60))),
                "".join(chr(source.randrange(0x20, 0x3000)) for _ in range(source.randrange(4))),
                chr(source.randrange(0x1F300, 0x1FAFF)) * source.randrange(1, 4),
                source.choice(CODE),
                " " * source.randrange(6),
            ]
            if added:
                kinds += [source.choice(added), source.choice(torn)]
            pieces += [source.choice(kinds), source.choice(MARKS)]
        yield "".join(pieces)


class SlowBytePairs:
    """Byte pairs as published with GPT-2: the merge that was learnt first goes first. The obvious way."""

    def __init__(self, folder: Path, pattern: str, added: Sequence[str]) -> None:
        import regex

        self.vocab = json.loads((folder / "vocab.json").read_text())
        lines = (folder / "merges.txt").read_text().splitlines()
        self.order = {tuple(line.split(" ")): rank for rank, line in enumerate(lines[1:])}
        self.pattern = regex.compile(pattern)
        self.added = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))))

    def encode(self, text: str, added_ids: dict[str, int]) -> list[int]:
        ids, position = [], 0
        for match in self.added.finditer(text):
            ids += [*self._run(text[position : match.start()]), added_ids[match.group()]]
            position = match.end()
        return ids + self._run(text[position:])

    def _run(self, text: str) -> list[int]:
        from mmrender.model.spelling import _BYTES

        spelled = {byte: char for char, byte in _BYTES.items()}
        ids: list[int] = []
        # Python's tables of NFC are newer than those of `tokenizers`, which Transformers normalizes by.
        for word in self.pattern.findall(normalizers.NFC().normalize_str(text)):
            pieces = [spelled[byte] for byte in word.encode()]
            while len(pieces) > 1:
                pairs = list(pairwise(pieces))
                best = min(pairs, key=lambda pair: self.order.get(pair, 1 << 30))
                if best not in self.order:
                    break
                merged, index = [], 0
                while index < len(pieces):
                    if tuple(pieces[index : index + 2]) == best:
                        merged.append("".join(best))
                        index += 2
                    else:
                        merged.append(pieces[index])
                        index += 1
                pieces = merged
            ids += [self.vocab[piece] for piece in pieces]
        return ids
