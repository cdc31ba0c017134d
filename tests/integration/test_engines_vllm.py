"""The engine client against two real vLLM servers with the tiny model, greedy.

A continued request computes its prompt in one go where the undisturbed one went token by token, and batches
differ from run to run, so logits differ in their last bits. The tiny model's two best logits are further apart
than that for every token sampled here; prompts and pictures are drawn from fixed seeds.
"""

import asyncio
import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from integration.engine_checks import data_url
from integration.engine_server import EngineServer as Process
from integration.engine_server import needs_tier, start_vllm
from mmrender.client.http import HTTPTransport
from mmrender.client.transport import RetryPolicy, TransportConfig
from mmrender.client.vllm import VLLMBackend
from mmrender.engines import HTTPEngine, InferenceEngineClient
from mmrender.renderer import Renderer
from mmrender.testing.tiny_model import build_tiny_model

pytestmark = needs_tier("vllm")

PROMPTS = 50
PARAMS = {"max_tokens": 48, "temperature": 0.0, "ignore_eos": True}
CYCLES = 10


def picture(seed: int) -> Image.Image:
    rng = random.Random(seed)
    image = Image.new("RGB", (rng.randrange(64, 160), rng.randrange(64, 160)), tuple(rng.randbytes(3)))
    draw = ImageDraw.Draw(image)
    for _ in range(4):
        x, y = rng.randrange(100), rng.randrange(100)
        draw.rectangle(
            (x, y, x + rng.randrange(10, 60), y + rng.randrange(10, 60)), fill=tuple(rng.randbytes(3))
        )
    return image


def conversation(seed: int) -> list[dict[str, Any]]:
    images = [{"type": "image", "image": picture(100 * seed + index)} for index in range(1 + seed % 3)]
    return [{"role": "user", "content": [*images, {"type": "text", "text": f"What is in picture {seed}?"}]}]


