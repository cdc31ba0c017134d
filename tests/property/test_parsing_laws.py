"""Laws of parsing: what a template writes is read back, and whatever a model writes is read without error."""

import math
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_cases import REAL
from mmrender import ParsedResponse
from mmrender.messages import Message, ToolCall
from mmrender.model.tokenizer import Tokenizer
from parsing_cases import BODIES, Case, model_case, written_case

TRIMMED = {"glm4_5v": None, "qwen3_5": None, "qwen3_vl_thinking": "\n", "gemma": None, "function_gemma": None}
"""Templates that trim, or that put content where blank text is none, and the characters they trim."""
WITHOUT_CONTENT = ("llama_json", "pythonic")
"""Templates that print no content beside calls."""
WITH_IDS = ("mistral_json", "mistral_call_id", "json_section")
TAGGED = ("xml_function", "arg_key_value", "minimax")

# Texts that look like syntax, numbers or words of a format, and no delimiter.
FRAGMENTS = ["\n", "\n\n", " ", '"', "'", "\\", "{", "}", "<", ">", "</", "7", "-1.5", "true", "null", "None"]
FRAGMENTS += [": ", ", ", "日本", "é", "🙂", "<b>", "</b>", "\t", "a", "word", "=", "&amp;", "\x00", "\x7f"]


def texts(max_size: int = 8) -> st.SearchStrategy[str]:
    # SentencePiece has one mark for a space and for itself.
    plain = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=4)
    pieces = st.lists(st.sampled_from(FRAGMENTS) | plain, max_size=max_size)
    return pieces.map(lambda found: unicodedata.normalize("NFC", "".join(found)))


NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,12}", fullmatch=True)
NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | texts(4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
KINDS = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}


def tools_for(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Definitions whose schemas allow exactly the types of the calls' arguments."""
    properties: dict[str, dict[str, Any]] = {}
    for call in calls:
        known = properties.setdefault(call.name, {})
        for key, value in call.arguments.items():
            known[key] = {"type": KINDS.get(type(value), "object")}
    return [
        {"name": name, "parameters": {"type": "object", "properties": known}}
        for name, known in properties.items()
    ]


@st.composite
def any_messages(draw: st.DrawFn, case: Case) -> Message:
    drawn = draw(st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), max_size=3))
    # A schema has one type for each parameter, so each tool is called once.
    calls = dict(drawn) if case.parser.choice.grammar is not None else {}
    if case.name == "llama_json":
        calls = dict(list(calls.items())[:1])
    made = [
        ToolCall(name=name, arguments=arguments, id=call_id(case, name, index))
        for index, (name, arguments) in enumerate(calls.items())
    ]
    content = trimmed(case, draw(texts()))
    reasoning = trimmed(case, draw(texts())) if case.parser.profile.reasoning is not None else ""
    if made and case.name in WITHOUT_CONTENT:
        content = ""
    return Message(
        role="assistant",
        content=content if content or not made else None,
        reasoning_content=reasoning or None,
        tool_calls=tuple(made),
    )


def trimmed(case: Case, text: str) -> str:
    if case.name not in TRIMMED:
        return text
    text = text.strip(TRIMMED[case.name])
    return text if text.strip() else ""


def call_id(case: Case, name: str, index: int) -> str | None:
    grammar = case.parser.choice.grammar
    assert grammar is not None
    if grammar.id_format is not None:
        return grammar.id_format.format(name=name, index=index)
    return f"call{index:05}" if grammar.name in WITH_IDS else None


def delimiters(case: Case) -> list[str]:
    """What no text of a canonical message holds."""
    found = list(case.tokenizer.added_ids)
    format_, grammar = case.parser.profile.reasoning, case.parser.choice.grammar
    if format_ is not None:
        found += [format_.begin, format_.end]
    if grammar is not None:
        found += [part for part in (*grammar.call, *grammar.argument) if isinstance(part, str)]
        if grammar.section is not None:
            found += [part for part in (grammar.section.begin, grammar.section.end) if part]
    # A lone ">" ends a name, and stands freely elsewhere.
    return [delimiter for delimiter in found if len(delimiter) > 1]


def holds(value: Any, unwanted: re.Pattern[str]) -> bool:
    if isinstance(value, str):
        return unwanted.search(value) is not None
    if isinstance(value, dict):
        return any(holds(item, unwanted) for item in value.values())
    return isinstance(value, list) and any(holds(item, unwanted) for item in value)


