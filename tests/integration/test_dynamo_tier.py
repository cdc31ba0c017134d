"""`DynamoBackend` against a running Dynamo: run by `make integration-dynamo`.

Frontend, runtime and planes are Dynamo's own. The worker is the project's: it runs the tiny model, so tokens and
logprobs are a model's. It also shows what a worker may leave out, when `nvext.annotations` asks for it. Neither
Dynamo's vLLM worker nor its key-value routing is shown here.
"""

import asyncio
import base64
from typing import Any

import numpy as np
import pytest

from integration.dynamo_server import start_dynamo
from integration.engine_checks import (
    MODEL,
    assert_reference,
    chat_answer,
    connected,
    conversations,
    picture,
    roll_out,
    user,
)
from integration.engine_server import needs_tier
from mmcodecs.vllm import decode_mm_kwargs_item
from mmrender import Renderer, generate
from mmrender.client.dynamo import DynamoBackend
from mmrender.client.types import EngineRequest
from mmrender.errors import (
    EngineConnectionError,
    EngineReplyError,
    EngineStatusError,
    EngineUnsupportedError,
    PromptTooLongError,
)

pytestmark = needs_tier("dynamo")

GREEDY = {"temperature": 0.0, "max_tokens": 12}
LONG = {"temperature": 0.0, "max_tokens": 1900, "ignore_eos": True}
LONGEST = 2047
PIXELS = ["uint8", "float32"]


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    with start_dynamo(tiny_model, folder=tmp_path_factory.mktemp("dynamo")) as server:
        yield server


@pytest.fixture(scope="module")
def renderer(tiny_model):
    return Renderer.from_pretrained(tiny_model)


def ask(server, renderer, **call):
    """One call of `generate`."""
    call.setdefault("backend", "dynamo")
    return connected(server, lambda way: generate(client=way, renderer=renderer, model=MODEL, **call))


def ask_directly(server, ids: list[int], sampling: dict[str, Any], *modes: str, **fields: Any):
    """One call of the backend, without a renderer; `modes` are what the worker is to leave out or do."""
    nvext = {"annotations": list(modes)} if modes else {}
    backend = fields.pop("backend", DynamoBackend(nvext=nvext))
    fields.setdefault("eos_token_ids", [1013])  # of the tiny model's vocabulary, never sampled greedily here
    request = EngineRequest(MODEL, ids, sampling, "direct", **fields)
    return connected(server, lambda way: backend.generate(request, way))


async def until(condition, seconds: float = 20.0) -> None:
    """Wait until a condition holds."""
    for _ in range(int(seconds / 0.05)):
        if await asyncio.to_thread(condition):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"did not come true within {seconds} s")


def test_logprobs_of_text_equal_the_chat_route_and_transformers(server, renderer, tiny_model):
    messages = conversations()["text"]
    chat = chat_answer(server, messages, max_tokens=12)
    theirs = chat["choices"][0]["logprobs"]["content"]
    templated = server.received[-1]["token_ids"]  # by the frontend's own template engine and tokenizer
    generation = ask(server, renderer, messages=messages, sampling_params=GREEDY)
    assert generation.prompt_ids == templated == server.received[-1]["token_ids"]
    assert generation.completion_ids == [entry["token_id"] for entry in theirs]
    np.testing.assert_allclose(generation.logprobs, [e["logprob"] for e in theirs], rtol=0, atol=1e-3)
    assert generation.finish_reason == "length"
    assert_reference(tiny_model, generation)


