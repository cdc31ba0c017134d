"""Types for arguments that are written as text, from the tools' JSON schemas.

A format such as `<parameter=n>7</parameter>` cannot tell the number 7 from the text "7". The schema can. Of
the types that it allows, the first that reads the text is taken, in the schema's order but null before all
others; text reads everything. A parameter without a schema stays the text that was written, since that
renders back to the same text.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mmrender.parsing.literals import NotAValue, number, parse_json

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_NULLS = frozenset({"null", "None"})
_BOOLEANS = {"true": True, "True": True, "false": False, "False": False}
_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (float,),
    "string": (str,),
    "array": (list, tuple),
    "object": (),
}
"""Python types of constants of each JSON type."""


class ToolSchemas:
    """The tools that a model was offered.

    Args:
        tools: Definitions as `mmrender.content.normalize_tools` gives them.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._parameters: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            inner = tool.get("function")
            definition = inner if isinstance(inner, Mapping) else tool
            parameters = definition.get("parameters") or definition.get("input_schema")
            self._parameters[str(definition.get("name"))] = (
                parameters if isinstance(parameters, Mapping) else {}
            )

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def typed(self, name: str, arguments: Mapping[str, str]) -> dict[str, Any]:
        """Arguments of a call of tool `name`, each of a type that its schema allows."""
        root = self._parameters.get(name, {})
        properties = root.get("properties")
        if not isinstance(properties, Mapping):
            return dict(arguments)
        return {key: _typed(text, properties.get(key), root) for key, text in arguments.items()}


def _typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    kinds = list(dict.fromkeys(_kinds(schema, root, depth=0)))
    for kind in sorted(kinds, key=lambda kind: kind != "null"):
        if kind == "string":
            return text
        try:
            return _read(kind, text)
        except NotAValue:
            continue
    return text


def _kinds(schema: Any, root: Mapping[str, Any], *, depth: int) -> Iterator[str]:
    """Names of the types that a schema allows, in its order."""
    if not isinstance(schema, Mapping) or depth > 16:
        return
    named = schema.get("type")
    for kind in named if isinstance(named, list | tuple) else (named,):
        if isinstance(kind, str) and kind in _TYPES:
            yield kind
    if schema.get("nullable") is True:
        yield "null"
    if named is None:
        yield from _kinds_of_values(schema)
    for key in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(key)
        for choice in choices if isinstance(choices, list | tuple) else ():
            yield from _kinds(choice, root, depth=depth + 1)
    yield from _kinds(_referred(schema.get("$ref"), root), root, depth=depth + 1)


def _kinds_of_values(schema: Mapping[str, Any]) -> Iterator[str]:
    enum = schema.get("enum")
    values = list(enum) if isinstance(enum, list | tuple) else []
    if "const" in schema:
        values.append(schema["const"])
    for value in values:
        for kind, types in _TYPES.items():
            if type(value) in types:
                yield kind


def _referred(reference: Any, root: Mapping[str, Any]) -> Any:
    """Resolve a `$ref` within the same schema."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for step in reference[2:].split("/"):
        key = step.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _read(kind: str, text: str) -> Any:
    """Read a text as a value of a type.

    Raises:
        NotAValue: It is not one.
    """
    word = text.strip()
    match kind:
        case "null" if word in _NULLS:
            return None
        case "boolean" if word in _BOOLEANS:
            return _BOOLEANS[word]
        case "number" | "integer" if _NUMBER.fullmatch(word):
            value = number(word.removeprefix("+"))
            if kind == "number":
                return value
            if isinstance(value, int) or value.is_integer():
                return int(value)
        case "object" | "array":
            parsed = parse_json(text)
            if isinstance(parsed, dict if kind == "object" else list):
                return parsed
    raise NotAValue
