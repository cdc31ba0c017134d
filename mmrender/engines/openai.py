"""OpenAI requests answered in tokens: rendered here, sampled from ids, parsed here.

Requests are read strictly: a field that would be ignored is refused by name.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import msgspec

from mmrender.client.generation import is_async, rendered_prompt
from mmrender.client.sampling import PARAMETERS, check_sampling_params, complete_sampling
from mmrender.client.types import EngineResponse, FinishReason, OnTokens, Prompt, finish_reason_of
from mmrender.engines.interface import InferenceEngineInterface, gather_all, new_request, with_own_seeds
from mmrender.errors import EngineReplyError, InputError, PromptTooLongError, SamplingParameterError
from mmrender.parsing import ParsedResponse

Emit = Callable[[dict[str, Any]], None]

IGNORED: Final = frozenset(
    {"metadata", "model", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
)
"""Fields that do not change the completion."""

_RESERVED: Final = frozenset(
    {"add_generation_prompt", "conversation", "continue_final_message", "messages", "self", "tools"}
)
"""Template variables that a request sets by its own fields."""

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
    """A chat request."""

    messages: list[Any]
    tools: list[Any] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def offered(self) -> list[Any] | None:
        """Tools that the model may call."""
        return None if self.tool_choice == "none" or not self.tools else self.tools


class _Completion(_Common, kw_only=True):
    """A completion request of token ids."""

    prompt: list[Any]
    logprobs: int | None = None


class TokenAPI:
    """Answers OpenAI requests over an engine that samples from token ids.

    Args:
        engine: Samples.
        renderer: Renders conversations, decodes and parses completions.
    """

    def __init__(self, engine: InferenceEngineInterface, renderer: Any) -> None:
        self._engine = engine
        self._renderer = renderer

    # --- chat ---

    async def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a chat request in one piece.

        Raises:
            InputError: A field is unknown, malformed, or asks for what is not offered; `where` names it.
            MMRenderError: The conversation cannot be rendered, or a completion failed.
        """
        request, prompt, params = await self._read_chat(body)
        responses = await gather_all([self._sample(request, prompt, each) for each in params])
        choices = []
        for index, response in enumerate(responses):
            parsed = self._parse(request, prompt, response.completion_ids)
            choice: dict[str, Any] = {
                "index": index,
                "message": _message(parsed, response, params[index]),
                "logprobs": self._logprobs(response) if request.logprobs else None,
                "finish_reason": finish_reason_of(response, parsed),
                "stop_reason": response.stop_reason,
            }
            if request.return_token_ids:
                choice["token_ids"] = response.completion_ids
            choices.append(choice)
        more = {"prompt_token_ids": prompt.ids} if request.return_token_ids else {}
        head = _head("chatcmpl", "chat.completion", request.model)
        return {**head, "choices": choices, "usage": _usage(responses), **more}

    async def stream_chat(self, body: Mapping[str, Any], emit: Emit) -> None:
        """Answer a chat request chunk by chunk; errors as for `chat`."""
        request, prompt, params = await self._read_chat(body)
        head = _head("chatcmpl", "chat.completion.chunk", request.model)

        async def choice(index: int, sampling: Mapping[str, Any]) -> EngineResponse:
            def send(delta: Mapping[str, Any], reason: str | None = None, **more: Any) -> None:
                fields = {"index": index, "delta": dict(delta), "logprobs": None, "finish_reason": reason}
                emit({**head, "choices": [{**fields, **more}]})

            writer = _DeltaWriter(
                lambda ids: self._parse(request, prompt, ids),
                margin=_MARGIN if request.offered else 0,
                stops=_stop_strings(sampling),
            )
            first = {"prompt_token_ids": prompt.ids} if request.return_token_ids and index == 0 else {}
            fields = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            emit({**head, "choices": [{**fields, "finish_reason": None}], **first})

            def tell(ids: Sequence[int], logprobs: Sequence[float], top: Any = None) -> None:
                for delta in writer.add(ids):
                    send(delta)
                more: dict[str, Any] = {"token_ids": list(ids)} if request.return_token_ids else {}
                if request.logprobs:
                    more["logprobs"] = self._logprobs_of(ids, logprobs, top)
                if more and ids:
                    send({}, **more)

            def on_tokens(
                ids: Sequence[int], logprobs: Sequence[float], reason: FinishReason | None, /
            ) -> None:
                tell(ids, logprobs)

            if request.top_logprobs:  # alternatives come with whole completions only
                response = await self._sample(request, prompt, sampling)
                tell(response.completion_ids, response.logprobs, response.top_logprobs)
            else:
                response = await self._sample(request, prompt, sampling, on_tokens)
            parsed = self._parse(request, prompt, response.completion_ids)
            for delta in writer.end(_message(parsed, response, sampling)):
                send(delta)
            send({}, finish_reason_of(response, parsed))
            return response

        responses = await gather_all([choice(index, each) for index, each in enumerate(params)])
        if request.stream_options is not None and request.stream_options.include_usage:
            emit({**head, "choices": [], "usage": _usage(responses)})

    async def _read_chat(self, body: Mapping[str, Any]) -> tuple[_Chat, Prompt, list[Mapping[str, Any]]]:
        """Read and render a chat request; its sampling parameters, one mapping for each choice."""
        request = _read(body, _Chat, besides=("n", "logprobs", "top_logprobs"))
        arguments = request.chat_template_kwargs or {}
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
        renderer = self._renderer
        if is_async(renderer):
            prompt = await rendered_prompt(renderer, request.messages, request.offered, arguments)  # type: ignore[arg-type]
        else:
            rendered = await asyncio.to_thread(
                renderer.render,
                request.messages,
                tools=request.offered,
                add_generation_prompt=True,
                **arguments,
            )
            prompt = Prompt(list(rendered.token_ids), rendered.multi_modal_data, rendered)
        return request, prompt, await self._all_params(params, len(prompt.ids), request.n)

    def _parse(self, request: _Chat, prompt: Prompt, ids: Sequence[int]) -> ParsedResponse:
        parsed: ParsedResponse = self._renderer.parse_response(
            ids, tools=request.offered, prompt_ids=prompt.ids, **(request.chat_template_kwargs or {})
        )
        return parsed

    # --- completions of token ids ---

    def takes_prompt(self, body: Mapping[str, Any]) -> bool:
        """Whether a completion request's prompt is token ids; text is the engine's to tokenize."""
        prompt = body.get("prompt")
        first = prompt[0] if isinstance(prompt, list) and prompt else None
        return isinstance(first, int) or (isinstance(first, list) and all(isinstance(t, int) for t in first))

    async def completion(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a completion request of token ids, one prompt or many; errors as for `chat`."""
        request, work = await self._read_completion(body)
        responses = await gather_all([self._sample(request, prompt, params) for prompt, params in work])
        choices = []
        for index, (response, (_, params)) in enumerate(zip(responses, work, strict=True)):
            text = _without_stop(self._renderer.decode(self._visible(response)), response, params)
            choice: dict[str, Any] = {
                "index": index,
                "text": text,
                "logprobs": None,
                "finish_reason": response.finish_reason,
                "stop_reason": response.stop_reason,
            }
            if request.logprobs is not None:
                choice["logprobs"] = self._text_logprobs(response.completion_ids, response.logprobs)
            if request.return_token_ids:
                choice["token_ids"] = response.completion_ids
            choices.append(choice)
        head = _head("cmpl", "text_completion", request.model)
        return {**head, "choices": choices, "usage": _usage(responses, per_prompt=request.n)}

    async def stream_completion(self, body: Mapping[str, Any], emit: Emit) -> None:
        """Answer a completion request of token ids chunk by chunk; errors as for `chat`."""
        request, work = await self._read_completion(body)
        head = _head("cmpl", "text_completion", request.model)

        async def choice(index: int, prompt: Prompt, params: Mapping[str, Any]) -> EngineResponse:
            seen: list[int] = []
            shown = ""

            def send(text: str, ids: Sequence[int], logprobs: Sequence[float], reason: str | None) -> None:
                fields: dict[str, Any] = {"index": index, "text": text, "finish_reason": reason}
                fields["logprobs"] = None
                if request.logprobs is not None and ids:
                    fields["logprobs"] = self._text_logprobs(ids, logprobs)
                if request.return_token_ids:
                    fields["token_ids"] = list(ids)
                emit({**head, "choices": [fields]})

            def on_tokens(
                ids: Sequence[int], logprobs: Sequence[float], reason: FinishReason | None, /
            ) -> None:
                nonlocal shown
                seen.extend(ids)
                certain = _certain(self._renderer.decode(seen), _stop_strings(params), 0)
                if reason is None and ids:
                    new = certain[len(shown) :] if certain.startswith(shown) else ""
                    shown += new
                    send(new, ids, logprobs, None)
                elif ids:
                    send("", ids, logprobs, None)

            response = await self._sample(request, prompt, params, on_tokens)
            whole = _without_stop(self._renderer.decode(self._visible(response)), response, params)
            send(whole[len(shown) :], (), (), response.finish_reason)
            return response

        responses = await gather_all([choice(index, *each) for index, each in enumerate(work)])
        if request.stream_options is not None and request.stream_options.include_usage:
            emit({**head, "choices": [], "usage": _usage(responses, per_prompt=request.n)})

    async def _read_completion(
        self, body: Mapping[str, Any]
    ) -> tuple[_Completion, list[tuple[Prompt, Mapping[str, Any]]]]:
        request = _read(body, _Completion, besides=("n", "logprobs"))
        prompts = [request.prompt] if isinstance(request.prompt[0], int) else request.prompt
        params = {"max_tokens": 16, **_sampling(body)}
        if request.logprobs:
            params["logprobs"] = request.logprobs
        work = []
        for index, ids in enumerate(prompts):
            if not isinstance(ids, list) or not ids or not all(type(each) is int for each in ids):
                raise InputError("must be a list of token ids", where=f"prompt[{index}]")
            prompt = Prompt(ids, new_request(ids, params).multi_modal_data, None)
            work += [(prompt, each) for each in await self._all_params(params, len(ids), request.n)]
        return request, work

    def _visible(self, response: EngineResponse) -> list[int]:
        """Completion tokens without the stop token."""
        ids = response.completion_ids
        return ids[:-1] if ids and ids[-1] in self._renderer.get_stop_token_ids() else ids

    def _text_logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        return {"tokens": [self._renderer.decode([each]) for each in ids], "token_logprobs": list(logprobs)}

    # --- both ---

    async def _all_params(
        self, params: dict[str, Any], prompt_tokens: int, count: int
    ) -> list[Mapping[str, Any]]:
        if not 1 <= count <= 128:
            raise InputError("must be from 1 to 128", where="n")
        limit = await self._engine.max_prompt_len()
        if limit is not None and prompt_tokens > limit:
            raise PromptTooLongError(prompt_tokens, limit, where="messages")
        if limit is None and params.get("max_tokens") is None:
            raise SamplingParameterError(
                "the request names no budget, and the engine does not report its context length",
                where="max_tokens",
            )
        room = None if limit is None else limit + 1 - prompt_tokens
        stops = self._renderer.get_stop_token_ids()
        return with_own_seeds(complete_sampling(params, room=room, stop_token_ids=stops), count)

    async def _sample(
        self,
        request: _Common,
        prompt: Prompt,
        params: Mapping[str, Any],
        on_tokens: OnTokens | None = None,
    ) -> EngineResponse:
        sent = replace(
            new_request(prompt.ids, params, prompt.data),
            cache_salt=request.cache_salt,
            priority=request.priority,
        )
        return await self._engine.complete(sent, session_id=request.session_id, on_tokens=on_tokens)

    def _logprobs(self, response: EngineResponse) -> dict[str, Any]:
        return self._logprobs_of(response.completion_ids, response.logprobs, response.top_logprobs)

    def _logprobs_of(self, ids: Sequence[int], logprobs: Sequence[float], top: Any) -> dict[str, Any]:
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
        self._margin = margin
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
            certain, shown = _certain(text, self._stops, self._margin).rstrip(), self._shown[name]
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


def _certain(text: str, stops: Sequence[str], margin: int) -> str:
    """The beginning of a growing text that later tokens cannot change."""
    text = text.rstrip("\ufffd")
    for stop in stops:
        text = text.split(stop)[0]
    held = max([margin, *(len(stop) - 1 for stop in stops)])
    return text[: max(0, len(text) - held)] if held else text


def _read(body: Mapping[str, Any], kind: type[Any], *, besides: Sequence[str]) -> Any:
    """Convert a body, strictly.

    Raises:
        InputError: A field is unknown, or has a wrong type or value.
    """
    known = {*kind.__struct_fields__, *IGNORED, *PARAMETERS}
    given = {name: value for name, value in body.items() if value is not None}
    if unknown := sorted(given.keys() - known):
        raise InputError("unknown field of this request", where=unknown[0])
    fields = {name: value for name, value in given.items() if name in kind.__struct_fields__}
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at ")
        where = path.strip("`$.") or None
        raise InputError(problem, where=where) from error


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters of a body, checked; `n` and `logprobs` mean something else there."""
    given = {
        name: body[name]
        for name in PARAMETERS
        if name not in ("n", "logprobs") and body.get(name) is not None
    }
    return check_sampling_params(given)


def _check_media(messages: Sequence[Any]) -> None:
    """Require data and http(s) URLs: a caller must not name files of this machine.

    Raises:
        InputError: A part names something else.
    """
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(part, Mapping):
                continue
            for name in ("image", "image_url", "input_image", "video", "video_url", "audio", "input_audio"):
                source = part.get(name)
                source = source.get("url", source) if isinstance(source, Mapping) else source
                if source is None:
                    continue
                if not isinstance(source, str) or not source.lower().startswith(
                    ("data:", "http://", "https://")
                ):
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


def _message(parsed: ParsedResponse, response: EngineResponse, params: Mapping[str, Any]) -> dict[str, Any]:
    """The assistant message of a reply; malformed calls stay out of it."""
    calls = [
        {
            "id": call.id or f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()},
        }
        for call in parsed.to_message().tool_calls
    ]
    content = _without_stop(parsed.content, response, params)
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if parsed.reasoning_content is not None:
        message["reasoning_content"] = _without_stop(parsed.reasoning_content, response, params)
    return {**message, "tool_calls": calls} if calls else message


def _stop_strings(params: Mapping[str, Any]) -> list[str]:
    stop = params.get("stop") or ()
    return [] if params.get("include_stop_str_in_output") else [stop] if isinstance(stop, str) else list(stop)


def _without_stop(text: str, response: EngineResponse, params: Mapping[str, Any]) -> str:
    """Cut the matched stop string, and what its last token holds beyond it, from a text."""
    stop = response.stop_reason
    if response.finish_reason != "stop" or not isinstance(stop, str) or stop not in _stop_strings(params):
        return text
    head, found, _ = text.rpartition(stop)
    return head if found else text


def _head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """Members that every chunk and reply of one request has."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def _usage(responses: Sequence[EngineResponse], per_prompt: int | None = None) -> dict[str, Any]:
    """Token counts; a prompt that was sampled `per_prompt` times, by default always, counts once."""
    firsts = responses[:: per_prompt or len(responses)]
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
