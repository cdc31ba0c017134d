"""Vocabularies in other formats than `tokenizer.json`: which file counts, and what is refused by name."""

import base64
import importlib.util
import json
import sys

import pytest

from kit import error_of
from mmrender.errors import MissingDependencyError, TokenizerError
from mmrender.model import vocabulary
from mmrender.model.convert import with_tokenizer
from mmrender.model.files import ModelDir
from mmrender.model.pattern import declared_pattern
from mmrender.model.tokenizer import Tokenizer
from mmrender.model.vocabulary import check_tekken, find_vocabulary, read_ranks
from other_formats import HAN_PATTERN, RANKS_CODE, byte_pairs, needs, ranks, with_merges, with_ranks

RANKED = b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(ranks()))
CONFIG = {"pattern": r"\s+|\S+", "version": "v3", "default_vocab_size": 302, "default_num_special_tokens": 2}
VOCAB = [
    {"rank": rank, "token_bytes": base64.b64encode(token).decode()}
    for rank, token in enumerate(ranks()[:300])
]
SPECIAL = [{"rank": 0, "token_str": "<s>"}, {"rank": 1, "token_str": "</s>"}]


def tekken(**changes):
    return json.dumps({"config": CONFIG, "vocab": VOCAB, "special_tokens": SPECIAL, **changes}).encode()


@pytest.fixture
def read(tmp_path, sentence):
    """Assert that a directory with these files is refused with the expected sentence."""

    def refuse(files, kind=TokenizerError):
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        error = error_of(kind, with_tokenizer, ModelDir(tmp_path))
        assert error.replace(str(tmp_path), "MODEL") == sentence

    return refuse


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["tekken.json", "tiktoken.model", "tokenizer.model", "vocab.json", "merges.txt"], "tekken"),
        (["tiktoken.model", "tokenizer.model", "vocab.json", "merges.txt"], "tiktoken"),
        (["qwen.tiktoken", "tokenizer.model"], "tiktoken"),
        (["tokenizer.model", "vocab.json", "merges.txt"], "sentencepiece"),
        (["spiece.model"], "sentencepiece"),
        (["vocab.json", "merges.txt"], "merges"),
        (["vocab.txt"], None),
    ],
)
def test_one_vocabulary_of_a_directory_counts(tmp_path, names, expected):
    for name in names:
        (tmp_path / name).write_bytes(b"\n\x10")
    found = find_vocabulary(ModelDir(tmp_path))
    assert (found and found.format) == expected


