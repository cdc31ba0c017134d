"""OpenAI's chat completions: requests read strictly, replies, chunks of streams, errors."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from mmrender.client.sampling import check_sampling_params
from mmrender.errors import InputError, MessageError, check_count
from mmrender.gateway.call import Answer, Call, Delta, ProtocolName, ToolChoice
from mmrender.gateway.reading import (
    Strict,
    assistant,
    check_choice,
    convert,
    read_arguments,
    read_content,
    read_fields,
    read_origin,
    set_structure,
)
from mmrender.gateway.writing import (
    AgentProtocol,
    EventWriter,
    event,
    is_cut,
    openai_error,
    openai_logprobs,
    total_usage,
)
from mmrender.messages import Message, Role, ToolCall, text_of

REFUSED: Final[Mapping[str, str]] = {
    "audio": "Answers are text",
    "cache_salt": "Sessions are kept apart by their names",
    "documents": "Write them into a message",
    "echo": "The trajectory has the prompt",
    "function_call": "Use tool_choice",
    "functions": "Use tools",
    "moderation": "Leave it out",
    "priority": "Leave it out",
    "prompt_logprobs": "The trajectory has the log-probabilities of what was sampled",
    "return_token_ids": "The trajectory has them",
    "web_search_options": "Give the model a tool that searches",
}
"""Known fields that are not supported, and a way out for each."""

_MAX_ANSWERS: Final = 128
"""Maximum number of answers of one request."""
_TEXTS: Final = ("text", "input_text", "output_text", "refusal")
_PARTS: Final = (*_TEXTS, "image_url", "input_image", "video_url", "input_audio", "audio_url")
_ROLES: Final[Mapping[str, Role]] = {"developer": "system", "function": "tool"}


class _StreamOptions(Strict, kw_only=True):
    include_usage: bool = False
    include_obfuscation: Any = None
    continuous_usage_stats: Literal[False] | None = None


class _Schema(Strict, kw_only=True):
    name: Any = None
    description: Any = None
    schema: dict[str, Any] | None = None
    strict: Any = None


class _ResponseFormat(Strict, kw_only=True):
    type: str
    json_schema: _Schema | None = None


class _Thinking(Strict, kw_only=True):
    type: Literal["enabled", "disabled", "auto"]
    budget_tokens: int | None = None


class _Request(Strict, kw_only=True):
    ignored = frozenset({
        *("metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "store", "user"),
    })  # fmt: skip
    model: str = ""
    messages: list[Any]
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    n: int = 1
    logprobs: bool = False
    top_logprobs: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    response_format: _ResponseFormat | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    enable_thinking: bool | None = None
    thinking: _Thinking | None = None
    reasoning_effort: str | None = None
    verbosity: Any = None
    modalities: list[Literal["text"]] | None = None
    add_generation_prompt: Literal[True] = True
    continue_final_message: bool = False


class _Function(Strict, kw_only=True):
    ignored = ("parsed_arguments",)
    name: str
    arguments: Any = None


class _ToolCall(Strict, kw_only=True):
    ignored = ("extra_content", "index", "provider_specific_fields", "status", "thought_signature")
    function: Any
    id: str | None = None
    type: Literal["function"] = "function"


class _Message(Strict, kw_only=True):
    ignored = (
        *("annotations", "cache_control", "id", "parsed", "provider_specific_fields", "reasoning_details"),
        *("refusal", "thinking_blocks"),
    )
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    function_call: None = None
    audio: None = None


class _NamedFunction(Strict, kw_only=True):
    name: str


class _NamedTool(Strict, kw_only=True):
    type: Literal["function"]
    function: _NamedFunction


class _Allowed(Strict, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[_NamedTool], msgspec.Meta(min_length=1)]


class _AllowedTools(Strict, kw_only=True):
    type: str
    allowed_tools: _Allowed


class ChatEvents(EventWriter):
    """Writes one streamed reply as chunks."""

    def begin(self) -> bytes:
        """Return the first chunk of each answer."""
        first = {"role": "assistant", "content": ""}
        return b"".join([self._chunk(index, first) for index in range(len(self._ids))])

    def text(self, delta: Delta) -> bytes:
        """Return the chunk of a piece of text."""
        return self._chunk(delta.index, {_FIELDS[delta.field]: delta.text})

    def end(self, answers: Sequence[Answer]) -> bytes:
        """Return the chunks after the last text, and the end mark."""
        events: list[bytes] = []
        for index, answer in enumerate(answers):
            events.append(self.rest(answer, index))
            if calls := _calls(answer):
                numbered = [{"index": number, **call} for number, call in enumerate(calls)]
                events.append(self._chunk(index, {"tool_calls": numbered}))
            last = {"finish_reason": _finish_reason(answer), "logprobs": _logprobs(self._call, answer)}
            events.append(self._chunk(index, {}, **last))
        if self._call.with_usage:
            events.append(self._event(choices=[], usage=_usage(answers)))
        return b"".join(events) + _DONE

    def failure(self, status: int, code: str, message: str) -> bytes:
        """Return the error, and the end mark, or nothing if an equal call may succeed.

        OpenAI's clients raise an error without a status for such an event, which agents do not repeat. They
        repeat calls whose connection broke.
        """
        if status >= 500:
            return b""
        return event(openai_error(status, code, message, None)) + _DONE

    def _chunk(self, index: int, delta: Mapping[str, Any], **members: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **members}
        return self._event(choices=[choice])

    def _event(self, **members: Any) -> bytes:
        return event({**_head(self._call, self._ids[0], self._created, "chat.completion.chunk"), **members})


class Chat(AgentProtocol):
    """OpenAI's chat completions."""

    name: ProtocolName = "chat"
    path = "chat/completions"
    events = ChatEvents

    def read(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Call:
        """Read a request. See `AgentProtocol`."""
        request, params = read_fields(body, _Request, REFUSED)
        if not request.messages:
            raise InputError("must be a list of one or more messages", where="messages")
        if request.continue_final_message:
            raise InputError("an answer cannot be continued", where="continue_final_message")
        check_count("n", request.n, maximum=_MAX_ANSWERS)
        tools = (
            None
            if request.tools is None
            else tuple([_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools)])
        )
        choice, named = _choice(request.tool_choice)
        check_choice(tools, choice, named)
        _set_params(params, request)
        options = request.stream_options
        notes = [] if request.verbosity is None else ["verbosity"]
        if any(tool["function"].get("strict") for tool in tools or ()):
            notes.append("tools.strict")
        thinking = request.enable_thinking
        if request.thinking is not None:
            if thinking is None and request.thinking.type != "auto":
                thinking = request.thinking.type == "enabled"
            if request.thinking.budget_tokens is not None:
                notes.append("thinking.budget_tokens")
        if request.reasoning_effort == "none" and thinking is None:
            thinking = False
        elif request.reasoning_effort is not None:
            notes.append("reasoning_effort")
        return Call(
            protocol=self.name,
            model=request.model,
            messages=tuple(
                [_message(message, f"messages[{index}]") for index, message in enumerate(request.messages)]
            ),
            tools=tools,
            tool_choice=choice,
            named_tools=named,
            parallel_tool_calls=request.parallel_tool_calls,
            sampling_params=check_sampling_params(params),
            template_arguments=request.chat_template_kwargs,
            thinking=thinking,
            stream=request.stream,
            n=request.n,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            with_usage=options is not None and options.include_usage,
            notes=tuple(notes),
            origin=read_origin(headers),
            idempotency_key=headers.get("idempotency-key"),
        )

    def reply(self, call: Call, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the body of an unstreamed reply."""
        choices = [
            {
                "index": index,
                "message": _reply_message(answer),
                "logprobs": _logprobs(call, answer),
                "finish_reason": _finish_reason(answer),
            }
            for index, answer in enumerate(answers)
        ]
        head = _head(call, answers[0].id, answers[0].created, "chat.completion")
        return {**head, "choices": choices, "usage": _usage(answers)}


_DONE: Final = b"data: [DONE]\n\n"
_FIELDS: Final = {"reasoning": "reasoning_content", "content": "content"}


def _message(value: Any, where: str) -> Message:
    read = convert(value, _Message, where, error=MessageError)
    if read.role != "assistant":
        if read.tool_calls:
            raise MessageError("only an assistant calls tools", where=f"{where}.tool_calls", got=read.role)
        return Message(
            role=_ROLES.get(read.role, read.role),  # type: ignore[arg-type]
            content=read_content(read.content, f"{where}.content", _PARTS),
            name=read.name,
            tool_call_id=read.tool_call_id,
        )
    calls = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(read.tool_calls or ())]
    text = text_of(read_content(read.content, f"{where}.content", _TEXTS))
    return assistant([text], read.reasoning_content or read.reasoning or read.thinking, calls)


def _call(value: Any, where: str) -> ToolCall:
    call = convert(value, _ToolCall, where, error=MessageError)
    function = convert(call.function, _Function, f"{where}.function", error=MessageError)
    arguments = read_arguments(function.arguments, f"{where}.function.arguments")
    return ToolCall(function.name, arguments, call.id)


def _tool(tool: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Check a tool, which the template prints as it is."""
    kind, function = tool.get("type", "function"), tool.get("function")
    if kind != "function":
        raise InputError(
            "unsupported type of tool", where=f"{where}.type", expected="function", got=repr(kind)
        )
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise InputError("the tool does not name a function", where=f"{where}.function.name")
    return tool


def _choice(choice: ToolChoice | Mapping[str, Any]) -> tuple[ToolChoice, tuple[str, ...]]:
    if isinstance(choice, str):
        return choice, ()
    if choice.get("type") == "allowed_tools":
        allowed = convert(choice, _AllowedTools, "tool_choice").allowed_tools
        return allowed.mode, tuple([tool.function.name for tool in allowed.tools])
    return "required", (convert(choice, _NamedTool, "tool_choice").function.name,)


def _set_params(params: dict[str, Any], request: _Request) -> None:
    """Set the sampling parameters that only this protocol spells so."""
    if request.top_logprobs is not None and not (request.logprobs and 0 <= request.top_logprobs <= 20):
        raise InputError("must be from 0 to 20, with logprobs=true", where="top_logprobs")
    budgets = [each for each in (request.max_tokens, request.max_completion_tokens) if each is not None]
    if budgets:
        params["max_tokens"] = min(budgets)
    if request.response_format is not None:
        wanted = request.response_format
        schema = None if wanted.json_schema is None else wanted.json_schema.schema
        set_structure(params, wanted.type, schema, "response_format")


def _head(call: Call, answer_id: str, created: int, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer_id}", "object": kind, "created": created, "model": call.model}


def _calls(answer: Answer) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.calls
    ]


def _reply_message(answer: Answer) -> dict[str, Any]:
    content = answer.content if answer.content or not answer.calls else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = _calls(answer)
    return message


def _finish_reason(answer: Answer) -> str:
    return "length" if is_cut(answer) else answer.finish_reason


def _logprobs(call: Call, answer: Answer) -> dict[str, Any] | None:
    return None if call.logprobs is None else {"content": openai_logprobs(answer), "refusal": None}


def _usage(answers: Sequence[Answer]) -> dict[str, Any]:
    usage = total_usage(answers)
    counts: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    return counts
