import enum
from typing import Any

import numpy as np
import pytest

from mmrender.content.messages import normalize_messages
from mmrender.content.tools import parse_arguments
from mmrender.errors import MessageError
from mmrender.messages import ToolCall


def calls_of(*calls: Any) -> tuple[ToolCall, ...]:
    (message,) = normalize_messages([{"role": "assistant", "content": "", "tool_calls": list(calls)}])
    return message.tool_calls


def error_of(call: Any) -> str:
    with pytest.raises(MessageError) as caught:
        calls_of({"name": "f"}, call)
    return str(caught.value).removesuffix(".")


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    "call",
    [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, null]}'}},
        {
            "id": "c1",
            "function": {"name": "f", "arguments": {"a": (1, None)}},
            "index": 0,
            "extra_content": {"g": 1},
        },
        {"id": "c1", "name": "f", "arguments": '{"a":[1,null]}', "function": None},
        {"id": "c1", "type": None, "name": "f", "arguments": {"a": [1, None]}},
        ToolCall("f", {"a": [1, None]}, id="c1"),
    ],
)
def test_spellings_of_a_call(call):
    assert calls_of(call) == (ToolCall("f", {"a": [1, None]}, id="c1"),)


def test_the_legacy_function_call():
    (message,) = normalize_messages(
        [{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a":1}'}}]
    )
    assert message.tool_calls == (ToolCall("f", {"a": 1}),)


@pytest.mark.parametrize(
    "calls",
    [
        None,
        [],
    ],
)
def test_no_calls(calls):
    (message,) = normalize_messages([{"role": "user", "content": "x", "tool_calls": calls}])
    assert message.tool_calls == ()


class Unit(enum.IntEnum):
    KELVIN = 3


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {}),
        ("", {}),
        (" \n", {}),
        ('{"b": 1, "a": 1.0, "c": true, "d": null}', {"b": 1, "a": 1.0, "c": True, "d": None}),
        ('{"a": 1, "a": 2}', {"a": 2}),
        ('{"a": 18446744073709551617}', {"a": 18446744073709551617}),
        ('{"é": "\\u00e9\\ud83d\\ude00"}', {"é": "é😀"}),
        ({"a": {"x": None}, "b": None}, {"a": {"x": None}, "b": None}),
        ({"a": np.int64(3), "b": np.float32(0.5), "c": np.bool_(True)}, {"a": 3, "b": 0.5, "c": True}),
        ({"a": np.array(["x", "y"], dtype=object)}, {"a": ["x", "y"]}),
        ({"a": Unit.KELVIN, "b": np.str_("x")}, {"a": 3, "b": "x"}),
    ],
)
def test_arguments(given, expected):
    result = parse_arguments(given, "a")
    assert result == expected
    assert [type(value) for value in result.values()] == [type(value) for value in expected.values()]
    assert list(result) == list(expected)


def test_arguments_are_not_shared_with_the_caller():
    arguments = {"a": [{"b": 1}]}
    (call,) = calls_of({"name": "f", "arguments": arguments})
    arguments["a"][0]["b"] = 2
    assert call.arguments == {"a": [{"b": 1}]}


@pytest.mark.parametrize("given", [nested(100), "[" * 100 + "]" * 100, '{"a":' * 99 + "{}" + "}" * 99])
def test_the_deepest_accepted_nesting(given):
    if isinstance(given, str) and given.startswith("["):
        given = '{"a":' + given[1:-1] + "}"
    assert parse_arguments(given, "a")


@pytest.mark.parametrize(
    "given", [nested(101), nested(2000), '{"a":' * 101 + "1" + "}" * 101, '{"a":' * 90000]
)
def test_nesting_beyond_the_limit_is_a_named_error(given):
    with pytest.raises(MessageError, match="nests too deep - expected at most 100 levels"):
        parse_arguments(given, "messages[0].tool_calls[0].arguments")


SHAPE = 'a dict like {"id": …, "function": {"name": …, "arguments": {…}}}'
KEEP = "If a model wrote this call, keep it as text in content instead of tool_calls"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("f", f": cannot be read - expected {SHAPE}, got 'f'"),
        (
            {"function": "f"},
            '.function: cannot be read - expected a dict like {"name": …, "arguments": {…}}, got \'f\'',
        ),
        ({}, f": the tool call names no function - expected {SHAPE}, got no keys"),
        (
            {"id": "1", "function": {"arguments": "{}"}},
            ".function: the tool call names no function - expected a key 'name', got key 'arguments'",
        ),
        (
            {"type": "custom", "name": "f"},
            ".type: unknown type of tool call - expected 'function', got 'custom'",
        ),
        (
            {"name": "f", "parameters": {"a": 1}},
            f".parameters: unknown key in a tool call - expected {SHAPE}, got dict with key 'a'. "
            "Remove the key, or set it to None",
        ),
        (
            {"function": {"name": "f", "arguments": '{"city": Paris}'}},
            ".function.arguments: arguments are not JSON (JSON is malformed: invalid character (byte 9)) - "
            f"expected JSON text of an object, got '{{\"city\": Paris}}'. {KEEP}",
        ),
        (
            {"function": {"name": "f", "arguments": "[1]"}},
            ".function.arguments: arguments are not a JSON object - expected JSON text of an object, got '[1]'",
        ),
        (
            {"name": "f", "arguments": [1]},
            ".arguments: arguments are not a JSON object - expected a dict, or JSON text "
            "of one, got list of length 1",
        ),
        (
            {"name": "f", "arguments": {"a": [0, float("nan")]}},
            ".arguments.a[1]: is not a JSON value - expected text, a finite number, bool, None, list or dict, "
            "got nan",
        ),
        (
            {"name": "f", "arguments": {"a": {"b c": b"x"}}},
            ".arguments.a['b c']: is not a JSON value - expected text, a finite number, bool, None, list or "
            "dict, got bytes of length 1",
        ),
        (
            {"name": "f", "arguments": {"\udc00": 1}},
            ".arguments: the text cannot be encoded as UTF-8 - expected no lone surrogates, got U+DC00 at "
            "position 0. Decode the original bytes with errors='replace'",
        ),
        ({"name": "f", "arguments": {1: 2}}, ".arguments: JSON keys are text - expected str keys, got 1"),
    ],
)
def test_errors(call, text):
    assert error_of(call) == "messages[0].tool_calls[1]" + text


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', "\ud800", '{"a": 1} x'])
def test_text_that_is_not_json(text):
    with pytest.raises(MessageError, match="arguments are not JSON"):
        parse_arguments(text, "a")


def test_calls_that_are_no_list():
    with pytest.raises(MessageError) as caught:
        normalize_messages([{"role": "assistant", "tool_calls": {"name": "f"}}])
    assert str(caught.value) == (
        "messages[0].tool_calls: tool calls come in a list - expected a list, got dict with key 'name'"
    )
