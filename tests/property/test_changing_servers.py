"""What was learnt of one server is not believed of another that answers at the same address."""

import asyncio
import contextlib
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrender.client.server_facts import Process
from mmrender.client.vllm import VLLMBackend
from mmrender.client.vllm_images import GENERATE_PATH, RENDER_PATH
from mmrender.errors import EngineMismatchError, EngineStatusError, MMRenderError
from mmrender.renderer import Renderer
from mmrender.testing.memory_transport import Answer, MemoryTransport
from vllm_contract import Recalling, completion, contract_request, info, one_image, served

PIXELS = ("uint8", "float32", "uint8", "bfloat16")
"""What each of the servers takes."""


@pytest.fixture(scope="module")
def image(tiny_model):
    return one_image(Renderer.from_pretrained(tiny_model))


class Address:
    """An address at which several servers answer; `turns` says which one answers each question.

    Attributes:
        wrong: Whether some completion was made of pixels that its server does not take.
        killed: Whether some server was sent a hash without data that it does not have.
        hashes_sent: Hashes that came without data.
    """

    def __init__(self, image, turns):
        self.wrong = self.killed = False
        self.hashes_sent = 0
        self._turns = iter(turns)
        self._hashes = {}
        self._recalling = {}
        self._image = image
        self.transport = MemoryTransport(
            {
                "GET /metrics/": lambda _: f"# HELP\nprocess_start_time_seconds 1.7{self._next()}e+09\n",
                f"POST {RENDER_PATH}": lambda _: served(image, PIXELS[self._next()]),
                "GET /server_info": lambda _: info(api_server=self._next()),
                f"POST {GENERATE_PATH}": self._generate,
            }
        )

    def _next(self):
        return next(self._turns)

    def _generate(self, asked):
        server = self._next()
        if "content_parts" in asked.json:
            return self._recalling.setdefault(server, Recalling(self._image))(asked)
        features = asked.json["features"]
        for name, data in zip(features["mm_hashes"]["image"], features["kwargs_data"]["image"], strict=True):
            self.wrong |= not name.endswith(PIXELS[server])
            known = self._hashes.setdefault(server, set())
            self.hashes_sent += data is None
            if data is None and name not in known:
                self.killed = True
                return Answer("a miss", status=500)
            known.add(name)
        return completion(asked)

    def ask(self, mode="features"):
        return asyncio.run(VLLMBackend(images=mode).generate(contract_request(self._image), self.transport))


@settings(max_examples=20)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=6), st.sampled_from(["auto", "features", "hash_only"])
)
def test_servers_may_change_between_calls(image, order, mode):
    present = [0]
    address = Address(image, iter(lambda: present[0], None))
    # A server that comes back is one of several behind a balancer, where an unlike one may be refused.
    is_back = len([*itertools.groupby(order)]) > len({*order})
    for present[0] in order:
        with contextlib.suppress(*[EngineMismatchError] * is_back):
            address.ask(mode)
    assert not address.wrong
    assert not address.killed


@settings(max_examples=20)
@given(st.integers(0, 30), st.permutations(range(4)), st.sampled_from(["auto", "features", "hash_only"]))
def test_a_server_that_changes_at_any_moment_is_an_error_at_most_once(image, moment, servers, mode):
    turns = itertools.chain(itertools.repeat(servers[0], moment), itertools.repeat(servers[1]))
    address = Address(image, turns)
    failures = 0
    for _ in range(8):
        address.wrong = False
        try:
            address.ask(mode)
        except MMRenderError:
            failures += 1
        else:
            assert not address.wrong
    assert failures <= 1


@settings(max_examples=20)
@given(st.permutations(range(4)), st.integers(2, 4))
def test_unlike_servers_that_answer_by_turns_are_noticed(image, servers, count):
    among = servers[:count]
    address = Address(image, itertools.cycle(among))
    for _ in range(4):
        address.wrong = False
        try:
            address.ask()
        except EngineMismatchError:
            continue
        assert not address.wrong


@settings(max_examples=20)
@given(st.integers(0, 12), st.permutations(range(4)), st.integers(2, 4), st.booleans())
def test_by_default_no_hash_goes_where_servers_answer_by_turns(image, alone, servers, count, at_random):
    """A balancer in front of several servers, of which the first may have answered alone for a while."""
    among = servers[:count]
    turns = random.Random(alone).choice if at_random else itertools.cycle(among).__next__
    each = (lambda: turns(among)) if at_random else turns
    address = Address(image, itertools.chain(itertools.repeat(among[0], alone), iter(each, None)))
    for _ in range(6):
        with contextlib.suppress(MMRenderError):
            address.ask("auto")
    address.hashes_sent = 0
    for _ in range(6):
        with contextlib.suppress(MMRenderError):
            address.ask("auto")
    assert not address.hashes_sent


def test_like_servers_that_answer_by_turns_are_asked_once_each(image):
    address = Address(image, itertools.cycle([0, 2]))
    for _ in range(9):
        address.ask()
    assert len(address.transport.of_path(RENDER_PATH)) <= 4
    assert not address.wrong


def test_a_server_that_does_not_say_which_process_answers_is_asked_once(image):
    address = Address(image, itertools.repeat(0))
    address.transport._routes.pop("GET /metrics/")
    for _ in range(3):
        address.ask()
    paths = [asked.path for asked in address.transport.asked]
    assert paths == ["/metrics/", RENDER_PATH, *[GENERATE_PATH] * 3]


def test_a_gateway_error_is_not_taken_for_silence():
    transport = MemoryTransport({"GET /metrics/": [Answer("no", status=503), "process_start_time_seconds 1"]})
    with pytest.raises(EngineStatusError):
        asyncio.run(Process.answering(transport))
    assert asyncio.run(Process.answering(transport)).facts.name == "process_start_time_seconds 1"
