"""OpenAI requests answered in tokens: rendered here, sampled from ids, parsed here.

Requests are read strictly: a field that would be ignored is refused by name.
"""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import msgspec

from mmrender.client.sampling import PARAMETERS, check_sampling_params, complete_sampling
from mmrender.client.types import EngineResponse, FinishReason, Prompt, finish_reason_of
from mmrender.engines.interface import (
    InferenceEngineInterface,
    gather_all,
    new_request,
    prompt_of,
    with_own_seeds,
)
from mmrender.errors import EngineReplyError, InputError, PromptTooLongError, SamplingParameterError
from mmrender.parsing import ParsedResponse
from mmrender.protocols import RendererProtocol

Emit = Callable[[dict[str, Any]], None]

IGNORED: Final = frozenset(
    {"metadata", "model", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
)
"""Fields that do not change the completion."""

_RESERVED: Final = frozenset(
    {"add_generation_prompt", "conversation", "continue_final_message", "messages", "self", "tools"}
)
"""Template variables that a request sets by its own fields."""

_MEDIA: Final = ("image", "image_url", "input_image", "video", "video_url", "audio", "input_audio")
_MARGIN: Final = 24
"""Characters held back where tools are offered; the openers of calls are shorter."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class _Common(msgspec.Struct, kw_only=True):
    """Fields of both kinds of request that are not sampling parameters."""

    n: int = 1
    stream: bool = False
    stream_options: _StreamOptions | None = None
    return_token_ids: bool = False
    cache_salt: str | None = None
    priority: int | None = None
    session_id: str | int | None = None
    model: str = ""


class _Chat(_Common, kw_only=True):
    messages: list[Any]
    tools: list[Any] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def offered(self) -> list[Any] | None:
        """Tools that the model may call."""
        return None if self.tool_choice == "none" or not self.tools else self.tools


class _Completion(_Common, kw_only=True):
    prompt: list[int | list[int]]
    logprobs: int | None = None


class TokenAPI:
    """Answers OpenAI requests over an engine that samples from token ids.

    Args:
        engine: Samples.
        renderer: Renders conversations, decodes and parses completions.
    """

    def __init__(self, engine: InferenceEngineInterface, renderer: RendererProtocol) -> None:
        self._engine = engine
        self._renderer = renderer

    def takes_prompt(self, body: Mapping[str, Any]) -> bool:
        """Whether a completion request's prompt is token ids; text is the engine's to tokenize."""
        prompt = body.get("prompt")
        first = prompt[0] if isinstance(prompt, list) and prompt else None
        return isinstance(first, int) or (isinstance(first, list) and all(isinstance(t, int) for t in first))

    async def chat(self, body: Mapping[str, Any], emit: Emit | None = None) -> dict[str, Any]:
        """Answer a chat request; with `emit`, chunk by chunk besides.

        Raises:
            InputError: A field is unknown, malformed, or asks for what is not offered; `where` names it.
            MMRenderError: The conversation cannot be rendered, or a completion failed.
        """
        request: _Chat = _read(body, _Chat)
        arguments = request.chat_template_kwargs
        if not request.messages:
            raise InputError("must be a list of one or more messages", where="messages")
        if reserved := sorted(_RESERVED.intersection(arguments)):
            raise InputError("is not a template argument", where=f"chat_template_kwargs.{reserved[0]}")
        if not isinstance(arguments.get("documents", []), list):
            raise InputError("must be a list", where="chat_template_kwargs.documents")
        _check_media(request.messages)
        params = _sampling(body)
        if request.top_logprobs is not None and not (request.logprobs and 0 <= request.top_logprobs <= 20):
            raise InputError("must be from 0 to 20, with logprobs=true", where="top_logprobs")
        if request.top_logprobs:
            params["logprobs"] = request.top_logprobs
        if request.max_completion_tokens is not None:
            params["max_tokens"] = request.max_completion_tokens
        params |= _response_format(request.response_format)
        prompt = await prompt_of(self._renderer, request.messages, request.offered, arguments)
        return await self._answer(request, [prompt], params, emit)

    async def completion(self, body: Mapping[str, Any], emit: Emit | None = None) -> dict[str, Any]:
        """Answer a completion request of token ids, one prompt or many; as for `chat`."""
        request: _Completion = _read(body, _Completion)
        prompts: list[Any] = request.prompt
        if all(isinstance(each, int) for each in prompts):
            prompts = [prompts]
        if not all(isinstance(each, list) and each for each in prompts):
            raise InputError("must be token ids, or lists of token ids", where="prompt")
        params = {"max_tokens": 16, **_sampling(body)}
        if request.logprobs:
            params["logprobs"] = request.logprobs
        work = [Prompt(ids, new_request(ids, params).multi_modal_data, None) for ids in prompts]
        return await self._answer(request, work, params, emit)

    async def _answer(
        self,
        request: _Chat | _Completion,
        prompts: Sequence[Prompt],
        params: dict[str, Any],
        emit: Emit | None,
    ) -> dict[str, Any]:
        """Sample `n` completions of each prompt, and answer them in the shape of the request's kind."""
        if not 1 <= request.n <= 128:
            raise InputError("must be from 1 to 128", where="n")
        work = [
            (prompt, each)
            for prompt in prompts
            for each in with_own_seeds(await self._completed(params, len(prompt.ids)), request.n)
        ]
        is_chat = isinstance(request, _Chat)
        kind = "text_completion" if not is_chat else f"chat.completion{'.chunk' if emit else ''}"
        head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": request.model,
        }
        more = {"prompt_token_ids": prompts[0].ids} if is_chat and request.return_token_ids else {}

        def send(index: int, delta: Mapping[str, Any], reason: str | None = None, **members: Any) -> None:
            said = {"delta": delta} if is_chat else {"text": delta.get("content") or ""}
            choice = {"index": index, **said, "logprobs": None, "finish_reason": reason, **members}
            first = more if index == 0 and "role" in delta else {}
            if emit is not None:
                emit({**head, "choices": [choice], **first})

        answers = await gather_all(
            [
                self._choice(request, prompt, each, index, send if emit is not None else None)
                for index, (prompt, each) in enumerate(work)
            ]
        )
        usage = _usage([response for response, _ in answers], request.n)
        if emit is not None and request.stream_options is not None and request.stream_options.include_usage:
            emit({**head, "choices": [], "usage": usage})
        return {**head, "choices": [choice for _, choice in answers], "usage": usage, **more}

    async def _choice(
        self,
        request: _Chat | _Completion,
        prompt: Prompt,
        params: Mapping[str, Any],
        index: int,
        send: Callable[..., None] | None,
    ) -> tuple[EngineResponse, dict[str, Any]]:
        """Sample one completion, sending its deltas; return the response and the whole choice."""
        chat = request if isinstance(request, _Chat) else None

        def parse(ids: Sequence[int]) -> ParsedResponse:
            if chat is None:
                stopped = ids and ids[-1] in self._renderer.get_stop_token_ids()
                return ParsedResponse(self._renderer.decode(ids[:-1] if stopped else ids))
            return self._renderer.parse_response(
                ids, tools=chat.offered, prompt_ids=prompt.ids, **chat.chat_template_kwargs
            )

        def extras(ids: Sequence[int], logprobs: Sequence[float], top: Any = None) -> dict[str, Any]:
            members: dict[str, Any] = {"token_ids": list(ids)} if request.return_token_ids else {}
            if chat is not None and chat.logprobs:
                members["logprobs"] = self._chat_logprobs(ids, logprobs, top)
            elif chat is None and request.logprobs is not None:
                texts = [self._renderer.decode([each]) for each in ids]
                members["logprobs"] = {"tokens": texts, "token_logprobs": list(logprobs)}
            return members

        stops = params.get("stop") or []
        stops = (
            [] if params.get("include_stop_str_in_output") else [stops] if isinstance(stops, str) else stops
        )
        writer = _DeltaWriter(parse, margin=_MARGIN if chat is not None and chat.offered else 0, stops=stops)

        def tell(ids: Sequence[int], logprobs: Sequence[float], top: Any = None) -> None:
            if send is None:
                return
            for delta in writer.add(ids):
                send(index, delta)
            if ids and (members := extras(ids, logprobs, top)):
                send(index, {}, **members)

        def on_tokens(ids: Sequence[int], logprobs: Sequence[float], reason: FinishReason | None, /) -> None:
            tell(ids, logprobs)

        if send is not None and chat is not None:
            send(index, {"role": "assistant", "content": ""})
        # Alternatives come with whole completions only.
        listens = send is not None and not (chat is not None and chat.top_logprobs)
        response = await self._engine.complete(
            replace(
                new_request(prompt.ids, params, prompt.data),
                cache_salt=request.cache_salt,
                priority=request.priority,
            ),
            session_id=request.session_id,
            on_tokens=on_tokens if listens else None,
        )
        if not listens:
            tell(response.completion_ids, response.logprobs, response.top_logprobs)
        parsed = parse(response.completion_ids)
        message = _message(parsed, response, stops)
        reason = finish_reason_of(response, parsed)
        if send is not None:
            for delta in writer.end(message):
                send(index, delta)
            send(index, {}, reason)
        choice = {
            "index": index,
            **({"message": message} if chat is not None else {"text": message["content"]}),
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": response.stop_reason,
        }
        return response, choice | extras(response.completion_ids, response.logprobs, response.top_logprobs)

    async def _completed(self, params: dict[str, Any], prompt_tokens: int) -> dict[str, Any]:
        """Sampling parameters with a budget that fits the engine's context, and the model's stop tokens."""
        limit = await self._engine.max_prompt_len()
        if limit is not None and prompt_tokens > limit:
            raise PromptTooLongError(prompt_tokens, limit, where="messages")
        if limit is None and params.get("max_tokens") is None:
            raise SamplingParameterError(
                "the request names no budget, and the engine does not report its context length",
                where="max_tokens",
            )
        room = None if limit is None else limit + 1 - prompt_tokens
        return complete_sampling(params, room=room, stop_token_ids=self._renderer.get_stop_token_ids())

    def _chat_logprobs(self, ids: Sequence[int], logprobs: Sequence[float], top: Any) -> dict[str, Any]:
        """Logprobs of tokens as OpenAI's chat replies hold them, with alternatives."""

        def entry(token_id: int, logprob: float) -> dict[str, Any]:
            text = self._renderer.decode([token_id])
            return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}

        content = []
        for index, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            others = top[index] if top is not None and index < len(top) else ()
            content.append(
                {**entry(token_id, logprob), "top_logprobs": [entry(other, value) for other, value in others]}
            )
        return {"content": content, "refusal": None}


