"""The laws of rendering over small templates that differ in kind (`tests/templates/`).

Texts and ids are compared with Transformers' own rendering and with the whole tokenizer; which tokens are
sampled, with the definition: full minus prompt, found by rendering each prompt by itself.
"""

import random
from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils import chat_template_utils

from kit import conversations
from mmrender.errors import MessageError, MMRenderError, PlaceholderError, RenderError, TemplateError
from mmrender.sidecar import Repeat
from mmrender.testing.conversations import sample_images
from mmrender.tokens.rendered import CONTENT_KINDS
from small_models import MODELS, NOW, TEMPLATES

NAMES = sorted(MODELS)
IMAGES = sample_images(random.Random(3), 4, largest=60)
every_model = pytest.mark.parametrize("name", NAMES)


@cache
def renderer_of(name, rule="parse"):
    """A renderer; the rule `default` stands for the default by role."""
    return MODELS[name].renderer(**({} if rule == "default" else {"content_special_tokens": rule}))


@cache
def media_tokens(name):
    processor = MODELS[name].processor
    return processor.placeholder_tokens if processor is not None else frozenset()


def literals_of(name):
    return sorted(set(MODELS[name].tokenizer.added_ids) - media_tokens(name))


def conversations_of(name, *, literals=False, rule="parse"):
    model, profile = MODELS[name], renderer_of(name, rule).profile
    return conversations(
        profile,
        images=IMAGES if model.processor is not None else (),
        literals=literals_of(name) if literals else (),
        max_turns=3,
        tools=not model.spec.alternating,
    )


@pytest.fixture(autouse=True, scope="module")
def _one_clock():
    """The reference reads the clock of its own module."""

    class Clock:
        @staticmethod
        def now():
            return NOW

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_template_utils, "datetime", Clock)
        yield


def reference_text(name, messages, options):
    """Transformers' rendering, or None where the template refuses."""
    options = {**options, **(MODELS[name].spec.variables or {})}
    template = chat_template_utils._compile_jinja_template(MODELS[name].source)
    given_ = chat_template_utils._alias_reasoning_fields(MODELS[name].as_given(messages))
    tools = options.pop("tools", None)
    try:
        return template.render(messages=given_, tools=tools, documents=None, **options)
    except Exception:
        return None


def reference_ids(name, text, items):
    """The whole text, placeholders widened in it, encoded at once by the whole tokenizer."""
    pieces = text.split(MODELS[name].spec.placeholder) if items else [text]
    widened = pieces[0]
    for item, piece in zip(items, pieces[1:], strict=True):
        for part in item.expansion:
            widened += part.token * part.count if isinstance(part, Repeat) else part.text
        widened += piece
    return MODELS[name].engine.encode(widened, add_special_tokens=False).ids


def render(name, messages, options, rule="parse"):
    try:
        return renderer_of(name, rule).render(messages, **options)
    except (TemplateError, RenderError, MessageError) as error:
        return error


def test_every_template_has_a_model():
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == set(NAMES)
    for path in TEMPLATES.glob("*.jinja"):
        assert path.read_text("utf-8").startswith("{#"), "a template says in its first line what it is for"


@every_model
def test_text_and_ids_equal_those_of_the_reference_and_spans_cover_every_token_once(name):
    @settings(max_examples=8)
    @given(conversations_of(name, literals=True), st.sampled_from(["parse", "text"]))
    def check(case, rule):
        messages, options = case
        expected = reference_text(name, messages, options)
        ours = render(name, messages, options)
        if expected is None or isinstance(ours, MMRenderError):
            # If the template drops an image, the reference renders and ours refuses by name.
            assert isinstance(ours, PlaceholderError) or (expected is None) == isinstance(ours, TemplateError)
            return
        assert ours.text == expected
        items = ours.multi_modal_data.mm_items.get("image", [])
        assert ours.token_ids == reference_ids(name, expected, items)
        assert_covered(messages, ours if rule == "parse" else render(name, messages, options, rule))

    check()


def assert_covered(messages, ours):
    position = 0
    for span in ours.spans:
        assert span.start == position < span.stop
        assert -1 <= span.message < len(messages)
        assert not span.sampled or messages[span.message]["role"] == "assistant"
        position = span.stop
    assert position == len(ours.token_ids)
    for array in (ours.message_indices, ours.sampled_mask, ours.is_content, ours.loss_mask()):
        assert len(array) == len(ours)
    placed = [place for places in ours.multi_modal_data.mm_placeholders.values() for place in places]
    assert all(place.offset >= 0 and place.offset + place.length <= len(ours) for place in placed)
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    assert len(placed) == sum(part["type"] == "image" for content in contents for part in content)


