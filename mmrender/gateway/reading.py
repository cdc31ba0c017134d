"""Strict reading of requests, for all protocols: fields, content, tools, sampling parameters, headers."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeVar

import msgspec
from msgspec import inspect

from mmcodecs.structs import ready
from mmrender.client.sampling import PARAMETERS
from mmrender.content.parts import normalize_part
from mmrender.content.tools import parse_arguments
from mmrender.content.values import describe, member
from mmrender.errors import InputError, MessageError, one_of
from mmrender.gateway.call import Kind, Origin, ToolChoice
from mmrender.messages import MediaPart, Message, Part, TextPart, ToolCall, text_of

UNPARSED: Final = "__unparsed"
"""Only key of the arguments of a call whose text is no JSON object. Its value is that text."""

_UNREPORTED: Final = frozenset({
    *("detokenize", "extra_args", "flat_logprobs", "logprob_token_ids", "prompt_logprob_start"),
    *("prompt_logprob_token_ids", "prompt_logprobs", "stream_interval", "trace_decode_token_ids"),
})  # fmt: skip
"""Sampling parameters that only change reports, which replies of the three protocols do not have."""

SAMPLING: Final = frozenset(PARAMETERS) - _UNREPORTED - {"n", "logprobs"}
"""Sampling parameters that a body may have under their own names."""

_REMOTE: Final = ("data:", "http://", "https://")
_FIELD_PROBLEM: Final = re.compile(r"Object (contains unknown|missing required) field `(.*)`")


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    """Base of the forms of objects in a request. A field that is neither read nor ignored is refused."""

    ignored: ClassVar[Collection[str]] = ()
    """Members of an object of this form that are not read. They do not count in objects inside of others."""


FormT = TypeVar("FormT", bound=Strict)


def convert(value: Any, form: type[FormT], where: str = "", *, error: type[InputError] = InputError) -> FormT:
    """Convert a decoded JSON object into its form. A member that is null counts as absent.

    Clients that write whole models write null for every member that they know and do not use.

    Raises:
        InputError: It does not have this form. `where` names the field. `error` is the class.
    """
    if isinstance(value, dict):
        value = {name: item for name, item in value.items() if item is not None and name not in form.ignored}
    try:
        return msgspec.convert(value, ready(form))
    except msgspec.ValidationError as failure:
        problem, _, path = str(failure).partition(" - at ")
        path = path.strip("`").removeprefix("$").removeprefix("." if not where else "")
        if match := _FIELD_PROBLEM.fullmatch(problem):
            problem = "unknown field" if match[1] == "contains unknown" else "is missing"
            raise error(problem, where=member(where + path, match[2]).removeprefix(".")) from failure
        expected = None
        if problem.startswith("Invalid enum value"):
            problem, expected = problem.replace("Invalid enum value", "unknown value"), _choices(form, path)
        raise error(problem, where=where + path or None, expected=expected) from failure


def _choices(form: type[Strict], path: str) -> str | None:
    """The values that a field may have, if they can be listed. `path` is as in errors of msgspec."""

    def alternatives(kind: Any) -> Sequence[Any]:
        return getattr(kind, "types", (kind,))

    kinds: Sequence[Any] = [inspect.type_info(form)]
    for name, bracket in re.findall(r"([a-z_]+)(\[)?", path):
        fields = [field for kind in kinds for field in getattr(kind, "fields", ()) if field.name == name]
        kinds = [kind for field in fields for kind in alternatives(field.type)]
        if bracket:
            items = [kind.item_type for kind in kinds if hasattr(kind, "item_type")]
            kinds = [kind for item in items for kind in alternatives(item)]
    values = [value for kind in kinds if isinstance(kind, inspect.LiteralType) for value in kind.values]
    return one_of([str(value) for value in values]) if values else None


def read_fields(
    body: Mapping[str, Any], form: type[FormT], refused: Mapping[str, str]
) -> tuple[FormT, dict[str, Any]]:
    """Read the fields of a body. A field that is null counts as absent.

    Args:
        body: The decoded body.
        form: Form of the fields that the protocol reads. Those that it ignores do not change the answer.
        refused: A way out for each field that is known and not supported.

    Returns:
        The fields, and the sampling parameters, unchecked.

    Raises:
        InputError: A field is unknown, refused or malformed.
    """
    fields = {name: value for name, value in body.items() if value is not None}
    own = set(form.__struct_fields__)
    sampled = SAMPLING - own - refused.keys()
    for name in sorted(fields.keys() - own - sampled - set(form.ignored)):
        if name in refused:
            raise InputError("this field is not supported", where=name, remedy=refused[name])
        raise InputError("unknown field of this request", where=name)
    request = convert({name: value for name, value in fields.items() if name in own}, form)
    return request, {name: fields[name] for name in sorted(sampled & fields.keys())}


# --- messages ---


def read_content(value: Any, where: str, types: Sequence[str], *, begin: int = 0) -> str | tuple[Part, ...]:
    """Read the content of a user, system or tool message. Media must be `data:` and `http(s):` URLs.

    Args:
        value: Text, None or a list of parts.
        where: Path of the content.
        types: Types of parts that the protocol has here.
        begin: Index of the first part in its message, for errors.

    Returns:
        Text, or parts in order. A single text part is returned as its text: harnesses write one text in both
        forms, with a part if it carries a cache mark.
    """
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise MessageError(
            "content cannot be read", where=where, expected="text or a list of parts", got=describe(value)
        )
    parts = tuple([_part(item, f"{where}[{index}]", types) for index, item in enumerate(value, begin)])
    if all(isinstance(part, TextPart) for part in parts) and len(parts) < 2:
        return text_of(parts)
    return parts


def _part(value: Any, where: str, types: Sequence[str]) -> Part:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in types:
        raise MessageError(
            "unsupported part", where=f"{where}.type", expected=one_of(types), got=describe(kind)
        )
    part = normalize_part({key: item for key, item in value.items() if key not in _PART_FIELDS}, where)
    if isinstance(part, MediaPart):
        frames = part.source if isinstance(part.source, tuple) else (part.source,)
        sound = getattr(part, "sound", None)
        for source in (*frames, *(() if sound is None else (sound.source,))):
            # A caller must not name files of this machine.
            if not isinstance(source, str) or not source[:8].lower().startswith(_REMOTE):
                raise MessageError(f"the {part.modality} must be a data: or http(s): URL", where=where)
    return part


_PART_FIELDS: Final = frozenset({"citations", "parsed", "parsed_output", "prompt_cache_breakpoint"})
"""Fields of parts that concern an API. `content` ignores more of them."""


def assistant(texts: Sequence[str], reasoning: str | None, calls: Sequence[ToolCall]) -> Message:
    """The canonical message of an answer. Without text, content is None if there are calls, else empty."""
    text = "".join(texts)
    return Message(
        role="assistant",
        content=None if calls and not text else text,
        reasoning_content=reasoning or None,
        tool_calls=tuple(calls),
    )


def read_arguments(value: Any, where: str) -> dict[str, Any]:
    """Read the arguments of a call. Text that is no JSON object becomes `{UNPARSED: text}`."""
    try:
        arguments = parse_arguments(value, where)
    except MessageError:
        if isinstance(value, str):
            return {UNPARSED: value}
        raise
    match arguments:
        case {"__unparsedToolInput": {"raw": str(text)}} if len(arguments) == 1:  # Claude Code's form of it
            return read_arguments(text, where)
    return arguments


# --- tools and the form of the answer ---


def function_tool(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """A tool in OpenAI's form, without absent fields."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def read_tools(
    tools: Sequence[Mapping[str, Any]] | None,
    notes: dict[str, None],
    read: Callable[[Mapping[str, Any], str], Iterable[Mapping[str, Any]]],
) -> tuple[Mapping[str, Any], ...] | None:
    """Read each tool by `read(tool, where)`. The provider's own search is left out, and noted.

    Raises:
        InputError: None is left. A model that is asked to search without a search would make results up.
    """
    if tools is None:
        return None
    left: list[Mapping[str, Any]] = []
    for index, tool in enumerate(tools):
        kind = tool.get("type")
        if isinstance(kind, str) and kind.startswith("web_search"):
            notes[f"tools.{kind}"] = None
        else:
            left += read(tool, f"tools[{index}]")
    if tools and not left:
        remedy = "Give the model a tool that searches"
        raise InputError("the search of the provider is not run here", where="tools", remedy=remedy)
    return tuple(left)


def check_choice(tools: Sequence[Mapping[str, Any]] | None, choice: ToolChoice, named: Sequence[str]) -> None:
    """Check that tools that are named, or that must be called, are there.

    Raises:
        InputError: One is not.
    """
    names = [tool["function"]["name"] for tool in tools or ()]
    if choice == "required" and not names:
        raise InputError("a tool must be called, and the request has none", where="tool_choice")
    if unknown := [name for name in named if name not in names]:
        got = repr(unknown[0])
        raise InputError("is not one of the tools", where="tool_choice", expected=one_of(names), got=got)


def set_structure(params: dict[str, Any], kind: str, schema: Mapping[str, Any] | None, where: str) -> None:
    """Set the sampling parameters for an answer of this form.

    Raises:
        InputError: The form is unknown, lacks its schema, or is set already.
    """
    wanted: dict[str, Any] = {}
    if kind == "json_object":
        wanted = {"json_object": True}
    elif kind == "json_schema" and schema is not None:
        wanted = {"json": schema}
    elif kind != "text":
        expected = "text, json_object, or json_schema with a schema"
        raise InputError("unknown form of an answer", where=where, expected=expected, got=repr(kind))
    if wanted and "structured_outputs" in params:
        raise InputError("the form of the answer is set twice", where=where)
    if wanted:
        params["structured_outputs"] = wanted


# --- headers ---


def read_origin(headers: Mapping[str, str], *, thread: str | None = None) -> Origin:
    """Read where a call comes from: headers of Claude Code, Codex and opencode.

    Args:
        headers: Headers with names in lower case.
        thread: The thread that the body names, if no header does.
    """
    named = {name: value for name, value in headers.items() if value}
    agent = named.get("x-claude-code-agent-id")
    parent = named.get("x-claude-code-parent-agent-id")
    own = next((named[name] for name in _THREADS if name in named), thread)
    started_by = next((named[name] for name in _PARENTS if name in named), None)
    task = named.get("x-openai-subagent")
    if agent is None and (task is not None or started_by not in (None, own)):
        agent, parent = own or task, started_by
    kind: Kind | None = None if agent is None else "subagent"
    turn = json_object(named.get("x-codex-turn-metadata"))
    if task == "compact" or turn.get("request_kind") == "compaction":
        kind = "compaction"
    return Origin(thread=own, agent=agent, parent_agent=parent, kind=kind, client=named.get("user-agent"))


_THREADS: Final = ("x-claude-code-session-id", "thread-id", "session-id", "x-session-id")
_PARENTS: Final = ("x-codex-parent-thread-id", "x-parent-session-id")


def json_object(text: object) -> Mapping[str, Any]:
    """The JSON object that a text holds. Empty if it holds none."""
    try:
        value = msgspec.json.decode(text) if isinstance(text, str) else None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
