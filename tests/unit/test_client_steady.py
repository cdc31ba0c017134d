"""Over real HTTP: a server's facts are asked once while it is the same process, and then a turn is one request."""

import asyncio
import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
from aiohttp import web

from mmrender.client import server_facts
from mmrender.client.engine import Engine
from mmrender.client.http import HTTPTransport
from mmrender.client.transport import RetryPolicy, TransportConfig
from mmrender.client.vllm import VLLMBackend
from mmrender.client.vllm_images import GENERATE_PATH, RENDER_PATH
from mmrender.errors import EngineMismatchError
from mmrender.renderer import Renderer
from stub_server import serving
from vllm_contract import completion, info, one_image, served


@pytest.fixture(scope="module")
def renderer(tiny_model):
    return Renderer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def image(renderer):
    return one_image(renderer)


class Address:
    """A vLLM server, or a balancer in front of several, whose processes answer in turn.

    Attributes:
        processes: By the name of a process, which pixels it takes.
        paths: Paths that were asked for.
        wrong: Completions of pixels that the process does not take.
    """

    def __init__(self, image, processes):
        self.image, self.processes = image, processes
        self._turns = itertools.count()
        self.paths = Counter()
        self.wrong = 0

    async def answer(self, request):
        body = await request.json() if await request.read() else {}
        self.paths[request.path] += 1
        names = list(self.processes)
        name = names[next(self._turns) % len(names)]
        pixels = self.processes[name]
        if request.path == "/metrics/":
            return web.Response(text=f"# HELP\nprocess_start_time_seconds {name}\n")
        if request.path == GENERATE_PATH:
            if "features" not in body:  # it processes the image itself
                ids = self.image.token_ids
                seen = {"prompt_token_ids": ids, "usage": {"prompt_tokens": len(ids)}}
                return web.json_response(completion(SimpleNamespace(json=body)) | seen)
            self.wrong += not body["features"]["mm_hashes"]["image"][0].endswith(pixels)
            return web.json_response(completion(SimpleNamespace(json=body)))
        answers = {
            "/server_info": info(),
            "/v1/models": {"data": [{"id": "m", "max_model_len": 4096}]},
            RENDER_PATH: served(self.image, pixels),
        }
        return web.json_response(answers[request.path])

    def questions(self):
        """Requests other than turns, since the last call."""
        asked = {path: count for path, count in self.paths.items() if path != GENERATE_PATH}
        self.paths.clear()
        return asked


def engine_at(url, renderer, images="auto"):
    config = TransportConfig(url, keepalive=600, retries=RetryPolicy(attempts=1))
    return Engine(VLLMBackend(images=images), HTTPTransport(config), model="m", renderer=renderer)


async def turns(engine, image, count):
    for _ in range(count):
        await engine.sample(engine.prompt(attribution=image), {"max_tokens": 4})