@pytest.mark.parametrize("pixels", PIXELS)
@pytest.mark.parametrize("name", ["one image", "three images"])
def test_images_pass_byte_for_byte_to_a_model_that_sees_them(server, renderer, tiny_model, name, pixels):
    """The chat route takes no tensors, so there is no answer of its own to compare with; Transformers' is."""
    backend = DynamoBackend(pixels=pixels)
    generation = ask(
        server, renderer, messages=conversations()[name], backend=backend, sampling_params=GREEDY
    )
    received = server.received[-1]
    assert received["token_ids"] == generation.prompt_ids
    features = received["extra_args"]["vllm_tito"]["features"]
    data = generation.multi_modal_data
    assert features["mm_hashes"]["image"] == [f"{digest}-{pixels}" for digest in data.mm_hashes["image"]]
    for text, item in zip(features["kwargs_data"]["image"], data.mm_items["image"], strict=True):
        sent = decode_mm_kwargs_item(text)["pixel_values"].data
        ours = item.levels() if pixels == "uint8" else item.tensors("float32")["pixel_values"]
        assert (sent.dtype.name, sent.tobytes()) == (pixels, ours.tobytes())
    assert_reference(tiny_model, generation)


@pytest.mark.parametrize("pixels", PIXELS)
def test_a_bridged_rollout_with_an_image_a_turn(server, renderer, tiny_model, pixels):
    async def rollout(way):
        async def sample(rendered):
            return await generate(
                client=way,
                renderer=renderer,
                model=MODEL,
                backend=DynamoBackend(pixels=pixels),
                prompt_attribution=rendered,
                sampling_params={"temperature": 1.0, "seed": 7, "max_tokens": 10},
            )

        return await roll_out(renderer, sample)

    turns = connected(server, rollout)
    assert [len(turn.multi_modal_data.mm_items["image"]) for turn in turns] == [1, 2, 3, 4]
    for turn in turns:
        assert_reference(tiny_model, turn)


def test_a_bridged_rollout_of_text(server, renderer, tiny_model):
    rendered = renderer.render([user("Count.")], add_generation_prompt=True)
    for turn in range(4):
        generation = ask(
            server,
            renderer,
            prompt_attribution=rendered,
            sampling_params={"temperature": 1.0, "seed": turn, "max_tokens": 10},
        )
        assert_reference(tiny_model, generation)
        rendered = renderer.bridge_to_next_turn(
            generation.prompt_ids, generation.completion_ids, [user(f"Again, number {turn}.")]
        )
        assert rendered is not None
        sampled = [*generation.prompt_ids, *generation.completion_ids]
        assert rendered.token_ids[: len(sampled)] == sampled


def test_images_need_the_pixels_of_the_workers(server, renderer):
    before = len(server.received)
    with pytest.raises(EngineUnsupportedError, match=r"DynamoBackend\(pixels='uint8'\)"):
        ask(server, renderer, messages=conversations()["one image"], sampling_params=GREEDY)
    assert len(server.received) == before


def test_overflow_is_seen_before_sending_and_kept_back_after(server, renderer):
    messages = [user("word " * 3000)]
    length = len(renderer.render_ids(messages, add_generation_prompt=True))
    before = len(server.received)
    with pytest.raises(PromptTooLongError) as early:
        ask(server, renderer, messages=messages, sampling_params=GREEDY)
    assert (early.value.prompt_len, early.value.max_prompt_len) == (length, LONGEST)
    assert len(server.received) == before
    with pytest.raises(EngineStatusError) as late:
        ask(server, renderer, messages=messages, sampling_params=GREEDY, max_prompt_len=100_000)
    assert (late.value.status, late.value.body) == (
        400,
        '{"message":"Invalid request","type":"Bad Request","code":400}',
    )
    assert "the worker's log has it" in str(late.value)


def test_the_longest_prompt_is_one_less_than_the_context(server):
    async def limit(way):
        return await DynamoBackend().resolve_max_prompt_len(MODEL, way)

    assert connected(server, limit) == LONGEST
    assert len(ask_directly(server, [5] * LONGEST, {**GREEDY, "max_tokens": 1}).completion_ids) == 1
    with pytest.raises(EngineStatusError):
        ask_directly(server, [5] * (LONGEST + 1), {**GREEDY, "max_tokens": 1})


