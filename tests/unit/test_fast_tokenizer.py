"""The fast engine gives what `tokenizers` gives, in any vocabulary that it is proved for, or does not serve."""

import importlib.util
import os
import sys
import types
from functools import cache
from sys import getsizeof

import pytest
import tokenizers
from hypothesis import given, settings
from tokenizers import Tokenizer as Engine

from mmrender.model import fast
from mmrender.model.tokenizer import Tokenizer
from mmrender.renderer import Renderer
from mmrender.view.doctor import diagnose
from vocabularies import KINDS, build, texts

INSTALLED = importlib.util.find_spec("fastokens") is not None
SERVED = f"tokenizers {tokenizers.__version__}"
KNOWN = "fastokens 1.0"


class StandIn:
    """What `fastokens` offers, made of `tokenizers`; `change` spoils ids."""

    change = staticmethod(lambda text, ids: ids)

    def __init__(self, engine):
        self.engine = engine

    @classmethod
    def from_json_str(cls, definition):
        return cls(Engine.from_str(definition))

    def no_truncation(self):
        self.engine.no_truncation()

    def no_padding(self):
        self.engine.no_padding()

    def encode_ordinary(self, text):
        text.encode()  # refuses a lone surrogate
        ids = self.engine.encode(text, add_special_tokens=False).ids
        return types.SimpleNamespace(ids=self.change(text, ids))


@pytest.fixture
def stand_in(monkeypatch):
    """Put a stand-in in place of `fastokens`; a test may spoil it."""
    kind = type("Spoilt", (StandIn,), {})
    monkeypatch.setitem(sys.modules, "fastokens", types.SimpleNamespace(Tokenizer=kind))
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"fastokens": "1.0"}[name])
    return kind


@cache
def settled(kind, engine):
    tokenizer = Tokenizer(build(kind), memo_bytes=0)
    tokenizer.choice.settle()
    return tokenizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["stand-in", *["fastokens"] * INSTALLED])
def test_runs_are_those_of_tokenizers_whoever_serves(kind, engine, request):
    if engine == "stand-in":
        request.getfixturevalue("stand_in")
    tokenizer = settled(kind, engine)
    if engine == "stand-in":
        assert tokenizer.choice.reason == f"{KNOWN}: equal to {SERVED} over {count(tokenizer)} texts"

    @settings(max_examples=20)
    @given(texts())
    def check(text):
        for before, twin in tokenizer._engines.items():
            encoding = twin.encode(text, add_special_tokens=False)
            run = tokenizer.encode_run(text, before=before, starts_to=len(text))
            assert (run.ids, run.starts.tolist()) == (encoding.ids, [start for start, _ in encoding.offsets])
            assert tokenizer.encode_run(text, before=before).ids == encoding.ids
            for place in (0, len(text) // 2):
                first = tokenizer.encode_run(text, before=before, starts_to=place).starts.tolist()
                assert first == run.starts.tolist()[: len(first)]
                assert len(first) == len(run.starts) or first[-1] >= place

    check()


def count(tokenizer):
    return sum(1 for _ in fast.proof_texts(tokenizer.added_ids))


def test_offsets_follow_from_bytes_where_blanks_alone_are_rewritten(stand_in):
    """Else the law above would hold without any offset that was derived."""
    for kind in KINDS:
        tokenizer = settled(kind, "stand-in")
        found = tokenizer.choice.fast.starts("a line of text", tokenizer.choice.fast.ids("a line of text"))
        is_rewritten = kind.startswith(("metaspace", "unigram")) or kind.endswith("prefix_space")
        assert (found is None) == is_rewritten, kind


def spoiling(char):
    def change(text, ids):
        return [*ids, ids[-1]] if char in text else ids

    return staticmethod(change)


@pytest.mark.parametrize(
    "text", ["<|end|>", "\u0661", "\U0001f600", "\r\n", "\t" * 7, "x" * 70_000, "\ufffd"]
)
def test_an_engine_that_differs_anywhere_does_not_serve(stand_in, text):
    stand_in.change = spoiling(text)
    tokenizer = Tokenizer(build("byte_level"))
    first = next(each for each in fast.proof_texts(tokenizer.added_ids) if text in each)
    expected = f"{SERVED}: {KNOWN} returns other tokens for {first[:60]!r}"
    assert tokenizer.choice.settle() == tokenizer.choice.reason == expected
    assert tokenizer.choice.fast is None
    assert tokenizer.encode_run(text).ids == tokenizer._engines["token"].encode(text).ids


def test_an_engine_that_refuses_a_vocabulary_or_is_not_there_does_not_serve(stand_in, monkeypatch):
    def refuse(definition):
        raise ValueError("unsupported pre-tokenizer")

    stand_in.from_json_str = staticmethod(refuse)
    reason = Tokenizer(build("byte_level")).choice.settle()
    assert reason == f"{SERVED}: {KNOWN} does not support it: unsupported pre-tokenizer"
    monkeypatch.setitem(sys.modules, "fastokens", None)
    assert Tokenizer(build("byte_level")).choice.settle() == f"{SERVED}: fastokens is not installed"


def test_doctor_says_which_one_serves_and_why(tiny_model):
    renderer = Renderer.from_pretrained(tiny_model)
    found = diagnose(renderer)["tokenizer"]["encoded by"]
    assert found == renderer.tokenizer.choice.reason
    assert (f": equal to {SERVED} over " in found) == INSTALLED


def test_a_text_that_it_gives_up_on_is_encoded_by_tokenizers(stand_in):
    tokenizer = Tokenizer(build("byte_level"))
    tokenizer.choice.settle()
    stand_in.encode_ordinary = lambda self, text: 1 // 0
    text = "one two\nthree"
    assert tokenizer.encode_run(text, starts_to=len(text)).ids == tokenizer._engines["token"].encode(text).ids


def test_it_is_loaded_beside_once_enough_was_encoded_and_changes_nothing(stand_in, monkeypatch):
    monkeypatch.setattr(fast, "_WORTH", 2_000)
    tokenizer = Tokenizer(build("byte_level"))
    assert tokenizer.choice.reason == f"{SERVED}: fastokens is loaded after 2,000 characters"
    before = [tokenizer.encode_run(f"{number} of many").ids for number in range(100)]
    assert tokenizer.choice._thread is None
    tokenizer.encode_run("more " * 1_000)
    tokenizer.choice._thread.join()
    assert tokenizer.choice.fast is not None
    tokenizer._memo.clear()
    assert [tokenizer.encode_run(f"{number} of many").ids for number in range(100)] == before


@pytest.mark.skipif(not INSTALLED, reason="fastokens is not installed")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_encodes_as_its_parent_does():
    """The engine has threads of its own for long texts, which a child lacks."""
    tokenizer = Tokenizer(build("byte_level"))
    tokenizer.choice.settle()
    text = "some words " * 100_000
    expected = tokenizer.encode_run(text).ids
    child = os.fork()
    if not child:
        tokenizer._memo.clear()
        os._exit(0 if tokenizer.encode_run(text).ids == expected else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@given(texts())
@settings(max_examples=40)
def test_the_memo_of_runs_is_bounded_in_bytes(text):
    tokenizer = bounded()
    for number in range(8):
        tokenizer.encode_run(f"{number} {text}", starts_to=number % 2 - 1)
    entries = [(key, tokenizer._memo.get(key)) for key in tokenizer._memo]
    held = sum(
        getsizeof(key) + getsizeof(key[1]) + getsizeof(run.ids) + 28 * len(run.ids) + 4 * len(run.ids)
        for key, run in entries
    )
    assert held <= tokenizer._memo.max_size == 8_000


@cache
def bounded():
    return Tokenizer(build("byte_level"), memo_bytes=8_000)
