"""Small vocabularies of every kind that chat models have, and text that finds their seams.

Each is trained on the shipped text, and spells some of its added tokens by merges or as pieces too, as vocabularies
do whose special tokens were in the training text.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Engine

from mmrender.testing.tiny_model import _DATA, PRE_TOKENIZER, train_byte_pairs

TURNS = ("<|user|>", "<|end|>", "<image>", "[INST]", "</s>", "<s>", "<||>", "a<b")
"""Added tokens. `<||>` and `</s>` are words of the vocabularies too; the last holds a letter and a symbol."""
BLANKS = ("\n\n", "\n\n\n", "  ", "\t")
"""Added tokens that are white space: no syntax."""
SPELLED = ("</s>", "<s>", "<||>", "<|end|>")


@cache
def _corpus() -> list[str]:
    lines = _DATA.joinpath("corpus.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    return [*lines, "<|user|> hi\n<|end|>\n\n[INST] 1 2 3 </s> <image> a<b <||> x  y\t"]


def _spelling(definition: dict[str, Any], words: Iterable[str]) -> dict[str, Any]:
    """Let the merges of a byte-pair vocabulary spell some words, before they do anything else."""
    model = definition["model"]
    grown = [(word[:at], word[at]) for word in words for at in range(1, len(word))]
    merges = [list(merge) for merge in dict.fromkeys(grown)]
    for token in [piece for merge in merges for piece in (*merge, "".join(merge))]:
        model["vocab"].setdefault(token, len(model["vocab"]))
    model["merges"] = [*merges, *[merge for merge in model["merges"] if merge not in merges]]
    return definition


@cache
def _byte_level() -> str:
    return json.dumps(_spelling(json.loads(train_byte_pairs(600).to_str()), ["<||>"]))


@cache
def _sentence_pieces() -> str:
    engine = Engine(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False
    )
    engine.train_from_iterator(_corpus(), trainer)
    definition = json.loads(engine.to_str())
    definition["added_tokens"] = []
    return json.dumps(_spelling(definition, SPELLED))


@cache
def _unigrams() -> str:
    engine = Engine(models.Unigram())
    engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", *SPELLED], unk_token="<unk>", show_progress=False
    )
    engine.train_from_iterator(_corpus(), trainer)
    definition = json.loads(engine.to_str())
    definition["added_tokens"] = []
    return json.dumps(definition)


def _byte_pairs(normalizer: Any = None, *, prefix: bool = False) -> Engine:
    engine = Engine.from_str(_byte_level())
    engine.normalizer = normalizer
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
        ]
    )
    return engine


def _metaspace(scheme: str) -> Engine:
    engine = Engine.from_str(_sentence_pieces())
    engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    engine.decoder = _pieces_decoder(prefixed=scheme != "never")
    return engine


def _normalized_pieces(*rules: Any, split: bool = False) -> Engine:
    engine = Engine.from_str(_sentence_pieces())
    engine.normalizer = normalizers.Sequence([*rules, normalizers.Replace(" ", "▁")])
    definition = json.loads(engine.to_str())
    definition["pre_tokenizer"] = None
    engine = Engine.from_str(json.dumps(definition))
    if split:
        engine.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    engine.decoder = _pieces_decoder(prefixed=normalizers.Prepend in map(type, rules))
    return engine


def _pieces_decoder(*, prefixed: bool) -> Any:
    """What turns pieces into text; the blank that was prefixed is stripped, as in Llama's."""
    strips = [decoders.Strip(" ", 1, 0)] if prefixed else []
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strips])


def _unigram(normalizer: Any, scheme: str) -> Engine:
    engine = Engine.from_str(_unigrams())
    engine.normalizer = normalizer
    engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
    return engine


def _ignoring_merges() -> Engine:
    definition = json.loads(_byte_pairs().to_str())
    definition["model"]["ignore_merges"] = True
    return Engine.from_str(json.dumps(definition))


