"""Servers that hang, over real sockets: every control call has a deadline, and a hung server costs its own requests only.

The event loop's clock stands while a server works and jumps while only hung ones have requests, so that no deadline
depends on the machine's load.
"""

import asyncio
import functools
import inspect
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from kit import raised_by, user
from mmrender.client.hooks import ClientHooks
from mmrender.client.http import HTTPTransport
from mmrender.client.transport import RetryPolicy, TransportConfig
from mmrender.engines import HTTPEngine, InferenceEngineClient
from mmrender.engines.interface import EngineResult, new_request
from mmrender.errors import EngineStateError, EngineTimeoutError, EngineUnavailableError
from mmrender.gateway.gateway import Gateway
from stub_server import IDS, LOGPROBS, PROMPT, serving, vllm_reply

GENERATE = "/inference/v1/generate"
UPDATE = {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[1]], "weight_version": "v2"}


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock moves by hand alone while it is stopped."""

    ahead = 0.0
    stopped_at = None

    def time(self):
        return (super().time() if self.stopped_at is None else self.stopped_at) + self.ahead


class InFlight(ClientHooks):
    """Counts the requests in flight at one server, by whether they sample."""

    def __init__(self):
        self.counts = {True: 0, False: 0}

    def on_request(self, event):
        self.counts[event.url.endswith(GENERATE)] += 1

    def on_response(self, event):
        self.counts[event.url.endswith(GENERATE)] -= 1

    on_error = on_response


class Server:
    """A vLLM server's routes. While it is `hung`, it takes requests and never answers them."""

    def __init__(self):
        self.url = ""
        self.is_paused = False
        self.well = asyncio.Event()
        self.well.set()
        self.version = "v0"
        self.paths = []
        self.resumed = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def answer(self, request):
        body = await request.json() if await request.read() else {}
        self.paths.append(request.path)
        await self.well.wait()
        if request.path == GENERATE:
            await self.gate.wait()
            while self.is_paused:
                await self.resumed.wait()
            reply = vllm_reply(list(IDS), list(LOGPROBS))
            spans = [{"version": self.version, "start": 0, "end": len(IDS)}]
            reply["choices"][0]["weight_versions"] = spans
            reply["usage"] = {"prompt_tokens": len(body["token_ids"])}
            return web.json_response(reply)
        if request.path in ("/pause", "/resume"):
            self.is_paused = request.path == "/pause"
            self.resumed.set()
            self.resumed = asyncio.Event()
        self.version = body.get("new_version") or body.get("weight_version") or self.version
        answers = {
            "/is_paused": {"is_paused": self.is_paused},
            "/weight_info": {"weight_version": self.version},
            "/v1/models": {"data": [{"id": "m", "max_model_len": 2048}]},
        }
        return web.json_response(answers.get(request.path, {}))

    @property
    def requests(self):
        return self.paths.count(GENERATE)

    @property
    def is_hung(self):
        return not self.well.is_set()

    @is_hung.setter
    def is_hung(self, hangs):
        (self.well.clear if hangs else self.well.set)()


class House:
    """Servers, and the clients that use them."""

    def __init__(self, servers):
        self.servers = servers
        self.flights = [[] for _ in servers]
        self.clients = []

    def client(self, **settings):
        engines = []
        for number, (server, flights) in enumerate(zip(self.servers, self.flights, strict=True)):
            flights.append(InFlight())
            config = TransportConfig(server.url, retries=RetryPolicy(attempts=1))
            transport = HTTPTransport(config, hooks=flights[-1:])
            engines.append(HTTPEngine("vllm", transport, model="m", name=f"server{number}"))
        retries = RetryPolicy(attempts=5, wait_jitter=0.0)
        self.clients.append(InferenceEngineClient(engines, retries=retries, **settings))
        return self.clients[-1]

    def works(self, server, flights):
        """Whether an answer of a server is on its way."""
        if server.is_hung:
            return False
        samples = not server.is_paused and server.gate.is_set()
        return any(each.counts[False] or (samples and each.counts[True]) for each in flights)

    async def pace(self):
        """Put the clock forward while no server works: deadlines pass for those alone that hang or wait."""
        loop = asyncio.get_running_loop()
        loop.stopped_at = loop.time()
        while True:
            for _ in range(20):  # always ready, so that the loop never waits for its clock
                await asyncio.sleep(0)
            if not any(map(self.works, self.servers, self.flights)):
                loop.ahead += 1.0


