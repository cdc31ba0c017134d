"""The laws of tokens, over vocabularies of every kind: equal to the reference, and content is no syntax."""

import json
import pickle
from collections import Counter
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mmrender.errors import SpecialTokenError, TokenizerError
from mmrender.media.processor import Affixes
from mmrender.model.files import ModelDir
from mmrender.model.tokenizer import Tokenizer
from mmrender.renderer import Renderer
from mmrender.sidecar import Repeat, Text
from mmrender.template.known import TemplateSet
from mmrender.template.text import Origin, TracedStr, concat
from mmrender.tokens.encode import DEFAULT_RULES, TokenWriter
from small_models import MODELS, build_engine
from vocabularies import BLANKS, KINDS, POST_PROCESSORS, TURNS, WIDE, build, flagged_tokens, texts

every_kind = pytest.mark.parametrize("kind", KINDS)
IMAGE = "<image>"


@cache
def plain_tokenizer(kind, post_processor="none"):
    return Tokenizer(build(kind, post_processor=post_processor))


def writer_of(tokenizer, rule="text", affixes=lambda bos, *, images: Affixes(), **options):
    rules = dict.fromkeys(DEFAULT_RULES, rule)
    processor = SimpleNamespace(placeholder={"image": IMAGE}, placeholder_tokens=[IMAGE], affixes=affixes)
    return TokenWriter(tokenizer, processor, rules=rules, **options)


def reference_ids(engine, text):
    return engine.encode(text, add_special_tokens=False).ids


@every_kind
def test_added_tokens_of_any_flags_are_found_as_in_the_reference_or_the_model_is_refused(kind):
    opened = Counter()

    @settings(max_examples=8)
    @given(flagged_tokens(normalized=True), texts(), texts())
    def check(added, text, other):
        engine = build(kind, added)
        tokenizer = Tokenizer(engine)
        opened[tokenizer.dependent_token is None] += 1
        if tokenizer.dependent_token is not None:
            assert any(token.normalized for token in added)
            with pytest.raises(TokenizerError, match="differently after other text"):
                writer_of(tokenizer)
            return
        assert tokenizer.encode(text + other) == reference_ids(engine, text + other)
        assert pickle.loads(pickle.dumps(tokenizer)).encode(text) == tokenizer.encode(text)

    check()
    assert opened[True] > opened[False] or kind == "prepended"


@every_kind
@settings(max_examples=8)
@given(texts(without=[IMAGE]))
@example("[INST] hi [/INST] ")
@example("<|user|> hi <|end|> hi")
@example("＜｜ｅｎｄ｜＞hello")
def test_text_goes_on_from_any_token_of_a_text_as_in_the_whole_text(kind, text):
    """No prefix is written within a text: a completion that was cut off is closed there."""
    tokenizer = plain_tokenizer(kind)
    writer = writer_of(tokenizer, "parse")
    whole = tokenizer._engine.encode(text, add_special_tokens=False)
    starts, words = [start for start, _ in whole.offsets], whole.word_ids
    ends = {match.own_stop for match in tokenizer.find(text)}
    for at in range(1, len(starts)):
        # This kind prefixes each word, and what goes on from a token may be no word of its own.
        is_seam = kind != "byte_level_prefix_space" or words[at] != words[at - 1]
        # Text may spell an added token after its normalizer, and goes on from it as text.
        is_seam = is_seam and (
            whole.ids[at - 1] not in tokenizer.all_added_ids or whole.offsets[at - 1][1] in ends
        )
        if is_seam and starts[at] > max(starts[:at]):
            rest = writer.lay_out(traced([("template", text[starts[at] :])]))
            assert writer.write(rest, (), before=whole.ids[:at]).ids == whole.ids


def traced(pieces):
    """Text of template, user and system in turn; each piece is `(author, text)`."""
    laid = []
    for index, (author, text) in enumerate(pieces):
        origin = Origin(index, None if author == "template" else author, "content", f"messages[{index}]")
        scaffold = Origin(index, "user", "scaffold", "")
        laid.append(TracedStr.whole(text, scaffold if author == "template" else origin))
    return concat(laid)


pieces = st.lists(
    st.tuples(st.sampled_from(["template", "user", "system"]), texts(without=[IMAGE])), max_size=6
)


