"""`Upstream`: an inference server without a model, on the routes of vLLM 0.32, in real tokens.

It takes tokens at `/inference/v1/generate`, and messages of three protocols, which the model's own template
renders anew with each call, as vLLM does. A function says which tokens follow a prompt.
"""

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import msgspec

from mmcodecs.structs import ready
from mmrender.client.types import FinishReason, Usage
from mmrender.client.vllm_images import GENERATE_PATH
from mmrender.errors import InputError, MMRenderError, importing
from mmrender.gateway.call import Answer, AnswerCall, Call, ProtocolName, new_id
from mmrender.gateway.failures import failure_of
from mmrender.gateway.protocols import PROTOCOLS
from mmrender.gateway.writing import AgentProtocol, event
from mmrender.renderer import Renderer
from mmrender.testing.agents.recordings import PATHS

with importing("aiohttp", "client", "the scripted server"):
    from aiohttp import web

Complete: TypeAlias = Callable[[list[int]], Sequence[int]]
"""Returns the tokens that follow a prompt, with a stop token at their end."""

LOGPROB: Final = -0.25
"""Log-probability of each token."""
_MAX_BODY: Final = 1 << 30
_MAX_MODEL_LEN: Final = 1 << 18
_CHUNK: Final = 8
"""Tokens of a chunk of a stream of tokens."""
_DONE: Final = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Exchange:
    """One prompt, with all placeholders of its pictures, and its completion."""

    prompt_ids: list[int]
    completion_ids: list[int]

    @property
    def ids(self) -> list[int]:
        """All of its tokens."""
        return [*self.prompt_ids, *self.completion_ids]


class _Generate(msgspec.Struct):
    """The members of a request for tokens that are used."""

    token_ids: list[int]
    content_parts: list[dict[str, Any]] = []
    sampling_params: dict[str, Any] = {}
    stream: bool = False