def in_house(test):
    """A test in an event loop that jumps, with three servers and their pace."""

    async def scenario(*args, **options):
        async with AsyncExitStack() as stack:
            servers = [Server() for _ in range(3)]
            for server in servers:
                server.url = await stack.enter_async_context(serving(server.answer))
            house = House(servers)
            pace = asyncio.create_task(house.pace())
            try:
                await test(house, *args, **options)
            finally:
                for server in servers:  # so that nothing waits for it
                    server.is_hung, server.is_paused = False, False
                    server.gate.set()
                    server.resumed.set()
                for client in house.clients:
                    await client.teardown()
                    for engine in client.engines:
                        await engine.transport.aclose()
                asyncio.get_running_loop().stopped_at = None
                pace.cancel()
                await asyncio.gather(pace, return_exceptions=True)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    @functools.wraps(test)
    def run(*args, **options):
        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            runner.run(scenario(*args, **options))

    names = list(inspect.signature(test).parameters.values())[1:]
    run.__signature__ = inspect.Signature(names)  # pytest passes no house
    return run


async def ask(client, session=None):
    response = await client.complete(new_request(PROMPT, {"max_tokens": 5}), session_id=session)
    assert response.completion_ids == IDS
    return response


async def ask_all(client, count=6):
    return await asyncio.gather(*[ask(client) for _ in range(count)])


def outcomes(results):
    assert all(isinstance(each, EngineResult) for each in results)
    assert [each.name for each in results] == ["server0", "server1", "server2"]
    assert all((each.error is None) == (each.outcome == "ok") for each in results)
    return [each.outcome for each in results]


def now():
    return asyncio.get_running_loop().time()


CALLS = {
    "pause abort": lambda client: client.pause_generation("abort"),
    "pause keep": lambda client: client.pause_generation("keep"),
    "pause wait": lambda client: client.pause_generation("wait"),
    "abort": lambda client: client.abort_generation(),
    "sleep": lambda client: client.sleep(),
    "wake": lambda client: client.wake_up(),
    "reset": lambda client: client.reset_prefix_cache(),
    "load": lambda client: client.load_weights("/step-1", weight_version="v1"),
    "set version": lambda client: client.set_weight_version("v1"),
    "version": lambda client: client.control("weight_version"),
    "health": lambda client: client.check_health(),
}


@pytest.mark.parametrize("call", list(CALLS))
@in_house
async def test_every_call_ends_at_its_deadline_without_the_hung_server(house, call):
    hung, *_ = house.servers
    client = house.client(pause_timeout=30, update_timeout=90)
    await ask_all(client)
    hung.is_hung = True
    begun = now()
    results = await CALLS[call](client)
    if call == "abort":  # nothing was in flight, so nobody had to be asked
        assert outcomes(results) == ["ok"] * 3
        return
    assert outcomes(results) == ["failed" if call == "health" else "timed out", "ok", "ok"]
    assert now() - begun < 95
    if call.startswith("pause"):
        assert outcomes(await client.resume_generation()) == ["failed", "ok", "ok"]
    assert [each.down is None for each in client.replicas] == [False, True, True]
    before, begun = hung.requests, now()
    await ask_all(client)
    assert hung.requests == before
    assert now() - begun < 5  # nobody waits for the hung one
    if call == "version":
        assert await client.weight_version() == "v0"


async def until(predicate):
    """Wait for an event; the clock jumps meanwhile."""
    for _ in range(10_000):
        if predicate():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


