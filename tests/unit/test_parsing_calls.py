"""What becomes of calls that are wrong: one status each, and the calls round them stay whole."""

import json
from typing import Any

import pytest

from mmrender import ParsedResponse
from mmrender.parsing import ToolCallAttempt
from parsing_cases import BODIES, written_case

PROPERTIES = {"a": {"type": "integer"}, "b": {"type": "string"}}
TOOLS = [{"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}}]

OK: dict[str, str] = {
    "json_tags": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    "xml_function": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "arg_key_value": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "kimi_sections": '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "mistral_json": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "call00000"}]',
    "mistral_args": '[TOOL_CALLS]f[ARGS]{"a": 1}',
    "mistral_call_id": '[TOOL_CALLS]f[CALL_ID]call00000[ARGS]{"a": 1}',
    "llama_json": '{"name": "f", "parameters": {"a": 1}}',
    "pythonic": "[f(a=1)]",
    "gemma": "<|tool_call>call:f{a:1}<tool_call|>",
    "function_gemma": "<start_function_call>call:f{a:1}<end_function_call>",
    "pythonic_section": "<|tool_call_start|>[f(a=1)]<|tool_call_end|>",
    "json_section": '<tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>',
    "minimax": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n</minimax:tool_call>',
}


IDS = {"kimi_sections": "functions.f:0", "mistral_json": "call00000", "mistral_call_id": "call00000"}


def parse(name: str, text: str, tools: Any = None) -> ParsedResponse:
    case = written_case(name)
    return case.parser.parse(case.tokenizer.encode(text), tools=tools)


def outcome(attempt: ToolCallAttempt) -> tuple[str, str | None, dict[str, Any] | None]:
    return attempt.status, attempt.name, attempt.arguments


@pytest.mark.parametrize("name", BODIES)
def test_a_tool_that_was_not_offered(name):
    parsed = parse(name, OK[name], [{"name": "other", "parameters": {}}])
    assert [attempt.status for attempt in parsed.tool_calls] == ["unknown_tool"]
    assert list((parsed.tool_calls[0].arguments or {}).values()) in ([1], ["1"])
    assert parsed.tool_calls[0].id == IDS.get(name)
    assert parsed.to_message().tool_calls == ()


BROKEN: dict[str, list[tuple[str, str, str | None, dict[str, Any] | None]]] = {
    "json_tags": [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>', 'invalid_json', 'f', None),
        ('<tool_call>\nf(1)\n</tool_call>', 'invalid_json', None, None),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', 'invalid_json', 'f', None),
        ('<tool_call>{"name": "f", "arguments": {"b": "\\ud800"}}</tool_call>', 'invalid_json', 'f', None),
        ('<tool_call>{"name": "f", "arguments": {"b": "a\nb"}}</tool_call>', 'invalid_json', 'f', None),
        ('<tool_call>{"arguments": {"a": 1}}</tool_call>', 'missing_name', None, {'a': 1}),
        ('<tool_call>{"name": "", "arguments": {"a": 1}}</tool_call>', 'missing_name', None, {'a': 1}),
        ('<tool_call>{"name": "f"}</tool_call>', 'malformed', 'f', None),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', 'malformed', 'f', None),
        ('<tool_call>["f"]</tool_call>', 'malformed', None, None),
        ('<tool_call>{"name": "f", "arguments": {}} x</tool_call>', 'malformed', 'f', {}),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', 'unclosed', 'f', {'a': 1}),
        ("<tool_call>" + "[" * 5000 + "</tool_call>", 'invalid_json', None, None),
    ],
    "xml_function": [
        ('<tool_call><function=></function></tool_call>', 'missing_name', None, {}),
        ('<tool_call>f(1)</tool_call>', 'malformed', None, None),
        ('<tool_call><function=f>text</function></tool_call>', 'malformed', 'f', {}),
        ('<tool_call><function=f><parameter=a>1</tool_call>', 'malformed', 'f', None),
        ('<tool_call><function=f><parameter=a>\n1\n</parameter></tool_call>', 'malformed', 'f', {'a': 1}),
        ('<tool_call><function=f g></function></tool_call>', 'unknown_tool', 'f g', {}),
        ('<tool_call><function=f><parameter=a>\n1', 'unclosed', 'f', None),
    ],
    "arg_key_value": [
        ('<tool_call>\n</tool_call>', 'missing_name', None, {}),
        ('<tool_call>f<arg_key>a</arg_key></tool_call>', 'malformed', 'f', None),
        ('<tool_call>f<arg_key>a</arg_key><arg_value>1', 'unclosed', 'f', None),
    ],
    "kimi_sections": [
        ('<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{1}<|tool_call_end|>', 'invalid_json', 'f', None),
        ('<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|>{}<|tool_call_end|>', 'missing_name', None, {}),
        ('<|tool_calls_section_begin|><|tool_calls_section_end|>', 'malformed', None, None),
        ('<|tool_calls_section_begin|>', 'unclosed', None, None),
        ('<|tool_calls_section_begin|>f()<|tool_calls_section_end|>', 'malformed', None, None),
    ],
    "mistral_json": [
        ('[TOOL_CALLS]', 'unclosed', None, None),
        ('[TOOL_CALLS][]', 'malformed', None, None),
        ('[TOOL_CALLS]g', 'invalid_json', None, None),
        ('[TOOL_CALLS][-', 'unclosed', None, None),
    ],
    "mistral_args": [
        ('[TOOL_CALLS]f[ARGS]{a: 1}', 'invalid_json', 'f', None),
        ('[TOOL_CALLS]f[ARGS]{"a": 1', 'unclosed', 'f', None),
        ('[TOOL_CALLS]f[ARGS]{"b": "x\\', 'unclosed', 'f', None),
        ('[TOOL_CALLS]f[ARGS][1]', 'malformed', 'f', None),
        ('[TOOL_CALLS][ARGS]{}', 'missing_name', None, {}),
    ],
    "mistral_call_id": [
        ('[TOOL_CALLS]f[ARGS]{}', 'unclosed', None, None),
    ],
    "json_section": [
        ('<tool_calls>', 'unclosed', None, None),
        ('<tool_calls>[]</tool_calls>', 'malformed', None, None),
        ('<tool_calls>[{"name": "f", "arguments"', 'unclosed', None, None),
        ('<tool_calls>[{"name": "f", "arguments":}]</tool_calls>', 'invalid_json', None, None),
    ],
    "pythonic_section": [
        ('<|tool_call_start|>[f(a=)]<|tool_call_end|>', 'malformed', 'f', None),
        ('<|tool_call_start|>[f(a=1', 'unclosed', 'f', None),
    ],
    "llama_json": [
        ('{"name": "f", "parameters": {"a": 1', 'unclosed', None, None),
        ('{"name": "f", "parameters": {a}}', 'invalid_json', None, None),
    ],
    "pythonic": [
        ('[f(a=1', 'unclosed', 'f', None),
    ],
    "gemma": [
        ('<|tool_call>call:f{a:}<tool_call|>', 'malformed', 'f', None),
        ('<|tool_call>call:f{a:1', 'unclosed', 'f', None),
        ('<|tool_call>call:{}<tool_call|>', 'missing_name', None, {}),
        ('<|tool_call>f{}<tool_call|>', 'malformed', None, None),
    ],
    "minimax": [
        ('<minimax:tool_call><invoke name=""></invoke></minimax:tool_call>', 'missing_name', None, {}),
        ('<minimax:tool_call><invoke name="f">', 'unclosed', 'f', {}),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "status", "tool", "arguments"),
    [(name, *case) for name, cases in BROKEN.items() for case in cases],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_a_broken_call(name, text, status, tool, arguments):
    parsed = parse(name, text, TOOLS)
    assert [outcome(attempt) for attempt in parsed.tool_calls] == [(status, tool, arguments)]
    assert parsed.content == ""
    assert parsed.to_message().tool_calls == ()


@pytest.mark.parametrize(
    ("name", "text", "written"),
    [
        ("json_tags", '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>', '{"a": 1}'),
        ("json_tags", '<tool_call>{ "name" : "f", "arguments" : {"a": 1,} }</tool_call>', '{"a": 1,}'),
        ("json_tags", '<tool_call>{"name": "f", "parameters": {"b": "a\nb"}}</tool_call>', '{"b": "a\nb"}'),
        ("json_tags", '<tool_call>{"name": "f", "arguments": [1, "é"]}</tool_call>', '[1, "é"]'),
        ("json_tags", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', '"{}"'),
        ("json_tags", '<tool_call>{"name": "f", "arguments":}</tool_call>', None),
        ("json_tags", '<tool_call>{"arguments": {a}, "name": "f"}</tool_call>', None),
        ("json_tags", '<tool_call>{"name": "f", "arguments": {"a": 1}}', None),
        ("mistral_args", "[TOOL_CALLS]f[ARGS]{a: 1}", "{a: 1}"),
        ("mistral_args", "[TOOL_CALLS]f[ARGS][1]", "[1]"),
        ("llama_json", '{"name": "f", "parameters": {a}}', None),
    ],
)
def test_the_text_of_arguments_that_are_no_object(name, text, written):
    [attempt] = parse(name, text, TOOLS).tool_calls
    assert attempt.arguments_text == written
    assert written is None or attempt.name == "f"


@pytest.mark.parametrize("name", BODIES)
def test_arguments_that_were_read_have_no_text(name):
    assert [attempt.arguments_text for attempt in parse(name, OK[name], TOOLS).tool_calls] == [None]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json_tags", '<tool_call>{"name": "f", "arguments": {"a" 1}}' + OK["json_tags"]),
        ("xml_function", "<tool_call><function=f><parameter=a>" + OK["xml_function"]),
        ("arg_key_value", "<tool_call>f<arg_key>" + OK["arg_key_value"]),
        ("mistral_args", '[TOOL_CALLS]f[ARGS]{"a' + OK["mistral_args"]),
        ("gemma", "<|tool_call>call:f{a" + OK["gemma"]),
    ],
)
def test_a_broken_call_does_not_swallow_the_next(name, text):
    broken, whole = parse(name, text, TOOLS).tool_calls
    assert broken.status in ("unclosed", "invalid_json")
    assert outcome(whole) == ("ok", "f", {"a": 1})
    assert broken.raw + whole.raw == text


def test_text_outside_calls_is_content_in_order():
    text = f"before\n{OK['json_tags']}\nbetween\n{OK['json_tags']}\nafter"
    assert parse("json_tags", text).content == "before\nbetween\n\nafter"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("llama_json", '{"name": "Ada", "age": 36}'),
        ("llama_json", 'The call was {"name": "f", "parameters": {}}.'),
        ("pythonic", "[f(x)] is an application."),
        ("pythonic", "[link](https://example.org)"),
        ("pythonic", "So [f(a=1)]."),
        ("mistral_args", "[tool_calls]f[ARGS]{}"),
    ],
)
def test_an_answer_that_only_looks_like_a_call(name, answer):
    parsed = parse(name, answer)
    assert (parsed.content, parsed.tool_calls) == (answer, ())