def is_canonical(case: Case, message: Message) -> bool:
    unwanted = re.compile("|".join(map(re.escape, delimiters(case))))
    texts = [message.content, message.reasoning_content, *(call.arguments for call in message.tool_calls)]
    grammar = case.parser.choice.grammar
    head = grammar.section.head if grammar and grammar.section else None
    if head is not None and isinstance(message.content, str) and head.match(message.content.strip()):
        return False
    return not any(holds(text, unwanted) for text in texts)


def messages(case: Case) -> st.SearchStrategy[Message]:
    """Messages that a template can print without loss: canonical ones."""
    return any_messages(case).filter(lambda message: is_canonical(case, message))


def exact(value: Any) -> Any:
    """The value with its types beside it, since 1, 1.0 and True are equal in Python."""
    if isinstance(value, dict):
        return {key: exact(item) for key, item in value.items()}
    if isinstance(value, list):
        return [exact(item) for item in value]
    return (type(value), math.copysign(1, value), value) if isinstance(value, float) else (type(value), value)


def assert_reads_back(case: Case, message: Message) -> None:
    tools = tools_for(message.tool_calls)
    prompt_ids, ids = case.completion(message, tools)
    for given_prompt in (prompt_ids, None):
        for tail in ([], [min(case.parser.profile.stop_ids)]):
            parsed = case.parser.parse(ids + tail, tools=tools, prompt_ids=given_prompt)
            assert [attempt.status for attempt in parsed.tool_calls] == ["ok"] * len(message.tool_calls)
            assert parsed.to_message() == message
            assert parsed.stopped == bool(tail)
            assert parsed.reasoning_closed
            for attempt, call in zip(parsed.tool_calls, message.tool_calls, strict=True):
                assert exact(attempt.arguments) == exact(call.arguments)
            assert_spans(parsed, case.tokenizer, ids + tail)


