"""Anthropic's messages: requests read strictly, replies, events of streams, errors."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from mmrender.client.sampling import check_sampling_params
from mmrender.client.types import Usage
from mmrender.errors import InputError, MessageError
from mmrender.gateway.call import Answer, Call, ProtocolName, ToolChoice
from mmrender.gateway.reading import (
    Strict,
    assistant,
    check_choice,
    convert,
    function_tool,
    json_object,
    read_arguments,
    read_content,
    read_fields,
    read_origin,
    read_tools,
    set_structure,
)
from mmrender.gateway.writing import AgentProtocol, Blocks, Field, event, is_cut, total_usage
from mmrender.messages import Message, ToolCall, text_of

REFUSED: Final[Mapping[str, str]] = {
    "compaction": "The agent compacts its own history",
    "container": "Give the model tools of the agent",
    "fallback_credit_token": "Leave it out",
    "fallbacks": "Leave it out",
    "mcp_servers": "Let the agent call the servers, and give the model their tools",
    "max_completion_tokens": "Use max_tokens",
    "prefill": "End the conversation with a user message",
    "stop": "Use stop_sequences",
    "thread": "Send the whole conversation in messages",
}
"""Known fields that are not supported, and a way out for each."""

_BILLING: Final = "x-anthropic-billing-header"
"""Begins a line of Claude Code's system prompt that differs from task to task and tells a model nothing."""

_PARTS: Final = ("text", "image")


class _Metadata(msgspec.Struct):
    user_id: Any = None


class _Thinking(Strict, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Any = None


class _Format(Strict, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class _OutputConfig(Strict, kw_only=True):
    effort: str | None = None
    format: _Format | None = None


class _Edit(Strict, kw_only=True):
    type: Literal["clear_thinking_20251015"]
    keep: Any = None


class _ContextManagement(Strict, kw_only=True):
    edits: list[_Edit] = msgspec.field(default_factory=list)


class _ToolChoice(Strict, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class _Request(Strict, kw_only=True):
    ignored = frozenset({
        *("betas", "billing_policy", "cache_control", "diagnostics", "inference_geo", "service_tier"),
        *("speed", "user_profile_id", "workspace_id"),
    })  # fmt: skip
    model: str = ""
    max_tokens: int | None = None  # absent if tokens are counted only
    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: _ToolChoice | None = None
    stop_sequences: list[str] = msgspec.field(default_factory=list)
    stream: bool = False
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: _Format | None = None
    context_management: _ContextManagement | None = None
    metadata: _Metadata | None = None


class _Tool(Strict, kw_only=True):
    ignored = ("allowed_callers", "cache_control", "defer_loading", "eager_input_streaming", "input_examples")
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None


class _Message(Strict, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Any]


class _ToolResult(Strict, kw_only=True):
    ignored = ("cache_control", "type")
    tool_use_id: str
    content: str | list[Any] | None = None
    is_error: bool | None = None


class _ToolUse(Strict, kw_only=True):
    ignored = ("cache_control", "caller", "type")
    id: str
    name: str
    input: Any = None


class _ThinkingBlock(Strict, kw_only=True):
    ignored = ("cache_control", "signature", "type")
    thinking: str


class MessageEvents(Blocks):
    """Writes one streamed reply as the events of a message."""

    _index = 0
    """Number of the block that is open, or opens next."""

    def begin(self) -> bytes:
        """Return the beginning of the message. Its token counts come at the end."""
        ending = {"stop_reason": None, "stop_sequence": None}
        message = {**_head(self._call, self._ids[0], [], _usage(Usage(0, 0))), **ending}
        return _event({"type": "message_start", "message": message}) + self.keep_alive()

    def keep_alive(self) -> bytes:
        """Return a ping."""
        return _event({"type": "ping"})

    def opened(self, field: Field) -> bytes:
        """Return the start of a block."""
        thinking = {"type": "thinking", "thinking": "", "signature": ""}
        return self._start(thinking if field == "reasoning" else {"type": "text", "text": ""})

    def extended(self, field: Field, text: str) -> bytes:
        """Return more of the open block."""
        if field == "reasoning":
            return self._delta({"type": "thinking_delta", "thinking": text})
        return self._delta({"type": "text_delta", "text": text})

    def closed(self, field: Field, text: str) -> bytes:
        """Return the end of the open block, with the signature of reasoning."""
        signed = self._delta({"type": "signature_delta", "signature": _signature(self._ids[0])})
        return (signed if field == "reasoning" else b"") + self._stop()

    def end(self, answers: Sequence[Answer]) -> bytes:
        """Return the rest of the text, the calls and the end of the message."""
        answer = answers[0]
        events = [self.rest(answer), self.close()]
        for call in answer.calls:
            events += [
                self._start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}}),
                self._delta({"type": "input_json_delta", "partial_json": call.arguments}),
                self._stop(),
            ]
        usage = _usage(total_usage(answers))
        events.append(_event({"type": "message_delta", "delta": _ending(answer), "usage": usage}))
        return b"".join(events) + _event({"type": "message_stop"})

    def failure(self, status: int, code: str, message: str) -> bytes:
        """Return the error, which ends the stream."""
        return _event(Messages().error(status, code, message, None))

    def _start(self, block: Mapping[str, Any]) -> bytes:
        return _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _stop(self) -> bytes:
        self._index += 1
        return _event({"type": "content_block_stop", "index": self._index - 1})