KINDS: dict[str, Callable[[], Engine]] = {
    "byte_level": _byte_pairs,
    "byte_level_nfc": lambda: _byte_pairs(normalizers.NFC()),
    "byte_level_nfkc": lambda: _byte_pairs(normalizers.NFKC()),
    "byte_level_lowercase": lambda: _byte_pairs(normalizers.Lowercase()),
    "byte_level_prefix_space": lambda: _byte_pairs(prefix=True),
    "byte_level_whole_words": _ignoring_merges,
    "metaspace_first": lambda: _metaspace("first"),
    "metaspace_always": lambda: _metaspace("always"),
    "metaspace_never": lambda: _metaspace("never"),
    "prepended": lambda: _normalized_pieces(normalizers.Prepend("▁")),
    "replaced": lambda: _normalized_pieces(split=True),
    "replaced_nfkc": lambda: _normalized_pieces(normalizers.NFKC()),
    "unigram_nfkc": lambda: _unigram(normalizers.NFKC(), "always"),
    "unigram_first": lambda: _unigram(normalizers.Sequence([]), "first"),
}
"""Vocabularies without added tokens, by what is special about them."""

POST_PROCESSORS: dict[str, Callable[[Engine], Any]] = {
    "none": lambda _: None,
    "byte level": lambda _: processors.ByteLevel(trim_offsets=True),
    "bos": lambda engine: _template(engine, "<s> $A"),
    "bos and eos": lambda engine: _template(engine, "<s> $A </s>"),
    "llama 3": lambda engine: processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), _template(engine, "<s> $A")]
    ),
    "bert": lambda engine: processors.BertProcessing(
        ("</s>", engine.token_to_id("</s>")), ("<s>", engine.token_to_id("<s>"))
    ),
}


def _template(engine: Engine, single: str) -> Any:
    named = [(token, engine.token_to_id(token)) for token in ("<s>", "</s>") if token in single]
    return processors.TemplateProcessing(single=single, special_tokens=named)


def build(kind: str, added: Sequence[AddedToken] | None = None, post_processor: str = "none") -> Engine:
    """A vocabulary with added tokens: by default all plain, those of turns special."""
    engine = KINDS[kind]()
    if added is None:
        added = [AddedToken(token, special=True, normalized=False) for token in TURNS]
        added += [AddedToken(token, special=False, normalized=False) for token in BLANKS]
    engine.add_tokens(list(added))
    processor = POST_PROCESSORS[post_processor](engine)
    if processor is not None:
        engine.post_processor = processor
    return engine


@st.composite
def flagged_tokens(
    draw: st.DrawFn, *, normalized: bool = False, single_word: bool = True
) -> list[AddedToken]:
    """Added tokens with every flag; `normalized` ones only where asked for."""
    flags = st.booleans() if draw(st.booleans()) else st.just(False)
    never = st.just(False)  # the reference crashes where two tokens swallow the same white space
    return [
        AddedToken(
            token,
            lstrip=draw(flags if token in TURNS else never),
            rstrip=draw(flags if token in TURNS else never),
            single_word=draw(flags) if single_word else False,
            normalized=draw(st.booleans()) if normalized else False,
            special=token in TURNS and draw(st.booleans()),
        )
        for token in (*TURNS, *BLANKS)
    ]


WIDE = str.maketrans({chr(code): chr(code + 0xFEE0) for code in range(0x21, 0x7F)})
"""To full-width letters, which NFKC turns back into ASCII."""


@st.composite
def texts(draw: st.DrawFn, *, without: Sequence[str] = ()) -> str:
    """Text with added tokens whole, torn, wide, in capitals, and white space of all kinds round them."""
    tokens = [token for token in (*TURNS, *BLANKS) if token not in without]
    words = ["hello", " hi", "x", "é", "e\u0301", "日本", "🙂", "1 2", "_", "the end", "ﬁ", "\u2581", "İ"]
    spaces = [" ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\x1c", "\u200b"]
    whole = st.sampled_from(tokens)
    cut = whole.flatmap(lambda token: st.integers(0, len(token)).map(lambda at: token[:at]))
    piece = st.one_of(
        whole,
        st.sampled_from(words),
        st.sampled_from(spaces),
        cut,
        whole.map(lambda token: token.translate(WIDE)),
        whole.map(str.upper),
    )
    text = "".join(draw(st.lists(piece, max_size=8)))
    for token in without:
        text = text.replace(token, "")
    return text
