"""OpenAI requests answered in tokens: rendered here, sampled from ids, parsed here.

Requests are read strictly: a field that would be ignored is refused by name.
"""

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final, Literal

import msgspec

from mmrender.client.generation import generate
from mmrender.client.sampling import PARAMETERS, check_sampling_params
from mmrender.client.types import EngineResponse, FinishReason, Prompt, RendererBackend, TopLogprobs
from mmrender.engines.http_engine import SESSION_HEADER
from mmrender.engines.interface import OpenAICall, gather_all, prompt_of, with_own_seeds
from mmrender.errors import EngineReplyError, InputError
from mmrender.parsing import ParsedResponse
from mmrender.protocols import RendererProtocol, RenderOptions
from mmrender.sidecar import MultiModalData

Emit = Callable[[dict[str, Any]], None]
Entry = tuple[int, float, Sequence[tuple[int, float]]]
"""A token, its logprob and alternatives."""

IGNORED: Final = frozenset(
    {"metadata", "model", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
)
"""Fields that do not change the completion."""

_MEDIA: Final = ("image", "image_url", "input_image", "video", "video_url", "audio", "input_audio")
_REMOTE: Final = ("data:", "http://", "https://")
_MARGIN: Final = 24
"""Characters withheld while a tool call may be opening. Openers are shorter."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class _Request(msgspec.Struct, kw_only=True):
    """Fields of both kinds of request that are not sampling parameters."""

    n: int = 1
    stream: bool = False
    stream_options: _StreamOptions | None = None
    return_token_ids: bool = False
    cache_salt: str | None = None
    priority: int | None = None
    session_id: str | int | None = None
    model: str = ""


class _Completion(_Request, kw_only=True):
    prompt: list[int | list[int]]
    logprobs: int | None = None

    kind: ClassVar = "text_completion"
    prefix: ClassVar = "cmpl"
    streams_alone: ClassVar = True
    offered: ClassVar = None
    chat_template_kwargs: ClassVar[dict[str, Any]] = {}

    def params(self) -> dict[str, Any]:
        """Sampling parameters that only this kind of request spells so."""
        return {"logprobs": self.logprobs or None}

    async def prompts(self, renderer: RendererProtocol) -> list[Prompt]:
        """Return the prompts, one or many."""
        given: list[Any] = self.prompt
        if all(isinstance(each, int) for each in given):
            given = [given]
        if not all(isinstance(each, list) and each for each in given):
            raise InputError("must be token ids, or lists of token ids", where="prompt")
        return [Prompt(ids, MultiModalData(), None) for ids in given]

    def parse(self, renderer: RendererProtocol, ids: Sequence[int], prompt: Prompt) -> ParsedResponse:
        """Read a completion: its text, without the stop token."""
        stopped = ids and ids[-1] in renderer.get_stop_token_ids()
        return ParsedResponse(renderer.decode(ids[:-1] if stopped else ids))

    def choice(self, message: Mapping[str, Any], *, is_delta: bool) -> dict[str, Any]:
        """The text of a choice."""
        return {"text": message.get("content") or ""}

    def logprobs_of(self, entries: Iterable[Entry], text: Callable[[int], str]) -> dict[str, Any] | None:
        """Logprobs of tokens, if requested."""
        if self.logprobs is None:
            return None
        pairs = [(text(token), value) for token, value, _ in entries]
        return {"tokens": [token for token, _ in pairs], "token_logprobs": [value for _, value in pairs]}


class _Chat(_Request, kw_only=True):
    messages: list[Any]
    tools: list[Any] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    response_format: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    kind: ClassVar = "chat.completion"
    prefix: ClassVar = "chatcmpl"

    @property
    def streams_alone(self) -> bool:
        """Whether streamed tokens carry all requested fields. Alternatives come with completions only."""
        return not self.top_logprobs

    @property
    def offered(self) -> list[Any] | None:
        """Tools that the model may call."""
        return None if self.tool_choice == "none" else self.tools or None

    def params(self) -> dict[str, Any]:
        """Sampling parameters that only this kind of request spells so."""
        params: dict[str, Any] = {}
        if self.top_logprobs is not None and not (self.logprobs and 0 <= self.top_logprobs <= 20):
            raise InputError("must be from 0 to 20, with logprobs=true", where="top_logprobs")
        if self.top_logprobs:
            params["logprobs"] = self.top_logprobs
        if self.max_completion_tokens is not None:
            params["max_tokens"] = self.max_completion_tokens
        wanted = self.response_format or {"type": "text"}
        schema = wanted.get("json_schema")
        if wanted.get("type") == "json_object":
            params["structured_outputs"] = {"json_object": True}
        elif wanted.get("type") == "json_schema" and isinstance(schema, dict) and "schema" in schema:
            params["structured_outputs"] = {"json": schema["schema"]}
        elif wanted.get("type") != "text":
            raise InputError("must be of type text, json_object or json_schema", where="response_format")
        return params

    async def prompts(self, renderer: RendererProtocol) -> list[Prompt]:
        """Render the conversation."""
        if not self.messages:
            raise InputError("must be a list of one or more messages", where="messages")
        _check_media(self.messages)
        options: RenderOptions = {
            "tools": self.offered,
            "documents": self.documents,
            "continue_final_message": self.continue_final_message,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        if self.add_generation_prompt is not None:
            options["add_generation_prompt"] = self.add_generation_prompt
        return [await prompt_of(renderer, self.messages, **options)]

    def parse(self, renderer: RendererProtocol, ids: Sequence[int], prompt: Prompt) -> ParsedResponse:
        """Read a completion: reasoning, content and calls."""
        return renderer.parse_response(
            ids,
            tools=self.offered,
            prompt_ids=prompt.ids,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def choice(self, message: Mapping[str, Any], *, is_delta: bool) -> dict[str, Any]:
        """The message of a choice, or a part of it."""
        return {"delta" if is_delta else "message": message}

    def logprobs_of(self, entries: Iterable[Entry], text: Callable[[int], str]) -> dict[str, Any] | None:
        """Logprobs of tokens with alternatives, if requested."""

        def named(token_id: int, logprob: float) -> dict[str, Any]:
            token = text(token_id)
            return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "replace"))}

        if not self.logprobs:
            return None
        content = [
            {**named(token_id, logprob), "top_logprobs": [named(*other) for other in others]}
            for token_id, logprob, others in entries
        ]
        return {"content": content, "refusal": None}


class TokenAPI:
    """Answers OpenAI requests over a backend that samples from token ids.

    Args:
        backend: Samples.
        renderer: Renders conversations, decodes and parses completions.
    """

    def __init__(self, backend: RendererBackend, renderer: RendererProtocol) -> None:
        self._backend = backend
        self._renderer = renderer

    def takes(self, call: OpenAICall, body: Mapping[str, Any]) -> bool:
        """Whether a request can be answered in tokens. A prompt that is text is the engine's to tokenize."""
        prompt = body.get("prompt")
        first = prompt[0] if isinstance(prompt, list) and prompt else prompt
        return call == "chat_completion" or not isinstance(first, str)

    async def answer(
        self, call: OpenAICall, body: Mapping[str, Any], emit: Emit | None = None
    ) -> dict[str, Any]:
        """Answer a request, also chunk by chunk with `emit`.

        Raises:
            InputError: A field is unknown, malformed, or not supported. `where` names it.
            MMRenderError: The conversation cannot be rendered, or a completion failed.
        """
        request: _Chat | _Completion = _read(body, _Chat if call == "chat_completion" else _Completion)
        # `n` and `logprobs` mean something else in a body.
        names = [name for name in PARAMETERS if name not in ("n", "logprobs")]
        params = check_sampling_params({name: body[name] for name in names if body.get(name) is not None})
        if not 1 <= request.n <= 128:
            raise InputError("must be from 1 to 128", where="n")
        defaults = {"max_tokens": 16} if call == "completion" else {}
        params = {**defaults, **params, **request.params()}
        prompts = await request.prompts(self._renderer)
        head = {
            "id": f"{request.prefix}-{uuid.uuid4().hex}",
            "object": request.kind + (".chunk" if emit and call == "chat_completion" else ""),
            "created": int(time.time()),
            "model": request.model,
        }
        is_asked = call == "chat_completion" and request.return_token_ids
        more = {"prompt_token_ids": prompts[0].ids} if is_asked else {}

        def send(index: int, delta: Mapping[str, Any], reason: str | None = None, **members: Any) -> None:
            said = request.choice(delta, is_delta=True)
            choice = {"index": index, **said, "logprobs": None, "finish_reason": reason, **members}
            first = more if index == 0 and "role" in delta else {}
            if emit is not None:
                emit({**head, "choices": [choice], **first})

        work = [(prompt, each) for prompt in prompts for each in with_own_seeds(params, request.n)]
        choices = [
            _Choice(self._renderer, request, prompt, each, partial(send, index) if emit else None)
            for index, (prompt, each) in enumerate(work)
        ]
        responses = await gather_all([choice.sampled(self._backend) for choice in choices])
        usage = _usage(responses, request.n)
        if emit is not None and request.stream_options is not None and request.stream_options.include_usage:
            emit({**head, "choices": [], "usage": usage})
        wholes = [{"index": index, **choice.whole} for index, choice in enumerate(choices)]
        return {**head, "choices": wholes, "usage": usage, **more}


class _Choice:
    """One completion of a request: sent in deltas as it grows, and answered whole.

    A delta cannot be taken back, so text is held back while it may still become something else: part of a
    character, a stop string, or the beginning of a tool call.
    """

    def __init__(
        self,
        renderer: RendererProtocol,
        request: _Chat | _Completion,
        prompt: Prompt,
        params: Mapping[str, Any],
        send: Callable[..., None] | None,
    ) -> None:
        self.whole: dict[str, Any] = {}
        self._renderer = renderer
        self._request = request
        self._prompt = prompt
        self._params = params
        self._send = send or (lambda delta, reason=None, **members: None)
        self._streams = send is not None
        stops = params.get("stop") or []
        kept = params.get("include_stop_str_in_output")
        self._stops = [] if kept else [stops] if isinstance(stops, str) else stops
        margin = _MARGIN if request.offered else 0
        self._held = max([margin, *(len(stop) - 1 for stop in self._stops)])
        self._ids: list[int] = []
        self._parsed = 0
        self._shown = {"reasoning_content": "", "content": ""}

    async def sampled(self, backend: RendererBackend) -> EngineResponse:
        """Sample it, sending deltas. `whole` is the choice then."""
        request, prompt = self._request, self._prompt
        is_chat = isinstance(request, _Chat)
        if is_chat:
            self._send({"role": "assistant", "content": ""})
        listens = self._streams and request.streams_alone
        session = {} if request.session_id is None else {SESSION_HEADER: str(request.session_id)}
        generation = await generate(
            backend=backend,
            renderer=self._renderer,
            model=request.model,
            prompt_ids=prompt.ids,
            multi_modal_data=prompt.data,
            tools=request.offered,
            sampling_params=self._params,
            cache_salt=request.cache_salt,
            priority=request.priority,
            extra_headers=session,
            template_arguments=request.chat_template_kwargs,
            on_tokens=self.add if listens else None,
        )
        response = generation.response
        ids, logprobs, top = response.completion_ids, response.logprobs, response.top_logprobs
        if self._streams and not listens:
            self.add(ids, logprobs, top=top)
        parsed = generation.parsed if is_chat else request.parse(self._renderer, ids, prompt)
        message = _message(parsed, response, self._stops)
        for name in self._shown:
            self._show(name, message.get(name) or "", is_final=True)
        if calls := message.get("tool_calls"):
            self._send({"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]})
        reason = generation.finish_reason if is_chat else response.finish_reason
        self._send({}, reason)
        self.whole = {
            **request.choice(message, is_delta=False),
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": response.stop_reason,
            **self._extras(ids, logprobs, top),
        }
        return response

    def add(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        reason: FinishReason | None = None,
        /,
        *,
        top: TopLogprobs | None = None,
    ) -> None:
        """Take tokens. Send the text that is certain by now, and other requested fields."""
        self._ids += token_ids
        # Parsing is linear in the whole, so a long completion is parsed at every 64th part of it.
        if len(self._ids) - self._parsed >= max(1, len(self._ids) // 64):
            self._parsed = len(self._ids)
            parsed = self._request.parse(self._renderer, self._ids, self._prompt)
            texts = {"reasoning_content": parsed.reasoning_content or ""}
            if not parsed.tool_calls and parsed.reasoning_closed:
                texts["content"] = parsed.content
            for name, text in texts.items():
                certain = text.rstrip("\ufffd")
                for stop in self._stops:
                    certain = certain.split(stop)[0]
                self._show(name, certain[: max(0, len(certain) - self._held)].rstrip())
        if token_ids and (members := self._extras(token_ids, logprobs, top)):
            self._send({}, **members)

    def _show(self, name: str, text: str, *, is_final: bool = False) -> None:
        """Send the text after the shown part, with which the final text must begin."""
        shown = self._shown[name]
        if text.startswith(shown) and len(text) > len(shown):
            self._shown[name] = text
            self._send({name: text[len(shown) :]})
        elif is_final and text != shown:
            raise EngineReplyError(
                "the completion parses differently as a whole than its beginning did",
                where=name,
                expected=repr(shown)[-80:],
                got=repr(text)[-80:],
            )

    def _extras(
        self, ids: Sequence[int], logprobs: Sequence[float], top: TopLogprobs | None
    ) -> dict[str, Any]:
        """Token ids and logprobs, as far as they are asked for."""
        entries = zip(ids, logprobs, top or [()] * len(ids), strict=True)
        values = self._request.logprobs_of(entries, lambda token: self._renderer.decode([token]))
        named = {} if values is None else {"logprobs": values}
        return {**named, "token_ids": list(ids)} if self._request.return_token_ids else named


def _read(body: Mapping[str, Any], kind: type[Any]) -> Any:
    """Convert a body, strictly."""
    known = {*kind.__struct_fields__, *IGNORED, *PARAMETERS}
    given = {name: value for name, value in body.items() if value is not None}
    if unknown := sorted(given.keys() - known):
        raise InputError("unknown field of this request", where=unknown[0])
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at ")
        raise InputError(problem, where=path.strip("`$.") or None) from error


def _check_media(messages: Sequence[Any]) -> None:
    """Require data and http(s) URLs: a caller must not name files of this machine."""
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        for number, part in enumerate(content if isinstance(content, list) else ()):
            for name in _MEDIA if isinstance(part, Mapping) else ():
                source = part.get(name)
                source = source.get("url", source) if isinstance(source, Mapping) else source
                if source is not None and not str(source).lower().startswith(_REMOTE):
                    raise InputError(
                        "media must be given as data: or http(s) URLs",
                        where=f"messages[{index}].content[{number}].{name}",
                    )


def _message(parsed: ParsedResponse, response: EngineResponse, stops: Sequence[str]) -> dict[str, Any]:
    """Return the assistant message of a reply, without malformed calls and a matched stop string."""
    stop = response.stop_reason if response.finish_reason == "stop" else None

    def cut(text: str) -> str:  # with the rest of the last token after the stop string
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
    """Token counts. A prompt that was sampled `per_prompt` times counts once."""
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
