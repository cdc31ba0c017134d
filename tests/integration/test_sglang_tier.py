"""`SGLangBackend` against a running SGLang: run by `make integration-sglang`.

One server does for all; the last test ends it by force.
"""

import asyncio
import json
import shutil
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from integration.engine_checks import (
    MODEL,
    assert_reference,
    chat_answer,
    connected,
    conversations,
    picture,
    reference_logprobs,
    roll_out,
    user,
)
from integration.engine_server import needs_tier
from integration.sglang_server import start_sglang
from mmrender import Renderer, generate
from mmrender.client.sglang import SGLangBackend
from mmrender.client.types import EngineRequest
from mmrender.errors import (
    EngineConnectionError,
    EngineMismatchError,
    EngineStatusError,
    EngineTimeoutError,
    EngineUnsupportedError,
    PromptTooLongError,
    SamplingParameterError,
)

pytestmark = [needs_tier("sglang"), pytest.mark.timeout(600)]

GREEDY = {"temperature": 0.0, "max_tokens": 12}
LONG = {"temperature": 0.0, "max_tokens": 1900, "ignore_eos": True}
CONTEXT = 2048
LONGEST = 2041  # of a context of 2048, seen on the running server


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    with start_sglang(tiny_model, log=tmp_path_factory.mktemp("sglang") / "server.log") as server:
        yield server


@pytest.fixture(scope="module")
def renderer(tiny_model):
    return Renderer.from_pretrained(tiny_model)


def ask(server, renderer, **call):
    """One call of `generate`."""
    call.setdefault("backend", "sglang")
    return connected(server, lambda way: generate(client=way, renderer=renderer, model=MODEL, **call))


def ask_directly(server, ids: list[int], sampling: dict[str, Any], **fields: Any):
    """One call of the backend, without a renderer."""
    backend = fields.pop("backend", SGLangBackend())
    request = EngineRequest(MODEL, ids, sampling, fields.pop("request_id", "direct"), **fields)
    return connected(server, lambda way: backend.generate(request, way))


def running_requests(server) -> int:
    return server.get("/v1/loads")["loads"][0]["num_running_reqs"]


async def until_running(server, count: int, seconds: float = 20.0) -> None:
    """Wait until the server runs that many requests."""
    for _ in range(int(seconds / 0.05)):
        if await asyncio.to_thread(running_requests, server) == count:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"the server never ran {count} requests within {seconds} s")


@pytest.mark.parametrize("name", list(conversations()))
def test_logprobs_equal_the_chat_route_and_transformers(server, renderer, tiny_model, name):
    messages = conversations()[name]
    chat = chat_answer(server, messages, max_tokens=12)
    theirs = chat["choices"][0]["logprobs"]["content"]
    generation = ask(server, renderer, messages=messages, sampling_params=GREEDY)
    assert len(generation.prompt_ids) == chat["usage"]["prompt_tokens"]
    assert [renderer.decode([token]) for token in generation.completion_ids] == [e["token"] for e in theirs]
    np.testing.assert_allclose(generation.logprobs, [e["logprob"] for e in theirs], rtol=0, atol=1e-3)
    assert generation.finish_reason == "length"
    assert generation.usage.completion_tokens == 12
    assert_reference(tiny_model, generation)


def test_a_bridged_rollout_with_an_image_a_turn(server, renderer, tiny_model):
    async def rollout(way):
        async def sample(rendered):
            return await generate(
                client=way,
                renderer=renderer,
                model=MODEL,
                backend="sglang",
                prompt_attribution=rendered,
                sampling_params={"temperature": 1.0, "max_tokens": 10},
            )

        return await roll_out(renderer, sample)

    turns = connected(server, rollout)
    assert [len(turn.multi_modal_data.mm_items["image"]) for turn in turns] == [1, 2, 3, 4]
    # The server keeps what it has seen of a prompt; a later turn is served from there up to its images.
    assert turns[-1].usage.cached_tokens > 0
    for turn in turns:
        assert_reference(tiny_model, turn)


def test_logprobs_are_those_of_the_distribution_at_its_temperature(server, renderer, tiny_model):
    """As the guide says: not those of the model's own distribution, which vLLM reports."""
    messages = conversations()["text"]
    sampling = {"temperature": 0.5, "max_tokens": 12, "logprobs": 0}
    generation = ask(server, renderer, messages=messages, sampling_params=sampling)
    plain = reference_logprobs(
        tiny_model, generation.prompt_ids, generation.completion_ids, generation.multi_modal_data
    )
    assert np.abs(np.array(generation.logprobs) - plain).max() > 0.1
    scaled = at_temperature(tiny_model, generation, 0.5)
    np.testing.assert_allclose(generation.logprobs, scaled, rtol=0, atol=1e-2)