class _DeltaWriter:
    """Turns a growing completion into deltas: reasoning and content as soon as they are certain.

    A delta cannot be taken back, so text is held back while it may still become something else: part of a
    character, a stop string, or the beginning of a tool call.
    """

    def __init__(
        self, parse: Callable[[Sequence[int]], ParsedResponse], *, margin: int, stops: Sequence[str]
    ) -> None:
        self._parse = parse
        self._held = max([margin, *(len(stop) - 1 for stop in stops)])
        self._stops = stops
        self._ids: list[int] = []
        self._parsed = 0
        self._shown = {"reasoning_content": "", "content": ""}

    def add(self, token_ids: Sequence[int]) -> list[dict[str, str]]:
        """Take tokens; return what can be shown by now."""
        self._ids += token_ids
        # Parsing is linear in the whole, so a long completion is parsed at every 64th part of it.
        if len(self._ids) - self._parsed < max(1, len(self._ids) // 64):
            return []
        self._parsed = len(self._ids)
        parsed = self._parse(self._ids)
        texts = {"reasoning_content": parsed.reasoning_content or ""}
        if not parsed.tool_calls and parsed.reasoning_closed:
            texts["content"] = parsed.content
        deltas = []
        for name, text in texts.items():
            certain = text.rstrip("\ufffd")
            for stop in self._stops:
                certain = certain.split(stop)[0]
            certain = certain[: max(0, len(certain) - self._held)].rstrip()
            shown = self._shown[name]
            if len(certain) > len(shown) and certain.startswith(shown):
                self._shown[name] = certain
                deltas.append({name: certain[len(shown) :]})
        return deltas

    def end(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the rest, once the completion has ended.

        Raises:
            EngineReplyError: The whole does not begin with what was shown.
        """
        deltas: list[dict[str, Any]] = []
        for name, shown in self._shown.items():
            whole = message.get(name) or ""
            if not whole.startswith(shown):
                raise EngineReplyError(
                    "the completion parses differently as a whole than its beginning did",
                    where=name,
                    expected=repr(shown)[-80:],
                    got=repr(whole)[-80:],
                )
            if len(whole) > len(shown):
                deltas.append({name: whole[len(shown) :]})
        if calls := message.get("tool_calls"):
            deltas.append({"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]})
        return deltas


def _read(body: Mapping[str, Any], kind: type[Any]) -> Any:
    """Convert a body, strictly.

    Raises:
        InputError: A field is unknown, or has a wrong type or value.
    """
    known = {*kind.__struct_fields__, *IGNORED, *PARAMETERS}
    given = {name: value for name, value in body.items() if value is not None}
    if unknown := sorted(given.keys() - known):
        raise InputError("unknown field of this request", where=unknown[0])
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at ")
        raise InputError(problem, where=path.strip("`$.") or None) from error


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters of a body, checked; `n` and `logprobs` mean something else there."""
    names = [name for name in PARAMETERS if name not in ("n", "logprobs")]
    return check_sampling_params({name: body[name] for name in names if body.get(name) is not None})


def _check_media(messages: Sequence[Any]) -> None:
    """Require data and http(s) URLs: a caller must not name files of this machine.

    Raises:
        InputError: A part names something else.
    """
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        for number, part in enumerate(content if isinstance(content, list) else ()):
            for name in _MEDIA if isinstance(part, Mapping) else ():
                source = part.get(name)
                source = source.get("url", source) if isinstance(source, Mapping) else source
                allowed = isinstance(source, str) and source.lower().startswith(
                    ("data:", "http://", "https://")
                )
                if source is not None and not allowed:
                    raise InputError(
                        "media must be given as data: or http(s) URLs",
                        where=f"messages[{index}].content[{number}].{name}",
                    )


def _response_format(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The sampling parameter of a response format."""
    kind = None if given is None else given.get("type")
    if given is None or kind == "text":
        return {}
    if kind == "json_object":
        return {"structured_outputs": {"json_object": True}}
    schema = given.get("json_schema")
    if kind == "json_schema" and isinstance(schema, Mapping) and isinstance(schema.get("schema"), Mapping):
        return {"structured_outputs": {"json": schema["schema"]}}
    raise InputError("must be of type text, json_object or json_schema", where="response_format")


def _message(parsed: ParsedResponse, response: EngineResponse, stops: Sequence[str]) -> dict[str, Any]:
    """The assistant message of a reply; malformed calls stay out of it, and so does a matched stop string."""
    stop = response.stop_reason if response.finish_reason == "stop" else None

    def cut(text: str) -> str:  # what the last token holds beyond the stop string goes too
        return text.rpartition(stop)[0] if isinstance(stop, str) and stop in stops and stop in text else text

    calls = [
        {
            "id": call.id or f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()},
        }
        for call in parsed.to_message().tool_calls
    ]
    content = cut(parsed.content)
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if parsed.reasoning_content is not None:
        message["reasoning_content"] = cut(parsed.reasoning_content)
    return {**message, "tool_calls": calls} if calls else message


def _usage(responses: Sequence[EngineResponse], per_prompt: int) -> dict[str, Any]:
    """Token counts; a prompt that was sampled `per_prompt` times counts once."""
    firsts = responses[::per_prompt]
    prompt = sum(each.usage.prompt_tokens for each in firsts)
    completion = sum(len(each.completion_ids) for each in responses)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if firsts[0].usage.cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": firsts[0].usage.cached_tokens}
    return usage
