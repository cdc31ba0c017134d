"""Vocabularies in other formats give the tokens of the library that they belong to, or are refused."""

import json
import random
from functools import cache, partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit import error_of
from mmrender.errors import RenderError, TokenizerError
from mmrender.gateway.protocols import PROTOCOLS
from mmrender.model import convert
from mmrender.model.convert import FOLDER, open_model, with_tokenizer
from mmrender.model.files import ModelDir
from mmrender.model.spelling import TokenSpeller
from mmrender.model.tokenizer import Tokenizer
from mmrender.renderer import Renderer
from mmrender.template.text import plain
from mmrender.testing.agents.recordings import records
from mmrender.testing.conversations import ConversationMaker
from mmrender.testing.parity import check_parity
from mmrender.testing.tiny_model import ADDED_TOKENS, PRE_TOKENIZER, SPECIAL_TOKENS
from other_formats import (
    SlowBytePairs,
    added_tokens,
    byte_pairs,
    needs,
    sample_texts,
    with_code_of_pieces,
    with_merges,
    with_pieces,
    with_ranks,
    write_tekken,
)
from vocabularies import texts

pytest.importorskip("transformers", reason="converts by Transformers")

NUM_TEXTS = 300
TOKENS = (*SPECIAL_TOKENS, *ADDED_TOKENS)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ (c.function or c) | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Model:
    """A directory, its renderer and the encoding of its format's own library, which reads added tokens as syntax."""

    def __init__(self, folder, encode, **options):
        self.folder, self.encode = folder, encode
        self.renderer = Renderer.from_pretrained(folder, image_backend="pil", **options)
        self.tokenizer = self.renderer.tokenizer
        self.added = sorted(self.tokenizer.added_ids)


def pieces_model(folder, **options):
    """SentencePiece by the slow class of Transformers, without its blank before a first word."""
    needs("sentencepiece", "google.protobuf")
    from transformers import AutoTokenizer
    from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

    added = [*AutoTokenizer.from_pretrained(with_pieces(folder, **options)).get_added_vocab()]
    slow = SentencePieceBackend.from_pretrained(folder, legacy=False, extra_special_tokens=added)

    def encode(text):
        return slow(text, add_special_tokens=False).input_ids

    return Model(folder, encode)


def merges_model(folder):
    """Byte pairs by the published algorithm."""
    pytest.importorskip("regex")
    with_merges(folder)
    slow = SlowBytePairs(folder, PRE_TOKENIZER, TOKENS)
    ids = {entry["content"]: int(index) for index, entry in added_tokens(len(byte_pairs()[0])).items()}
    return Model(folder, partial(slow.encode, added_ids=ids))


def ranks_model(folder):
    """tiktoken by the model's own class, a slow one of Transformers."""
    needs("tiktoken")
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(with_ranks(folder), trust_remote_code=True)
    return Model(folder, lambda text: slow.model.encode(text, allowed_special="all"))


def tekken_model(folder):
    """mistral-common, which never reads added tokens as syntax."""
    needs("mistral_common", "tiktoken")
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    slow = Tekkenizer.from_file(write_tekken(folder) / "tekken.json")
    return Model(folder, partial(slow.encode, bos=False, eos=False))


BUILDERS = {"pieces": pieces_model, "merges": merges_model, "ranks": ranks_model, "tekken": tekken_model}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return cache(lambda name: BUILDERS[name](tmp_path_factory.mktemp("formats") / name))


def ours(model, text, *, parse):
    """Tokens within a prompt: a blank that the first word of a prompt may get is left out."""
    tokenizer, ids, position = model.tokenizer, [], 0
    for match in tokenizer.find(text) if parse else ():
        ids += (
            tokenizer.encode_run(text[position : match.start], before="text").ids
            if match.start > position
            else []
        )
        ids.append(tokenizer.added_ids[match.token])
        position = match.stop
    return ids + (tokenizer.encode_run(text[position:], before="text").ids if position < len(text) else [])


