"""The tool-call grammars in use, as data.

A grammar is a pattern of delimiters and fields: a tuple in which a string is a delimiter, with any white
space before it, and a `Field` is the text between two delimiters. `calls.py` runs patterns. The grammars
follow the chat templates and tool-use guides of the models' makers. None is assumed of a model: `prove.py`
tries them on the output of the model's own template.
"""

import re
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from mmrender.parsing.literals import FUNCTION_GEMMA, GEMMA, JSON, PYTHON, Dialect
from mmrender.plugins import load_plugins


class Field(Enum):
    """A field that a pattern captures."""

    NAME = "the name of the tool, as text"
    ID = "the id of the call, as text"
    OBJECT = "a JSON object that holds the name, and as `arguments` or `parameters` the arguments"
    JSON = "the arguments as a JSON object"
    VALUES = "the arguments in brackets, in a dialect"
    TAGGED = "the arguments, each in its own delimiters"
    KEY = "the name of one argument, as text"
    TEXT = "the value of one argument, as text whose type the schema decides"


Pattern: TypeAlias = tuple[str | Field, ...]


@dataclass(frozen=True)
class Section:
    """Delimiters around several calls.

    Attributes:
        begin: Delimiter that begins the section. None if `head` finds it.
        end: Delimiter that ends it. None if it runs to the end of the turn.
        head: Start of the first call of a section without `begin`. It only counts at the start of the content
            and right after an added token.
        opens: Delimiters that may precede the head and belong to the section.
        brackets: Brackets of the list of calls.
        separator: Delimiter between calls.
    """

    begin: str | None = None
    end: str | None = None
    head: re.Pattern[str] | None = None
    opens: tuple[str, ...] = ()
    brackets: tuple[str, str] | None = None
    separator: str | None = None


@dataclass(frozen=True)
class Grammar:
    """Spelling of tool calls.

    Attributes:
        name: For people and for `grammar=`.
        call: Pattern of one call.
        section: Delimiters around the calls.
        argument: Pattern of one argument, for `Field.TAGGED`.
        padding: Text that is removed once from each side of a `Field.TEXT`.
        dialect: Spelling of `Field.VALUES`.
        name_in_id: Finds the name, as its group 1, in the id.
        id_format: Format of ids with `{name}` and `{index}`, if they are not free text.
    """

    name: str
    call: Pattern
    section: Section | None = None
    argument: Pattern = ()
    padding: str = ""
    dialect: Dialect = JSON
    name_in_id: re.Pattern[str] | None = None
    id_format: str | None = None


_TOOL_CALLS = "[TOOL_CALLS]"