@every_kind
@settings(max_examples=7)
@given(pieces)
def test_rendered_text_encodes_as_in_the_reference_and_content_keeps_its_characters(kind, case):
    tokenizer = plain_tokenizer(kind)
    text = traced(case)
    whole = str.__str__(text)
    expected = tokenizer._engine.encode(whole, add_special_tokens=False)
    for words in (whole, f"{whole}{IMAGE}{whole}"):
        assert tokenizer.encode(words) == reference_ids(tokenizer._engine, words)
    writer = writer_of(tokenizer, "parse")
    encoded = writer.write(writer.lay_out(text), ())
    assert encoded.ids == expected.ids
    # Every token belongs to the piece of its first character.
    owners = [span.message for span in encoded.spans for _ in range(span.start, span.stop)]
    for owner, (start, _) in zip(owners, expected.offsets, strict=True):
        assert owner == next(origin.message for _, stop, origin in text.spans if start < stop)
    # Characters are kept under the rule `text` too, white space of the vocabulary included.
    writer = writer_of(tokenizer)
    decoded = [tokenizer.decode(ids) for ids in (writer.write(writer.lay_out(text), ()).ids, expected.ids)]
    # Some kinds of vocabulary lose capitals, or how much white space there is.
    ours, theirs = ("".join(words.replace("\u2581", " ").lower().split()) for words in decoded)
    assert ours == theirs or "<unk>" in ours


def as_letters(text):
    """The same text with nothing in it that could be part of a token, but white space and word bounds."""
    return "".join(
        char if char.isspace() else "日" if char.isalnum() or char in "_\u200b" else "¦" for char in text
    )


def syntax_of(tokenizer, ids):
    unknown = tokenizer.token_id("<unk>")
    return Counter(token for token in ids if token in tokenizer.syntax_ids and token != unknown)


@every_kind
@settings(max_examples=7)
@given(st.none() | flagged_tokens(), pieces)
@example(None, [("user", "a</s>b"), ("template", "<|end|>")])
@example(None, [("user", "a</s>b".translate(WIDE)), ("template", "<|end|>")])
@example(None, [("user", "<||>"), ("user", "<|END|> </S>")])
def test_no_special_token_comes_out_of_content(kind, added, case):
    tokenizer = plain_tokenizer(kind) if added is None else Tokenizer(build(kind, added))
    writer = writer_of(tokenizer)
    text = traced(case)
    encoded = writer.write(writer.lay_out(text), ())
    safe = concat([piece if author == "template" else as_letters(piece) for author, piece in case])
    safe = str.__str__(safe)
    written = [tokenizer.added_ids[match.token] for match in tokenizer.find(safe)]
    found = syntax_of(tokenizer, encoded.ids)
    assert syntax_of(tokenizer, written) <= found <= syntax_of(tokenizer, tokenizer.encode(safe))


@every_kind
def test_an_error_rule_names_the_content_that_a_vocabulary_spells_a_token_in(kind):
    tokenizer = plain_tokenizer(kind)
    writer = writer_of(tokenizer, "error")
    text = traced([("template", "<|end|>"), ("user", "a</s>b")])
    with pytest.raises(SpecialTokenError) as caught:
        writer.lay_out(text)
    assert caught.value.where == "messages[1]"
    wide = traced([("template", "<|end|>"), ("user", "a</s>b".translate(WIDE))])
    if "nfkc" in kind and "byte" not in kind:
        with pytest.raises(SpecialTokenError) as caught:
            writer.write(writer.lay_out(wide), ())
        assert caught.value.where == "messages[1]"
    else:
        assert not syntax_of(tokenizer, writer.write(writer.lay_out(wide), ()).ids[1:])


@every_kind
@pytest.mark.parametrize("blank", BLANKS)
def test_blanks_in_content_encode_as_in_any_text(kind, blank):
    tokenizer = plain_tokenizer(kind)
    writer = writer_of(tokenizer)
    text = traced([("template", "<|user|>"), ("user", f"a{blank}b{blank}"), ("template", f"{blank}<|end|>")])
    assert writer.write(writer.lay_out(text), ()).ids == reference_ids(tokenizer._engine, str.__str__(text))


@dataclass(frozen=True)
class Item:
    expansion: tuple
    modality: str = "image"


edges = st.sampled_from(["", "", "\n", "\n\n", " ", "x", "the ", "\n\nImage: "])
expansions = st.tuples(edges, st.integers(1, 3), edges, st.booleans(), edges).map(
    lambda drawn: (
        Text(drawn[0]), Repeat("<s>", 1, embeds=False), Repeat(IMAGE, drawn[1]),
        *((Text(f"{drawn[2]}[INST]"), Repeat(IMAGE, 2), Repeat("<||>", 1, embeds=False)) if drawn[3] else ()),
        Text(drawn[4]),
    )
)  # fmt: skip


@every_kind
@settings(max_examples=7)
@given(
    st.none() | flagged_tokens(single_word=False),
    st.lists(st.tuples(texts(without=[IMAGE]), expansions), max_size=3),
    texts(without=[IMAGE]),
)
@example(None, [("<|user|>\n", (Text("\n\n"), Repeat(IMAGE, 2), Text("\n\n")))], "\nwhat?")
def test_an_expansion_encodes_as_if_written_into_the_text(kind, added, case, rest):
    tokenizer = plain_tokenizer(kind) if added is None else Tokenizer(build(kind, added))
    writer = writer_of(tokenizer, "parse")
    laid, whole = [], ""
    for text, expansion in case:
        laid += [("user", text), ("template", IMAGE)]
        whole += text + "".join(p.text if isinstance(p, Text) else p.token * p.count for p in expansion)
    text = traced([*laid, ("user", rest)])
    layout = writer.lay_out(text)
    cuts = [stop for _, stop, _ in text.spans]
    encoded = writer.write(layout, [Item(expansion) for _, expansion in case], cuts)
    assert encoded.ids == reference_ids(tokenizer._engine, whole + rest)
    assert sum(span.stop - span.start for span in encoded.spans) == len(encoded.ids)
    image = tokenizer.token_id(IMAGE)
    for found, (_, expansion) in zip(encoded.ranges, case, strict=True):
        placed = encoded.ids[found.offset : found.offset + found.length]
        assert found.num_embeds == sum(p.count for p in expansion if isinstance(p, Repeat) and p.embeds)
        spans = found.embed_spans if found.embed_spans is not None else ((0, found.length),)
        assert all(token == image for start, stop in spans for token in placed[start:stop])
    assert list(encoded.cuts) == cuts


@every_kind
@pytest.mark.parametrize("post_processor", POST_PROCESSORS)
def test_the_post_processor_writes_round_a_prompt_once(kind, post_processor):
    tokenizer = plain_tokenizer(kind, post_processor)
    reference = PreTrainedTokenizerFast(tokenizer_object=build(kind, post_processor=post_processor))
    writer = writer_of(tokenizer, "parse", bos_token="<s>", affixes=lambda _, *, images: None)

    @settings(max_examples=4)
    @given(texts(without=[IMAGE]), st.sampled_from(["", "<s>", " <s>"]))
    def check(text, start):
        text = start + text
        layout = writer.lay_out(traced([("template", text)]))
        encoded = writer.write(layout, ())
        assert encoded.ids == reference(text, add_special_tokens=not text.startswith("<s>")).input_ids
        assert sum(span.stop - span.start for span in encoded.spans) == len(encoded.ids)
        # What is appended to other tokens gets none.
        if "first" not in kind:
            before, bare = tokenizer.encode("<s>"), reference(text, add_special_tokens=False).input_ids
            assert writer.write(layout, (), before=[*before]).ids == before + bare

    check()


@pytest.mark.parametrize("ends", [False, True])
def test_what_the_post_processor_writes_is_never_sampled_and_bridged_only_where_it_begins_a_prompt(ends):
    model = MODELS["reasoning_optional"]
    engine = build_engine([*model.spec.special, "<s>", "</s>"])
    bare = Tokenizer(engine)
    engine = build_engine([*model.spec.special, "<s>", "</s>"])
    engine.post_processor = POST_PROCESSORS["bos and eos" if ends else "bos"](engine)
    plain, written = (model.renderer(tokenizer=tokenizer) for tokenizer in (bare, Tokenizer(engine)))
    bos, eos = ([engine.token_to_id(token)] for token in ("<s>", "</s>"))
    conversation = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    following = [{"role": "user", "content": "three"}]
    expected, found = plain.render(conversation), written.render(conversation)
    assert found.token_ids == [*bos, *expected.token_ids, *(eos if ends else [])]
    assert found.rewritten == ((1,) if ends else ())
    assert found.sampled_mask.tolist() == [
        False, *(expected.sampled_mask & (not ends)).tolist(), *([False] if ends else [])
    ]  # fmt: skip
    prompt = written.render_ids(conversation[:1], add_generation_prompt=True)
    completion = expected.token_ids[expected.sampled_mask.argmax() :][: expected.sampled_mask.sum()]
    bridged = written.bridge_to_next_turn(prompt, completion, following)
    if ends:
        assert bridged is None
        assert "ends every prompt" in written.why_not_bridged
    else:
        whole = written.render_ids([*conversation, *following], add_generation_prompt=True)
        assert bridged.token_ids == whole
        assert whole.count(bos[0]) == 1


INSTRUCTED = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s> {% endif %}{% endfor %}"
)


@every_kind
def test_a_completion_that_was_cut_off_is_closed_as_its_content_is(kind):
    """Where prompts end in text and the turn begins with a blank, as LLaVA's do."""
    tokenizer = Tokenizer(build(kind))
    stop = tokenizer.added_ids["</s>"]
    templates = TemplateSet({"default": INSTRUCTED}, tokenizer, model_stop_ids=[stop])
    renderer = Renderer(templates, tokenizer)
    prompt = renderer.render_ids([{"role": "user", "content": "one"}], add_generation_prompt=True)
    stable = 0
    for content in ("", "hi", "hi the end", "日本", " ", " hi", "\n"):
        turns = [("user", "one"), ("assistant", content), ("user", "two")]
        messages = [{"role": role, "content": text} for role, text in turns]
        whole = renderer.render_ids(messages, add_generation_prompt=True)
        if whole[: len(prompt)] == prompt:
            stable += 1
            completion = whole[len(prompt) : whole.index(stop)]
            bridged = renderer.bridge_to_next_turn(prompt, completion, messages[2:])
            assert bridged.token_ids == whole, content
    assert stable


named = st.sampled_from([*TURNS, "<new>", "<other>"])
described = st.builds(
    lambda text, **flags: {"content": text, **flags},
    named, lstrip=st.booleans(), rstrip=st.booleans(), normalized=st.booleans(), special=st.booleans(), single_word=st.booleans(),
)  # fmt: skip
configs = st.fixed_dictionaries(
    {},
    optional={
        "bos_token": named,
        "eos_token": named | described.map(lambda token: {"__type": "AddedToken", **token}),
        "image_token": named,
        "extra_special_tokens": st.lists(named, max_size=3, unique=True)
        | st.dictionaries(st.just("x_token"), named),
        "additional_special_tokens": st.lists(named, max_size=2, unique=True),
        "add_bos_token": st.booleans(),
        "legacy": st.booleans(),
    },
)


@settings(max_examples=30)
@given(
    configs,
    st.none() | st.lists(described, max_size=3, unique_by=lambda token: token["content"]),
    st.booleans(),
    texts(),
)
def test_a_directory_gives_the_tokenizer_that_transformers_loads(
    tmp_path_factory, config, listed, has_legacy, text
):
    directory = tmp_path_factory.mktemp("model")
    engine = build("byte_level", [AddedToken(token, special=True) for token in ("<s>", *TURNS[:4])], "bos")
    engine.save(str(directory / "tokenizer.json"))
    config = {**config, "tokenizer_class": "PreTrainedTokenizerFast"}
    if listed is not None:
        ids = {token: engine.token_to_id(token) for token in TURNS}
        fresh = iter(range(engine.get_vocab_size(), 10_000))
        config["added_tokens_decoder"] = {
            str(ids[token["content"]] if ids.get(token["content"]) is not None else next(fresh)): token
            for token in listed
        }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if has_legacy:
        (directory / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<new>"}))
        (directory / "added_tokens.json").write_text(json.dumps({"<late>": engine.get_vocab_size()}))
    ours = Tokenizer.load(ModelDir(directory))
    theirs = AutoTokenizer.from_pretrained(directory)
    assert ours._engine.get_added_tokens_decoder() == theirs._tokenizer.get_added_tokens_decoder()
    assert [*ours.affixes[0], *ours.encode("a"), *ours.affixes[1]] == theirs("a").input_ids
    if ours.dependent_token is None:
        assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize(
    ("kind", "tokenizer_class"),
    [
        ("prepended", "LlamaTokenizer"),
        ("metaspace_first", "LlamaTokenizer"),
        ("replaced", "GemmaTokenizer"),
        ("byte_level_nfc", "Qwen2Tokenizer"),
        ("byte_level", "GPT2Tokenizer"),
    ],
)
def test_a_tokenizer_that_transformers_rebuilds_is_equal_once_transformers_has_saved_it(
    tmp_path, kind, tokenizer_class, legacy, prefix
):
    engine = build(kind, post_processor="bos")
    engine.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": tokenizer_class, "legacy": legacy, "add_prefix_space": prefix}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<s>"}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    theirs.save_pretrained(tmp_path / "saved")
    ours = Tokenizer.load(ModelDir(tmp_path / "saved"))

    @settings(max_examples=5)
    @given(texts())
    def check(text):
        assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids

    check()
    assert [*ours.affixes[0], *ours.encode("a"), *ours.affixes[1]] == theirs("a").input_ids
