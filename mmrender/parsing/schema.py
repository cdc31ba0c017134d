"""Types for arguments that are written as text, from the tools' JSON schemas.

In a format such as `<parameter=n>7</parameter>`, the number 7 and the text "7" look the same, and the schema
decides. The first of its types that reads the text is taken, in the schema's order, but null before all
others. Text reads everything. A parameter without a schema stays text, which renders back to the same text.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from mmrender.parsing.literals import number, parse_json

ToolSchemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's arguments, by the tool's name."""

KINDS: dict[type, str] = {
    **{type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string"},
    **{list: "array", tuple: "array", dict: "object"},
}
"""JSON types of Python values."""

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_WORDS: dict[str, dict[str, bool | None]] = {
    "null": {"null": None, "None": None},
    "boolean": {"true": True, "True": True, "false": False, "False": False},
}


def tool_schemas(tools: Sequence[Mapping[str, Any]]) -> ToolSchemas:
    """Schemas of definitions from `mmrender.content.normalize_tools`."""
    schemas = {}
    for tool in tools:
        inner = tool.get("function")
        definition = inner if isinstance(inner, Mapping) else tool
        parameters = definition.get("parameters") or definition.get("input_schema")
        schemas[str(definition.get("name"))] = parameters if isinstance(parameters, Mapping) else {}
    return schemas


def typed(arguments: Mapping[str, str], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments written as text, each of a type that its schema allows."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return dict(arguments)
    return {key: _typed(text, properties.get(key), schema) for key, text in arguments.items()}


def _typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    kinds = dict.fromkeys(kind for kind in _kinds(schema, root) if isinstance(kind, str))
    for kind in sorted(kinds, key=lambda kind: kind != "null"):
        try:
            return _read(kind, text)
        except ValueError:
            continue
    return text


def _kinds(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Iterator[Any]:
    """Names of the types that a schema allows, in its order."""
    if not isinstance(schema, Mapping) or depth > 16:
        return
    named = schema.get("type")
    yield from named if isinstance(named, list | tuple) else (named,)
    if schema.get("nullable") is True:
        yield "null"
    if named is None:
        enum = schema.get("enum")
        values = [*enum] if isinstance(enum, list | tuple) else []
        for value in [*values, schema["const"]] if "const" in schema else values:
            yield KINDS.get(type(value))
    for key in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(key)
        for choice in choices if isinstance(choices, list | tuple) else ():
            yield from _kinds(choice, root, depth + 1)
    yield from _kinds(_referred(schema.get("$ref"), root), root, depth + 1)


def _referred(reference: Any, root: Mapping[str, Any]) -> Any:
    """Resolve a `$ref` within the same schema."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    schema: Any = root
    for step in reference[2:].split("/"):
        key = step.replace("~1", "/").replace("~0", "~")
        schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema


def _read(kind: str, text: str) -> Any:
    """Read a text as a value of a type, or raise `ValueError`."""
    word = text.strip()
    match kind:
        case "string":
            return text
        case "null" | "boolean" if word in _WORDS[kind]:
            return _WORDS[kind][word]
        case "number" | "integer" if _NUMBER.fullmatch(word):
            value = number(word.removeprefix("+"))
            if kind == "number":
                return value
            if isinstance(value, int) or value.is_integer():
                return int(value)
        case "object" | "array":
            parsed = parse_json(text)
            if KINDS.get(type(parsed)) == kind:
                return parsed
    raise ValueError(text)