class Counted(HTTPEngine):
    """Counts its requests."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.requests = 0

    async def complete(self, request, **options):
        self.requests += 1
        return await super().complete(request, **options)


@pytest.fixture(scope="module")
def servers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Process]]:
    logs = tmp_path_factory.mktemp("engines")
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        starting = [start_vllm(tiny_model, log=logs / f"server{index}.log") for index in range(2)]
        yield list(pool.map(stack.enter_context, starting))


@pytest.fixture(autouse=True)
def running(servers: list[Process]) -> Iterator[None]:
    """A test that fails under a pause must not stall the next."""
    yield
    for server in servers:
        if server.alive and server.get("/is_paused")["is_paused"]:
            server.post("/resume")


async def generate_some_at_once(client, batch, count):
    """The batch, of which no more than `count` prompts are in flight."""
    slots = asyncio.Semaphore(count)

    async def one(index):
        async with slots:
            single = {name: batch[name][index : index + 1] for name in ("prompts", "session_ids")}
            return await client.generate({**single, "sampling_params": batch["sampling_params"]})

    outputs = await asyncio.gather(*[one(index) for index in range(len(batch["prompts"]))])
    return {name: [value for output in outputs for value in output[name]] for name in outputs[0]}


def client_of(servers: list[Process], renderer: Renderer | None) -> InferenceEngineClient:
    engines = [
        Counted(
            VLLMBackend(),
            HTTPTransport(TransportConfig(server.base_url, retries=RetryPolicy(attempts=2))),
            model="tiny",
            name=f"engine{index}",
        )
        for index, server in enumerate(servers)
    ]
    return InferenceEngineClient(engines, renderer=renderer)


@pytest.fixture(scope="module")
def batch(renderer: Renderer) -> dict[str, Any]:
    return {
        "prompts": [conversation(seed) for seed in range(PROMPTS)],
        "sampling_params": PARAMS,
        "session_ids": [f"session{seed // 2}" for seed in range(PROMPTS)],
    }


@pytest.fixture(scope="module")
def undisturbed(servers, renderer, batch) -> dict[str, Any]:
    async def run():
        client = client_of(servers, renderer)
        output = await client.generate(batch)
        await client.teardown()
        return output

    output = asyncio.run(run())
    assert [len(ids) for ids in output["response_ids"]] == [PARAMS["max_tokens"]] * PROMPTS
    return output


def assert_same(output, undisturbed):
    assert output["response_ids"] == undisturbed["response_ids"]
    assert output["responses"] == undisturbed["responses"]
    assert output["stop_reasons"] == undisturbed["stop_reasons"]
    for logprobs, expected in zip(output["response_logprobs"], undisturbed["response_logprobs"], strict=True):
        np.testing.assert_allclose(logprobs, expected, atol=2e-4)


def sampled_so_far(server: Process) -> float:
    """Tokens that a server has sampled in all."""
    lines = server.get("/metrics").decode().splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:generation_tokens_total")
    )


async def settled(servers: list[Process]) -> float:
    """Tokens that servers have sampled in all, once their count has come to rest, long before all are sampled."""
    for _ in range(4):
        before = sum(map(sampled_so_far, servers))
        await asyncio.sleep(0.1)
        if sum(map(sampled_so_far, servers)) == before:
            return before
    raise AssertionError("paused servers go on sampling")


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
def test_pauses_change_nothing(mode, servers, renderer, batch, undisturbed):
    rng = random.Random(mode)
    under_way: list[int] = []

    async def run():
        # A pause that waits takes a whole round of requests, so there must be more rounds than pauses.
        client = client_of(servers, renderer)
        await client.set_weight_version("step-0")
        sampling = generate_some_at_once(client, batch, 4 if mode == "wait" else 16)
        generating = asyncio.create_task(sampling)
        for cycle in range(CYCLES):
            await asyncio.sleep(rng.uniform(0.02, 0.2))
            under_way.append(sum(len(replica.calls) for replica in client.replicas))
            await client.pause_generation(mode, clear_cache=rng.random() < 0.5)
            assert all(server.get("/is_paused")["is_paused"] for server in servers)
            held = [len(replica.calls) for replica in client.replicas]
            if mode != "keep":
                assert held == [0, 0]
            if mode == "keep":  # replies and counts of what had been sampled may still be on their way
                frozen = await settled(servers)
            await asyncio.sleep(rng.uniform(0.0, 0.05))
            now = [len(replica.calls) for replica in client.replicas]
            if mode == "keep":
                assert sum(map(sampled_so_far, servers)) == frozen
                assert all(count <= before for count, before in zip(now, held, strict=True))
            else:
                assert now == held
            if mode == "abort":
                await client.set_weight_version(f"step-{cycle + 1}")
            await client.resume_generation()
        output = await generating
        requests = sum(engine.requests for engine in client.engines)
        await client.teardown()
        assert len(asyncio.all_tasks()) == 1
        return output, requests

    output, requests = asyncio.run(run())
    assert_same(output, undisturbed)
    assert sum(count > 0 for count in under_way) >= CYCLES // 2  # pauses met work
    if mode == "abort":
        assert requests > PROMPTS
        check_versions(output)
    else:
        assert requests == PROMPTS  # nothing had to be asked again


def check_versions(output):
    changed = 0
    for response in output["engine_responses"]:
        ids, spans = response.completion_ids, response.weight_versions
        bounds = [0, *[span.stop for span in spans]]
        assert [span.start for span in spans] == bounds[:-1]
        assert bounds[-1] == len(ids)
        steps = [int(span.version.removeprefix("step-")) for span in spans]
        assert steps == sorted(set(steps))
        changed += len(spans) > 1
    assert changed


def test_cancelling_reaches_the_servers(servers, renderer, batch):
    long = {**batch, "prompts": batch["prompts"][:8], "session_ids": None}
    long["sampling_params"] = {**PARAMS, "max_tokens": 1500}

    async def run():
        client = client_of(servers, renderer)
        begun = [sampled_so_far(server) for server in servers]

        def sampled():
            return [sampled_so_far(server) - before for server, before in zip(servers, begun, strict=True)]

        generating = asyncio.create_task(client.generate(long))
        while min(sampled()) < 20:  # a request that its server has not begun is another matter
            await asyncio.sleep(0.02)
        before = sampled()  # one server may have finished its requests before the other began
        generating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await generating
        await client.pause_generation("wait")  # returns when the engines are idle
        stopped = sampled()
        await client.resume_generation()
        await client.teardown()
        return before, stopped

    before, stopped = asyncio.run(run())
    assert sum(stopped) - sum(before) < (8 * 1500 - sum(before)) / 2, (before, stopped)


def test_weights_are_read_anew(servers, renderer, tmp_path, tiny_model, batch, undisturbed):
    """What follows is sampled with the other weights, and with the first ones again after those."""
    other = build_tiny_model(tmp_path / "other", seed=7)
    some = {**batch, "prompts": batch["prompts"][:6], "session_ids": None}

    async def run():
        client = client_of(servers, renderer)
        await client.load_weights(str(other), weight_version="other")
        changed = await client.generate(some)
        assert await client.weight_version() == "other"
        await client.pause_generation("wait")
        await client.load_weights(str(tiny_model), weight_version="first")
        await client.resume_generation()
        restored = await client.generate(some)
        await client.teardown()
        return changed, restored

    changed, restored = asyncio.run(run())
    assert changed["response_ids"] != undisturbed["response_ids"][:6]
    assert restored["response_ids"] == undisturbed["response_ids"][:6]
    assert {span.version for each in changed["engine_responses"] for span in each.weight_versions} == {
        "other"
    }


def test_both_ways_of_chat_sample_the_same(servers, renderer):
    """The engine's own rendering of the picture, and ours."""
    messages = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(picture(5))}}]}
    ]
    params = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}

    async def run():
        client = client_of(servers, None)
        body = {"messages": messages, "return_token_ids": True, **params}
        reply = await client.chat_completion({"json": body})
        await client.teardown()
        client = client_of(servers, renderer)
        output = await client.generate({"prompts": [messages], "sampling_params": params})
        await client.teardown()
        return reply["choices"][0]["token_ids"], output["response_ids"][0]

    passed_on, in_tokens = asyncio.run(run())
    assert passed_on == in_tokens


def test_a_server_that_is_killed_loses_nothing(servers, renderer, batch, undisturbed):
    """The last test: it leaves one server."""

    async def run():
        client = client_of(servers, renderer)
        generating = asyncio.create_task(generate_some_at_once(client, batch, 16))
        for _ in itertools.count():
            await asyncio.sleep(0.01)
            if sum(engine.requests for engine in client.engines) > PROMPTS // 2:
                break
        await asyncio.to_thread(servers[1].kill)
        output = await generating
        ills = {replica.name: replica.down for replica in client.replicas}
        requests = sum(engine.requests for engine in client.engines)
        await client.teardown()
        assert len(asyncio.all_tasks()) == 1
        return output, ills, requests

    output, ills, requests = asyncio.run(run())
    assert_same(output, undisturbed)
    assert ills["engine0"] is None
    assert ills["engine1"] is not None
    assert requests > PROMPTS