def test_a_model_file_of_base64_lines_is_a_tiktoken_file(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(RANKED)
    found = find_vocabulary(ModelDir(tmp_path))
    assert found.format == "tiktoken"
    assert list(read_ranks(*found.files)) == ranks()


def test_a_tokenizer_json_counts_before_all_others(tmp_path):
    for name in ("tokenizer.json", "tekken.json"):
        (tmp_path / name).write_bytes(b"{")
    assert with_tokenizer(ModelDir(tmp_path)).conversion is None


def test_a_directory_without_any_vocabulary_is_refused(tmp_path, sentence):
    model = with_tokenizer(ModelDir(tmp_path))
    assert error_of(TokenizerError, Tokenizer.load, model).replace(str(tmp_path), "MODEL") == sentence


DAMAGED_RANKS = {
    "cut within a line": RANKED[:-7],
    "cut within a token": RANKED[: RANKED.rindex(b" ")],
    "wrong base64": RANKED + b"QUJ* 600\n",
    "no padding": RANKED + b"QUI 600\n",
    "a token twice": RANKED + RANKED.splitlines(keepends=True)[300].replace(b" 300", b" 600"),
    "a rank twice": RANKED + base64.b64encode(b"unseen") + b" 300\n",
    "a gap": RANKED + base64.b64encode(b"unseen") + b" 700\n",
    "a negative rank": RANKED + base64.b64encode(b"unseen") + b" -1\n",
    "an empty token": RANKED + b" 600\n",
    "a long token": RANKED + base64.b64encode(b"x" * 5000) + b" 600\n",
    "no byte 255": RANKED.replace(
        base64.b64encode(b"\xff") + b" 255\n", base64.b64encode(b"zzzz") + b" 255\n"
    ),
}


@pytest.mark.parametrize("case", DAMAGED_RANKS)
def test_a_damaged_tiktoken_file_is_refused_with_the_line(read, case):
    read({"tiktoken.model": DAMAGED_RANKS[case]})


DAMAGED_TEKKEN = {
    "cut": tekken()[:-40],
    "no object": b"[]",
    "not UTF-8": b'{"config": "\xff"}',
    "nested": b'{"vocab":' + b"[" * 100_000,
    "no pattern": tekken(config={**CONFIG, "pattern": ""}),
    "wrong base64": tekken(vocab=[*VOCAB[:-1], {"rank": 299, "token_bytes": "?"}]),
    "a rank twice": tekken(vocab=[*VOCAB[:-1], {**VOCAB[-1], "rank": 298}]),
    "a token twice": tekken(vocab=[*VOCAB[:-1], {**VOCAB[280], "rank": 299}]),
    "bytes in another order": tekken(vocab=[{**VOCAB[1], "rank": 0}, {**VOCAB[0], "rank": 1}, *VOCAB[2:]]),
    "too large a size": tekken(config={**CONFIG, "default_vocab_size": 500}),
    "too many special tokens": tekken(special_tokens=[*SPECIAL, {"rank": 2, "token_str": "x"}]),
    "a special token twice": tekken(special_tokens=[SPECIAL[0], {"rank": 1, "token_str": "<s>"}]),
    "a special rank twice": tekken(special_tokens=[SPECIAL[0], {"rank": 0, "token_str": "</s>"}]),
}


@pytest.mark.parametrize("case", DAMAGED_TEKKEN)
def test_a_damaged_tekken_file_is_refused_with_the_entry(read, case):
    read({"tekken.json": DAMAGED_TEKKEN[case]})


def test_a_whole_tekken_file_passes_the_checks(tmp_path):
    (tmp_path / "tekken.json").write_bytes(tekken())
    check_tekken(tmp_path / "tekken.json")


def merges(*lines, vocab=None):
    known, pairs = byte_pairs()
    text = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in pairs), *lines])
    return {"vocab.json": json.dumps(vocab or known).encode(), "merges.txt": text.encode()}


DAMAGED_MERGES = {
    "no merges": {"vocab.json": merges()["vocab.json"]},
    "no vocabulary": {"merges.txt": merges()["merges.txt"]},
    "cut": {**merges(), "merges.txt": merges()["merges.txt"][:-3]},
    "cut at a line": {**merges(), "merges.txt": merges()["merges.txt"][:600].rpartition(b"\n")[0]},
    "an unknown piece": merges("Ġ unheard"),
    "no pair": merges("alone"),
    "not UTF-8": {**merges(), "merges.txt": b"\xff"},
    "a vocabulary that is cut": {**merges(), "vocab.json": merges()["vocab.json"][:-1]},
    "no ids": {**merges(), "vocab.json": b'{"a": "b"}'},
    "an id twice": merges(vocab={"a": 1, "b": 1}),
    "a negative id": merges(vocab={"a": -1}),
}


@pytest.mark.parametrize("case", DAMAGED_MERGES)
def test_damaged_merges_are_refused_with_the_line(read, case):
    read(DAMAGED_MERGES[case])


@pytest.mark.parametrize("limit", ["_MAX_BYTES", "_MAX_TOKENS", "_MAX_WORK"])
def test_files_are_bounded(monkeypatch, read, limit):
    monkeypatch.setattr(vocabulary, limit, 100)
    read({"tiktoken.model": RANKED})


def test_a_tiktoken_file_without_special_tokens_is_refused(read):
    needs("tiktoken")
    read({"tiktoken.model": RANKED})


