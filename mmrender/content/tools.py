"""Read tool definitions, documents and tool calls.

Definitions are dicts, which stay as they are, or Python functions, whose schema Transformers derives. Calls
come in OpenAI's wrapping or bare. Their arguments are parsed.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mmrender.content.values import (
    MAX_DEPTH,
    as_fields,
    as_identifier,
    as_list,
    copy_json,
    describe,
    excerpt,
    is_record,
    keys_of,
    member,
    record_fields,
    too_deep,
)
from mmrender.errors import MessageError, importing, located
from mmrender.messages import ToolCall

_TOOL = 'a dict like {"type": "function", "function": {"name": …, "parameters": {…}}}, or a Python function'
_CALL = 'a dict like {"id": …, "function": {"name": …, "arguments": {…}}}'
# Added by APIs and gateways, and not part of the prompt.
_IGNORED_KEYS = frozenset(
    {"extra_content", "index", "parsed_arguments", "provider_specific_fields", "status", "thought_signature"}
)


def normalize_tools(
    tools: Sequence[Any] | None, *, where: str = "tools"
) -> tuple[dict[str, Any], ...] | None:
    """Turn tool definitions into the dicts that a chat template prints.

    Args:
        tools: Dicts with a `function` or a `name` of their own, pydantic models, dataclasses, or Python
            functions with type hints and a Google-style docstring. None, for no tools, differs to a template
            from an empty list.
        where: Start of the paths in errors.

    Returns:
        The dicts themselves, not copies, since templates print them whole, with None values and in their
        order of keys. Models lose the optional fields that are None, at the top and in `function`.

    Raises:
        MessageError: A tool cannot be read, lacks a name, or is a function without hints or docstring.
        MissingDependencyError: A tool is a Python function and Transformers is not installed.
    """
    if tools is None:
        return None
    items = tools
    if type(tools) is not list and type(tools) is not tuple:
        remedy = "Wrap a single tool in a list" if is_record(tools) or callable(tools) else None
        items = as_list(tools, where, "tools come in a list", remedy=remedy)
    return tuple([_tool(tool, f"{where}[{index}]") for index, tool in enumerate(items)])


def normalize_documents(documents: Sequence[Any]) -> tuple[Mapping[str, Any], ...]:
    """Turn documents, dicts or other records, into the dicts that a chat template prints."""
    remedy = "Wrap a single document in a list" if is_record(documents) else None
    items = as_list(documents, "documents", "documents come in a list", remedy=remedy)
    expected = 'a dict like {"title": …, "text": …}'
    for index, item in enumerate(items):
        if not is_record(item):
            where = f"documents[{index}]"
            raise MessageError("is not a document", where=where, expected=expected, got=describe(item))
    return tuple([record_fields(item, f"documents[{index}]") for index, item in enumerate(items)])


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if type(tool) is dict:
        definition = tool
    elif inspect.isfunction(tool) or inspect.ismethod(tool):
        return _schema_of(tool, where)
    elif isinstance(tool, Mapping):
        definition = dict(tool)
    else:
        definition = as_fields(tool, where, _TOOL)
        if is_record(definition.get("function")):
            definition["function"] = as_fields(definition["function"], f"{where}.function", _TOOL)
    inner = definition.get("function")
    holder, path = (definition, where) if inner is None else (inner, f"{where}.function")
    name = holder.get("name") if isinstance(holder, Mapping) else None
    if not isinstance(name, str) or not name:
        raise MessageError(
            "the tool does not name a function", where=path, expected=_TOOL, got=describe(holder)
        )
    return definition


def _schema_of(function: Any, where: str) -> dict[str, Any]:
    purpose = "a tool given as a Python function"
    with located(where), importing("transformers", "hf", purpose, otherwise="pass its JSON schema"):
        from transformers.utils import get_json_schema
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # whatever it refuses in the function, the caller can change
        raise MessageError(
            f"cannot derive a JSON schema from {function.__name__} ({excerpt(str(error))})",
            where=where,
            expected="type hints and a Google-style docstring that describes each argument",
            remedy="Or pass its JSON schema",
        ) from error
    return schema


def normalize_tool_calls(value: Any, where: str) -> tuple[ToolCall, ...]:
    """Normalise the `tool_calls` of one assistant message."""
    if value is None:
        return ()
    calls = as_list(value, where, "tool calls come in a list")
    return tuple([normalize_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)])


def normalize_tool_call(value: Any, where: str) -> ToolCall:
    """Normalise one call: OpenAI's `{"id", "type", "function": {…}}` or the bare `{"name", "arguments"}`."""
    if isinstance(value, ToolCall):
        return value
    outer = as_fields(value, where, _CALL)
    call_id = outer.pop("id", None)
    kind = outer.pop("type", "function")
    if kind != "function":
        raise MessageError(
            "unknown type of tool call", where=f"{where}.type", expected="'function'", got=describe(kind)
        )
    inner, inner_where = outer, where
    if "function" in outer:
        inner_where = f"{where}.function"
        inner = as_fields(outer.pop("function"), inner_where, 'a dict like {"name": …, "arguments": {…}}')
        _refuse_leftovers(outer, where)
    name = inner.get("name")
    if name is None or name == "":
        expected = _CALL if inner is outer else "a key 'name'"
        raise MessageError(
            "the tool call does not name a function", where=inner_where, expected=expected, got=keys_of(inner)
        )
    del inner["name"]
    arguments = parse_arguments(inner.pop("arguments", None), f"{inner_where}.arguments")
    _refuse_leftovers(inner, inner_where)
    return ToolCall(
        name=as_identifier(name, f"{inner_where}.name"),
        arguments=arguments,
        id=None if call_id is None else as_identifier(call_id, f"{where}.id"),
    )


def parse_arguments(value: Any, where: str) -> dict[str, Any]:
    """Parse the arguments of a call into a new dict; see `docs/messages.md`."""
    if value is None or (isinstance(value, str) and (not value or value.isspace())):
        return {}
    if is_record(value):
        copy: dict[str, Any] = copy_json(value, where)
        return copy
    expected = "a dict, or JSON text of one"
    if isinstance(value, str):
        expected = "JSON text of an object"
        try:
            parsed = msgspec.json.decode(value)
        except RecursionError:
            raise too_deep(where) from None
        except (msgspec.MsgspecError, ValueError) as error:
            raise MessageError(
                f"arguments are not JSON ({excerpt(str(error))})",
                where=where,
                expected=expected,
                got=describe(value),
                remedy="If a model wrote this call, keep it as text in content instead of tool_calls",
            ) from None
        if type(parsed) is dict:
            if value.count("{") + value.count("[") > MAX_DEPTH:
                copy_json(parsed, where)
            return parsed
    raise MessageError("arguments are not a JSON object", where=where, expected=expected, got=describe(value))


def _refuse_leftovers(fields: dict[str, Any], where: str) -> None:
    for key, value in fields.items():
        if key not in _IGNORED_KEYS:
            raise MessageError(
                "unknown key in a tool call",
                where=member(where, key),
                expected=_CALL,
                got=describe(value),
                remedy="Remove the key, or set it to None",
            )
