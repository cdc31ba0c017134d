"""Tool definitions: dicts as they are, Python functions through Transformers' schema maker."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from mmrender.content.coerce import as_fields, as_sequence, describe, excerpt, is_record
from mmrender.errors import MessageError, MissingDependencyError

_EXPECTED = (
    'a dict like {"type": "function", "function": {"name": …, "parameters": {…}}}, or a Python function'
)


def normalize_tools(
    tools: Sequence[Any] | None, *, where: str = "tools"
) -> tuple[dict[str, Any], ...] | None:
    """Turn tool definitions into what a chat template prints.

    Args:
        tools: Dicts with a `function` or a `name` of their own, pydantic models, dataclasses, or Python
            functions with type hints and a Google-style docstring. None means that there are no tools, and
            is not the same to a template as an empty list.
        where: What paths in errors start with.

    Returns:
        The dicts themselves, not copies, since templates print them whole, None values and key order
        included. Models lose the optional fields that are None, at the top and in `function`.

    Raises:
        MessageError: A tool is none of these, names no function, or is a function that lacks what a
            schema needs.
        MissingDependencyError: A Python function is given and Transformers is not installed.
    """
    if tools is None:
        return None
    items = as_sequence(tools)
    if items is None:
        remedy = "Wrap a single tool in a list" if is_record(tools) or callable(tools) else None
        raise MessageError(
            "tools come in a list", where=where, expected="a list", got=describe(tools), remedy=remedy
        )
    return tuple([_tool(tool, f"{where}[{index}]") for index, tool in enumerate(items)])


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if inspect.isfunction(tool) or inspect.ismethod(tool):
        return _schema_of(tool, where)
    if type(tool) is dict:
        definition = tool
    elif isinstance(tool, Mapping):
        definition = dict(tool)
    else:
        definition = as_fields(tool, where, _EXPECTED)
        if is_record(definition.get("function")):
            definition["function"] = as_fields(definition["function"], f"{where}.function", _EXPECTED)
    _check_name(definition, where)
    return definition


def _check_name(definition: dict[str, Any], where: str) -> None:
    inner = definition.get("function")
    holder, path = (definition, where) if inner is None else (inner, f"{where}.function")
    name = holder.get("name") if isinstance(holder, Mapping) else None
    if not isinstance(name, str) or not name:
        raise MessageError("the tool names no function", where=path, expected=_EXPECTED, got=describe(holder))


def _schema_of(function: Any, where: str) -> dict[str, Any]:
    try:
        from transformers.utils import get_json_schema
    except ImportError:
        raise MissingDependencyError.of_extra(
            "transformers", "hf", "a tool given as a Python function", otherwise="pass its JSON schema"
        ).at(where) from None
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # Whatever it dislikes about the function, the caller must mend.
        raise MessageError(
            f"no schema can be made of {function.__name__} ({excerpt(str(error))})",
            where=where,
            expected="type hints and a Google-style docstring that describes each argument",
            remedy="Or pass its JSON schema",
        ) from error
    return schema