def test_what_the_worker_is_told(server):
    backend = DynamoBackend(nvext={"extra_fields": ["timing", "engine_data"], "agent_hints": {"osl": 9}})
    sampling = {"max_tokens": 3, "temperature": 0.0, "min_tokens": 2, "logprobs": 2, "stop_token_ids": [9]}
    response = ask_directly(
        server, [5, 6, 7], sampling, backend=backend, cache_salt="one", priority=4, vocab_size=1024
    )
    received = server.received[-1]
    assert received["token_ids"] == [5, 6, 7]
    assert received["extra_args"]["nvext"]["extra_fields"] == [
        "timing",
        "engine_data",
        "completion_token_ids",
        "prompt_token_ids",
    ]
    # Lower is first here and in vLLM, higher is first in Dynamo.
    assert (received["routing"]["priority"], received["routing"]["cache_salt"]) == (-4, "one")
    assert received["stop_conditions"]["min_tokens"] == 2
    assert received["stop_conditions"]["stop_token_ids"] == [9]
    assert received["output_options"]["logprobs"] == 2
    assert [len(row) for row in response.top_logprobs] == [2, 2, 2]
    assert [row[0] for row in response.top_logprobs] == [
        (token, pytest.approx(logprob))
        for token, logprob in zip(response.completion_ids, response.logprobs, strict=True)
    ]


def test_each_channel_gives_the_same_completion(server):
    ids = [10, 11, 12]
    whole = ask_directly(server, ids, GREEDY)
    without = ask_directly(server, ids, GREEDY, "no_engine_data")
    assert without.completion_ids == whole.completion_ids
    np.testing.assert_allclose(without.logprobs, whole.logprobs, rtol=0, atol=1e-6)
    assert (whole.finish_reason, without.finish_reason) == ("length", "length")


def test_a_stop_string_ends_the_completion_at_the_frontend(server, renderer):
    ids = [10, 11, 12]
    whole = ask_directly(server, ids, GREEDY)
    text = renderer.decode(whole.completion_ids)
    cut = ask_directly(server, ids, {**GREEDY, "stop": [text[4:8]]})
    count = len(cut.completion_ids)
    assert 0 < count < 12
    assert (cut.finish_reason, cut.completion_ids) == ("stop", whole.completion_ids[:count])
    np.testing.assert_allclose(cut.logprobs, whole.logprobs[:count], rtol=0, atol=1e-6)


def test_a_stop_token_belongs_to_the_completion(server):
    whole = ask_directly(server, [10, 11, 12], GREEDY)
    sampling = {**GREEDY, "stop_token_ids": [whole.completion_ids[3]]}
    stopped = ask_directly(server, [10, 11, 12], sampling)
    assert (stopped.completion_ids, stopped.finish_reason) == (whole.completion_ids[:4], "stop")


def test_an_empty_completion_is_an_answer(server):
    empty = ask_directly(server, [10, 11, 12], GREEDY, "empty")
    assert (empty.completion_ids, empty.logprobs, empty.finish_reason) == ([], [], "abort")


def test_an_abort_that_the_frontend_calls_a_stop(server, renderer):
    backend = DynamoBackend(nvext={"annotations": ["abort"]})
    aborted = ask(server, renderer, messages=conversations()["text"], backend=backend, sampling_params=GREEDY)
    assert aborted.raw["choices"][0]["finish_reason"] == "stop"
    assert aborted.finish_reason == "abort"


def test_lengths_that_differ_are_refused(server):
    with pytest.raises(EngineReplyError, match="tokens and logprobs are not equally many"):
        ask_directly(server, [10, 11, 12], GREEDY, "short_logprobs")


@pytest.mark.parametrize("mode", ["raise", "http_error"])
def test_errors_of_workers_lose_their_text(server, mode):
    with pytest.raises(EngineStatusError) as caught:
        ask_directly(server, [10, 11, 12], GREEDY, mode)
    assert caught.value.status == 400
    assert "asked to fail" not in caught.value.body
    assert not DynamoBackend().is_overflow_error(caught.value)


