import enum
import functools
import json
import sys
from typing import Any

import numpy as np
import pydantic
import pytest

from mmrender.content import normalize_messages, normalize_tools
from mmrender.content.tools import parse_arguments
from mmrender.errors import MessageError, MissingDependencyError
from mmrender.messages import ToolCall

WRAPPED = {
    "type": "function",
    "function": {"name": "f", "description": None, "parameters": {"type": "object"}},
}
BARE = {"name": "f", "parameters": {"type": "object"}}
EXPECTED = (
    'expected a dict like {"type": "function", "function": {"name": …, "parameters": {…}}}, '
    "or a Python function"
)


def multiply(a: float, b: float = 2.0) -> float:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


def undocumented(a: int) -> int:
    return a


def error_of(tools: Any) -> str:
    with pytest.raises(MessageError) as caught:
        normalize_tools(tools)
    return str(caught.value).removesuffix(".")


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


def test_functions_give_the_schema_of_transformers():
    utils = pytest.importorskip("transformers.utils")
    (schema,) = normalize_tools([multiply])
    assert schema == utils.get_json_schema(multiply)
    assert schema["function"]["parameters"]["required"] == ["a"]


def test_functions_need_type_hints_a_docstring_and_transformers(monkeypatch):
    pytest.importorskip("transformers")
    text = error_of([WRAPPED, undocumented])
    assert text.startswith("tools[1]: no schema can be made of undocumented (Cannot generate JSON schema for")
    assert text.endswith(
        "expected type hints and a Google-style docstring that describes each argument. "
        "Or pass its JSON schema"
    )
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "transformers.utils", None)
    with pytest.raises(MissingDependencyError) as caught:
        normalize_tools([multiply])
    assert str(caught.value) == (
        "tools[0]: a tool given as a Python function needs transformers, which is not installed. "
        "Install it with: pip install 'mmrender[hf]', or pass its JSON schema"
    )


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        (WRAPPED, "tools: tools come in a list - expected a list, got dict with keys 'type', 'function'. "
         "Wrap a single tool in a list"),
        (multiply, "tools: tools come in a list - expected a list, got function. Wrap a single tool in a "
         "list"),
        ("[]", "tools: tools come in a list - expected a list, got '[]'"),
        ([BARE, "f"], f"tools[1]: cannot be read - {EXPECTED}, got 'f'"),
        ([functools.partial(multiply, 1)], f"tools[0]: cannot be read - {EXPECTED}, got partial"),
        ([int], f"tools[0]: cannot be read - {EXPECTED}, got type"),
        ([{"type": "function"}], f"tools[0]: the tool names no function - {EXPECTED}, got dict with key "
         "'type'"),
        ([{"type": "function", "function": {"name": 3}}], "tools[0].function: the tool names no function - "
         f"{EXPECTED}, got dict with key 'name'"),
    ],
)  # fmt: skip
def test_errors(tools, text):
    assert error_of(tools) == text


# --- calls ---


def calls_of(*calls: Any) -> tuple[ToolCall, ...]:
    (message,) = normalize_messages([{"role": "assistant", "content": "", "tool_calls": list(calls)}])
    return message.tool_calls


def call_error(call: Any) -> str:
    with pytest.raises(MessageError) as caught:
        calls_of({"name": "f"}, call)
    return str(caught.value).removesuffix(".")


def nested(depth: int) -> str:
    return '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)


def test_keys_that_apis_add_to_a_call_are_ignored_and_its_legacy_form_is_read():
    function = {"name": "f", "arguments": {"a": (1, None)}, "parsed_arguments": {}}
    call = {"id": "c1", "type": None, "function": function, "index": 0, "extra_content": {"g": 1}}
    assert calls_of(call) == (ToolCall("f", {"a": [1, None]}, id="c1"),)
    legacy = {"name": "f", "arguments": '{"a":1}'}
    (message,) = normalize_messages([{"role": "assistant", "content": None, "function_call": legacy}])
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


SHAPE = 'a dict like {"id": …, "function": {"name": …, "arguments": {…}}}'
KEEP = "If a model wrote this call, keep it as text in content instead of tool_calls"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("f", f": cannot be read - expected {SHAPE}, got 'f'"),
        ({"function": "f"},
         '.function: cannot be read - expected a dict like {"name": …, "arguments": {…}}, got \'f\''),
        ({}, f": the tool call names no function - expected {SHAPE}, got no keys"),
        ({"id": "1", "function": {"arguments": "{}"}}, ".function: the tool call names no function - "
         "expected a key 'name', got key 'arguments'"),
        ({"type": "custom", "name": "f"}, ".type: unknown type of tool call - expected 'function', got "
         "'custom'"),
        ({"name": "f", "parameters": {"a": 1}}, ".parameters: unknown key in a tool call - expected "
         f"{SHAPE}, got dict with key 'a'. Remove the key, or set it to None"),
        ({"function": {"name": "f", "arguments": '{"city": Paris}'}}, ".function.arguments: arguments are "
         "not JSON (JSON is malformed: invalid character (byte 9)) - expected JSON text of an object, got "
         f"'{{\"city\": Paris}}'. {KEEP}"),
        ({"function": {"name": "f", "arguments": "[1]"}}, ".function.arguments: arguments are not a JSON "
         "object - expected JSON text of an object, got '[1]'"),
        ({"name": "f", "arguments": [1]}, ".arguments: arguments are not a JSON object - expected a dict, or "
         "JSON text of one, got list of length 1"),
        ({"name": "f", "arguments": {"a": [0, float("nan")]}}, ".arguments.a[1]: is not a JSON value - "
         "expected text, a finite number, bool, None, list or dict, got nan"),
        ({"name": "f", "arguments": {"a": {"b c": b"x"}}}, ".arguments.a['b c']: is not a JSON value - "
         "expected text, a finite number, bool, None, list or dict, got bytes of length 1"),
        ({"name": "f", "arguments": {"\udc00": 1}}, ".arguments: the text cannot be encoded as UTF-8 - "
         "expected no lone surrogates, got U+DC00 at position 0. Decode the original bytes with "
         "errors='replace'"),
        ({"name": "f", "arguments": {1: 2}}, ".arguments: JSON keys are text - expected str keys, got 1"),
    ],
)  # fmt: skip
def test_errors_of_calls(call, text):
    assert call_error(call) == "messages[0].tool_calls[1]" + text


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
