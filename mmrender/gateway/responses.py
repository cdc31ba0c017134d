"""OpenAI's responses: requests read strictly. `ResponseEvents` writes the replies."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from mmrender.client.sampling import check_sampling_params
from mmrender.errors import InputError, MessageError, check_count
from mmrender.gateway.call import Answer, Call, ProtocolName, ToolChoice
from mmrender.gateway.reading import (
    Strict,
    assistant,
    check_choice,
    convert,
    function_tool,
    read_arguments,
    read_content,
    read_fields,
    read_origin,
    read_tools,
    set_structure,
)
from mmrender.gateway.response_events import ResponseEvents
from mmrender.gateway.writing import AgentProtocol
from mmrender.messages import Message, ToolCall, text_of

REFUSED: Final[Mapping[str, str]] = {
    "access_programs": "Leave it out",
    "background_options": "Leave it out",
    "context_management": "The agent compacts its own history",
    "conversation": "Send the whole conversation in input",
    "image": "Answers are text",
    "max_tokens": "Use max_output_tokens",
    "moderation": "Leave it out",
    "prompt": "Send its text in instructions or input",
}
"""Known fields that are not supported, and a way out for each."""

_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDES: Final = frozenset({
    _LOGPROBS, "reasoning.encrypted_content", "web_search_call.action.sources", "web_search_call.results"
})  # fmt: skip
_TEXTS: Final = ("input_text", "output_text", "refusal", "text")
_PARTS: Final = (*_TEXTS, "input_image")


class _Reasoning(Strict, kw_only=True):
    effort: str | None = None
    summary: Any = None
    generate_summary: Any = None
    context: Any = None


class _Format(Strict, kw_only=True):
    type: str
    name: Any = None
    description: Any = None
    schema: dict[str, Any] | None = None
    strict: Any = None


class _Text(Strict, kw_only=True):
    format: _Format | None = None
    verbosity: Any = None


class _Request(Strict, kw_only=True):
    # A prompt that is too long is refused, whatever `truncation` says.
    ignored = frozenset({
        *("client_metadata", "max_tool_calls", "metadata", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "stream_options"),
        *("truncation", "user"),
    })  # fmt: skip
    model: str = ""
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = None
    include: list[str] = msgspec.field(default_factory=list)
    top_logprobs: int | None = None
    reasoning: _Reasoning | None = None
    text: _Text | None = None
    stream: bool = False
    background: Literal[False] = False
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)


class _Tool(Strict, kw_only=True):
    ignored = ("allowed_callers", "defer_loading", "output_schema")
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Namespace(Strict, kw_only=True):
    type: Literal["namespace"]
    name: str
    tools: list[Any]
    description: str | None = None


class _NamedTool(Strict, kw_only=True):
    type: Literal["function"]
    name: str
    namespace: str | None = None


class _AllowedTools(Strict, kw_only=True):
    type: str
    mode: Literal["auto", "required"]
    tools: Annotated[list[_NamedTool], msgspec.Meta(min_length=1)]


class _Item(Strict, kw_only=True):
    """Base of the items of a conversation."""

    ignored = frozenset({"internal_chat_message_metadata_passthrough", "status", "type"})
    id: Any = None


class _MessageItem(_Item, kw_only=True):
    ignored = _Item.ignored | {"phase"}
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Any]


class _ReasoningText(Strict, kw_only=True):
    type: Literal["summary_text", "reasoning_text", "text"]
    text: str


class _ReasoningItem(_Item, kw_only=True):
    ignored = _Item.ignored | {"encrypted_content"}
    summary: list[_ReasoningText] = msgspec.field(default_factory=list)
    content: list[_ReasoningText] | None = None


class _CallItem(_Item, kw_only=True):
    ignored = _Item.ignored | {"caller", "parsed_arguments"}
    call_id: str
    name: str
    arguments: Any = None
    namespace: str | None = None


class _ResultItem(_Item, kw_only=True):
    ignored = _Item.ignored | {"caller", "name", "namespace"}
    call_id: str
    output: str | list[Any]


class Responses(AgentProtocol):
    """OpenAI's responses."""

    name: ProtocolName = "responses"
    path = "responses"
    events = ResponseEvents

    def read(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Call:
        """Read a request. See `AgentProtocol`."""
        request, params = read_fields(body, _Request, REFUSED)
        notes: dict[str, None] = {}
        messages = _Conversation(notes).read(request)
        tools = read_tools(request.tools, notes, lambda tool, where: _tools(tool, where, notes))
        choice, named = _choice(request.tool_choice)
        check_choice(tools, choice, named)
        if unknown := sorted(set(request.include) - _INCLUDES):
            raise InputError("cannot be included", where="include", got=repr(unknown[0]))
        if request.top_logprobs is not None:
            check_count("top_logprobs", request.top_logprobs, minimum=0, maximum=20)
        wants_logprobs = _LOGPROBS in request.include or bool(request.top_logprobs)
        if request.max_output_tokens is not None:
            params["max_tokens"] = request.max_output_tokens
        if request.text is not None:
            if format_ := request.text.format:
                set_structure(params, format_.type, format_.schema, "text.format")
            if request.text.verbosity is not None:
                notes["text.verbosity"] = None
        effort = request.reasoning and request.reasoning.effort
        if effort not in (None, "none"):
            notes["reasoning.effort"] = None
        return Call(
            protocol=self.name,
            model=request.model,
            messages=messages,
            tools=tools,
            tool_choice=choice,
            named_tools=named,
            parallel_tool_calls=request.parallel_tool_calls,
            sampling_params=check_sampling_params(params),
            template_arguments=request.chat_template_kwargs,
            thinking=False if effort == "none" else None,
            stream=request.stream,
            logprobs=(request.top_logprobs or 0) if wants_logprobs else None,
            with_usage=True,
            previous=request.previous_response_id,
            instructions=request.instructions or None,
            notes=tuple(notes),
            origin=read_origin(headers),
            idempotency_key=headers.get("idempotency-key"),
        )

    def reply(self, call: Call, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body of an unstreamed reply."""
        answer = answers[0]
        events = ResponseEvents(call, [answer.id], answer.created)
        events.end(answers)
        return events.whole(answer)


class _Conversation:
    """Reads the items of a conversation. Items of one answer become one assistant message.

    Ids of ours name the answer. Many clients drop ids. Then an answer is reasoning, text and calls in this
    order, and an item out of order begins another.
    """

    def __init__(self, notes: dict[str, None]) -> None:
        self._notes = notes
        self._messages: list[Message] = []
        self._stage = -1
        self._answer_id: str | None = None
        self._thoughts: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []

    def read(self, request: _Request) -> tuple[Message, ...]:
        """Read instructions and input. System messages at the beginning become one."""
        items = request.input
        if isinstance(items, str):
            items = [{"role": "user", "content": items}]
        if not items:
            raise InputError("must be text, or a list of one or more items", where="input")
        if request.instructions and request.previous_response_id is None:
            self._messages.append(Message(role="system", content=request.instructions))
        for index, item in enumerate(items):
            self._item(item, f"input[{index}]")
        self._end_answer()
        return _with_one_system(self._messages)

    def _item(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type") or "message"
        form = _ITEMS.get(kind) if isinstance(kind, str) else None
        if isinstance(kind, str) and kind.startswith("web_search_call"):
            self._notes[kind] = None
            return
        if form is None:
            raise MessageError(
                "unsupported item",
                where=f"{where}.type",
                expected=", ".join(_ITEMS),
                got=repr(kind),
                remedy=_ITEM_REMEDIES.get(kind) if isinstance(kind, str) else None,
            )
        read = convert(item, form, where, error=MessageError)
        if isinstance(read, _ReasoningItem):
            self._begin(read.id, 0, joins=True)
            text = "".join([part.text for part in read.content or ()])
            self._thoughts.append(text or "\n\n".join([part.text for part in read.summary]))
        elif isinstance(read, _CallItem):
            self._begin(read.id, 2, joins=True)
            arguments = read_arguments(read.arguments, f"{where}.arguments")
            self._calls.append(ToolCall(_whole_name(read), arguments, read.call_id))
        elif isinstance(read, _MessageItem) and read.role == "assistant":
            self._begin(read.id, 1, joins=False)
            self._texts.append(text_of(read_content(read.content, f"{where}.content", _TEXTS)))
        elif isinstance(read, _MessageItem):
            self._end_answer()
            content = read_content(read.content, f"{where}.content", _PARTS)
            self._messages.append(Message(role="user" if read.role == "user" else "system", content=content))
        elif isinstance(read, _ResultItem):
            self._end_answer()
            content = read_content(read.output, f"{where}.output", _PARTS)
            self._messages.append(Message(role="tool", content=content, tool_call_id=read.call_id))

    def _begin(self, item_id: Any, stage: int, *, joins: bool) -> None:
        """Begin an item of an answer. `joins`: whether another of its kind belongs to the same answer."""
        match = _ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
        answer_id = None if match is None else match[1]
        if answer_id is not None and self._answer_id is not None:
            is_new = answer_id != self._answer_id
        else:
            is_new = stage < self._stage or (stage == self._stage and not joins)
        if is_new:
            self._end_answer()
        self._stage, self._answer_id = stage, answer_id or self._answer_id

    def _end_answer(self) -> None:
        if self._stage >= 0:
            reasoning = "\n\n".join([thought for thought in self._thoughts if thought])
            self._messages.append(assistant(self._texts, reasoning, self._calls))
        self._stage, self._answer_id = -1, None
        self._thoughts, self._texts, self._calls = [], [], []


_ITEM_ID: Final = re.compile("[a-z]+_([0-9A-Za-z]{24})_[0-9]+")
"""Id of an item of ours: its kind, the id of its answer, and its number there."""

_ITEMS: Final[Mapping[str, type[_Item]]] = {
    "message": _MessageItem,
    "reasoning": _ReasoningItem,
    "function_call": _CallItem,
    "function_call_output": _ResultItem,
}
_ITEM_REMEDIES: Final = {"item_reference": "Send the item itself, as with store=false"}


def _with_one_system(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Join the system messages at the beginning, since many templates print only the first."""
    count = 0
    while count < len(messages) and messages[count].role == "system" and not [*messages[count].media()]:
        count += 1
    if count < 2:
        return tuple(messages)
    texts = [message.text for message in messages[:count]]
    return (Message(role="system", content="\n\n".join(texts)), *messages[count:])


def _tools(item: Mapping[str, Any], where: str, notes: dict[str, None]) -> list[Mapping[str, Any]]:
    """Read a tool, or those of a namespace as `namespace.name`."""
    kind = item.get("type")
    if kind == "function":
        return [_tool(item, where, notes)]
    if kind != "namespace":
        raise InputError(
            "only the provider's own models know this tool",
            where=f"{where}.type",
            expected="function, namespace or web_search",
            got=repr(kind),
        )
    namespace = convert(item, _Namespace, where)
    if namespace.description:
        notes["tools.namespace.description"] = None
    prefix = f"{namespace.name}."
    return [
        _tool(inner, f"{where}.tools[{number}]", notes, prefix)
        for number, inner in enumerate(namespace.tools)
    ]


def _tool(item: Any, where: str, notes: dict[str, None], prefix: str = "") -> dict[str, Any]:
    tool = convert(item, _Tool, where)
    if "." in tool.name:
        raise InputError("a '.' parts a namespace from a name", where=f"{where}.name", got=repr(tool.name))
    if tool.strict:
        notes["tools.strict"] = None
    return function_tool(prefix + tool.name, tool.description, tool.parameters)


def _choice(choice: ToolChoice | Mapping[str, Any]) -> tuple[ToolChoice, tuple[str, ...]]:
    if isinstance(choice, str):
        return choice, ()
    if choice.get("type") == "allowed_tools":
        allowed = convert(choice, _AllowedTools, "tool_choice")
        return allowed.mode, tuple(map(_whole_name, allowed.tools))
    return "required", (_whole_name(convert(choice, _NamedTool, "tool_choice")),)


def _whole_name(named: _NamedTool | _CallItem) -> str:
    return named.name if named.namespace is None else f"{named.namespace}.{named.name}"