class Messages(AgentProtocol):
    """Anthropic's messages."""

    name: ProtocolName = "messages"
    path = "messages"
    events = MessageEvents

    def read(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Call:
        """Read a request. See `AgentProtocol`."""
        request, params = read_fields(body, _Request, REFUSED)
        reader = _Reader()
        messages = reader.conversation(request)
        tools = read_tools(request.tools, reader.notes, reader.tool)
        choice = request.tool_choice or _ToolChoice(type="auto")
        named: tuple[str, ...] = ()
        if choice.type == "tool":
            if choice.name is None:
                raise InputError("a tool must be named", where="tool_choice.name")
            named = (choice.name,)
        check_choice(tools, _CHOICES[choice.type], named)
        output = request.output_config or _OutputConfig()
        if output.effort is not None:
            reader.note("output_config.effort")
        if format_ := output.format or request.output_format:
            set_structure(params, format_.type, format_.schema, "output_config.format")
        if request.stop_sequences:
            params["stop"] = request.stop_sequences
        thinking = request.thinking
        if thinking is not None and thinking.budget_tokens is not None:
            reader.note("thinking.budget_tokens")
        user = json_object(request.metadata and request.metadata.user_id)
        session = user.get("session_id")
        return Call(
            protocol=self.name,
            model=request.model,
            messages=messages,
            tools=tools,
            tool_choice=_CHOICES[choice.type],
            named_tools=named,
            parallel_tool_calls=not choice.disable_parallel_tool_use,
            sampling_params=check_sampling_params({**params, "max_tokens": request.max_tokens}),
            thinking=None if thinking is None else _THINKING.get(thinking.type),
            stream=request.stream,
            with_usage=True,
            notes=tuple(reader.notes),
            origin=read_origin(headers, thread=session if isinstance(session, str) else None),
            idempotency_key=headers.get("idempotency-key"),
        )

    def reply(self, call: Call, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body of an unstreamed reply."""
        answer = answers[0]
        content: list[dict[str, Any]] = []
        if answer.reasoning:
            signature = _signature(answer.id)
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": signature})
        if answer.content:
            content.append({"type": "text", "text": answer.content})
        for call_ in answer.calls:
            arguments = msgspec.Raw(call_.arguments.encode())  # as it is, numbers and escapes included
            content.append({"type": "tool_use", "id": call_.id, "name": call_.name, "input": arguments})
        head = _head(call, answer.id, content, _usage(total_usage(answers)))
        return {**head, **_ending(answer)}

    def error(self, status: int, code: str, message: str, param: str | None) -> dict[str, Any]:
        """Return the body of an error."""
        kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": None}


_CHOICES: Final[Mapping[str, ToolChoice]] = {
    "auto": "auto", "any": "required", "tool": "required", "none": "none"
}  # fmt: skip
_THINKING: Final = {"enabled": True, "disabled": False}
_ERRORS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class _Reader:
    """Reads the conversation and the tools of one request, and collects notes."""

    def __init__(self) -> None:
        self.notes: dict[str, None] = {}

    def note(self, field: str) -> None:
        """Note an accepted field without effect."""
        self.notes[field] = None

    def conversation(self, request: _Request) -> tuple[Message, ...]:
        """Read the system prompt and the messages."""
        if not request.messages:
            raise InputError("must be a list of one or more messages", where="messages")
        messages: list[Message] = []
        if request.system is not None and (text := _system(request.system)):
            messages.append(Message(role="system", content=text))
        for index, item in enumerate(request.messages):
            where = f"messages[{index}]"
            message = convert(item, _Message, where, error=MessageError)
            if message.role == "assistant":
                messages.append(self._answer(message.content, f"{where}.content"))
            elif message.role == "system":
                content = read_content(message.content, f"{where}.content", ("text",))
                messages.append(Message(role="system", content=content))
            else:
                messages += self._user(message.content, f"{where}.content")
        if messages[-1].role == "assistant":
            raise InputError(
                "the conversation ends with an answer, which cannot be continued",
                where=f"messages[{len(request.messages) - 1}]",
                expected="a user message",
            )
        return tuple(messages)

    def tool(self, item: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
        """Read a tool."""
        kind = item.get("type")
        if kind not in (None, "custom"):
            raise InputError(
                "only the provider's own models know this tool",
                where=f"{where}.type",
                got=repr(kind),
                remedy="Define it with a name and an input_schema",
            )
        tool = convert(item, _Tool, where)
        if tool.strict:
            self.note("tools.strict")
        return [function_tool(tool.name, tool.description, tool.input_schema)]

    def _user(self, content: str | list[Any], where: str) -> list[Message]:
        """Read a user message: results of tools are messages of their own, in order with the rest."""
        if isinstance(content, str):
            return [Message(role="user", content=content)]
        messages: list[Message] = []
        parts: list[Any] = []
        begin = 0
        for index, block in enumerate([*content, None]):
            kind = block.get("type") if isinstance(block, dict) else None
            if parts and (kind == "tool_result" or index == len(content)):
                read = read_content(parts, where, _PARTS, begin=begin)
                messages.append(Message(role="user", content=read))
                parts = []
            if kind == "tool_result":
                messages.append(self._result(block, f"{where}[{index}]"))
                begin = index + 1
            elif index < len(content):
                parts.append(block)
        return messages or [Message(role="user", content="")]

    def _result(self, block: Any, where: str) -> Message:
        result = convert(block, _ToolResult, where, error=MessageError)
        if result.is_error:
            self.note("tool_result.is_error")
        content = read_content(result.content, f"{where}.content", _PARTS)
        return Message(role="tool", content=content, tool_call_id=result.tool_use_id)

    def _answer(self, content: str | list[Any], where: str) -> Message:
        if isinstance(content, str):
            return assistant([content], None, ())
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for index, block in enumerate(content):
            place = f"{where}[{index}]"
            kind = block.get("type") if isinstance(block, dict) else None
            if kind == "thinking":
                thoughts.append(convert(block, _ThinkingBlock, place, error=MessageError).thinking)
            elif kind == "redacted_thinking":
                self.note("redacted_thinking")
            elif kind == "tool_use":
                use = convert(block, _ToolUse, place, error=MessageError)
                calls.append(ToolCall(use.name, read_arguments(use.input, f"{place}.input"), use.id))
            else:
                texts.append(text_of(read_content([block], where, ("text",), begin=index)))
        return assistant(texts, "\n\n".join(thoughts), calls)


def _system(system: str | Sequence[Any]) -> str:
    """The system prompt as one text, without the billing line."""
    blocks = (
        [system]
        if isinstance(system, str)
        else [
            text_of(read_content([block], "system", ("text",), begin=index))
            for index, block in enumerate(system)
        ]
    )
    texts = [block.partition("\n")[2] if block.startswith(_BILLING) else block for block in blocks]
    return "\n\n".join([text for text in texts if text])


def _event(data: Mapping[str, Any]) -> bytes:
    return event(data, data["type"])


def _head(call: Call, answer_id: str, content: Sequence[Any], usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": f"msg_{answer_id}",
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": content,
        "usage": usage,
    }


def _signature(answer_id: str) -> str:
    """Our signature of reasoning, which names the answer. It proves nothing, since history is looked up."""
    return f"mmrender.{answer_id}"


def _ending(answer: Answer) -> dict[str, Any]:
    reason = {"tool_calls": "tool_use", "stop": "end_turn"}.get(answer.finish_reason, "max_tokens")
    if is_cut(answer) or answer.stop is None or answer.calls:
        return {"stop_reason": reason, "stop_sequence": None}
    return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}


def _usage(usage: Usage) -> dict[str, Any]:
    cached = usage.cached_tokens or 0
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }
