"""Routers from PyPI in front of servers: vllm-router before two real vLLM, SGLang's gateway before two stubs.

vLLM runs in the environment that `MMRENDER_VLLM_ENV` names, with the tiny model, greedy; see
`tests/integration/test_engines_vllm.py` for why tokens are equal from run to run.
"""

import asyncio
import itertools
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from integration.engine_server import running, start_vllm
from integration.test_engines_vllm import PARAMS, conversation, generate_some_at_once
from kit import free_port
from mmrender.client.transport import RetryPolicy, TransportConfig
from mmrender.engines import HTTPEngine, InferenceEngineClient
from mmrender.engines.interface import new_request
from mmrender.testing.tiny_model import build_tiny_model
from stub_server import IDS, LOGPROBS, serving, sglang_reply

pytestmark = pytest.mark.timeout(1200)

PROMPTS = 24
SESSIONS = 12


def start_router(command, urls, log):
    """A router, and the port of its metrics, which two of them must not share."""
    port, metrics = free_port(), free_port()
    line = [
        *command,
        "--port",
        port,
        "--prometheus-port",
        metrics,
        "--host",
        "127.0.0.1",
        "--worker-urls",
        *urls,
    ]
    return running(list(map(str, line)), name=str(command[0]), port=port, log=log, seconds=120)


@pytest.fixture(scope="module")
def fleet(tiny_model, tmp_path_factory):
    """Two vLLM servers, and the router before them."""
    logs = tmp_path_factory.mktemp("router")
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        starting = [start_vllm(tiny_model, log=logs / f"server{index}.log") for index in range(2)]
        servers = list(pool.map(stack.enter_context, starting))
        command = [Path(sys.executable).with_name("vllm-router"), "--policy", "consistent_hash"]
        command += ["--health-check-interval-secs", "2", "--health-failure-threshold", "3"]
        # By default it leaves out a server for a minute after some failures.
        command += ["--cb-timeout-duration-secs", "1"]
        urls = [server.base_url for server in servers]
        yield servers, stack.enter_context(start_router(command, urls, logs / "router.log"))


@pytest.fixture(scope="module")
def batch():
    sessions = [f"session{seed % SESSIONS}" for seed in range(PROMPTS)]
    prompts = [conversation(seed) for seed in range(PROMPTS)]
    return {"prompts": prompts, "sampling_params": PARAMS, "session_ids": sessions}


def client_of(fleet, renderer, *, routed=True):
    servers, router = fleet
    once = RetryPolicy(attempts=2)
    engines = [
        HTTPEngine(
            "vllm", TransportConfig(server.base_url, retries=once), model="tiny", name=f"engine{index}"
        )
        for index, server in enumerate(servers)
    ]
    # The router refuses with 503 while it takes no server for healthy.
    patient = RetryPolicy(attempts=20, wait_initial=0.2, wait_max=2.0)
    return InferenceEngineClient(
        engines, router=router.base_url if routed else None, renderer=renderer, retries=patient
    )


def sampled(fleet, renderer, batch, *, routed=True, during=None):
    async def run():
        client = client_of(fleet, renderer, routed=routed)
        generating = asyncio.create_task(generate_some_at_once(client, batch, 8))
        if during is not None:
            await asyncio.sleep(0.2)
            await during(client)
        output = await generating
        await client.teardown()
        return output

    return asyncio.run(run())


@pytest.fixture(scope="module")
def undisturbed(fleet, renderer, batch):
    return sampled(fleet, renderer, batch, routed=False)


def assert_same(output, undisturbed):
    assert output["response_ids"] == undisturbed["response_ids"]
    for logprobs, expected in zip(output["response_logprobs"], undisturbed["response_logprobs"], strict=True):
        np.testing.assert_allclose(logprobs, expected, atol=2e-4)


def finished(server):
    """Requests that a server has finished."""
    lines = server.get("/metrics").decode().splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:request_success_total")
    )


def test_each_session_stays_on_one_server(fleet, renderer, batch, undisturbed):
    servers, _ = fleet
    homes = []
    for session in range(SESSIONS):
        before = [finished(server) for server in servers]
        of = [index for index in range(PROMPTS) if index % SESSIONS == session]
        own = {name: [batch[name][index] for index in of] for name in ("prompts", "session_ids")}
        output = sampled(fleet, renderer, {**own, "sampling_params": PARAMS})
        assert output["response_ids"] == [undisturbed["response_ids"][index] for index in of]
        served = [finished(server) - count for server, count in zip(servers, before, strict=True)]
        assert sorted(served) == [0, len(of)]
        homes.append(served.index(len(of)))
    assert set(homes) == {0, 1}


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
def test_pauses_reach_both_servers_and_change_nothing(mode, fleet, renderer, batch, undisturbed):
    servers, _ = fleet

    async def pauses(client):
        for _ in range(3):
            await client.pause_generation(mode)
            assert all(server.get("/is_paused")["is_paused"] for server in servers)
            await client.resume_generation()
            assert not any(server.get("/is_paused")["is_paused"] for server in servers)
            await asyncio.sleep(0.1)

    assert_same(sampled(fleet, renderer, batch, during=pauses), undisturbed)


def test_weights_reach_both_servers(fleet, renderer, batch, undisturbed, tiny_model, tmp_path):
    servers, _ = fleet
    other = build_tiny_model(tmp_path / "other", seed=7)

    def after(path, version):
        async def run():
            client = client_of(fleet, renderer)
            await client.load_weights(str(path), weight_version=version)
            assert await client.weight_version() == version
            await client.teardown()

        asyncio.run(run())
        assert [server.get("/weight_info")["weight_version"] for server in servers] == [version] * 2
        return sampled(fleet, renderer, batch)

    changed = after(other, "other")
    pairs = zip(changed["response_ids"], undisturbed["response_ids"], strict=True)
    assert all(ids != first for ids, first in pairs)
    assert_same(after(tiny_model, "first"), undisturbed)


def test_a_server_that_is_killed_costs_nothing(fleet, renderer, batch, undisturbed):
    """The last test before vLLM: it leaves one server."""
    servers, _ = fleet
    begun = sum(map(finished, servers))

    async def kill(client):
        for _ in itertools.count():
            if sum(map(finished, servers)) - begun >= PROMPTS // 4:
                break
            await asyncio.sleep(0.02)
        await asyncio.to_thread(servers[1].kill)

    output = sampled(fleet, renderer, batch, during=kill)
    assert_same(output, undisturbed)
    assert finished(servers[0]) > 0
    assert not servers[1].alive


@asynccontextmanager
async def sglang_stub(asked):
    """What the gateway needs of an SGLang server, whose requests are counted by their first token."""

    async def answer(request):
        if request.path == "/generate":
            prompt = (await request.json())["input_ids"]
            asked[prompt[0]] += 1
            return web.json_response({**sglang_reply(IDS, LOGPROBS), "prompt_token_ids": prompt})
        return web.json_response({"model_path": "m", "served_model_name": "m", "data": []})

    async with serving(answer) as url:
        yield url


def test_sglangs_gateway_holds_sessions(tmp_path):
    counts = [Counter(), Counter()]

    async def scenario():
        async with sglang_stub(counts[0]) as one, sglang_stub(counts[1]) as two:
            command = [sys.executable, "-m", "sglang_router.launch_router", "--policy", "manual"]
            starting = start_router(command, [one, two], tmp_path / "gateway.log")
            router = await asyncio.to_thread(starting.__enter__)
            try:
                engines = [HTTPEngine("sglang", url, model="m") for url in (one, two)]
                client = InferenceEngineClient(engines, router=router.base_url)
                for _ in range(4):
                    for session in range(8):
                        request = new_request([session, 11, 12], {"max_tokens": 5})
                        await client.complete(request, session_id=f"s{session}")
                await client.teardown()
            finally:
                await asyncio.to_thread(starting.__exit__, None, None, None)

    asyncio.run(scenario())
    assert not set(counts[0]) & set(counts[1])
    assert all(counts)
    assert counts[0] + counts[1] == Counter(dict.fromkeys(range(8), 4))