@in_house
async def test_a_transfer_needs_every_server_and_names_the_hung_one(house):
    hung, *_ = house.servers
    client = house.client(pause_timeout=30, update_timeout=90)
    hung.is_hung = True
    late = "server0: the engine did not answer within"
    assert str(await raised_by(EngineTimeoutError, client.update_named_weights(UPDATE))) == f"{late} 90 s"
    assert client.replicas[0].down == f"it missed a weight update: {late} 90 s"
    for transfer in (client.update_named_weights(UPDATE), client.init_weight_update_communicator({})):
        assert f"{late} 5 s" in str(await raised_by(EngineUnavailableError, transfer))
    hung.is_hung = False
    refusal = "server0: the engine missed a weight update. Update the weights again"
    await until(lambda: client.replicas[0].down == refusal)
    assert outcomes(await client.check_health()) == ["failed", "ok", "ok"]
    assert outcomes(await client.update_named_weights(UPDATE)) == ["ok"] * 3
    await until(lambda: client.replicas[0].down is None)
    await ask_all(client)
    assert hung.requests


@in_house
async def test_a_hung_server_that_answers_again_is_updated_first_and_then_used(house):
    hung, *_ = house.servers
    client = house.client(pause_timeout=30, update_timeout=90)
    await ask_all(client)
    asked = hung.requests
    hung.is_hung = True
    begun = now()
    assert outcomes(await client.pause_generation("abort")) == ["timed out", "ok", "ok"]
    assert outcomes(await client.load_weights("/step-1", weight_version="v1")) == ["failed", "ok", "ok"]
    assert outcomes(await client.sleep(level=1)) == ["failed", "ok", "ok"]
    assert outcomes(await client.wake_up()) == ["failed", "ok", "ok"]
    assert outcomes(await client.resume_generation()) == ["failed", "ok", "ok"]
    assert now() - begun < 40  # its deadline was waited for once
    await ask_all(client)
    assert hung.requests == asked
    del hung.paths[:]
    hung.is_hung = False
    await until(lambda: client.replicas[0].down is None)
    expected = ["/reset_prefix_cache", "/sleep", "/wake_up", "/collective_rpc", "/resume"]
    told = [path for path in hung.paths if path in expected]
    assert list(dict.fromkeys(told)) == expected
    assert (hung.version, hung.is_paused) == ("v1", False)
    versions = [response.weight_versions[0].version for response in await ask_all(client)]
    assert versions == ["v1"] * 6
    assert hung.requests


@in_house
async def test_a_pause_that_waits_finds_out_a_server_that_hangs_with_requests(house):
    hung, *_ = house.servers
    client = house.client(pause_timeout=30)
    await ask_all(client)
    hung.is_hung = True
    asking = [asyncio.create_task(ask(client)) for _ in range(3)]  # in turn: one at each
    await until(lambda: sum(task.done() for task in asking) == 2)
    begun = now()
    assert outcomes(await client.pause_generation("wait")) == ["failed", "ok", "ok"]
    assert now() - begun < 45
    assert sum(task.done() for task in asking) == 2
    await client.resume_generation()
    await asyncio.gather(*asking)  # by another server


@pytest.mark.parametrize("mode", ["abort", "keep"])
@in_house
async def test_a_cancelled_pause_returns_at_once_and_every_server_is_resumed(house, mode):
    hung, *good = house.servers
    client = house.client(pause_timeout=3600)
    await ask_all(client)
    hung.is_hung = True
    pausing = asyncio.create_task(client.pause_generation(mode))
    await until(lambda: all(server.is_paused for server in good))
    begun = now()
    pausing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pausing
    assert now() - begun < 3
    assert not client.is_paused
    await ask_all(client)
    assert not any(server.is_paused for server in good)
    hung.is_hung, hung.is_paused = False, True  # the pause reached it after all
    await until(lambda: client.replicas[0].down is None)
    assert not hung.is_paused
    assert outcomes(await client.pause_generation(mode)) == ["ok"] * 3
    assert all(server.is_paused for server in house.servers)
    await client.resume_generation()


