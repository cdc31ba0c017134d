"""A call that the model must make, as a grammar for the engine in the model's own spelling of calls.

It is possible for models that write a call as a JSON object between two delimiters. The spelling is proved by
reading it back before it is used.
"""

import json
from collections.abc import Mapping
from typing import Any

from mmrender.client.types import Prompt
from mmrender.errors import InputError
from mmrender.gateway.call import Call
from mmrender.parsing.grammars import Field
from mmrender.parsing.schema import tool_schemas
from mmrender.renderer import Renderer


def forced_call(
    renderer: Any, call: Call, prompt: Prompt, template_arguments: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return `structured_outputs` that make the model call a tool. None if the call asks for nothing of that.

    Args:
        renderer: Its template decides the spelling.
        call: The call, with `tool_choice` and `forced_tool`.
        prompt: The prompt, which decides whether the completion begins inside reasoning.
        template_arguments: Template variables in force.

    Raises:
        InputError: The named tool is not offered, the answer must have another form as well, or the model's
            spelling of calls cannot be enforced.
    """
    if call.tool_choice != "required" and call.forced_tool is None:
        return None
    schemas = tool_schemas(call.offered or ())
    names = list(schemas) if call.forced_tool is None else [call.forced_tool]
    if not names or names[0] not in schemas:
        expected = f"one of {', '.join(schemas)}" if schemas else "tools"
        raise InputError("the tool is not offered", where="tool_choice", expected=expected, got=str(names))
    if "structured_outputs" in call.sampling_params:
        raise InputError("an answer of a given form cannot be a call of a tool", where="tool_choice")
    spelling = _spelling(renderer, template_arguments)
    if spelling is None:
        raise InputError(
            "a call cannot be enforced in this model's spelling of calls",
            where="tool_choice",
            expected="auto or none",
            got=call.forced_tool or call.tool_choice,
        )
    begin, end = spelling
    tags = [
        {
            "type": "tag",
            "begin": f'{begin}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ',
            "content": {"type": "json_schema", "json_schema": dict(schemas[name]) or {"type": "object"}},
            "end": f"}}\n{end}",
        }
        for name in names
    ]
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not call.parallel_tool_calls,
    }
    reasoning = _open_reasoning(renderer, prompt, template_arguments)
    if reasoning is not None:
        thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": reasoning}
        calls = {"type": "sequence", "elements": [thought, calls]}
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": calls}, ensure_ascii=False)}


def _spelling(renderer: Any, template_arguments: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the delimiters around the JSON object of a call, if a call between them is read back."""
    if not isinstance(renderer, Renderer):
        return None
    parser = renderer.response_parser(has_tools=True, chat_template_kwargs=template_arguments)
    grammar = parser.choice.grammar
    match None if grammar is None else grammar.call:
        case (str(begin), Field.OBJECT, str(end)):
            text = f'{begin}\n{{"name": "look", "arguments": {{"at": 1}}}}\n{end}'
            ids = renderer.tokenizer.encode(text)
            read = renderer.parse_response(ids, chat_template_kwargs=template_arguments).tool_calls
            made = [(attempt.status, attempt.name, attempt.arguments) for attempt in read]
            return (begin, end) if made == [("ok", "look", {"at": 1})] else None
    return None


def _open_reasoning(renderer: Renderer, prompt: Prompt, template_arguments: Mapping[str, Any]) -> str | None:
    """Return the text that ends reasoning, with the blanks after it, if a prompt ends inside reasoning."""
    profile = renderer.template_profile(has_tools=True, **template_arguments)
    format_ = profile.reasoning
    if format_ is None or not format_.is_open(renderer.decode(prompt.ids[-64:])):
        return None
    return format_.end + format_.after_end