_ALL = (
    # Hermes, Qwen2.5, Qwen3, Qwen3-VL: <tool_call>\n{"name": "f", "arguments": {…}}\n</tool_call>
    Grammar("json_tags", call=("<tool_call>", Field.OBJECT, "</tool_call>")),
    # Qwen3-Coder, Qwen3.5, Qwen3.6
    Grammar(
        "xml_function",
        call=("<tool_call>", "<function=", Field.NAME, ">", Field.TAGGED, "</function>", "</tool_call>"),
        argument=("<parameter=", Field.KEY, ">", Field.TEXT, "</parameter>"),
        padding="\n",
    ),
    # GLM-4.5 and later
    Grammar(
        "arg_key_value",
        call=("<tool_call>", Field.NAME, Field.TAGGED, "</tool_call>"),
        argument=("<arg_key>", Field.KEY, "</arg_key>", "<arg_value>", Field.TEXT, "</arg_value>"),
    ),
    # Kimi-K2, Kimi-K2.5: the id names the tool, as in functions.search:0
    Grammar(
        "kimi_sections",
        call=(
            "<|tool_call_begin|>",
            Field.ID,
            "<|tool_call_argument_begin|>",
            Field.JSON,
            "<|tool_call_end|>",
        ),
        section=Section("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        name_in_id=re.compile(r"(?:functions\.)?(.+?)(?::\d+)?"),
        id_format="functions.{name}:{index}",
    ),
    # Mistral v3 and v7: [TOOL_CALLS][{"name": "f", "arguments": {…}, "id": "…"}]
    Grammar(
        "mistral_json",
        call=(Field.OBJECT,),
        section=Section(begin=_TOOL_CALLS, brackets=("[", "]"), separator=","),
    ),
    # Mistral v13 and later: [TOOL_CALLS]f[ARGS]{…}
    Grammar("mistral_args", call=(_TOOL_CALLS, Field.NAME, "[ARGS]", Field.JSON)),
    # Mistral v11: [TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{…}
    Grammar("mistral_call_id", call=(_TOOL_CALLS, Field.NAME, "[CALL_ID]", Field.ID, "[ARGS]", Field.JSON)),
    # Llama 3.1 and later: {"name": "f", "parameters": {…}}
    Grammar(
        "llama_json",
        call=(Field.OBJECT,),
        section=Section(
            head=re.compile(r'\{\s*"name"\s*:'),
            opens=("<|python_tag|>", "<|python_start|>"),
            end="<|python_end|>",
            separator=";",
        ),
    ),
    # Llama 3.2, Llama 4: [f(key='value'), g()]
    Grammar(
        "pythonic",
        call=(Field.NAME, Field.VALUES),
        section=Section(
            head=re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\("),
            opens=("<|python_tag|>", "<|python_start|>"),
            end="<|python_end|>",
            brackets=("[", "]"),
            separator=",",
        ),
        dialect=PYTHON,
    ),
    # LFM2, LFM2-VL: <|tool_call_start|>[f(key='value'), g()]<|tool_call_end|>
    Grammar(
        "pythonic_section",
        call=(Field.NAME, Field.VALUES),
        section=Section("<|tool_call_start|>", "<|tool_call_end|>", brackets=("[", "]"), separator=","),
        dialect=PYTHON,
    ),
    # Apriel: <tool_calls>[{"name": "f", "arguments": {…}}, …]</tool_calls>; MiniMax-M1: one object a line
    Grammar(
        "json_section",
        call=(Field.OBJECT,),
        section=Section("<tool_calls>", "</tool_calls>", brackets=("[", "]"), separator=","),
    ),
    # Gemma 4: <|tool_call>call:f{key:<|"|>value<|"|>}<tool_call|>
    Grammar(
        "gemma",
        call=("<|tool_call>", "call:", Field.NAME, Field.VALUES, "<tool_call|>"),
        dialect=GEMMA,
    ),
    # FunctionGemma: <start_function_call>call:f{key:<escape>value<escape>}<end_function_call>
    Grammar(
        "function_gemma",
        call=("<start_function_call>", "call:", Field.NAME, Field.VALUES, "<end_function_call>"),
        dialect=FUNCTION_GEMMA,
    ),
    # MiniMax-M2
    Grammar(
        "minimax",
        call=('<invoke name="', Field.NAME, '">', Field.TAGGED, "</invoke>"),
        argument=('<parameter name="', Field.KEY, '">', Field.TEXT, "</parameter>"),
        section=Section("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
)

GRAMMARS: dict[str, Grammar] = {grammar.name: grammar for grammar in _ALL}
"""Grammars by name."""

GROUP = "mmrender.grammars"
"""Entry points of other packages' grammars, each under its own name."""


def provided_grammars() -> dict[str, Grammar]:
    """Grammars of other packages, by name. Raises `PluginError` if one of them cannot be used."""
    plugins = load_plugins(
        GROUP,
        lambda value: isinstance(value, Grammar) and value.name not in GRAMMARS,
        "a Grammar whose name is not used by mmrender",
    )
    return {plugin.value.name: plugin.value for plugin in plugins.values()}


def all_grammars(name: object) -> dict[str, Grammar]:
    """Return our grammars, and the grammars of other packages if `name` is not ours."""
    return GRAMMARS if name is None or name in GRAMMARS else {**GRAMMARS, **provided_grammars()}
