"""Two real vLLM servers behind one address that lets now one answer, now the other."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from integration.engine_checks import GREEDY, MODEL, picture, user
from integration.engine_server import EngineServer, needs_tier, start_vllm
from mmrender import generate
from mmrender.client.http import HTTPTransport
from mmrender.client.vllm import VLLMBackend
from mmrender.client.vllm_images import GENERATE_PATH
from mmrender.errors import EngineMismatchError
from mmrender.renderer import Renderer
from stub_server import serving

pytestmark = needs_tier("vllm")

SWITCHES = 100
FLAGS = ((), ("--no-mm-device-do-normalize",))


@pytest.fixture(scope="module")
def servers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineServer]]:
    logs = tmp_path_factory.mktemp("changing")
    with ExitStack() as stack:
        yield [
            stack.enter_context(start_vllm(tiny_model, flags, log=logs / f"{number}.log"))
            for number, flags in enumerate(FLAGS)
        ]


class Proxy:
    """A gateway: `present` answers; with `by_turns` each request goes to the next server."""

    def __init__(self, servers: list[EngineServer], session: aiohttp.ClientSession) -> None:
        self.servers, self.session = servers, session
        self.present = 0
        self.by_turns = False
        self.answered_by = 0
        self.url = ""
        self.connections: set[asyncio.Transport] = set()

    async def replace_by(self, number: int) -> None:
        """Let another server answer. Connections end, as they do when a server is stopped."""
        if number != self.present:
            for connection in self.connections:
                connection.close()
            self.connections.clear()
            for _ in range(3):  # clients on this event loop read the end of theirs
                await asyncio.sleep(0.01)
        self.present = number

    async def handle(self, request: web.Request) -> web.Response:
        if self.by_turns:
            self.present = (self.present + 1) % len(self.servers)
        assert request.transport is not None
        self.connections.add(request.transport)
        number, url = self.present, self.servers[self.present].base_url + request.path_qs
        headers = {"Content-Type": request.content_type}
        call = self.session.request(request.method, url, data=await request.read(), headers=headers)
        async with call as reply:
            if request.path == GENERATE_PATH:
                self.answered_by = number
            kind = {"Content-Type": reply.headers.get("Content-Type", "")}
            return web.Response(status=reply.status, body=await reply.read(), headers=kind)


@asynccontextmanager
async def proxy(servers: list[EngineServer]) -> AsyncIterator[Proxy]:
    async with AsyncExitStack() as stack:
        gate = Proxy(servers, await stack.enter_async_context(aiohttp.ClientSession()))
        gate.url = await stack.enter_async_context(serving(gate.handle))
        yield gate


async def asked(url: str, renderer: Renderer, seed: int, mode: str) -> list[float]:
    """Logprobs of a greedy completion for a picture."""
    transport = HTTPTransport(url)
    try:
        return await asked_over(transport, renderer, seed, mode)
    finally:
        await transport.aclose()


async def asked_over(transport: HTTPTransport, renderer: Renderer, seed: int, mode: str) -> list[float]:
    messages = [user("What is on it?", picture(seed, 128, 96))]
    generation = await generate(
        client=transport,
        renderer=renderer,
        messages=messages,
        model=MODEL,
        backend=VLLMBackend(images=mode),
        sampling_params=GREEDY,
    )
    return list(generation.logprobs)


@pytest.mark.parametrize("mode", ["auto", "features", "hash_only"])
def test_a_server_that_is_replaced_between_turns_is_asked_anew(servers, renderer, mode):
    order = random.Random(7)

    async def run() -> None:
        right = [await asked(servers[0].base_url, renderer, seed, "content_parts") for seed in range(5)]
        async with proxy(servers) as gate:
            transport = HTTPTransport(gate.url)
            for _ in range(SWITCHES // 2):
                await gate.replace_by(order.randrange(2))
                seed = order.randrange(5)
                found = await asked_over(transport, renderer, seed, mode)
                np.testing.assert_allclose(found, right[seed], rtol=0, atol=1e-3)
            await transport.aclose()

    asyncio.run(run())
    for server in servers:
        server.get("/health")


def test_unlike_servers_behind_one_address_are_noticed(servers, renderer):
    async def run() -> list[bool]:
        right = await asked(servers[0].base_url, renderer, 1, "content_parts")
        noticed = []
        async with proxy(servers) as gate:
            gate.by_turns = True
            transport = HTTPTransport(gate.url)
            for _ in range(10):
                try:
                    found = await asked_over(transport, renderer, 1, "features")
                except EngineMismatchError:
                    noticed.append(True)
                else:
                    np.testing.assert_allclose(found, right, rtol=0, atol=1e-3)
                    noticed.append(False)
            await transport.aclose()
        return noticed

    assert any(asyncio.run(run()))