@pytest.mark.parametrize("call", ["load", "sleep", "wake", "reset"])
@in_house
async def test_servers_make_up_for_a_call_that_was_cancelled(house, call):
    """Which of them had obeyed is not known."""
    hung, *good = house.servers
    client = house.client(pause_timeout=3600, update_timeout=3600)
    hung.is_hung = True
    calling = asyncio.create_task(CALLS[call](client))
    path = {
        "load": "/update_weight_version",
        "sleep": "/sleep",
        "wake": "/wake_up",
        "reset": "/reset_prefix_cache",
    }
    await until(lambda: all(path[call] in server.paths for server in good))
    begun = now()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert now() - begun < 3
    for server in house.servers:
        del server.paths[:]
    responses = await ask_all(client)
    for server in good:
        assert GENERATE not in server.paths[: server.paths.index(path[call])]
    hung.is_hung = False
    await until(lambda: client.replicas[0].down is None)
    responses += await ask_all(client)
    assert GENERATE not in hung.paths[: hung.paths.index(path[call])]
    assert {response.weight_versions[0].version for response in responses} == {
        "v1" if call == "load" else "v0"
    }


@in_house
async def test_an_update_that_was_cancelled_amid_a_pause_can_be_repeated(house):
    hung, *good = house.servers
    client = house.client(pause_timeout=30, update_timeout=3600)
    await client.pause_generation("abort")
    hung.is_hung = True
    updating = asyncio.create_task(client.load_weights("/step-1", weight_version="v1"))
    await until(lambda: all(server.version == "v1" for server in good))
    updating.cancel()
    await asyncio.gather(updating, return_exceptions=True)
    results = await client.load_weights("/step-2", weight_version="v2")
    assert outcomes(results) == ["failed", "ok", "ok"]
    assert outcomes(await client.resume_generation()) == ["failed", "ok", "ok"]
    assert not any(server.is_paused for server in good)
    await ask_all(client)
    hung.is_hung = False
    await until(lambda: client.replicas[0].down is None)
    assert (hung.version, hung.is_paused) == ("v2", False)


@in_house
async def test_a_cancelled_resumption_can_be_repeated(house):
    hung, *good = house.servers
    client = house.client(pause_timeout=3600)
    await client.pause_generation("abort")
    hung.is_hung = True
    resuming = asyncio.create_task(client.resume_generation())
    await until(lambda: not any(server.is_paused for server in good))
    resuming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resuming
    assert client.is_paused
    hung.is_hung = False
    assert outcomes(await client.resume_generation()) == ["ok"] * 3
    assert not any(server.is_paused for server in house.servers)
    await ask_all(client)


@in_house
async def test_a_pause_of_one_process_is_waited_for_by_all(house):
    """However long it lasts: a time limit of single requests is no limit of pauses."""
    controller, worker = house.client(), house.client(attempt_timeout=10)
    await controller.pause_generation("abort")
    asking = [asyncio.create_task(ask(worker)) for _ in range(6)]
    await asyncio.sleep(300)
    assert not any(task.done() for task in asking)
    assert await worker.reports_pause()
    assert all(replica.down is None for replica in worker.replicas)
    await controller.load_weights("/step-1", weight_version="v1")
    await controller.resume_generation()
    for task in asking:
        assert (await task).weight_versions[0].version == "v1"


@in_house
async def test_a_gateway_waits_for_the_pause_of_a_controller(house, renderers):
    renderer, controller = renderers("tiny"), house.client()
    async with Gateway(house.client(attempt_timeout=10), renderer, model="m") as gateway:
        await controller.pause_generation("wait")
        rendered = renderer.render([user("hi")], add_generation_prompt=True)
        turn = gateway.engine.turn(gateway.engine.prompt(attribution=rendered), {"max_tokens": 5})
        answering = asyncio.create_task(turn)
        await asyncio.sleep(300)
        assert not answering.done()
        await controller.resume_generation()
        assert (await answering).completion_ids == IDS


