"""A server without a model: the answers of three engines on their wires, and an HTTP server with faults."""

import asyncio
import copy
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from mmrender.client import dynamo, vllm_images
from mmrender.client.dynamo import DynamoBackend
from mmrender.client.sglang import SGLangBackend
from mmrender.client.types import EngineRequest
from mmrender.client.vllm import ABORT_PATH, VLLMBackend

PROMPT, IDS, LOGPROBS, END = [10, 11, 12], [50, 51, 52], [-1.5, -0.25, 0.0], 52
Reply = dict[str, Any]


@dataclass(frozen=True)
class Engine:
    """One engine: `reply` builds its good answer, `change` names the places of what can be wrong in it."""

    backend: Any
    path: str
    reply: Callable[[list[Any], list[Any]], Reply]
    change: dict[str, Callable[[Reply, Any], None]]
    limit: tuple[str, Reply, int]
    malformed_limits: tuple[Any, ...]
    abort: tuple[str, Reply] | None

    @property
    def route(self) -> str:
        return f"POST {self.path}"

    def answer(self) -> Reply:
        return copy.deepcopy(self.reply(list(IDS), list(LOGPROBS)))


def vllm_reply(ids: list[Any], logprobs: list[Any]) -> Reply:
    content = [{"token_id": token, "logprob": value} for token, value in zip(ids, logprobs, strict=False)]
    choice = {"index": 0, "finish_reason": "stop", "token_ids": ids, "logprobs": {"content": content}}
    return {"request_id": "r", "usage": {"prompt_tokens": 3}, "choices": [choice]}


def sglang_reply(ids: list[Any], logprobs: list[Any]) -> Reply:
    pairs = [[value, token, None] for token, value in zip(ids, logprobs, strict=False)]
    meta = {"id": "r", "finish_reason": {"type": "stop", "matched": 52}, "output_token_logprobs": pairs}
    return {"output_ids": ids, "prompt_token_ids": PROMPT, "meta_info": meta}


def dynamo_reply(ids: list[Any], logprobs: list[Any]) -> Reply:
    data = {"completion_token_ids": ids, "completion_logprobs": logprobs, "prompt_token_ids": PROMPT}
    choice = {"index": 0, "finish_reason": "stop"}
    return {"id": "r", "usage": {"prompt_tokens": 3}, "choices": [choice], "nvext": {"engine_data": data}}


def at(*path: Any) -> Callable[[Reply, Any], None]:
    def put(reply: Reply, value: Any) -> None:
        node: Any = reply
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value

    return put


ENGINES = {
    "vllm": Engine(
        VLLMBackend(),
        vllm_images.GENERATE_PATH,
        vllm_reply,
        {
            "reason": at("choices", 0, "finish_reason"),
            "ids": at("choices", 0, "token_ids"),
            "token": at("choices", 0, "token_ids", 1),
            "logprob": at("choices", 0, "logprobs", "content", 1, "logprob"),
            "named": at("choices", 0, "logprobs", "content", 1, "token_id"),
            "usage": at("usage"),
            "prompt": lambda reply, value: at("usage")(reply, {"prompt_tokens": len(value) + 1}),
            "experts": at("choices", 0, "routed_experts"),
            "versions": at("choices", 0, "weight_versions"),
        },
        ("/v1/models", {"data": [{"id": "m", "max_model_len": 2048}]}, 2047),
        ({}, [], "text", {"data": 1}, {"data": [{}]}, {"data": [{"id": "m", "parent": [1]}]}),
        (ABORT_PATH, {"request_ids": ["generate-tokens-mine"]}),
    ),
    "sglang": Engine(
        SGLangBackend(),
        "/generate",
        sglang_reply,
        {
            "reason": at("meta_info", "finish_reason", "type"),
            "ids": at("output_ids"),
            "token": at("output_ids", 1),
            "logprob": at("meta_info", "output_token_logprobs", 1, 0),
            "named": at("meta_info", "output_token_logprobs", 1, 1),
            "usage": at("meta_info"),
            "experts": at("meta_info", "routed_experts"),
            "versions": at("meta_info", "weight_versions"),
            "prompt": at("prompt_token_ids"),
        },
        ("/server_info", {"max_req_input_len": 2042}, 2041),
        ([], "text", {"max_req_input_len": "long"}),
        ("/abort_request", {"rid": "mine"}),
    ),
    "dynamo": Engine(
        DynamoBackend(),
        dynamo.CHAT_PATH,
        dynamo_reply,
        {
            "reason": at("choices", 0, "finish_reason"),
            "ids": at("nvext", "engine_data", "completion_token_ids"),
            "token": at("nvext", "engine_data", "completion_token_ids", 1),
            "logprob": at("nvext", "engine_data", "completion_logprobs", 1),
            "usage": at("usage"),
            "prompt": at("nvext", "engine_data", "prompt_token_ids"),
            "experts": at("nvext", "routed_experts"),
        },
        ("/v1/models", {"data": [{"id": "m", "context_window": 2048}]}, 2047),
        ({}, [], "text", {"data": [{}]}, {"data": [{"id": "m", "context_window": []}]}),
        None,
    ),
}