@pytest.mark.parametrize("name", BUILDERS)
def test_hundreds_of_texts_have_the_tokens_of_the_library(models, name):
    model = models(name)
    parse = name != "tekken"
    for text in sample_texts(NUM_TEXTS, model.added if parse else ()):
        assert ours(model, text, parse=parse) == model.encode(text), repr(text)


@pytest.mark.parametrize("name", BUILDERS)
def test_any_text_has_the_tokens_of_the_library(models, name):
    model = models(name)
    parse = name != "tekken"

    @settings(max_examples=60)
    @given(texts() | st.text(st.characters(exclude_categories=["Cs"])))
    def check(text):
        assert ours(model, text, parse=parse) == model.encode(text)

    check()


@pytest.mark.parametrize("name", BUILDERS)
def test_decoding_gives_the_text_again(models, name):
    model = models(name)
    speller = TokenSpeller(model.tokenizer)
    for text in sample_texts(200, seed=3):
        ids = model.tokenizer.encode(f"a{text}")
        expected = (
            f"a{text}" if name != "merges" else model.tokenizer._engine.normalizer.normalize_str(f"a{text}")
        )
        assert model.tokenizer.decode(ids) == expected
        assert b"".join(speller.spell_all(ids)).decode().removeprefix(" ") == expected


def conversations(profile, shared_agents):
    maker = ConversationMaker(profile, literals=[token for token in TOKENS if "pad" not in token], odd=True)
    source = random.Random(1)
    made = [maker.make(source) for _ in range(15)]
    for path in sorted(shared_agents.glob("*.jsonl")):
        for _, name, record in [*records(path)][::3]:
            call = PROTOCOLS[name].read(record["body"], record["headers"])
            if not any(True for message in call.messages for _ in message.media()):
                made.append((call.messages, {"tools": call.tools}))
    return made


@pytest.mark.parametrize("name", ["pieces", "merges", "ranks"])
def test_conversations_have_the_tokens_of_the_library(models, name, shared_agents):
    model = models(name)
    renderer = Renderer.from_pretrained(
        model.folder,
        chat_template=CHATML,
        image_backend="pil",
        content_special_tokens="parse",
        unprinted="allow",
    )
    count = 0
    for messages, options in conversations(renderer.profile, shared_agents):
        try:
            text = plain(renderer.render_text(messages, **options))
        except RenderError:  # an option of one conversation does not fit its end
            continue
        count += 1
        assert renderer.render_ids(messages, **options) == model.encode(text)
    assert count > 30


@pytest.mark.parametrize("name", ["pieces", "merges", "ranks"])
def test_conversations_with_images_equal_those_of_transformers(models, name):
    report = check_parity(models(name).folder, image_backend="pil", cases=5)
    assert (report.mismatch, report.not_compared, report.cases) == (None, None, 5)
    assert report.images > 0


def test_pieces_that_no_file_declares_are_refused(tmp_path, sentence):
    needs("sentencepiece", "google.protobuf")
    folder = with_pieces(tmp_path / "model")
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    del config["added_tokens_decoder"]
    file.write_text(json.dumps(config))
    assert error_of(TokenizerError, open_model, folder).replace(str(folder), "MODEL") == sentence


def test_a_class_that_normalizes_otherwise_is_refused(tmp_path, sentence):
    needs("sentencepiece", "google.protobuf")
    folder = with_pieces(tmp_path / "model", normalization_rule_name="nfkc")
    assert error_of(TokenizerError, open_model, folder).replace(str(folder), "MODEL") == sentence


def test_unigrams_with_bytes_are_refused(tmp_path):
    # The engine takes `<0x0A>` in text for the byte, and SentencePiece does not.
    needs("sentencepiece", "google.protobuf")
    folder = with_pieces(tmp_path / "model", kind="TokenizersBackend", model_type="unigram")
    assert error_of(TokenizerError, open_model, folder).startswith(f"{folder / 'tokenizer.model'}: ")


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-300], lambda data: b"\n\xff" + data, lambda _: b"\n" * 99]
)
def test_a_damaged_sentencepiece_file_is_refused_with_its_name(tmp_path, damage):
    needs("sentencepiece", "google.protobuf")
    folder = with_pieces(tmp_path / "model")
    file = folder / "tokenizer.model"
    file.write_bytes(damage(file.read_bytes()))
    assert error_of(TokenizerError, open_model, folder).startswith(f"{file}: tokenizer.model cannot be ")