class Upstream:
    """Answers prompts by a function.

    Args:
        renderer: Renders messages and parses completions.
        complete: Called with each prompt.

    Attributes:
        exchanges: All prompts with their completions, in order.
        seconds: Seconds that each took here.
    """

    def __init__(self, renderer: Renderer, complete: Complete) -> None:
        self.exchanges: list[Exchange] = []
        self.seconds: list[float] = []
        self._renderer = renderer
        self._complete = complete
        self._widths: dict[str, int] = {}
        self._placeholder = -1

    def app(self) -> web.Application:
        """Return the application, to which routes may be added."""
        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_post(GENERATE_PATH, partial(self._answered, self._generate))
        for protocol, path in PATHS.items():
            app.router.add_post(path, partial(self._answered, partial(self._messages, protocol)))
        for path in ("/v1/models", "/health"):
            app.router.add_get(path, _models)
        return app

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        """Serve on loopback while the block runs. Yield the root URL. Port 0 is any free one.

        Raises:
            OSError: The port is taken.
        """
        runner = web.AppRunner(self.app(), access_log=None, shutdown_timeout=1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def _answered(
        self, answer: Callable[[bytes], tuple[int, bytes]], request: web.Request
    ) -> web.Response:
        body = await request.read()
        begun = time.perf_counter()
        status, reply = answer(body)
        if status == 200:
            self.seconds.append(time.perf_counter() - begun)
        kind = "text/event-stream" if reply.startswith((b"data:", b"event:")) else "application/json"
        return web.Response(status=status, body=reply, content_type=kind)

    def _completion(self, prompt_ids: list[int], budget: int | None) -> tuple[list[int], FinishReason]:
        whole = list(self._complete(prompt_ids))
        ids = whole[:budget]
        self.exchanges.append(Exchange(prompt_ids, ids))
        return ids, "stop" if len(ids) == len(whole) else "length"

    # --- tokens ---

    def _generate(self, body: bytes) -> tuple[int, bytes]:
        """Answer tokens with tokens."""
        request = msgspec.json.decode(body, type=ready(_Generate))
        prompt, places = request.token_ids, None
        if request.content_parts:
            prompt, places = self._widened(request)
        ids, reason = self._completion(prompt, request.sampling_params.get("max_tokens"))
        head: dict[str, Any] = {"request_id": "scripted"}
        if places is not None:
            head |= {"prompt_token_ids": prompt, "mm_placeholders": {"image": places}}
        counts = {"usage": _usage(prompt, ids)}
        if not request.stream:
            return 200, msgspec.json.encode({**head, **counts, "choices": [_choice(ids, reason)]})
        pieces = [ids[start : start + _CHUNK] for start in range(0, len(ids), _CHUNK)]
        events = [event({**head, "choices": [_choice(piece, None)]}) for piece in pieces]
        last = event({**head, **counts, "choices": [_choice([], reason)]})
        return 200, b"".join([*events, last, _DONE])

    def _widened(self, request: _Generate) -> tuple[list[int], list[dict[str, int]]]:
        """Return a prompt whose pictures come as URLs, with all placeholders of each, and their places."""
        ids: list[int] = []
        places: list[dict[str, int]] = []
        widths = iter([self._width(part) for part in request.content_parts])
        for token in request.token_ids:
            count = 1
            if token == self._placeholder:
                count = next(widths)
                places.append({"offset": len(ids), "length": count})
            ids += [token] * count
        return ids, places

    def _width(self, part: Mapping[str, Any]) -> int:
        """Return the placeholder tokens of a picture, which later requests may name by its uuid alone."""
        name = part.get("uuid") or _url_of(part)
        if name not in self._widths:
            shown = {"type": "image_url", "image_url": {"url": _url_of(part)}}
            rendered = self._renderer.render([{"role": "user", "content": [shown]}])
            [place] = rendered.multi_modal_data.mm_placeholders["image"]
            self._widths[name], self._placeholder = place.length, rendered.token_ids[place.offset]
        return self._widths[name]

    # --- messages ---

    def _messages(self, name: ProtocolName, body: bytes) -> tuple[int, bytes]:
        """Answer messages with a message, or with its events."""
        protocol = PROTOCOLS[name]
        fields: dict[str, Any] = json.loads(body)
        wants_ids = name == "chat" and fields.get("return_token_ids")
        try:
            call = _read(protocol, fields)
            tools = call.tools or None
            prompt = self._renderer.render_ids(call.messages, tools=tools, add_generation_prompt=True)
        except MMRenderError as error:
            failure = failure_of(error)
            refusal = protocol.error(failure.status, failure.code, str(error), failure.param)
            return failure.status, msgspec.json.encode(refusal)  # nothing here is a secret
        ids, reason = self._completion(prompt, call.sampling_params.get("max_tokens"))
        answer = self._answer(call, prompt, ids, reason)
        if not call.stream:
            reply = protocol.reply(call, [answer])
            if wants_ids:
                reply["prompt_token_ids"] = prompt
                reply["choices"][0]["token_ids"] = ids
            return 200, msgspec.json.encode(reply)
        writer = protocol.events(call, [answer.id])
        events = writer.begin() + writer.end([answer])
        return 200, _with_ids(events, prompt, ids) if wants_ids else events

    def _answer(self, call: Call, prompt: list[int], ids: list[int], reason: FinishReason) -> Answer:
        parsed = self._renderer.parse_response(ids, tools=call.offered, prompt_ids=prompt)
        calls = tuple(
            AnswerCall(f"call_{new_id()}", each.name, json.dumps(each.arguments, ensure_ascii=False))
            for each in parsed.tool_calls
            if each.name is not None and each.arguments is not None
        )
        return Answer(
            id=new_id(),
            created=int(time.time()),
            step=0,
            reasoning=parsed.reasoning_content,
            content=parsed.content,
            calls=calls if call.offered else (),
            finish_reason="tool_calls" if calls and reason == "stop" else reason,
            stop=None,
            usage=Usage(len(prompt), len(ids)),
            token_ids=ids,
            logprobs=[LOGPROB] * len(ids),
            token_texts={token: self._renderer.decode([token]) for token in ids},
        )


def _read(protocol: AgentProtocol, fields: Mapping[str, Any]) -> Call:
    """Read a request without the fields that our reader refuses, since vLLM takes any."""
    while True:
        try:
            return protocol.read(fields, {})
        except InputError as error:
            if error.where not in fields:
                raise
            fields = {name: value for name, value in fields.items() if name != error.where}


async def _models(request: web.Request) -> web.Response:
    card = {"id": "scripted", "object": "model", "max_model_len": _MAX_MODEL_LEN}
    return web.json_response({"object": "list", "data": [card]})


def _url_of(part: Mapping[str, Any]) -> str:
    url = part.get("url", part.get("image_url"))
    url = url["url"] if isinstance(url, Mapping) else url
    if not isinstance(url, str):
        raise InputError("a part of content has no URL", where="content_parts", got=repr(part)[:80])
    return url


def _usage(prompt: Sequence[int], ids: Sequence[int]) -> dict[str, int]:
    total = len(prompt) + len(ids)
    return {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": total}


def _choice(ids: Sequence[int], reason: FinishReason | None) -> dict[str, Any]:
    content: list[dict[str, Any]] = [
        {
            "token": f"token_id:{token}",
            "token_id": token,
            "logprob": LOGPROB,
            "bytes": None,
            "top_logprobs": [],
        }
        for token in ids
    ]
    return {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": reason}


def _with_ids(events: bytes, prompt: Sequence[int], ids: Sequence[int]) -> bytes:
    """Return chunks of chat completions with the prompt in the first, and all sampled tokens in the last."""
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith(b"data: {")]
    chunks[0]["prompt_token_ids"] = prompt
    last = next(chunk for chunk in reversed(chunks) if chunk["choices"])
    last["choices"][0]["token_ids"] = ids
    return b"".join(map(event, chunks)) + _DONE
