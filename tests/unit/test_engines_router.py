"""A router in front of two servers, all three over HTTP: requests go to it, control calls to the servers."""

import asyncio
import pickle
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from syrupy.assertion import SnapshotAssertion

from engine_cases import patient
from kit import error_of
from mmrender.client.http import HTTPTransport
from mmrender.client.transport import TransportConfig
from mmrender.engines.client import InferenceEngineClient
from mmrender.engines.http_engine import HTTPEngine
from mmrender.engines.interface import new_request
from mmrender.errors import EngineConnectionError, InputError
from mmrender.testing.memory_transport import MemoryTransport
from stub_server import IDS, LOGPROBS, PROMPT, serving, vllm_reply

GENERATE = "/inference/v1/generate"


class Node:
    """A server, or a router in front of `workers`."""

    def __init__(self, workers: list["Node"] | None = None, header: str = "") -> None:
        self.workers = workers
        self.header = header
        self.url = ""
        self.is_dead = False
        self.paths: list[str] = []
        self.sessions: list[str | None] = []
        self.keys: set[str | None] = set()

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.paths.append(request.path)
        self.keys.add(request.headers.get("Authorization"))
        if self.is_dead:
            request.transport.abort()
        if self.workers is not None:
            return await self.pass_on(request, body)
        if request.path == GENERATE:
            self.sessions.append(request.headers.get("X-Session-ID"))
            return web.json_response(vllm_reply(list(IDS), list(LOGPROBS)))
        return web.json_response(
            {} if request.path in ("/health", "/pause", "/resume") else {"weight_version": "v"}
        )

    async def pass_on(self, request: web.Request, body: bytes) -> web.Response:
        """Hash the header to a worker; one that breaks off is left out from then on."""
        assert self.workers is not None
        choice = self.workers[zlib.crc32(request.headers.get(self.header, "").encode()) % len(self.workers)]
        headers = {name: request.headers[name] for name in ("X-Session-ID",) if name in request.headers}
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.request(
                    request.method, choice.url + request.path_qs, data=body, headers=headers
                ) as reply,
            ):
                return web.Response(
                    body=await reply.read(), status=reply.status, content_type="application/json"
                )
        except aiohttp.ClientError:
            self.workers = [worker for worker in self.workers if worker is not choice]
            return web.Response(status=502)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        async with serving(self.answer) as self.url:
            yield


@pytest.mark.parametrize("header", ["X-Session-ID", "X-SMG-Routing-Key"])
async def test_sessions_stay_control_reaches_the_servers_and_a_dead_one_costs_nothing(header: str) -> None:
    servers = [Node(), Node()]
    router = Node(list(servers), header)
    async with AsyncExitStack() as stack:
        for node in (*servers, router):
            await stack.enter_async_context(node.serve())
        engines = [
            HTTPEngine(
                "vllm", HTTPTransport(TransportConfig(node.url, api_key="k", connect_timeout=2)), model="m"
            )
            for node in servers
        ]
        client = InferenceEngineClient(
            engines, router=router.url, **patient(attempt_timeout=5, pause_timeout=60)
        )
        assert client.router is not None
        assert [each.name for each in client.replicas] == [router.url, *[node.url for node in servers]]

        async def ask(sessions: list[Any]) -> None:
            requests = [
                client.complete(new_request(PROMPT, {"max_tokens": 5}), session_id=each) for each in sessions
            ]
            for response in await asyncio.gather(*requests):
                assert response.completion_ids == IDS

        sessions = [f"s{index}" for index in range(8)]
        for _ in range(3):
            await ask(sessions)
        held = [sorted(set(node.sessions)) for node in servers]
        assert sorted(held[0] + held[1]) == sessions  # each at one server
        assert all(held)
        assert router.keys == {"Bearer k"}
        await client.pause_generation("abort")
        await client.resume_generation()
        await client.set_weight_version("v")
        assert await client.weight_version() == "v"
        for node in servers:
            assert {"/pause", "/resume", "/update_weight_version", "/weight_info"} <= set(node.paths)
        assert {GENERATE} == {path for path in router.paths if path != "/health" and "v1/models" not in path}
        servers[0].is_dead = True
        await ask(sessions)
        dead, well = await client.set_weight_version("w")
        assert (dead.name, dead.outcome, type(dead.error)) == (
            servers[0].url,
            "failed",
            EngineConnectionError,
        )
        assert (well.name, well.outcome) == (servers[1].url, "ok")
        assert set(held[1]) <= set(servers[1].sessions[-len(sessions) :])
        await client.teardown()
        for engine in engines:
            await engine.transport.aclose()
    again = pickle.loads(pickle.dumps(client))
    assert again.router.name == router.url


def test_a_url_needs_engines_that_say_how_it_is_asked(sentence: SnapshotAssertion) -> None:
    first, other = (
        HTTPEngine("vllm", MemoryTransport(base_url=f"http://{name}"), model=name) for name in "ab"
    )
    assert error_of(InputError, InferenceEngineClient, [first, other], router="http://r") == sentence
    with pytest.raises(InputError, match="got InferenceEngineClient"):
        InferenceEngineClient([InferenceEngineClient([first])], router="http://r")