def with_marks(messages):
    """The same messages, each text with an unmistakable word in it; `(word, message, kind)` of each."""
    marked, words = [], []
    for index, message in enumerate(messages):
        message = dict(message)

        def mark(text, kind, index=index):
            words.append((f"qz{len(words):03}zq", index, kind))
            return f"{text[: len(text) // 2]}{words[-1][0]}{text[len(text) // 2 :]}"

        if isinstance(message["content"], str):
            message["content"] = mark(message["content"], "content")
        else:
            message["content"] = [
                {**part, "text": mark(part["text"], "content")} if part["type"] == "text" else part
                for part in message["content"]
            ]
        if message.get("reasoning_content") is not None:
            message["reasoning_content"] = mark(message["reasoning_content"], "reasoning")
        if message.get("tool_calls"):
            message["tool_calls"] = [
                {**call, "function": {"name": mark("f", "tool_call"), "arguments": {mark("k", "tool_call"): mark("v", "tool_call")}}}
                for call in message["tool_calls"]
            ]  # fmt: skip
        marked.append(message)
    return marked, words


def assert_attributed(text, words):
    for word, message, kind in words:
        start = text.find(word)
        while start >= 0:
            stop = start + len(word)
            spans = [span for span in text.spans if span[0] < stop and span[1] > start]
            assert {(origin.message, origin.kind) for _, _, origin in spans} == {(message, kind)}, (
                word,
                spans,
            )
            assert sum(min(high, stop) - max(low, start) for low, high, _ in spans) == len(word)
            start = text.find(word, start + 1)


def with_text(messages, roles, insert):
    """The same messages with `insert` inside every text of these roles; without it, a letter in its place."""
    changed = []
    for message in messages:
        if message["role"] in roles:
            if isinstance(message["content"], str):
                message = {**message, "content": f"a{insert}b{message['content']}"}
            else:
                content = [
                    {**p, "text": f"a{insert}b{p['text']}"} if p["type"] == "text" else p
                    for p in message["content"]
                ]
                message = {**message, "content": content}
        changed.append(message)
    return changed


@st.composite
def typed_syntax(draw, name):
    """Text that looks like syntax: added tokens whole, doubled, nested, torn, with white space round them."""
    tokens = st.sampled_from(sorted(MODELS[name].tokenizer.added_ids))
    pieces = draw(
        st.lists(
            tokens | st.sampled_from([" ", "\n", "x", "<", "|", ">", "im", "_end"]), min_size=1, max_size=5
        )
    )
    torn = draw(tokens)
    cut = draw(st.integers(0, len(torn)))
    return "".join(pieces) + torn[:cut] + draw(st.sampled_from(["", torn])) + torn[cut:]


@every_model
@pytest.mark.parametrize("rule", ["default", "parse", "text"])
def test_no_text_becomes_syntax(name, rule):
    """No text of users and tools by default; no text in any role becomes a placeholder under any rule."""
    added, media = MODELS[name].tokenizer.added_ids, sorted(media_tokens(name))
    if rule == "default":
        roles, inserts, watched = ("user", "tool"), typed_syntax(name), set(added.values())
    elif media:
        roles, watched = ("system", "user", "assistant", "tool"), {added[token] for token in media}
        pieces = st.sampled_from([*media, "x", "\n", "<"])
        inserts = st.lists(pieces, min_size=1, max_size=4).map("".join)
    else:
        pytest.skip("the template takes no images")

    def counted(rendered):
        return Counter(token for token in rendered.token_ids if token in watched)

    @settings(max_examples=6 if rule == "default" else 3)
    @given(conversations_of(name, rule=rule), inserts)
    def check(case, insert):
        messages, options = case
        plain_ = render(name, with_text(messages, roles, "c"), options, rule)
        typed = render(name, with_text(messages, roles, insert), options, rule)
        if isinstance(plain_, MMRenderError) or isinstance(typed, MMRenderError):
            assert type(plain_) is type(typed)
            return
        assert counted(typed) == counted(plain_)
        assert typed.multi_modal_data.mm_hashes == plain_.multi_modal_data.mm_hashes
        # The user's tokens are still the user's text.
        assert rule != "default" or insert.strip() in typed.text or name in ("macros", "openers")

    check()