def test_delimiters_that_are_tokens_or_hold_one_count_only_as_tokens():
    case = written_case("json_tags")
    spelled = case.tokenizer.encode_run(OK["json_tags"]).ids
    parsed = case.parser.parse(spelled)
    assert (parsed.content, parsed.tool_calls) == (OK["json_tags"], ())
    case = written_case("gemma")
    ids = case.tokenizer.encode("<|channel>thought\nHm.\n<channel|>Yes.")
    assert case.parser.parse(ids).reasoning_content == "Hm."
    spelled = case.tokenizer.encode_run("<|channel>thought\nHm.\n").ids + case.tokenizer.encode("Yes.")
    assert case.parser.parse(spelled).reasoning_content is None


def test_a_value_may_hold_what_closes_it():
    text = "<tool_call><function=f><parameter=b>\na</parameter>b\n</parameter>\n</function></tool_call>"
    assert parse("xml_function", text).tool_calls[0].arguments == {"b": "a</parameter>b"}


LINES = (
    '<tool_calls>\n{"name": "f", "arguments": {"a": 1}}\n{"name": "f", "arguments": {}}\n</tool_calls>done'
)


@pytest.mark.parametrize(
    ("name", "text", "arguments", "content"),
    [
        ("llama_json", OK["llama_json"] + "; " + OK["llama_json"], [{"a": 1}] * 2, ""),
        ("llama_json", "<|python_tag|>" + OK["llama_json"], [{"a": 1}], ""),
        ("pythonic", "<|python_start|>[f(a=1), f()]<|python_end|>", [{"a": 1}, {}], ""),
        ("json_section", LINES, [{"a": 1}, {}], "done"),
    ],
)
def test_several_lists_and_separators(name, text, arguments, content):
    parsed = parse(name, text)
    assert [outcome(attempt) for attempt in parsed.tool_calls] == [("ok", "f", each) for each in arguments]
    assert parsed.content == content