def test_gemma_has_no_blank_before_the_first_word(tmp_path):
    options = {"add_dummy_prefix": False, "bos_piece": "<bos>", "eos_piece": "<eos>", "pad_piece": "<pad>"}
    ids = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
    model = pieces_model(tmp_path / "model", kind="GemmaTokenizer", **options, **ids)
    for text in sample_texts(200, model.added):
        assert model.tokenizer.encode(text) == model.encode(text), repr(text)


@pytest.mark.parametrize("legacy", [False, True])
def test_the_blank_before_words_is_where_transformers_writes_it(tmp_path, legacy):
    needs("sentencepiece", "google.protobuf")
    from transformers import AutoTokenizer

    folder = with_pieces(tmp_path / "model")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "legacy": legacy}))
    reference = AutoTokenizer.from_pretrained(folder)
    tokenizer = Tokenizer.load(open_model(folder))
    for text in sample_texts(200, sorted(tokenizer.added_ids)):
        assert tokenizer.encode(text) == reference(text, add_special_tokens=False).input_ids, repr(text)


@pytest.mark.parametrize("prefix", [False, True])
def test_a_slow_class_of_the_directory_is_converted_with_the_flag(tmp_path, prefix):
    needs("sentencepiece", "google.protobuf")
    from transformers import AutoTokenizer

    folder = with_code_of_pieces(tmp_path / "model", add_dummy_prefix=prefix)
    slow = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    tokenizer = Tokenizer.load(open_model(folder, trust_remote_code=True))
    for text in sample_texts(300, sorted(tokenizer.added_ids)):
        assert tokenizer.encode(text) == slow(text, add_special_tokens=False).input_ids, repr(text)


def test_a_conversion_is_kept_and_follows_its_files(tmp_path, monkeypatch):
    monkeypatch.setenv("MMRENDER_CACHE", str(tmp_path / "cache"))
    folder = with_merges(tmp_path / "model")
    converted = open_model(folder)
    kept = list((tmp_path / "cache" / FOLDER).iterdir())
    assert len(kept) == 1
    with monkeypatch.context() as patch:
        patch.setattr(convert, "_convert", None)
        assert open_model(folder).conversion == converted.conversion
    kept[0].write_bytes(kept[0].read_bytes()[:-9])
    assert open_model(folder).conversion == converted.conversion
    lines = (folder / "merges.txt").read_text().splitlines(keepends=True)
    (folder / "merges.txt").write_text("".join(lines[:-1]))
    assert open_model(folder).conversion != converted.conversion
    assert "equal to transformers" in converted.conversion.proof


def test_the_code_of_a_directory_runs_only_with_the_flag(tmp_path, sentence):
    needs("tiktoken")
    folder = with_ranks(tmp_path / "model")
    code = (folder / "tokenization_small.py").read_text()
    (folder / "tokenization_small.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n{code}")
    read = open_model(folder)
    assert not (tmp_path / "ran").exists()
    run = open_model(folder, trust_remote_code=True)
    assert (tmp_path / "ran").exists()
    assert read.conversion == run.conversion
    (folder / "tiktoken.model").rename(folder / "tokenizer.model")
    with_pieces(tmp_path / "pieces")
    (folder / "tokenizer.model").write_bytes((tmp_path / "pieces" / "tokenizer.model").read_bytes())
    (folder / "config.json").write_text(json.dumps({"model_type": "unheard"}))
    assert error_of(TokenizerError, open_model, folder).replace(str(folder), "MODEL") == sentence


def test_the_special_tokens_of_the_class_are_named_for_templates(tmp_path):
    folder = with_merges(tmp_path / "model")
    model = with_tokenizer(ModelDir(folder))
    assert model.special_tokens["unk_token"] == "<|endoftext|>"
    assert "unk_token" not in ModelDir(folder).special_tokens