def assert_spans(parsed: ParsedResponse, tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    """Spans lie inside, rise, and their tokens spell the raw text."""
    before = (0, 0)
    for attempt in parsed.tool_calls:
        start, stop = attempt.span
        assert 0 <= start < stop <= len(ids)
        assert before[0] <= start
        assert before[1] - 1 <= start, "attempts share one token at most"
        assert before[1] <= stop
        before = attempt.span
        covering = tokenizer.decode(ids[start:stop])
        if "\ufffd" not in covering and "\ufffd" not in attempt.raw:
            assert attempt.raw in covering
            inner = tokenizer.decode(ids[start + 1 : stop - 1])
            assert "\ufffd" in inner or inner in attempt.raw


@pytest.mark.parametrize(
    ("kind", "added_tokens"),
    [("byte_level", True), ("byte_level", False), ("sentence_piece", True)],
    ids=["tokens", "text", "sentence_piece"],
)
@pytest.mark.parametrize("name", BODIES)
@settings(max_examples=3)
@given(data=st.data())
def test_written_templates_are_read_back(
    name: str, kind: str, added_tokens: bool, data: st.DataObject
) -> None:
    """Also where delimiters are ordinary text."""
    case = written_case(name, added_tokens=added_tokens, kind=kind)
    message = data.draw(messages(case))
    assert_reads_back(case, message)


@pytest.mark.parametrize("name", REAL)
@settings(max_examples=4)
@given(data=st.data())
def test_models_are_read_back(shared_models: Path, name: str, data: st.DataObject) -> None:
    case = model_case(shared_models / name)
    message = data.draw(messages(case))
    assert_reads_back(case, message)


@pytest.mark.parametrize("name", ["glm4_5v", "qwen3_5"])
@settings(max_examples=4)
@given(data=st.data())
def test_a_block_that_the_prompt_closes_is_no_reasoning(
    shared_models: Path, name: str, data: st.DataObject
) -> None:
    case = model_case(shared_models / name, enable_thinking=False)
    drawn = data.draw(messages(case))
    # Where there is nothing to say, GLM writes nothing after the block, which its prompt does.
    content = drawn.content or (None if drawn.tool_calls else "yes")
    message = Message(role="assistant", content=content, tool_calls=drawn.tool_calls)
    assert_reads_back(case, message)
    # The parser of the template's other mode learns from the prompt's tokens that the block is closed.
    tools = tools_for(message.tool_calls)
    prompt_ids, ids = case.completion(message, tools)
    thinking = model_case(shared_models / name)
    assert thinking.parser.parse(ids, tools=tools, prompt_ids=prompt_ids).to_message() == message


@pytest.mark.parametrize("name", [name for name in BODIES if name not in TAGGED])
@settings(max_examples=4)
@given(data=st.data())
def test_a_quoted_argument_may_hold_the_delimiters(name: str, data: st.DataObject) -> None:
    case = written_case(name)
    # Gemma's quotes are tokens that nothing escapes.
    quotes = re.compile(r'<\|"\|>|<escape>')
    spelled = st.sampled_from([text for text in delimiters(case) if not quotes.match(text)])
    text = data.draw(
        st.lists(spelled | texts(2), max_size=4).map("".join).filter(lambda text: '<|"|>' not in text)
    )
    call = ToolCall(name="f", arguments={"text": text}, id=call_id(case, "f", 0))
    assert_reads_back(case, Message(role="assistant", tool_calls=(call,)))


@pytest.mark.parametrize("name", BODIES)
@settings(max_examples=2)
@given(data=st.data())
def test_every_prefix_has_whole_calls_and_at_most_one_unclosed(name: str, data: st.DataObject) -> None:
    case = written_case(name)
    message = data.draw(messages(case).filter(lambda message: bool(message.tool_calls)))
    tools = tools_for(message.tool_calls)
    prompt_ids, ids = case.completion(message, tools)
    for stop in range(len(ids)):
        parsed = case.parser.parse(ids[:stop], tools=tools, prompt_ids=prompt_ids)
        statuses = [attempt.status for attempt in parsed.tool_calls]
        whole = statuses[:-1] if statuses and statuses[-1] == "unclosed" else statuses
        assert set(whole) <= {"ok"}
        assert parsed.to_message().tool_calls == message.tool_calls[: len(whole)]
        assert_spans(parsed, case.tokenizer, ids[:stop])
        if not parsed.reasoning_closed:
            assert (parsed.content, statuses) == ("", [])
            format_ = case.parser.profile.reasoning
            whole_block = (message.reasoning_content or "") + format_.before_end + format_.end
            # The last character may be cut in two.
            assert whole_block.startswith((parsed.reasoning_content or "").rstrip("\ufffd"))


@st.composite
def soups(draw: st.DrawFn, case: Case) -> list[int]:
    """Tokens without sense: any, delimiters, and pieces of calls."""
    grammar, added = case.parser.choice.grammar, sorted(case.tokenizer.added_ids.values())
    pieces = ['{"name": "f", "arguments": {"a": [1, "', '{"name": "f", "parameters": {}}', "[f(a='", "f"]
    pieces += ['"}', "}}", "call:f{a:1}", "functions.f:0", "\n", "</", "é"[:1], "[", "]", ";", '{"name":']
    if grammar is not None:
        pieces += [part for part in (*grammar.call, *grammar.argument) if isinstance(part, str)]
    spelled = st.sampled_from([case.tokenizer.encode(piece) for piece in pieces])
    tokens = st.sampled_from(added) | st.integers(0, case.tokenizer.vocab_size + 3)
    drawn = draw(st.lists(spelled | tokens.map(lambda token: [token]), max_size=30))
    return [token for part in drawn for token in part]


def assert_reads_soup(case: Case, ids: list[int], prompt_ids: list[int] | None) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for offered in (tools, None):
        parsed = case.parser.parse(ids, tools=offered, prompt_ids=prompt_ids)
        assert_spans(parsed, case.tokenizer, ids)
        parsed.content.encode()
        (parsed.reasoning_content or "").encode()
        for attempt in parsed.tool_calls:
            if attempt.status == "ok":
                assert attempt.name
                assert attempt.arguments is not None
                assert offered is None or attempt.name == "f"


@pytest.mark.parametrize("added_tokens", [True, False])
@pytest.mark.parametrize("name", BODIES)
@settings(max_examples=4)
@given(data=st.data())
def test_token_soup_is_read(name: str, added_tokens: bool, data: st.DataObject) -> None:
    case = written_case(name, added_tokens=added_tokens)
    prompt_ids = data.draw(st.none() | soups(case))
    assert_reads_soup(case, data.draw(soups(case)), prompt_ids)


@pytest.mark.parametrize("name", REAL)
@settings(max_examples=4)
@given(data=st.data())
def test_token_soup_of_models_is_read(shared_models: Path, name: str, data: st.DataObject) -> None:
    case = model_case(shared_models / name)
    prompt_ids = data.draw(st.none() | soups(case))
    assert_reads_soup(case, data.draw(soups(case)), prompt_ids)


@pytest.mark.parametrize("name", ["idefics3", "internvl3", "qwen2_5_vl"])
@settings(max_examples=7)
@given(data=st.data())
def test_without_grammar_all_text_is_content(shared_models: Path, name: str, data: st.DataObject) -> None:
    case = model_case(shared_models / name)
    ids = data.draw(soups(case))
    while ids and ids[-1] in case.parser.profile.stop_ids:
        ids.pop()
    assert case.parser.parse(ids).content == case.tokenizer.decode(ids)