def test_python_values():
    text = r"""[f(a=[1, -2.5, 1e3], b={'k': "it's", "n": None}, c='\n\x41\u00e9\101\q', d=True, e=false)]"""
    expected = {"a": [1, -2.5, 1000.0], "b": {"k": "it's", "n": None}, "c": "\nAéA\\q", "d": True, "e": False}
    assert parse("pythonic", text).tool_calls[0].arguments == expected
    beyond_a_double = 10**400
    assert parse("pythonic", f"[f(a={beyond_a_double})]").tool_calls[0].arguments == {"a": beyond_a_double}


def test_bytes_that_are_no_text():
    case = written_case("json_tags")
    head = case.tokenizer.encode('é<tool_call>{"name": "f", "arguments": {"b": "é')
    tail = case.tokenizer.encode('"}}</tool_call>')
    # Half of a character before the call, and half of one inside it.
    ids = head[1:-1] + tail
    parsed = case.parser.parse(ids)
    assert (parsed.content, parsed.tool_calls[0].arguments) == ("\ufffd", {"b": "\ufffd"})
    assert parsed.tool_calls[0].span == (1, len(ids))
    assert json.dumps(parsed.tool_calls[0].raw)
    outside = case.parser.parse([-1, *case.tokenizer.encode("a"), 10**9, 2**40])
    assert outside.content == "a"
