"""`DynamoBackend` against a running Dynamo: run by `make integration-dynamo`.

Frontend, runtime and planes are Dynamo's own. The worker is the project's: it runs the tiny model, so tokens and
logprobs are a model's. It also shows what a worker may leave out, when `nvext.annotations` asks for it. Neither
Dynamo's vLLM worker nor its key-value routing is shown here.
"""

import base64
import time
from typing import Any

import numpy as np
import pytest

from integration.dynamo_server import start_dynamo
from integration.engine_checks import (
    GREEDY,
    MODEL,
    ask,
    assert_death,
    assert_logprobs,
    assert_reference,
    bridged,
    cancelled,
    chat_answer,
    connected,
    conversations,
    picture,
    rolled_out,
    until,
    user,
)
from integration.engine_checks import ask_directly as ask_backend
from integration.engine_server import needs_tier
from mmrender.client.dynamo import DynamoBackend
from mmrender.errors import (
    EngineConnectionError,
    EngineReplyError,
    EngineStatusError,
    EngineUnsupportedError,
    PromptTooLongError,
)
from mmrender.media.vllm_items import decode_mm_kwargs_item

pytestmark = needs_tier("dynamo")

BACKEND = DynamoBackend()
LONGEST = 2047
PIXELS = ["uint8", "float32"]


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    with start_dynamo(tiny_model, folder=tmp_path_factory.mktemp("dynamo")) as server:
        yield server


def with_modes(*modes: str) -> DynamoBackend:
    """A backend that says what the worker is to leave out or do."""
    return DynamoBackend(nvext={"annotations": list(modes)})


def ask_directly(server, *modes: str, backend=None, ids=(10, 11, 12), **fields: Any):
    fields.setdefault("eos_token_ids", [1013])  # of the tiny model's vocabulary, never sampled greedily here
    return ask_backend(server, backend or with_modes(*modes), list(ids), **fields)


def test_logprobs_of_text_equal_the_chat_route_and_transformers(server, renderer, tiny_model):
    messages = conversations()["text"]
    chat = chat_answer(server, messages, max_tokens=12)
    theirs = chat["choices"][0]["logprobs"]["content"]
    templated = server.received[-1]["token_ids"]  # by the frontend's own template engine and tokenizer
    generation = ask(server, renderer, backend=BACKEND, messages=messages)
    assert generation.prompt_ids == templated == server.received[-1]["token_ids"]
    assert generation.completion_ids == [entry["token_id"] for entry in theirs]
    assert_logprobs(generation.logprobs, chat)
    assert generation.finish_reason == "length"
    assert_reference(tiny_model, generation)


@pytest.mark.parametrize("pixels", PIXELS)
@pytest.mark.parametrize("name", ["one image", "three images"])
def test_images_pass_byte_for_byte_to_a_model_that_sees_them(server, renderer, tiny_model, name, pixels):
    """The chat route takes no tensors, so there is no answer of its own to compare with; Transformers' is."""
    backend = DynamoBackend(pixels=pixels)
    generation = ask(server, renderer, messages=conversations()[name], backend=backend)
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
    sampling = {"temperature": 1.0, "seed": 7, "max_tokens": 10}
    backend = DynamoBackend(pixels=pixels)
    rolled_out(server, renderer, tiny_model, backend=backend, sampling_params=sampling)


def test_a_bridged_rollout_of_text(server, renderer, tiny_model):
    rendered = renderer.render([user("Count.")], add_generation_prompt=True)
    for turn in range(4):
        sampling = {"temperature": 1.0, "seed": turn, "max_tokens": 10}
        call = {"backend": BACKEND, "prompt_attribution": rendered, "sampling_params": sampling}
        generation = ask(server, renderer, **call)
        assert_reference(tiny_model, generation)
        rendered = bridged(renderer, generation, user(f"Again, number {turn}."))


