import functools
import sys
from typing import Any

import pydantic
import pytest

from mmrender.content import normalize_tools
from mmrender.errors import MessageError, MissingDependencyError

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


def test_dicts_are_kept_whole():
    first, second = normalize_tools([WRAPPED, BARE])
    assert first is WRAPPED
    assert second is BARE


def test_none_and_empty_stay_apart():
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


def test_functions_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "transformers.utils", None)
    with pytest.raises(MissingDependencyError) as caught:
        normalize_tools([multiply])
    assert str(caught.value) == (
        "tools[0]: a tool given as a Python function needs transformers, which is not installed. "
        "Install it with: pip install 'mmrender[hf]', or pass its JSON schema"
    )


def test_a_function_that_has_no_schema():
    pytest.importorskip("transformers")
    text = error_of([WRAPPED, undocumented])
    assert text.startswith("tools[1]: no schema can be made of undocumented (Cannot generate JSON schema for")
    assert text.endswith(
        "expected type hints and a Google-style docstring that describes each argument. "
        "Or pass its JSON schema"
    )


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        (
            WRAPPED,
            "tools: tools come in a list - expected a list, got dict with keys 'type', 'function'. "
            "Wrap a single tool in a list",
        ),
        (
            multiply,
            "tools: tools come in a list - expected a list, got function. Wrap a single tool in a list",
        ),
        ("[]", "tools: tools come in a list - expected a list, got '[]'"),
        ([BARE, "f"], f"tools[1]: cannot be read - {EXPECTED}, got 'f'"),
        ([functools.partial(multiply, 1)], f"tools[0]: cannot be read - {EXPECTED}, got partial"),
        ([int], f"tools[0]: cannot be read - {EXPECTED}, got type"),
        (
            [{"type": "function"}],
            f"tools[0]: the tool names no function - {EXPECTED}, got dict with key 'type'",
        ),
        (
            [{"type": "function", "function": {"name": 3}}],
            f"tools[0].function: the tool names no function - {EXPECTED}, got dict with key 'name'",
        ),
    ],
)
def test_errors(tools, text):
    assert error_of(tools) == text
