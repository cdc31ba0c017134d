"""The tool-call grammars in use, as data.

Each was written down from the chat templates and tool-use guides that the models' makers publish. None is
assumed of a model: `prove.py` tries them on what the model's own template prints.
"""

import re

from mmrender.errors import InputError
from mmrender.parsing.grammar import Field, Grammar, Section
from mmrender.parsing.literals import FUNCTION_GEMMA, GEMMA, PYTHON

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
        section=Section(begin="<|tool_calls_section_begin|>", end="<|tool_calls_section_end|>"),
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
        brackets=("(", "=", ")"),
    ),
    # LFM2, LFM2-VL: <|tool_call_start|>[f(key='value'), g()]<|tool_call_end|>
    Grammar(
        "pythonic_section",
        call=(Field.NAME, Field.VALUES),
        section=Section(
            begin="<|tool_call_start|>", end="<|tool_call_end|>", brackets=("[", "]"), separator=","
        ),
        dialect=PYTHON,
        brackets=("(", "=", ")"),
    ),
    # Apriel: <tool_calls>[{"name": "f", "arguments": {…}}, …]</tool_calls>; MiniMax-M1: one object a line
    Grammar(
        "json_section",
        call=(Field.OBJECT,),
        section=Section(begin="<tool_calls>", end="</tool_calls>", brackets=("[", "]"), separator=","),
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
        section=Section(begin="<minimax:tool_call>", end="</minimax:tool_call>"),
    ),
)

GRAMMARS: dict[str, Grammar] = {grammar.name: grammar for grammar in _ALL}
"""Grammars by name."""


def find_grammar(name: str) -> Grammar:
    """The grammar of a name.

    Raises:
        InputError: There is none.
    """
    if name not in GRAMMARS:
        raise InputError(
            "no such tool-call grammar", where="grammar", expected=" or ".join(GRAMMARS), got=repr(name)
        )
    return GRAMMARS[name]