@pytest.mark.parametrize(
    "listed", [{"600": {"text": "<s>"}}, {"600": {"content": "<s>"}, "x": "y"}, {"4000000": "<s>"}]
)
def test_a_damaged_list_of_special_tokens_is_refused(read, listed):
    needs("tiktoken")
    read(
        {
            "tiktoken.model": RANKED,
            "tokenizer_config.json": json.dumps({"added_tokens_decoder": listed}).encode(),
        }
    )


def test_a_tiktoken_file_without_a_pattern_is_refused(tmp_path, sentence):
    needs("tiktoken", "transformers")
    folder = with_ranks(tmp_path / "model")
    (folder / "tokenization_small.py").unlink()
    assert (
        error_of(TokenizerError, with_tokenizer, ModelDir(folder)).replace(str(folder), "MODEL") == sentence
    )


@pytest.mark.parametrize("package", ["tiktoken", "sentencepiece", "mistral_common"])
def test_a_missing_library_is_named_with_its_extra(monkeypatch, read, package):
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "mmrender.model.mistral", raising=False)
    config = {"added_tokens_decoder": {str(len(ranks())): "<s>"}}
    files = {
        "tiktoken": {"tiktoken.model": RANKED, "tokenizer_config.json": json.dumps(config).encode()},
        "sentencepiece": {"tokenizer.model": b"\n\x10"},
        "mistral_common": {"tekken.json": tekken()},
    }
    read(files[package], MissingDependencyError)


PATTERNS = {
    "of a class": RANKS_CODE.replace("PIECES", repr(list(HAN_PATTERN))),
    "of a module": "PAT = r'\\s+'\nx = tiktoken.Encoding('n', pat_str=PAT, mergeable_ranks={}, special_tokens={})",
    "of an argument": "Encoding(pat_str=r'a' r'b' + r'|c')",
    "of an instance": "class A:\n def f(self):\n  self.p: str = 'p'\n  return t.Encoding('n', pat_str=self.p)",
    "of a joined tuple": "Encoding(pat_str='|'.join(('a', 'b')))",
    "two equal ones": "Encoding(pat_str='a')\nEncoding(pat_str='a')",
    "two": "Encoding(pat_str='a')\nEncoding(pat_str='b')",
    "a name with two values": "p = 'a'\np = 'b'\nEncoding(pat_str=p)",
    "a call": "Encoding(pat_str=open('/etc/passwd').read())",
    "a formatted text": "Encoding(pat_str=f'{x}')",
    "a circle": "p = q\nq = p\nEncoding(pat_str=p)",
    "no code": "Encoding(pat_str=",
    "zero bytes": "\0",
    "deep": "Encoding(pat_str=" + "+".join(["'a'"] * 3000) + ")",
    "none": "x = 1",
}
EXPECTED = {
    "of a class": "|".join(HAN_PATTERN),
    "of a module": r"\s+",
    "of an argument": "ab|c",
    "of an instance": "p",
    "of a joined tuple": "a|b",
    "two equal ones": "a",
}


@pytest.mark.parametrize("case", PATTERNS)
def test_a_pattern_is_read_from_code_without_running_it(tmp_path, case):
    (tmp_path / "tokenization_it.py").write_text(PATTERNS[case])
    assert declared_pattern(ModelDir(tmp_path)) == EXPECTED.get(case)


def test_the_code_that_the_settings_name_counts_first(tmp_path):
    (tmp_path / "tokenization_a.py").write_text("Encoding(pat_str='a')")
    (tmp_path / "other.py").write_text("Encoding(pat_str='o')")
    config = {"auto_map": {"AutoTokenizer": ["other.Tokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert declared_pattern(ModelDir(tmp_path)) == "o"


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}},
    ],
)
def test_merges_without_a_class_that_cuts_text_are_refused(tmp_path, settings, sentence):
    folder = with_merges(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"model_type": "unheard"}))
    file = folder / "tokenizer_config.json"
    config = {
        name: value for name, value in json.loads(file.read_text()).items() if name != "tokenizer_class"
    }
    file.write_text(json.dumps({**config, **settings}))
    error = error_of(TokenizerError, with_tokenizer, ModelDir(folder))
    assert error.replace(str(folder), "MODEL") == sentence
