"""Deltas of any answer, in any format of calls, however the tokens arrive."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit import error_of
from mmrender import ParsedResponse
from mmrender.errors import EngineReplyError
from mmrender.gateway.deltas import TextDeltas, without_stop
from mmrender.messages import Message, ToolCall
from parsing_cases import BODIES, written_case

TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"at": {}}}},
    }
    for name in ("look", "go")
]
ONE_CALL = {"llama_json"}
WITHOUT_TEXT = {"llama_json", "pythonic"}
"""Formats whose calls come without text."""

words = st.text(st.sampled_from("ab <>/[{\n😀é日"), max_size=60)
calls = st.lists(
    st.builds(
        lambda name, at: ToolCall(name, {"at": at}, f"functions.{name}:0"),
        st.sampled_from(["look", "go"]),
        st.one_of(st.integers(0, 9), words),
    ),
    max_size=2,
)


def sizes_of(draw, length):
    """Numbers of tokens that arrive at a time, whose sum is the length."""
    sizes = []
    while length:
        size = draw(st.integers(1, min(length, 9)))
        sizes.append(size)
        length -= size
    return sizes


def run(parse, ids, sizes, **options):
    """The deltas, and the parsed whole."""
    sent = []
    deltas = TextDeltas(parse, sent.append, **options)
    begin = 0
    for size in sizes:
        deltas.add(ids[begin : begin + size], [-1.0] * size, None)
        begin += size
    whole = parse(ids)
    deltas.finish(whole.reasoning_content, whole.content)
    return sent, whole


def texts(sent, field):
    return "".join(delta.text for delta in sent if delta.field == field)


@pytest.mark.parametrize("is_added", [True, False])
@pytest.mark.parametrize("name", BODIES)
@settings(max_examples=6)
@given(data=st.data())
def test_deltas_add_up_to_the_answer(name, is_added, data):
    case = written_case(name, added_tokens=is_added)
    called = data.draw(calls)
    if name in ONE_CALL:
        called = called[:1]
    message = Message(
        role="assistant",
        content="" if called and name in WITHOUT_TEXT else data.draw(words),
        reasoning_content=data.draw(st.none() | words.filter(str.strip)),
        tool_calls=tuple(called),
    )
    prompt, ids = case.completion(message, TOOLS)

    def parse(token_ids):
        return case.parser.parse(token_ids, tools=TOOLS, prompt_ids=prompt)

    sent, whole = run(parse, ids, sizes_of(data.draw, len(ids)), offers_tools=True)
    assert texts(sent, "content") == whole.content
    assert texts(sent, "reasoning") == (whole.reasoning_content or "")
    fields = [delta.field for delta in sent]
    assert fields == sorted(fields, reverse=True)
    assert all(delta.text for delta in sent)


@given(
    text=words,
    sizes=st.lists(st.integers(1, 9), min_size=200, max_size=200),
    stop=st.sampled_from(["a", "b <", "ab"]),
)
def test_a_stop_string_is_never_sent_in_part(text, sizes, stop):
    text = text.replace(stop, "")
    ids = [*text.encode(), *stop.encode(), 33]  # the last token goes on behind it

    def parse(token_ids):
        return ParsedResponse(bytes(token_ids).decode("utf-8", "replace"))

    sent = []
    deltas = TextDeltas(parse, sent.append, stops=[stop])
    begin = 0
    for size in sizes:
        deltas.add(ids[begin : begin + size])
        begin += size
    answer = without_stop(parse(ids).content, stop)
    assert answer.startswith(texts(sent, "content"))
    deltas.finish(None, answer)
    assert texts(sent, "content") == answer


def test_text_comes_as_soon_as_it_is_certain():
    def parse(token_ids):
        return ParsedResponse("".join(chr(token) for token in token_ids))

    sent = []
    deltas = TextDeltas(parse, sent.append, index=3)
    for letter in "One two.":
        deltas.add([ord(letter)])
    assert [delta.text for delta in sent] == ["O", "n", "e", " t", "w", "o", "."]
    assert {delta.index for delta in sent} == {3}


def test_parsing_costs_a_multiple_of_the_answer():
    lengths = []

    def parse(token_ids):
        lengths.append(len(token_ids))
        return ParsedResponse("a" * len(token_ids))

    deltas = TextDeltas(parse, lambda delta: None)
    for _ in range(20_000):
        deltas.add([1])
    assert sum(lengths) < 70 * 20_000


def test_an_answer_that_parses_differently_as_a_whole_is_an_error(sentence):
    deltas = TextDeltas(lambda token_ids: ParsedResponse("a" * len(token_ids)), lambda delta: None)
    deltas.add([1, 2])
    assert error_of(EngineReplyError, deltas.finish, "aa", "") == sentence
