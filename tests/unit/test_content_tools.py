import enum
import functools
import json
import re
import sys
from typing import Any

import numpy as np
import pydantic
import pytest

from kit import assistant, error_of
from mmrender.content import normalize_messages, normalize_tools
from mmrender.content.tools import parse_arguments
from mmrender.errors import MessageError, MissingDependencyError
from mmrender.messages import ToolCall

WRAPPED = {
    "type": "function",
    "function": {"name": "f", "description": None, "parameters": {"type": "object"}},
}
BARE = {"name": "f", "parameters": {"type": "object"}}


def multiply(a: float, b: float = 2.0) -> float:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


def undocumented(a: int) -> int:
    return a


def test_dicts_are_kept_whole_and_none_and_empty_stay_apart():
    first, second = normalize_tools([WRAPPED, BARE])
    assert first is WRAPPED
    assert second is BARE
    assert normalize_tools(None) is None
    assert normalize_tools([]) == ()


def test_models_lose_the_optional_fields_that_are_none():
    class Function(pydantic.BaseModel):
        name: str
        description: str | None = None
        parameters: dict[str, Any]

    class Tool(pydantic.BaseModel):
        type: str = "function"
        function: Function
        strict: bool | None = None

    tool = Tool(function=Function(name="f", parameters={"default": None}))
    assert normalize_tools([tool]) == (
        {"type": "function", "function": {"name": "f", "parameters": {"default": None}}},
    )


def test_functions_give_the_schema_of_transformers_or_say_what_they_lack(monkeypatch, sentence):
    utils = pytest.importorskip("transformers.utils")
    (schema,) = normalize_tools([multiply])
    assert schema == utils.get_json_schema(multiply)
    assert schema["function"]["parameters"]["required"] == ["a"]
    pytest.importorskip("transformers")
    text = error_of(MessageError, normalize_tools, [WRAPPED, undocumented])
    assert re.sub(r"\(Cannot generate .*?\)", "(...)", text) == sentence
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "transformers.utils", None)
    assert error_of(MissingDependencyError, normalize_tools, [multiply]) == sentence


ERRORS = {
    "one dict": WRAPPED,
    "one function": multiply,
    "text": "[]",
    "a name": [BARE, "f"],
    "a partial": [functools.partial(multiply, 1)],
    "a class": [int],
    "no function": [{"type": "function"}],
    "a number": [{"type": "function", "function": {"name": 3}}],
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case, sentence):
    assert error_of(MessageError, normalize_tools, ERRORS[case]) == sentence


# --- calls ---


def calls_of(*calls: Any) -> tuple[ToolCall, ...]:
    (message,) = normalize_messages([assistant("", tool_calls=list(calls))])
    return message.tool_calls


def call_error(call: Any) -> str:
    return error_of(MessageError, calls_of, {"name": "f"}, call)


def nested(depth: int) -> str:
    return '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)


def test_keys_that_apis_add_to_a_call_are_ignored_and_its_legacy_form_is_read():
    function = {"name": "f", "arguments": {"a": (1, None)}, "parsed_arguments": {}}
    call = {"id": "c1", "type": None, "function": function, "index": 0, "extra_content": {"g": 1}}
    assert calls_of(call) == (ToolCall("f", {"a": [1, None]}, id="c1"),)
    legacy = {"name": "f", "arguments": '{"a":1}'}
    (message,) = normalize_messages([assistant(None, function_call=legacy)])
    assert message.tool_calls == (ToolCall("f", {"a": 1}),)


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


@pytest.mark.parametrize("read", [str, json.loads])
def test_nesting_beyond_the_limit_is_a_named_error(read):
    assert parse_arguments(read(nested(100)), "a")
    for text in (nested(101), nested(900), '{"a":' + "[" * 101 + "]" * 101 + "}"):
        with pytest.raises(MessageError, match="nests too deep - expected at most 100 levels"):
            parse_arguments(read(text), "messages[0].tool_calls[0].arguments")


def test_hostile_nesting_is_a_named_error():
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"a": deep}
    for given in (deep, '{"a":' * 90_000):
        with pytest.raises(MessageError, match="nests too deep - expected at most 100 levels"):
            parse_arguments(given, "a")


CALL_ERRORS = {
    "text": "f",
    "a function that is text": {"function": "f"},
    "nothing": {},
    "no name": {"id": "1", "function": {"arguments": "{}"}},
    "another type": {"type": "custom", "name": "f"},
    "unknown key": {"name": "f", "parameters": {"a": 1}},
    "no JSON": {"function": {"name": "f", "arguments": '{"city": Paris}'}},
    "a JSON list": {"function": {"name": "f", "arguments": "[1]"}},
    "a list": {"name": "f", "arguments": [1]},
    "NaN": {"name": "f", "arguments": {"a": [0, float("nan")]}},
    "bytes": {"name": "f", "arguments": {"a": {"b c": b"x"}}},
    "a surrogate": {"name": "f", "arguments": {"\udc00": 1}},
    "a key that is a number": {"name": "f", "arguments": {1: 2}},
}


@pytest.mark.parametrize("case", CALL_ERRORS)
def test_errors_of_calls(case, sentence):
    assert call_error(CALL_ERRORS[case]) == sentence


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', "\ud800", '{"a": 1} x'])
def test_text_that_is_not_json(text):
    assert "arguments are not JSON" in error_of(MessageError, parse_arguments, text, "a")