def test_images_need_the_pixels_of_the_workers(server, renderer):
    before = len(server.received)
    with pytest.raises(EngineUnsupportedError, match=r"DynamoBackend\(pixels='uint8'\)"):
        ask(server, renderer, backend=BACKEND, messages=conversations()["one image"])
    assert len(server.received) == before


def test_overflow_is_seen_before_sending_and_kept_back_after(server, renderer):
    messages = [user("word " * 3000)]
    length = len(renderer.render_ids(messages, add_generation_prompt=True))
    before = len(server.received)
    with pytest.raises(PromptTooLongError) as early:
        ask(server, renderer, backend=BACKEND, messages=messages)
    assert (early.value.prompt_len, early.value.max_prompt_len) == (length, LONGEST)
    assert len(server.received) == before
    with pytest.raises(EngineStatusError) as late:
        ask(server, renderer, backend=BACKEND, messages=messages, max_prompt_len=100_000)
    assert (late.value.status, late.value.body) == (
        400,
        '{"message":"Invalid request","type":"Bad Request","code":400}',
    )
    assert "The worker's log has it" in str(late.value)


def test_the_longest_prompt_is_one_less_than_the_context(server):
    assert connected(server, lambda way: BACKEND.resolve_max_prompt_len(MODEL, way)) == LONGEST
    one = {**GREEDY, "max_tokens": 1}
    assert len(ask_directly(server, ids=[5] * LONGEST, sampling_params=one).completion_ids) == 1
    with pytest.raises(EngineStatusError):
        ask_directly(server, ids=[5] * (LONGEST + 1), sampling_params=one)


def test_what_the_worker_is_told(server):
    backend = DynamoBackend(nvext={"extra_fields": ["timing", "engine_data"], "agent_hints": {"osl": 9}})
    sampling = {"max_tokens": 3, "temperature": 0.0, "min_tokens": 2, "logprobs": 2, "stop_token_ids": [9]}
    fields = {"sampling_params": sampling, "cache_salt": "one", "priority": 4, "vocab_size": 1024}
    response = ask_directly(server, ids=[5, 6, 7], backend=backend, **fields)
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
    whole = ask_directly(server)
    without = ask_directly(server, "no_engine_data")
    assert without.completion_ids == whole.completion_ids
    np.testing.assert_allclose(without.logprobs, whole.logprobs, rtol=0, atol=1e-6)
    assert (whole.finish_reason, without.finish_reason) == ("length", "length")


def test_a_stop_string_ends_the_completion_at_the_frontend(server, renderer):
    whole = ask_directly(server)
    text = renderer.decode(whole.completion_ids)
    cut = ask_directly(server, sampling_params={**GREEDY, "stop": [text[4:8]]})
    count = len(cut.completion_ids)
    assert 0 < count < 12
    assert (cut.finish_reason, cut.completion_ids) == ("stop", whole.completion_ids[:count])
    np.testing.assert_allclose(cut.logprobs, whole.logprobs[:count], rtol=0, atol=1e-6)


def test_a_stop_token_belongs_to_the_completion(server):
    whole = ask_directly(server).completion_ids
    stopped = ask_directly(server, sampling_params={**GREEDY, "stop_token_ids": [whole[3]]})
    assert (stopped.completion_ids, stopped.finish_reason) == (whole[:4], "stop")


def test_an_empty_completion_is_an_answer(server):
    empty = ask_directly(server, "empty")
    assert (empty.completion_ids, empty.logprobs, empty.finish_reason) == ([], [], "abort")


def test_an_abort_that_the_frontend_calls_a_stop(server, renderer):
    aborted = ask(server, renderer, messages=conversations()["text"], backend=with_modes("abort"))
    assert aborted.finish_reason == "abort"


def test_lengths_that_differ_are_refused(server):
    with pytest.raises(EngineReplyError, match="the numbers of tokens and logprobs differ"):
        ask_directly(server, "short_logprobs")