def at_temperature(directory, generation, temperature: float) -> np.ndarray:
    import torch

    from integration.engine_checks import reference_model

    ids = torch.tensor([[*generation.prompt_ids, *generation.completion_ids]])
    with torch.inference_mode():
        logits = reference_model(directory)(input_ids=ids).logits[0].float() / temperature
    logprobs = torch.log_softmax(logits, -1)
    start = len(generation.prompt_ids)
    return logprobs[torch.arange(start - 1, ids.shape[1] - 1), ids[0, start:]].numpy()


def test_overflow_before_and_after_sending(server, renderer):
    messages = [user("word " * 3000)]
    length = len(renderer.render_ids(messages, add_generation_prompt=True))
    with pytest.raises(PromptTooLongError) as before:
        ask(server, renderer, messages=messages, sampling_params=GREEDY)
    assert (before.value.prompt_len, before.value.max_prompt_len) == (length, LONGEST)
    assert before.value.__cause__ is None
    with pytest.raises(PromptTooLongError) as after:
        ask(server, renderer, messages=messages, sampling_params=GREEDY, max_prompt_len=100_000)
    assert after.value.prompt_len == length
    assert isinstance(after.value.__cause__, EngineStatusError)


def test_an_image_that_makes_the_prompt_too_long(server, renderer):
    rendered = renderer.render([user("Look.", picture(3, 160, 160))], add_generation_prompt=True)
    ids = [*rendered.token_ids, *[5] * (LONGEST + 1 - len(rendered))]
    with pytest.raises(PromptTooLongError) as caught:
        ask(
            server,
            renderer,
            prompt_ids=ids,
            multi_modal_data=rendered.multi_modal_data,
            sampling_params={"max_tokens": 1},
            max_prompt_len=100_000,
        )
    # What was sent, with its placeholder once, was not too long.
    assert (caught.value.prompt_len, caught.value.max_prompt_len) == (LONGEST + 1, LONGEST)


def test_the_longest_prompt_and_what_is_cut_of_max_tokens(server, caplog):
    async def limit(way):
        return await SGLangBackend().resolve_max_prompt_len(MODEL, way)

    assert connected(server, limit) == LONGEST
    kept = ask_directly(server, [5] * LONGEST, {**GREEDY, "max_tokens": 5, "ignore_eos": True})
    assert (len(kept.completion_ids), "max_tokens_granted" in kept.raw) == (5, False)
    cut = ask_directly(server, [5] * LONGEST, {**GREEDY, "max_tokens": 7, "ignore_eos": True})
    assert (len(cut.completion_ids), cut.raw["max_tokens_granted"]) == (5, 5)
    assert "SGLang cut max_tokens from 7 to 5" in caplog.text
    with pytest.raises(PromptTooLongError) as caught:
        ask_directly(server, [5] * (LONGEST + 1), {**GREEDY, "max_tokens": 1})
    assert caught.value.max_prompt_len == LONGEST
    with pytest.raises(PromptTooLongError) as caught:
        ask_directly(server, [5] * 2040, {**GREEDY, "max_tokens": 20})
    assert (caught.value.prompt_len, caught.value.max_prompt_len) == (2040, CONTEXT - 20)
    with pytest.raises(SamplingParameterError, match=r"max_tokens.*at most 2045, got 4000"):
        ask_directly(server, [5] * 3, {**GREEDY, "max_tokens": 4000})


def test_another_processor_is_found_by_the_prompt_that_comes_back(server, tiny_model, tmp_path):
    folder = tmp_path / "larger"
    shutil.copytree(tiny_model, folder)
    path = folder / "preprocessor_config.json"
    size = {"size": {"shortest_edge": 64 << 10, "longest_edge": 4 << 20}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **size}))
    other = Renderer.from_pretrained(folder)
    with pytest.raises(
        EngineMismatchError, match=r"prompt_token_ids\[\d+\] \(image 0\): the server saw another"
    ):
        ask(server, other, messages=[user("How large?", picture(5, 900, 700))], sampling_params=GREEDY)


