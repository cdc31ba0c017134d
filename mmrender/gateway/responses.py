"""OpenAI's responses: requests read strictly, replies, events of streams, errors."""

import re
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from mmrender.client.sampling import check_sampling_params
from mmrender.errors import InputError, MessageError, check_count
from mmrender.gateway.call import Answer, AnswerCall, Call, ProtocolName, ToolChoice
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
from mmrender.gateway.writing import (
    AgentProtocol,
    Blocks,
    Field,
    event,
    is_cut,
    openai_logprobs,
    total_usage,
)
from mmrender.messages import Message, ToolCall, text_of

IGNORED: Final = frozenset({
    *("client_metadata", "max_tool_calls", "metadata", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "stream_options", "truncation"),
    "user",
})  # fmt: skip
"""Fields that do not change the answer. A prompt that is too long is refused, whatever `truncation` says."""

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
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: Any = None
    defer_loading: Any = None
    output_schema: Any = None


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
    """Base of the items of a conversation. Its own fields are not read."""

    type: str = "message"
    id: Any = None
    status: Any = None
    internal_chat_message_metadata_passthrough: Any = None


class _MessageItem(_Item, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Any]
    phase: Any = None


class _ReasoningText(Strict, kw_only=True):
    type: Literal["summary_text", "reasoning_text", "text"]
    text: str


class _ReasoningItem(_Item, kw_only=True):
    summary: list[_ReasoningText] = msgspec.field(default_factory=list)
    content: list[_ReasoningText] | None = None
    encrypted_content: Any = None


class _CallItem(_Item, kw_only=True):
    call_id: str
    name: str
    arguments: Any = None
    namespace: str | None = None
    caller: Any = None
    parsed_arguments: Any = None


class _ResultItem(_Item, kw_only=True):
    call_id: str
    output: str | list[Any]
    caller: Any = None
    name: Any = None
    namespace: Any = None