@pytest.mark.parametrize("mode", ["raise", "http_error"])
def test_errors_of_workers_lose_their_text(server, mode):
    with pytest.raises(EngineStatusError) as caught:
        ask_directly(server, mode)
    assert caught.value.status == 400
    assert "asked to fail" not in caught.value.body
    assert not BACKEND.is_overflow_error(caught.value)


@pytest.mark.parametrize("start", [None, 0, 2, 3])
def test_router_choices(server, start):
    # The model has no experts; the worker counts, so that every row is known.
    fields = {"routed_experts": True, "routed_experts_prompt_start": start}
    experts = ask_directly(server, "routed_experts", **fields).routed_experts
    rows = 3 + 12 - 1
    counted = (np.arange(rows * 4) % 251).astype(np.uint8).reshape(rows, 2, 2)
    assert experts.start == (start or 0)
    np.testing.assert_array_equal(experts.data, counted[start or 0 :])


def test_router_choices_that_the_worker_does_not_give(server):
    with pytest.raises(EngineUnsupportedError, match="the server sends none"):
        ask_directly(server, routed_experts=True)


def test_a_cancelled_call_ends_on_the_worker(server, renderer):
    """A frontend that has not opened the worker's stream yet does not tell it, so a call is given some time."""

    async def cancelled_is_noted(way):
        before = len(server.received)

        def noted(ended):  # a note on an earlier call's end may come late
            return [each for each in server.received[before:] if ("cancelled" in each) == ended]

        def begun():
            begins = bool(noted(ended=False))
            time.sleep(0.3 * begins)
            return begins

        await cancelled(way, renderer, BACKEND, begun)
        try:
            await until(lambda: noted(ended=True), 10)
        except AssertionError:
            return False
        return True

    async def work(way):
        return any([await cancelled_is_noted(way) for _ in range(2)])

    assert connected(server, work)
    assert ask_directly(server).completion_ids


def test_bodies_with_images_are_refused_where_the_worker_would_not_get_them(server, renderer):
    """The bound is what one message to a worker may have, and the worker's own answer does not say so."""
    rendered = renderer.render([user("Much.", picture(1, 256, 256))], add_generation_prompt=True)
    call = {"prompt_attribution": rendered, "sampling_params": {**GREEDY, "max_tokens": 1}}
    with pytest.raises(EngineUnsupportedError, match="larger than the server's frontend takes"):
        ask(server, renderer, **call, backend=DynamoBackend(pixels="float32", max_image_bytes=10_000))

    async def padded(way, size):
        body = {
            "model": MODEL,
            "token_ids": [5, 6],
            "sampling_params": {"max_tokens": 1},
            "pad": base64.b64encode(bytes(size * 3 // 4)).decode(),
        }
        return await way.request("POST", "/inference/v1/generate", json=body)

    bound = BACKEND.max_image_bytes
    assert connected(server, lambda way: padded(way, bound - 100_000)).status == 200
    with pytest.raises(EngineStatusError) as caught:
        connected(server, lambda way: padded(way, bound + 100_000))
    assert caught.value.status == 400
    with pytest.raises((EngineStatusError, EngineConnectionError)):
        connected(server, lambda way: padded(way, BACKEND.max_body_bytes + 100_000))


def test_a_frontend_that_does_not_take_images(tiny_model, renderer, tmp_path):
    with start_dynamo(tiny_model, ["--no-generate-route"], folder=tmp_path) as closed:
        pixels = DynamoBackend(pixels="uint8")
        with pytest.raises(EngineUnsupportedError, match="DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE=1"):
            ask(closed, renderer, messages=conversations()["one image"], backend=pixels)
        assert ask(closed, renderer, messages=conversations()["text"], backend=BACKEND).completion_ids


def test_a_server_that_dies(server, renderer):
    """Last, since it ends the server."""
    before = len(server.received)
    assert_death(server, renderer, BACKEND, lambda: len(server.received) == before + 1)