def test_stops_and_alternatives(server):
    ids = [10, 11, 12]
    free = ask_directly(server, ids, {**GREEDY, "logprobs": 3})
    assert free.top_logprobs is not None
    for token, logprob, others in zip(free.completion_ids, free.logprobs, free.top_logprobs, strict=True):
        assert others[0] == (token, logprob)
        assert len(others) == 3
    stopped = ask_directly(server, ids, {**GREEDY, "stop_token_ids": [free.completion_ids[4]]})
    assert stopped.completion_ids == free.completion_ids[:5]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", free.completion_ids[4])


def test_a_cancelled_call_ends_on_the_server(server, renderer):
    async def work(way):
        call = {"client": way, "renderer": renderer, "model": MODEL, "messages": conversations()["text"]}
        task = asyncio.create_task(generate(**call, backend="sglang", sampling_params=LONG))
        await until_running(server, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # By itself the server notices a disconnect some seconds later.
        await until_running(server, 0, seconds=1.5)

    connected(server, work)


def test_a_call_that_times_out_ends_on_the_server(server):
    async def work(way):
        request = EngineRequest(MODEL, [5, 6, 7], LONG, "slow")
        with pytest.raises(EngineTimeoutError):
            await SGLangBackend().generate(request, Hasty(way))
        await until_running(server, 0, seconds=1.5)

    connected(server, work)


class Hasty:
    """A transport that waits for an answer for a second only."""

    def __init__(self, way):
        self._way = way
        self.base_url = way.base_url

    async def request(self, method, path, *, timeout=None, **options):
        return await self._way.request(method, path, timeout=timeout or 1.0, **options)


def test_an_aborted_request_gives_what_it_has(server):
    async def work(way):
        request = EngineRequest(MODEL, [5, 6, 7], LONG, "to-be-aborted")
        task = asyncio.create_task(SGLangBackend().generate(request, way))
        await until_running(server, 1)
        await way.request("POST", "/abort_request", json={"rid": "to-be-aborted"})
        return await task

    response = connected(server, work)
    assert response.finish_reason == "abort"
    assert response.request_id == "to-be-aborted"
    assert len(response.completion_ids) == len(response.logprobs) < 1900


def test_weight_versions_are_spans_of_the_completion(server):
    async def work(way):
        sampling = {**LONG, "max_tokens": 800}
        task = asyncio.create_task(
            SGLangBackend().generate(EngineRequest(MODEL, [5, 6, 7], sampling, "versions"), way)
        )
        await until_running(server, 1)
        change = {"new_version": "step-7", "abort_all_requests": False}
        await way.request("POST", "/update_weight_version", json=change)
        return await task

    spans = connected(server, work).weight_versions
    assert (spans[0].start, spans[-1].version, spans[-1].stop) == (0, "step-7", 800)
    assert all(before.stop == after.start for before, after in pairwise(spans))


def test_seeds_are_refused_since_this_server_ignores_them(server):
    with pytest.raises(SamplingParameterError, match="SGLang ignores seeds unless"):
        ask_directly(server, [5, 6], {"max_tokens": 2, "seed": 7})
    seeded = SGLangBackend(deterministic=True)
    sampling = {"max_tokens": 8, "temperature": 1.0, "seed": 7}
    answers = {tuple(ask_directly(server, [5, 6], sampling, backend=seeded).completion_ids) for _ in range(4)}
    assert len(answers) > 1


def test_router_choices_of_a_model_without_experts(server):
    with pytest.raises(EngineUnsupportedError, match="without their shape"):
        ask_directly(server, [5, 6], GREEDY, routed_experts=True)
    backend = SGLangBackend(routed_experts_shape=(2, 2))
    with pytest.raises(EngineUnsupportedError, match="the server gives none"):
        ask_directly(server, [5, 6], GREEDY, routed_experts=True, backend=backend)


def test_priority_and_salt_are_taken(server):
    response = ask_directly(server, [5, 6, 7], GREEDY, priority=3, cache_salt="one")
    assert response.usage.cached_tokens == 0


def test_a_server_that_dies(server, renderer):
    """Last, since it ends the server."""

    async def work(way):
        call = {"client": way, "renderer": renderer, "model": MODEL, "messages": conversations()["text"]}
        task = asyncio.create_task(generate(**call, backend="sglang", sampling_params=LONG))
        await until_running(server, 1)
        await asyncio.to_thread(server.kill)
        with pytest.raises(EngineConnectionError):
            await task
        with pytest.raises(EngineConnectionError):
            await generate(**call, backend="sglang", sampling_params=GREEDY)

    connected(server, work)
    assert not server.alive
