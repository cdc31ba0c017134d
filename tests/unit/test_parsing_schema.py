"""Types of arguments that are written as text."""

from typing import Any

import pytest

from mmrender.parsing.schema import tool_schemas, typed

REFERRED = {"$ref": "#/$defs/count"}


def read(text: str, schema: Any) -> Any:
    return typed({"a": text}, {"properties": {"a": schema}, "$defs": {"count": {"type": "integer"}}})["a"]


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("7", {"type": "string"}, "7"),
        ("7", {"type": "integer"}, 7),
        ("7.0", {"type": "integer"}, 7),
        ("7.5", {"type": "integer"}, "7.5"),
        ("1e-5", {"type": "number"}, 1e-5),
        ("1e999", {"type": "number"}, "1e999"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("٣", {"type": "integer"}, "٣"),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("None", {"type": "null"}, None),
        ("null", {"type": ["string", "null"]}, None),
        ("7", {"type": ["string", "integer"]}, "7"),
        ("seven", {"type": ["integer", "string"]}, "seven"),
        ("null", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("null", {"type": "integer", "nullable": True}, None),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("[1, 2]", {"type": "object"}, "[1, 2]"),
        ('{"k": [NaN]}', {"type": "object"}, '{"k": [NaN]}'),
        ('{"k": 1} ', {"type": "object"}, {"k": 1}),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("true", {"const": True}, True),
        ("7", REFERRED, 7),
        ("7", {"allOf": [REFERRED]}, 7),
        ("7", {"$ref": 3, "anyOf": 4, "enum": 5}, "7"),
        ("7", {}, "7"),
        ("7", None, "7"),
        ("7", {"$ref": "#/properties/a"}, "7"),
    ],
)
def test_a_type_is_taken_from_the_schema(text: str, schema: Any, expected: Any) -> None:
    value = read(text, schema)
    assert (type(value), value) == (type(expected), expected)


@pytest.mark.parametrize("key", ["parameters", "input_schema"])
def test_shapes_of_definitions(key: str) -> None:
    tool = {"name": "f", key: {"properties": {"a": {"type": "integer"}}}}
    for shape in (tool, {"type": "function", "function": tool}):
        assert typed({"a": "7", "b": "7"}, tool_schemas([shape])["f"]) == {"a": 7, "b": "7"}
    assert typed({"a": "7"}, tool_schemas([{"name": "f"}])["f"]) == {"a": "7"}