@every_model
def test_content_is_attributed_wherever_it_is_printed_and_sampled_is_full_minus_prompt(name):
    """Against the definition, slowly: the prompt of each assistant turn rendered by itself."""
    stops = {MODELS[name].tokenizer.added_ids[token] for token in MODELS[name].spec.stop}

    @settings(max_examples=8)
    @given(conversations_of(name))
    def check(case):
        messages, words = with_marks(case[0])
        options = case[1]
        try:
            assert_attributed(renderer_of(name).render_text(messages, **options), words)
        except TemplateError:
            return
        full = render(name, messages, options)
        if isinstance(full, MMRenderError):
            return
        sampled = {
            index: [span for span in full.spans if span.sampled and span.message == index]
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        }
        for index, spans in sampled.items():
            prompt = (
                render(name, messages[:index], {**options, "add_generation_prompt": True}) if index else None
            )
            if prompt is None or isinstance(prompt, MMRenderError):
                continue
            length = len(prompt)
            if full.token_ids[:length] != prompt.token_ids:
                assert index in {*full.rewritten, *full.answer_only}
                assert bool(spans) == (index in full.answer_only)
                assert not messages[index].get("reasoning_content") or not spans
                continue
            assert index not in {*full.rewritten, *full.answer_only}
            if length == len(full):
                assert not spans, "an empty answer that nothing closes"
                continue
            assert spans[0].start == length
            stop = spans[-1].stop
            assert sum(span.stop - span.start for span in spans) == stop - length, "one run"
            following = full.token_ids[length:]
            first_stop = next((at for at, token in enumerate(following) if token in stops), None)
            if stop < len(full) or first_stop is not None:
                assert full.token_ids[stop - 1] in stops
            # Without special tokens in its content, a turn has one stop token, and it is the last sampled one.
            assert stop == (len(full) if first_stop is None else length + first_stop + 1)
        assert set(full.rewritten) <= set(sampled)
        assert full.loss_mask().sum() == sum(s.stop - s.start for spans in sampled.values() for s in spans)

    check()


def continued_text(name, messages, options, field=True):
    """Transformers' rendering of a conversation whose last message is continued, or None where it refuses."""
    try:
        return chat_template_utils.render_jinja_template(
            [MODELS[name].as_given(messages)],
            options.get("tools"),
            chat_template=MODELS[name].source,
            continue_final_message=field,
            **{key: value for key, value in options.items() if key not in ("tools", "add_generation_prompt")},
            **(MODELS[name].spec.variables or {}),
        )[0][0]
    except Exception:
        return None


@every_model
@pytest.mark.parametrize("field", [True, "reasoning_content"])
def test_a_continued_message_ends_as_that_of_the_reference(name, field):
    """Text, ids and refusals; and nothing of the message counts as sampled (law 4)."""

    @settings(max_examples=5)
    @given(conversations_of(name, literals=True), st.text(" \n\ta<>/", max_size=4))
    def check(case, end):
        messages, options = case
        final = {**messages[-1]}
        if field != True and final["role"] == "assistant":  # noqa: E712 - a name is true, too
            final.update(content="", reasoning_content=f"so far{end}")
        elif isinstance(final["content"], str):
            final["content"] += f" at last{end}"
        elif texts := [part for part in final["content"] or () if part["type"] == "text"]:
            # The reference looks for the text anywhere, and would find an earlier message of the same text.
            last_text = {**texts[-1], "text": f"{texts[-1]['text']} at last{end}"}
            final["content"] = [last_text if part is texts[-1] else part for part in final["content"]]
        messages = [*messages[:-1], final]
        expected = continued_text(name, messages, options, field)
        ours = render(
            name, messages, {**options, "add_generation_prompt": False, "continue_final_message": field}
        )
        if isinstance(ours, MMRenderError):
            # Content after the text would be lost, where the reference loses it.
            assert expected is None or "cut off" in str(ours) or isinstance(ours, PlaceholderError)
            return
        assert ours.text == expected
        items = ours.multi_modal_data.mm_items.get("image", [])
        assert ours.token_ids == reference_ids(name, expected, items)
        last = len(messages) - 1
        assert not any(span.sampled for span in ours.spans if span.message == last)
        assert last not in ours.rewritten

    check()


