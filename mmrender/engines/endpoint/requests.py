"""Chat requests read strictly: what would be ignored is refused, by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from mmrender.client.sampling import PARAMETERS, check_sampling_params
from mmrender.engines.endpoint.failures import RequestError


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat request in our terms.

    Attributes:
        messages: The conversation.
        tools: Tool definitions, or None.
        params: Sampling parameters in vLLM's names; `max_tokens` only where the request names it.
        count: Completions wanted.
        template_arguments: Further arguments of the template.
        wants_logprobs: Whether to answer with logprobs.
        wants_token_ids: Whether to answer with token ids.
        stream: Whether to answer as a stream.
        stream_usage: Whether a stream ends with token counts.
        cache_salt: Keeps the prefix cache of unlike requests apart.
        priority: Lower is served first.
    """

    messages: list[Any]
    tools: list[Any] | None
    params: dict[str, Any]
    count: int
    template_arguments: dict[str, Any]
    wants_logprobs: bool
    wants_token_ids: bool
    stream: bool
    stream_usage: bool
    cache_salt: str | None
    priority: int | None

    @property
    def wants_alternatives(self) -> bool:
        """Whether to answer with other tokens than those sampled; a stream then comes in one piece."""
        return bool(self.params.get("logprobs"))


IGNORED: Final = frozenset(
    {"metadata", "model", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
)
"""Fields that say nothing about the completion."""

_READ: Final = frozenset(
    {
        "cache_salt",
        "chat_template_kwargs",
        "logprobs",
        "max_completion_tokens",
        "messages",
        "n",
        "parallel_tool_calls",
        "priority",
        "response_format",
        "return_token_ids",
        "stream",
        "stream_options",
        "tool_choice",
        "tools",
        "top_logprobs",
    }
)
MAX_CHOICES: Final = 128
MAX_TOP_LOGPROBS: Final = 20


def read_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Read the body of a chat request.

    Raises:
        RequestError: A field is unknown, of the wrong type, or asks for what is not offered.
        SamplingParameterError: A sampling parameter has a value that it may not have.
    """
    sampling = {name for name in PARAMETERS if name not in ("n", "logprobs")}
    for name, value in body.items():
        if value is not None and name not in _READ and name not in IGNORED and name not in sampling:
            raise _refused(name, "is not a field of chat requests here")
    params = {name: body[name] for name in sampling if body.get(name) is not None}
    wants_logprobs = _field(body, "logprobs", bool, False)
    top = _field(body, "top_logprobs", int, 0)
    if top and not wants_logprobs:
        raise _refused("top_logprobs", "needs logprobs=true")
    if not 0 <= top <= MAX_TOP_LOGPROBS:
        raise _refused("top_logprobs", f"must be from 0 to {MAX_TOP_LOGPROBS}")
    if top:
        params["logprobs"] = top
    if body.get("max_completion_tokens") is not None:
        params["max_tokens"] = body["max_completion_tokens"]
    params |= _format(body.get("response_format"))
    options = _field(body, "stream_options", dict, {})
    return ChatRequest(
        messages=_messages(body),
        tools=_tools(body),
        params=check_sampling_params(params),
        count=_count(body),
        template_arguments=_field(body, "chat_template_kwargs", dict, {}),
        wants_logprobs=wants_logprobs,
        wants_token_ids=_field(body, "return_token_ids", bool, False),
        stream=_field(body, "stream", bool, False),
        stream_usage=bool(options.get("include_usage")),
        cache_salt=_field(body, "cache_salt", str, None),
        priority=_field(body, "priority", int, None),
    )


def _field(body: Mapping[str, Any], name: str, kind: Callable[..., Any], default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):  # type: ignore[arg-type]
        raise _refused(name, f"must be of type {kind.__name__}")
    return value


def _messages(body: Mapping[str, Any]) -> list[Any]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _refused("messages", "must be a list of one or more messages")
    return messages


def _tools(body: Mapping[str, Any]) -> list[Any] | None:
    tools = _field(body, "tools", list, None)
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise _refused("tool_choice", "must be 'auto' or 'none': calls cannot be forced")
    if body.get("parallel_tool_calls") is False:
        raise _refused("parallel_tool_calls", "cannot be turned off")
    return None if choice == "none" or not tools else tools


def _count(body: Mapping[str, Any]) -> int:
    count = _field(body, "n", int, 1)
    if not 1 <= count <= MAX_CHOICES:
        raise _refused("n", f"must be from 1 to {MAX_CHOICES}")
    return int(count)


def _format(given: Any) -> dict[str, Any]:
    """The sampling parameter of a response format."""
    if given is None:
        return {}
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"structured_outputs": {"json_object": True}}
    schema = given.get("json_schema") if isinstance(given, Mapping) else None
    if kind == "json_schema" and isinstance(schema, Mapping) and isinstance(schema.get("schema"), Mapping):
        return {"structured_outputs": {"json": schema["schema"]}}
    raise _refused("response_format", "must be of type text, json_object or json_schema with its schema")


def _refused(name: str, problem: str) -> RequestError:
    return RequestError(400, f"{name}: {problem}", code="invalid_value", param=name)