@pytest.fixture
def clock(monkeypatch):
    """The time by which facts grow old. It stands unless a test moves it."""
    now = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(server_facts, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


@pytest.mark.parametrize("images", ["auto", "features", "hash_only"])
async def test_turns_one_after_another_are_one_request_each(renderer, image, images, clock):
    address = Address(image, {"1": "uint8"})
    async with serving(address.answer) as url:
        engine = engine_at(url, renderer, images)
        await turns(engine, image, 1)
        first = address.questions()
        assert first[RENDER_PATH] == first["/v1/models"] == 1
        assert first["/metrics/"] < 16
        await turns(engine, image, 50)
        assert address.paths[GENERATE_PATH] == 50
        assert address.questions() == {}
        await engine.transport.aclose()


async def test_turns_side_by_side_are_one_request_each(renderer, image, clock):
    address = Address(image, {"1": "uint8"})
    async with serving(address.answer) as url:
        engine = engine_at(url, renderer)
        for number in range(4):
            await asyncio.gather(*[turns(engine, image, 3) for _ in range(12)])
            questions = address.questions()
            assert questions == {} or number < 2  # by then the connections are made
        await engine.transport.aclose()


async def test_a_completion_that_takes_minutes_is_no_pause(renderer, image, clock):
    class Slow(Address):
        async def answer(self, request):
            if request.path != GENERATE_PATH:
                return await super().answer(request)
            clock.seconds += 100
            return web.json_response(completion(SimpleNamespace(json=await request.json())))

    address = Slow(image, {"1": "uint8"})
    async with serving(address.answer) as url:
        engine = engine_at(url, renderer)
        for _ in range(3):
            await engine.sample(engine.prompt([5, 6, 7]), {"max_tokens": 4})
            await engine.transport.aclose()  # as a connection closes that is not used between turns
        assert address.questions() == {"/v1/models": 1}


async def test_another_process_at_the_url_is_asked_anew(renderer, image, clock):
    before, after = Address(image, {"1": "uint8"}), Address(image, {"2": "float32"})
    async with serving(before.answer) as url:
        engine = engine_at(url, renderer)
        await turns(engine, image, 3)
    async with serving(after.answer, port=int(url.rpartition(":")[2])):
        await turns(engine, image, 3)
        assert after.questions()[RENDER_PATH] == 1
        await turns(engine, image, 3)
        assert after.questions() == {}
        await engine.transport.aclose()
    assert before.wrong == after.wrong == 0


async def test_a_process_that_is_replaced_while_it_is_asked_is_noticed(renderer, image):
    """The old one still answers what it was asked, as servers do that are told to end."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    class Ending(Address):
        async def answer(self, request):
            if request.path == GENERATE_PATH and self.paths[GENERATE_PATH] == 3:
                begun.set()
                await go_on.wait()
            return await super().answer(request)

    before, after = Ending(image, {"1": "uint8"}), Address(image, {"2": "float32"})
    async with serving(after.answer) as other, serving(before.answer) as url:
        engine = engine_at(url, renderer)
        await turns(engine, image, 3)
        last = asyncio.create_task(turns(engine, image, 1))
        await begun.wait()
        engine.transport.base_url = other  # from here on new connections lead to the other process
        with pytest.raises(EngineMismatchError, match="replaced the server that was asked"):
            await turns(engine, image, 1)
        go_on.set()
        with pytest.raises(EngineMismatchError):  # it is not known which one answered
            await last
        await turns(engine, image, 2)
        await engine.transport.aclose()
    assert before.wrong == 0


async def test_a_turn_that_takes_minutes_forgets_nothing(renderer, image, clock):
    address = Address(image, {"1": "uint8"})
    async with serving(address.answer) as url:
        engine = engine_at(url, renderer)
        await turns(engine, image, 1)
        address.questions()
        for _ in range(3):
            clock.seconds += 300
            await turns(engine, image, 1)
            assert set(address.questions()) == {"/metrics/"}  # after a minute
        await engine.transport.aclose()


async def test_behind_a_balancer_of_equal_servers_one_handshake_a_minute_is_made_at_most(
    renderer, image, clock
):
    address = Address(image, dict.fromkeys("abcdefg", "uint8"))
    async with serving(address.answer) as url:
        engine = engine_at(url, renderer)
        await turns(engine, image, 1)
        assert address.questions()[RENDER_PATH] <= 4
        for _ in range(30):
            for _ in range(10):
                await turns(engine, image, 1)
                clock.seconds += 7  # a minute in nine turns
            questions = address.questions()
            assert questions.pop(RENDER_PATH, 0) <= 1
            assert questions.pop("/metrics/") <= 2
            assert questions == {}
        assert not address.wrong
        await engine.transport.aclose()


async def test_behind_a_balancer_of_unlike_servers_none_is_believed(renderer, image):
    address = Address(image, {"a": "uint8", "b": "float32", "c": "uint8"})
    async with serving(address.answer) as url:
        engine = engine_at(url, renderer)
        for _ in range(3):
            with pytest.raises(EngineMismatchError, match="servers with different settings"):
                await turns(engine, image, 1)
        await engine.transport.aclose()
    assert not address.paths[GENERATE_PATH]