@every_model
@pytest.mark.parametrize("ends", [True, False])
def test_a_turn_that_was_continued_is_bridged_as_one_that_was_sampled(name, ends):
    """What a bridge appends does not depend on how much of the turn the prompt held."""
    renderer, encode = renderer_of(name), MODELS[name].tokenizer.encode
    stop = [MODELS[name].tokenizer.added_ids[MODELS[name].spec.stop[0]]] if ends else []
    question, following = ([{"role": "user", "content": text}] for text in ("one", "three"))
    answer, field = {"role": "assistant", "content": "It is "}, True
    prompt = renderer.render_ids(question, add_generation_prompt=True)
    format_ = renderer.profile.reasoning
    if format_ is not None and format_.is_open(renderer.profile.generation_prompt):
        answer, field = (
            {"role": "assistant", "content": "", "reasoning_content": "It is"},
            "reasoning_content",
        )
    continued = renderer.render_ids([*question, answer], continue_final_message=field)
    rest = [*encode("a cow."), *stop]
    cases = ((prompt, [*encode("It is"), *rest]), (continued, rest), (continued, stop))
    tails = []
    for ids, completion in cases:
        whole = renderer.bridge_to_next_turn(ids, completion, following)
        tails.append(None if whole is None else whole.token_ids[len(ids) + len(completion) :])
    assert tails[0] == tails[1] == tails[2]
    assert tails[0] is not None or name in ("last_user", "dated")


@every_model
def test_reasoning_that_was_continued_is_closed_as_reasoning_that_was_sampled(name):
    """Wherever the prompt leaves off within a block, also where no token delimits it."""
    renderer, encode = renderer_of(name), MODELS[name].tokenizer.encode
    format_ = renderer.profile.reasoning
    if format_ is None or format_.carrier != "reasoning_content":
        return
    question, following = ([{"role": "user", "content": text}] for text in ("one", "three"))
    thought = {"role": "assistant", "content": "", "reasoning_content": "It is"}
    prompt = renderer.render_ids(question, add_generation_prompt=True)
    # A prompt that goes on longer than any generation prompt.
    long = {**thought, "reasoning_content": "It is a cow, or so. " * 40 + "It is"}
    opened = (
        "" if format_.is_open(renderer.profile.generation_prompt) else format_.begin + format_.after_begin
    )
    starts = [(prompt, encode(f"{opened}It is"))]
    for message in (thought, long):
        try:
            text = renderer.render_ids([*question, message], continue_final_message="reasoning_content")
        except MMRenderError:
            continue
        starts.append((text, []))
    for end, closed in ((" a cow.", False), ("", False), (f" a cow.{format_.before_end}{format_.end}", True)):
        tails = set()
        for ids, begun in starts:
            completion = [*begun, *encode(end)]
            bridge = renderer.bridge_to_next_turn(ids, completion, following)
            assert bridge is not None
            tails.add(bridge.decode(len(ids) + len(completion)))
        assert len(tails) == 1
        assert (format_.end in tails.pop().partition("three")[0]) == (not closed)


@every_model
def test_what_breaks_off_before_the_content_holds_none(name):
    """A completion that ends within what the template writes before content, or before reasoning."""
    renderer = renderer_of(name)
    question = [{"role": "user", "content": "one"}]
    prompt = renderer.render_ids(question, add_generation_prompt=True)
    for fields in ({}, {"reasoning_content": "Hm"}):
        full = renderer.render([*question, {"role": "assistant", "content": "\u6f22", **fields}])
        content = next(span for span in full.spans if span.message == 1 and span.kind in CONTENT_KINDS)
        if full.token_ids[: len(prompt)] != prompt:
            continue
        if fields and name == "spoken_reasoning":
            continue  # the beginning of a word in brackets may be that of any answer
        for stop in range(len(prompt), content.start + 1):
            parsed = renderer.parse_response(full.token_ids[len(prompt) : stop], prompt_ids=prompt)
            assert (parsed.content, (parsed.reasoning_content or "").strip(), parsed.tool_calls) == (
                "",
                "",
                (),
            )


@every_model
def test_turns_are_owned_by_their_messages(name):
    """Every special token of a plain conversation belongs to a turn; none but the first and the prompt's to none."""
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "five"},
    ]
    ours = renderer_of(name).render(messages)
    text = renderer_of(name).render_text(messages)
    owners = [origin.message for _, _, origin in text.spans]
    assert owners == sorted(owners)
    assert set(owners) == {0, 1, 2, 3, 4}
    first = next(span.start for span in ours.spans if span.message >= 0)
    # What ends a text that nothing follows belongs to no message.
    spans = ours.spans[:-1] if name == "end_of_text" else ours.spans
    assert all(span.message >= 0 for span in spans if span.start >= first)
    assert np.array_equal(np.unique(ours.message_indices[first : spans[-1].stop]), np.arange(5))
