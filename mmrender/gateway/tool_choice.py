"""Calls that the model must or may make, as a grammar for the engine in the model's own spelling of calls.

The grammar is a structural tag of xgrammar, which vLLM and SGLang take. It is used only if the model's
own template writes a call in this spelling.
"""

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from mmrender.client.types import Prompt
from mmrender.errors import InputError
from mmrender.gateway.call import Call
from mmrender.messages import Message, ToolCall
from mmrender.parsing.schema import tool_schemas
from mmrender.renderer import Renderer


class Spelling(NamedTuple):
    """A spelling of calls that structural tags can enforce.

    Attributes:
        begin: Text before the arguments, with `{name}` for the name of the tool.
        style: xgrammar's name for the spelling of the arguments.
        end: Text after the arguments.
        probe: The arguments `{"at": "1"}`.
        name_in_json: Whether the name is written as a JSON string.
    """

    begin: str
    style: str
    end: str
    probe: str
    name_in_json: bool = False


SPELLINGS: Final[Mapping[str, Spelling]] = {
    "json_tags": Spelling(
        '<tool_call>\n{{"name": {name}, "arguments": ', "json", "}\n</tool_call>", '{"at": "1"}', True
    ),
    "xml_function": Spelling(
        "<tool_call>\n<function={name}>\n",
        "qwen_xml",
        "\n</function>\n</tool_call>",
        "<parameter=at>\n1\n</parameter>",
    ),
    "arg_key_value": Spelling(
        "<tool_call>{name}\n",
        "glm_xml",
        "\n</tool_call>",
        "<arg_key>at</arg_key>\n<arg_value>1</arg_value>",
    ),
}
"""Spellings by name of the grammar that reads them. Calls are separated by a line break."""

_OPENER: Final = "<tool_call>"
"""Text that opens a call in each of the spellings."""
_PROBE: Final = "look"


def call_grammar(
    renderer: Any, call: Call, prompt: Prompt, template_arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `structured_outputs` that make the model call a tool, or keep it from calling others than named.

    If the prompt leaves a reasoning block open, the model reasons first. Otherwise a call that it must make
    comes at once.

    Args:
        renderer: Its template decides the spelling.
        call: The call, with `tool_choice` and `named_tools`.
        prompt: The prompt.
        template_arguments: Template variables in force.

    Raises:
        InputError: The answer must have another form as well, or the model's spelling of calls cannot be
            enforced.
    """
    schemas = tool_schemas(call.offered or ())
    names = dict.fromkeys(call.named_tools or schemas)
    problem = "a call cannot be enforced in this model's spelling of calls"
    spelling = _spelling(renderer, template_arguments)
    if "structured_outputs" in call.sampling_params:
        spelling, problem = None, "an answer of a given form cannot be a call of a tool"
    if spelling is None:
        asked = ", ".join(call.named_tools) or call.tool_choice
        raise InputError(problem, where="tool_choice", expected="auto or none", got=asked)
    must_call = call.tool_choice == "required"
    separation = {"separator": "\n"} if must_call else {"triggers": [_OPENER]}
    calls: dict[str, Any] = {
        "type": "tags_with_separator" if must_call else "triggered_tags",
        **separation,
        "tags": [_tag(spelling, name, schemas[name]) for name in names],
        "at_least_one": must_call,
        "stop_after_first": not call.parallel_tool_calls,
    }
    nothing = renderer.parse_response([], prompt_ids=prompt.ids, chat_template_kwargs=template_arguments)
    reasoning = renderer.template_profile(has_tools=True, **template_arguments).reasoning
    if reasoning is not None and not nothing.reasoning_closed:  # the prompt ends inside reasoning
        end = reasoning.end + reasoning.after_end
        thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": end}
        calls = {"type": "sequence", "elements": [thought, calls]}
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": calls}, ensure_ascii=False)}


def _tag(spelling: Spelling, name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the structural tag of one tool's calls."""
    content = {"type": "json_schema", "json_schema": dict(schema) or {"type": "object"}}
    if spelling.style != "json":  # the default, which earlier releases of xgrammar do not name
        content["style"] = spelling.style
    return {"type": "tag", "begin": _begin(spelling, name), "content": content, "end": spelling.end}


def _begin(spelling: Spelling, name: str) -> str:
    spelled = json.dumps(name, ensure_ascii=False) if spelling.name_in_json else name
    return spelling.begin.format(name=spelled)


def _spelling(renderer: Any, template_arguments: Mapping[str, Any]) -> Spelling | None:
    """Return the spelling of calls, if the template writes a probe in exactly this one."""
    if not isinstance(renderer, Renderer):
        return None
    parser = renderer.response_parser(has_tools=True, chat_template_kwargs=template_arguments)
    spelling = SPELLINGS.get(parser.choice.grammar.name) if parser.choice.grammar is not None else None
    if spelling is None:
        return None
    parameters = {"type": "object", "properties": {"at": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": _PROBE, "parameters": parameters}}
    made = Message(role="assistant", content="", tool_calls=(ToolCall(_PROBE, {"at": "1"}, "call_1"),))
    text = renderer.render_text(
        [Message(role="user", content="x"), made], tools=[tool], chat_template_kwargs=template_arguments
    )
    written = str(text)
    close = parser.profile.closes.get("end", "")
    expected = _begin(spelling, _PROBE) + spelling.probe + spelling.end
    return spelling if written.removesuffix(close).endswith(expected) else None