@pytest.mark.parametrize("start", [None, 0, 2, 3])
def test_router_choices(server, start):
    # The model has no experts; the worker counts, so that every row is known.
    response = ask_directly(
        server,
        [10, 11, 12],
        GREEDY,
        "routed_experts",
        routed_experts=True,
        routed_experts_prompt_start=start,
    )
    rows = 3 + 12 - 1
    counted = (np.arange(rows * 4) % 251).astype(np.uint8).reshape(rows, 2, 2)
    assert response.routed_experts.start == (start or 0)
    np.testing.assert_array_equal(response.routed_experts.data, counted[start or 0 :])


def test_router_choices_that_the_worker_does_not_give(server):
    with pytest.raises(EngineUnsupportedError, match="the server gives none"):
        ask_directly(server, [10, 11], GREEDY, routed_experts=True)


def test_a_cancelled_call_ends_on_the_worker(server, renderer):
    """A frontend that has not opened the worker's stream yet does not tell it, so a call is given some time."""

    async def cancelled_is_noted(way):
        before = len(server.received)
        call = {"client": way, "renderer": renderer, "model": MODEL, "messages": conversations()["text"]}
        task = asyncio.create_task(generate(**call, backend="dynamo", sampling_params=LONG))
        await until(lambda: len(server.received) == before + 1)
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        try:
            await until(lambda: "cancelled" in server.received[-1], 10)
        except AssertionError:
            return False
        return True

    async def work(way):
        return any([await cancelled_is_noted(way) for _ in range(2)])

    assert connected(server, work)
    assert ask_directly(server, [10, 11, 12], GREEDY).completion_ids


def test_bodies_with_images_are_refused_where_the_worker_would_not_get_them(server, renderer):
    """The bound is what one message to a worker may have, and the worker's own answer does not say so."""
    rendered = renderer.render([user("Much.", picture(1, 256, 256))], add_generation_prompt=True)
    call = {"prompt_attribution": rendered, "sampling_params": {**GREEDY, "max_tokens": 1}}
    with pytest.raises(EngineUnsupportedError, match="larger than the Dynamo frontend takes"):
        ask(server, renderer, **call, backend=DynamoBackend(pixels="float32", max_image_bytes=10_000))

    async def padded(way, size):
        body = {
            "model": MODEL,
            "token_ids": [5, 6],
            "sampling_params": {"max_tokens": 1},
            "pad": base64.b64encode(bytes(size * 3 // 4)).decode(),
        }
        return await way.request("POST", "/inference/v1/generate", json=body)

    bound = DynamoBackend().max_image_bytes
    assert connected(server, lambda way: padded(way, bound - 100_000)).status == 200
    with pytest.raises(EngineStatusError) as caught:
        connected(server, lambda way: padded(way, bound + 100_000))
    assert caught.value.status == 400
    with pytest.raises((EngineStatusError, EngineConnectionError)):
        connected(server, lambda way: padded(way, DynamoBackend().max_body_bytes + 100_000))


def test_a_frontend_that_does_not_take_images(tiny_model, renderer, tmp_path):
    with start_dynamo(tiny_model, ["--no-generate-route"], folder=tmp_path) as closed:
        with pytest.raises(EngineUnsupportedError) as caught:
            ask(
                closed,
                renderer,
                messages=conversations()["one image"],
                backend=DynamoBackend(pixels="uint8"),
                sampling_params=GREEDY,
            )
        assert "DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE=1" in str(caught.value)
        messages = conversations()["text"]
        assert ask(closed, renderer, messages=messages, sampling_params=GREEDY).completion_ids


def test_a_server_that_dies(server, renderer):
    """Last, since it ends the server."""
    before = len(server.received)

    async def work(way):
        call = {"client": way, "renderer": renderer, "model": MODEL, "messages": conversations()["text"]}
        task = asyncio.create_task(generate(**call, backend="dynamo", sampling_params=LONG))
        await until(lambda: len(server.received) == before + 1)
        await asyncio.to_thread(server.kill)
        with pytest.raises(EngineConnectionError):
            await task
        with pytest.raises(EngineConnectionError):
            await generate(**call, backend="dynamo", sampling_params=GREEDY)

    connected(server, work)
    assert not server.alive