@in_house
async def test_a_gateways_health_waits_for_no_hung_server(house, renderers):
    client = house.client()
    async with Gateway(client, renderers("tiny"), model="m") as gateway:
        house.servers[0].is_hung = True
        begun = now()
        await gateway.check_health()
        assert now() - begun < 3
        for server in house.servers:
            server.is_hung = True
        await raised_by(EngineUnavailableError, gateway.check_health())
        assert now() - begun < 10


@in_house
async def test_a_new_controller_ends_the_pause_of_one_that_is_gone(house):
    gone, controller = house.client(), house.client()
    assert "the client is not paused" in str(
        await raised_by(EngineStateError, controller.resume_generation())
    )
    await gone.pause_generation("abort")
    assert outcomes(await controller.resume_generation()) == ["ok"] * 3
    assert not any(server.is_paused for server in house.servers)
    await ask_all(controller)


@in_house
async def test_a_server_that_answers_again_at_the_end_of_a_pause_is_resumed(house):
    hung, *_ = house.servers
    client = house.client(pause_timeout=30, update_timeout=30)
    assert outcomes(await client.pause_generation("abort")) == ["ok"] * 3
    hung.is_hung = True
    update = await client.load_weights("/step-1", weight_version="v1")
    assert outcomes(update) == ["timed out", "ok", "ok"]
    limit = client.engines[0].max_prompt_len
    answers = []

    async def resumed_meanwhile():
        answers.append(await limit())
        if client.is_paused:
            await client.resume_generation()
        return answers[-1]

    client.engines[0].max_prompt_len = resumed_meanwhile
    hung.is_hung = False
    await until(lambda: not client.is_paused and client.replicas[0].down is None)
    assert answers
    assert (hung.version, hung.is_paused) == ("v1", False)
    await ask_all(client)


@in_house
async def test_a_new_controller_ends_the_pause_of_a_server_that_hung_when_it_came(house):
    hung, *_ = house.servers
    gone, controller = house.client(), house.client(pause_timeout=30)
    assert outcomes(await gone.pause_generation("abort")) == ["ok"] * 3
    await gone.teardown()
    hung.is_hung = True
    assert outcomes(await controller.check_health()) == ["failed", "ok", "ok"]
    assert outcomes(await controller.pause_generation("abort")) == ["failed", "ok", "ok"]
    assert outcomes(await controller.load_weights("/step-1", weight_version="v1")) == ["failed", "ok", "ok"]
    assert outcomes(await controller.resume_generation()) == ["failed", "ok", "ok"]
    hung.is_hung = False
    await until(lambda: controller.replicas[0].down is None)
    assert (hung.version, hung.is_paused) == ("v1", False)
    await ask_all(controller)


@in_house
async def test_a_worker_uses_no_server_whose_weights_others_have_left_behind(house):
    """It knows of no update: its controller is another process."""
    late, *others = house.servers
    worker = house.client()
    late.is_hung = True
    assert outcomes(await worker.check_health()) == ["failed", "ok", "ok"]
    for server in others:
        server.version = "v1"
    late.is_hung = False
    refusal = "server0: the engine has other weights - expected v1, got v0"
    await until(lambda: worker.replicas[0].down == refusal)
    await ask_all(worker)
    assert not late.requests
    late.version = "v1"
    await until(lambda: worker.replicas[0].down is None)
    await ask_all(worker)
    assert late.requests


@in_house
async def test_requests_of_other_servers_do_not_notice_a_hung_one(house):
    hung, *_ = house.servers
    client = house.client()
    await ask_all(client)
    hung.is_hung = True
    stuck = [asyncio.create_task(ask(client)) for _ in range(3)]  # in turn: one at each
    await until(lambda: sum(task.done() for task in stuck) == 2)
    begun = now()
    sessions = [f"session{number}" for number in range(40)]
    homes = {each: client._pool.begin(each, "").order[0].name for each in sessions}
    await asyncio.gather(*[ask(client, each) for each in sessions if homes[each] != "server0"])
    assert now() - begun < 5
    (task,) = [task for task in stuck if not task.done()]
    begun = now()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert now() - begun < 5