def asked(**fields: Any) -> EngineRequest:
    values: dict[str, Any] = {
        "model": "m",
        "prompt_ids": PROMPT,
        "sampling_params": {"max_tokens": 4},
        "request_id": "mine",
        "vocab_size": 1024,
        "eos_token_ids": [END],
    }
    return EngineRequest(**{**values, **fields})


class StubServer:
    """Answers the routes of the three engines and paths with faults, and notes the requests.

    Attributes:
        url: Root of the server.
        seen: Method, path, headers and body of each request, in order.
        gone: Paths whose caller went away before the answer.
        connections: Client ports that requests came from.
    """

    def __init__(self) -> None:
        self.url = ""
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.gone: list[str] = []
        self.connections: list[int] = []
        self.busy = 0
        self.busy_status = 503
        self.retry_after: str | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen.append((request.method, request.path_qs, dict(request.headers), body))
        peer = request.transport.get_extra_info("peername") if request.transport else ("", 0)
        self.connections.append(peer[1])
        answer = getattr(self, "answer_" + request.path.strip("/").replace("/", "_"), None)
        if answer is not None:
            return await answer(request, body)
        engine = next((each for each in ENGINES.values() if each.path == request.path), None)
        if engine is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response(engine.answer())

    async def answer_echo(self, request: web.Request, body: bytes) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    async def answer_chunked(self, request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(body), 65536):
            await response.write(body[start : start + 65536])
        return response

    async def answer_packed(self, request: web.Request, body: bytes) -> web.Response:
        return web.Response(body=gzip.compress(body), headers={"Content-Encoding": "gzip"})

    async def answer_busy(self, request: web.Request, body: bytes) -> web.Response:
        if self.busy:
            self.busy -= 1
            headers = {} if self.retry_after is None else {"Retry-After": self.retry_after}
            return web.Response(status=self.busy_status, text="busy", headers=headers)
        return web.json_response({"ok": True})

    async def answer_slow(self, request: web.Request, body: bytes) -> web.Response:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.gone.append(request.path)
            raise
        return web.Response()

    async def answer_cut(self, request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b"x" * 10)
        assert request.transport is not None
        request.transport.abort()
        return response

    async def answer_kept(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Serve one request of a connection, and close it when a second one comes."""
        if self.connections.count(self.connections[-1]) > 1:
            assert request.transport is not None
            request.transport.abort()
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(body or b"{}")
        return response

    async def answer_moved(self, request: web.Request, body: bytes) -> web.Response:
        return web.Response(status=307, headers={"Location": "/echo"})

    async def answer_refuse(self, request: web.Request, body: bytes) -> web.Response:
        return web.Response(status=400, text='{"error": {"message": "no  such\nthing"}}' + "." * 20_000)

    async def answer_lines(self, request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in (b"one\r\ntw", b"o\n\nthr", b"ee", b"\nlast"):
            await response.write(piece)
            await asyncio.sleep(0)
        return response

    async def answer_endless(self, request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"more\n")
                await asyncio.sleep(0.001)
        except (asyncio.CancelledError, ConnectionError):
            self.gone.append(request.path)
            raise


@asynccontextmanager
async def serving(
    handle: Callable[[web.Request], Awaitable[web.StreamResponse]], port: int = 0, **settings: Any
) -> AsyncIterator[str]:
    """Answer every request by a function on a port, by default a free one, while the block runs; the URL."""
    app = web.Application(client_max_size=1 << 28)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, **settings)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def stub_server(kind: type[StubServer] = StubServer, **settings: Any) -> AsyncIterator[StubServer]:
    """Serve on a free port while the block runs."""
    stub = kind()
    async with serving(stub.handle, **settings) as stub.url:
        yield stub