class Responses(AgentProtocol):
    """OpenAI's responses."""

    name: ProtocolName = "responses"

    def read(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Call:
        """Read a request. See `AgentProtocol`."""
        request, params = read_fields(body, _Request, ignored=IGNORED, refused=REFUSED)
        notes: dict[str, None] = {}
        messages = _Conversation(notes).read(request)
        tools = read_tools(request.tools, notes, lambda tool, where: _tools(tool, where, notes))
        choice, named = _choice(request.tool_choice)
        check_choice(tools, choice, named, "tool_choice")
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
        events = ResponseEvents(call, answer.id, answer.created)
        events.end(answers)
        return events.whole(answer)

    def events(self, call: Call, answer_ids: Sequence[str]) -> "ResponseEvents":
        """Return the writer of a streamed reply."""
        return ResponseEvents(call, answer_ids[0], int(time.time()))


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


# --- replies ---


class ResponseEvents(Blocks):
    """Writes one streamed reply as the events of a response."""

    def __init__(self, call: Call, answer_id: str, created: int) -> None:
        super().__init__()
        self._call = call
        self._id = answer_id
        self._created = created
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._answer: Answer | None = None

    def begin(self) -> bytes:
        """Return the beginning of the response."""
        response = _response(self._call, self._id, self._created, "in_progress")
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def opened(self, field: Field) -> bytes:
        """Return the beginning of an item and of its part."""
        if field == "reasoning":
            item = {
                **_reasoning(self._item_id("rs"), ""),
                "summary": [],
                "content": [],
                "status": "in_progress",
            }
            part = {"type": "summary_text", "text": ""}
            return self._added(item) + self._part("reasoning_summary_part.added", field, part=part)
        item = {
            **_message(self._item_id("msg"), "", None, self._call),
            "content": [],
            "status": "in_progress",
        }
        return self._added(item) + self._part(
            "content_part.added", field, part=_output_text("", None, self._call)
        )

    def extended(self, field: Field, text: str) -> bytes:
        """Return more text of the part."""
        if field == "reasoning":
            return self._part("reasoning_summary_text.delta", field, delta=text)
        return self._part("output_text.delta", field, delta=text, logprobs=[])

    def closed(self, field: Field, text: str) -> bytes:
        """Return the end of the part and of its item."""
        if field == "reasoning":
            item = _reasoning(self._item_id("rs"), text)
            place = {"item_id": item["id"], "output_index": len(self._output), "content_index": 0}
            return (
                self._part("reasoning_summary_text.done", field, text=text)
                + self._part("reasoning_summary_part.done", field, part=item["summary"][0])
                + self._event("reasoning_text.delta", **place, delta=text)
                + self._event("reasoning_text.done", **place, text=text)
                + self._done(item)
            )
        item = _message(self._item_id("msg"), text, self._answer, self._call)
        part = item["content"][0]
        done = self._part("output_text.done", field, text=text, logprobs=part["logprobs"])
        return done + self._part("content_part.done", field, part=part) + self._done(item)

    def end(self, answers: Sequence[Answer]) -> bytes:
        """Return the rest of the text, the calls and the whole response."""
        self._answer = answer = answers[0]
        events = [self.rest(answer)]
        if not answer.calls and not answer.content:
            events += [self._text("content", ""), self._close()]
        for call in answer.calls:
            item = _call(self._item_id("fc"), call)
            place = {"item_id": item["id"], "output_index": len(self._output)}
            events += [
                self._added({**item, "arguments": "", "status": "in_progress"}),
                self._event("function_call_arguments.delta", **place, delta=call.arguments),
                self._event(
                    "function_call_arguments.done", **place, name=item["name"], arguments=call.arguments
                ),
                self._done(item),
            ]
        response = self.whole(answer)
        return b"".join(events) + self._event(response["status"], response=response)

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the response with all items, once they are written."""
        usage = total_usage([answer])
        counts = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        cut = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut(answer) else {}
        status = "incomplete" if cut else "completed"
        return _response(
            self._call, self._id, self._created, status, output=self._output, usage=counts, **cut
        )

    def failure(self, status: int, code: str, message: str) -> bytes:
        """Return the failed response."""
        error = {"code": code, "message": message}
        response = _response(self._call, self._id, self._created, "failed", error=error)
        return self._event("failed", response=response)

    def _item_id(self, kind: str) -> str:
        """Return the id of the item that is open, or opens now."""
        return f"{kind}_{self._id}_{len(self._output)}"

    def _added(self, item: Mapping[str, Any]) -> bytes:
        return self._event("output_item.added", output_index=len(self._output), item=item)

    def _done(self, item: dict[str, Any]) -> bytes:
        self._output.append(item)
        return self._event("output_item.done", output_index=len(self._output) - 1, item=item)

    def _part(self, kind: str, field: Field, **members: Any) -> bytes:
        """Return an event of the one part of the open item."""
        item, index = ("rs", "summary_index") if field == "reasoning" else ("msg", "content_index")
        place = {"item_id": self._item_id(item), "output_index": len(self._output), index: 0}
        return self._event(kind, **place, **members)

    def _event(self, kind: str, **members: Any) -> bytes:
        name = f"response.{kind}"
        self._number += 1
        return event({"type": name, "sequence_number": self._number - 1, **members}, name)


def _reasoning(item_id: str, text: str) -> dict[str, Any]:
    """Return a reasoning item: clients show its summary, and some repeat nothing but its content."""
    return {
        "id": item_id,
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": text}],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": item_id,  # nothing is hidden, since history is looked up
    }


def _message(item_id: str, text: str, answer: Answer | None, call: Call) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": "incomplete" if answer is not None and is_cut(answer) else "completed",
        "content": [_output_text(text, answer, call)],
    }


def _output_text(text: str, answer: Answer | None, call: Call) -> dict[str, Any]:
    logprobs = [] if answer is None or call.logprobs is None else openai_logprobs(answer)
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _call(item_id: str, call: AnswerCall) -> dict[str, Any]:
    namespace, _, name = call.name.rpartition(".")
    item = {
        "id": item_id,
        "type": "function_call",
        "call_id": call.id,
        "name": name,
        "arguments": call.arguments,
        "status": "completed",
    }
    return {**item, "namespace": namespace} if namespace else item


def _response(call: Call, answer_id: str, created: int, status: str, **members: Any) -> dict[str, Any]:
    """Return a response. The tools are not repeated: the caller knows them, and they are long."""
    params = call.sampling_params
    return {
        "id": f"resp_{answer_id}",
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": params.get("max_tokens"),
        "metadata": {},
        "model": call.model,
        "output": [],
        "parallel_tool_calls": call.parallel_tool_calls,
        "previous_response_id": call.previous,
        "store": False,
        "temperature": params.get("temperature"),
        "tool_choice": call.tool_choice,
        "tools": [],
        "top_p": params.get("top_p"),
        "truncation": "disabled",
        "usage": None,
        **members,
    }
