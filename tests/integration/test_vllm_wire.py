"""`VLLMBackend` against a running vLLM: run by `make integration-vllm`.

Servers are started three times: as they are by default, with `--no-mm-device-do-normalize`, and without a
processor cache. The last test ends the last one by force.
"""

import asyncio
import json
import shutil
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
    roll_out,
    user,
)
from integration.engine_server import needs_tier
from mmrender import Renderer, generate
from mmrender.client.http import encode_json
from mmrender.client.server_facts import facts_of
from mmrender.client.types import EngineRequest
from mmrender.client.vllm import ABORT_PATH, GENERATE_PATH, VLLMBackend
from mmrender.errors import (
    EngineConnectionError,
    EngineMismatchError,
    EngineStatusError,
    EngineUnsupportedError,
    PromptTooLongError,
)

pytestmark = needs_tier("vllm")

SERVERS = {
    "default": (),
    "floats": ("--no-mm-device-do-normalize",),
    "no-cache": ("--mm-processor-cache-gb", "0"),
}
GREEDY = {"temperature": 0.0, "max_tokens": 12}
LONG = {"temperature": 0.0, "max_tokens": 1900, "ignore_eos": True}


@pytest.fixture(scope="session", params=list(SERVERS))
def server(request, vllm_servers):
    return vllm_servers.with_flags(*SERVERS[request.param])


def only(*names):
    """Run a test with these servers alone."""
    return pytest.mark.parametrize("server", names, indirect=True)


@pytest.fixture(params=["features", "hash_only", "content_parts"])
def mode(request, server):
    if request.param == "hash_only" and not multimodal_settings(server)["mm_processor_cache_gb"]:
        pytest.skip("refused there: see test_hashes_alone_are_refused_without_a_cache")
    return request.param


@pytest.fixture(scope="module")
def renderer(tiny_model):
    return Renderer.from_pretrained(tiny_model)


class Counted:
    """A transport that counts the bytes of the prompts it sends."""

    def __init__(self, transport):
        self.transport = transport
        self.sizes: list[int] = []

    @property
    def base_url(self):
        return self.transport.base_url

    async def request(self, method: str, path: str, *, json: Any = None, **options: Any):
        if path == GENERATE_PATH:
            self.sizes.append(sum(map(len, encode_json(json))))
        return await self.transport.request(method, path, json=json, **options)

    def stream(self, *arguments: Any, **options: Any):
        return self.transport.stream(*arguments, **options)

    async def aclose(self):
        await self.transport.aclose()


def running(server, work):
    """Run `await work(transport)` over a transport of its own that counts."""
    return connected(server, work, Counted)


def ask(server, renderer, **call):
    """One call of `generate`."""
    return running(server, lambda way: generate(client=way, renderer=renderer, model=MODEL, **call))


def multimodal_settings(server) -> dict[str, Any]:
    config = server.get("/server_info?config_format=json")["vllm_config"]
    return config["model_config"]["multimodal_config"]


def gauge(server, name: str, **labels: str) -> float:
    """A number of `/metrics`."""
    for line in server.get("/metrics").decode().splitlines():
        if line.startswith(f"vllm:{name}{{") and all(
            f'{key}="{value}"' in line for key, value in labels.items()
        ):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no metric {name} {labels}")


async def until(condition, seconds: float = 20.0) -> None:
    """Wait until a condition holds."""
    for _ in range(int(seconds / 0.05)):
        if await asyncio.to_thread(condition):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"did not come true within {seconds} s")


def test_the_server_runs_as_it_is_meant_to(server, request):
    settings = multimodal_settings(server)
    which = request.node.callspec.params["server"]
    assert settings["mm_device_do_normalize"] is (which != "floats")
    assert (settings["mm_processor_cache_gb"] > 0) is (which != "no-cache")


@pytest.mark.parametrize("name", list(conversations()))
def test_logprobs_equal_the_chat_route_and_transformers(server, renderer, tiny_model, mode, name):
    messages = conversations()[name]
    chat = chat_answer(server, messages, max_tokens=12, return_token_ids=True)
    choice = chat["choices"][0]
    theirs = [entry["logprob"] for entry in choice["logprobs"]["content"]]

    async def twice(way):
        call = {"client": way, "renderer": renderer, "model": MODEL, "messages": messages}
        backend = VLLMBackend(images=mode)
        answers = [await generate(**call, backend=backend, sampling_params=GREEDY) for _ in range(2)]
        return answers, way.sizes

    answers, sizes = running(server, twice)
    for generation in answers:
        assert generation.prompt_ids == chat["prompt_token_ids"]
        assert generation.completion_ids == choice["token_ids"]
        np.testing.assert_allclose(generation.logprobs, theirs, rtol=0, atol=1e-3)
        assert generation.finish_reason == choice["finish_reason"] == "length"
        assert generation.usage.prompt_tokens == chat["usage"]["prompt_tokens"]
        assert [span.stop for span in generation.weight_versions] == [12]
        assert_reference(tiny_model, generation)
    first, second = sizes
    if mode == "hash_only" and name != "text":
        assert second < 4000 < first
    else:
        assert abs(second - first) < 100


def test_a_bridged_rollout_with_an_image_a_turn(server, renderer, tiny_model, mode):
    sampling = {"temperature": 1.0, "seed": 7, "max_tokens": 10}

    async def rollout(way):
        async def sample(rendered):
            return await generate(
                client=way,
                renderer=renderer,
                model=MODEL,
                backend=VLLMBackend(images=mode),
                prompt_attribution=rendered,
                sampling_params=sampling,
            )

        return await roll_out(renderer, sample), way.sizes

    turns, sizes = running(server, rollout)
    assert [len(turn.multi_modal_data.mm_items["image"]) for turn in turns] == [1, 2, 3, 4]
    for turn in turns:
        assert_reference(tiny_model, turn)
    if mode == "hash_only":
        # The first turn was sent by no earlier mode's test, and each later one brings one image.
        last = turns[-1].multi_modal_data.mm_items["image"][-1]
        bytes_per_value = 1 if multimodal_settings(server)["mm_device_do_normalize"] else 4
        assert sizes[-1] < 1.4 * bytes_per_value * last.levels().nbytes


@only("default", "floats")
def test_a_hash_whose_data_the_server_lacks_is_sent_with_it(server, renderer):
    rendered = renderer.render([user("Never seen.", picture(99, 128, 96))], add_generation_prompt=True)
    (identity,) = rendered.multi_modal_data.mm_hashes["image"]

    async def forgotten(way):
        call = {"client": way, "renderer": renderer, "model": MODEL, "sampling_params": GREEDY}
        # As if the server had dropped it since.
        for pixels in ("uint8", "float32"):
            facts_of(way).hashes.put(f"{identity}-{pixels}", True)
        missed = await generate(**call, prompt_attribution=rendered, backend=VLLMBackend(images="hash_only"))
        whole = await generate(**call, prompt_attribution=rendered, backend=VLLMBackend())
        return missed, whole, way.sizes

    missed, whole, sizes = running(server, forgotten)
    assert sizes[0] < 4000 < sizes[1] == sizes[2]
    assert (missed.completion_ids, missed.logprobs) == (whole.completion_ids, whole.logprobs)


@only("no-cache")
def test_hashes_alone_are_refused_without_a_cache(server, renderer):
    messages = conversations()["one image"]
    backend = VLLMBackend(images="hash_only", trust_cache=True)
    with pytest.raises(EngineUnsupportedError) as caught:
        ask(server, renderer, messages=messages, backend=backend, sampling_params=GREEDY)
    assert str(caught.value) == (
        f"{server.base_url}: the server's settings make a hash without data fatal to its engine - "
        "got its processor cache is off. Send the data each time: VLLMBackend(images='features')"
    )
    assert ask(server, renderer, messages=messages, sampling_params=GREEDY).completion_ids


@only("default", "floats")
def test_pixels_of_the_other_kind_would_pass_silently(server, renderer, request):
    """Why the handshake is there: the server takes what it cannot use, and answers with other numbers."""
    other = "float32" if request.node.callspec.params["server"] == "default" else "uint8"
    messages = [user("Which is it?", picture(77, 128, 128))]
    call = {"messages": messages, "sampling_params": GREEDY}
    wrong = ask(server, renderer, **call, backend=VLLMBackend(pixels=other))
    right = ask(server, renderer, **call, backend=VLLMBackend())
    chat = chat_answer(server, messages, max_tokens=12)["choices"][0]["logprobs"]["content"]
    assert abs(right.logprobs[0] - chat[0]["logprob"]) < 1e-3
    assert abs(wrong.logprobs[0] - chat[0]["logprob"]) > 1e-2


@pytest.fixture(scope="module")
def other_settings(tiny_model, tmp_path_factory):
    """Renderers of the same model with another mean, and with larger pictures."""
    renderers = {}
    for name, change in {
        "mean": {"image_mean": [0.4, 0.5, 0.5]},
        "size": {"size": {"shortest_edge": 16384, "longest_edge": 4 << 20}},
    }.items():
        folder = tmp_path_factory.mktemp("models") / name
        shutil.copytree(tiny_model, folder)
        path = folder / "preprocessor_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
        renderers[name] = Renderer.from_pretrained(folder)
    return renderers


@only("floats")
def test_another_mean_is_found_by_the_handshake(server, other_settings):
    with pytest.raises(
        EngineMismatchError, match=r"something else of an image.*values of pixel_values.*0\.2"
    ):
        ask(
            server,
            other_settings["mean"],
            messages=conversations()["one image"],
            sampling_params=GREEDY,
        )


@only("default")
@pytest.mark.parametrize("mode", ["features", "content_parts"])
def test_another_size_is_found(server, renderer, other_settings, mode):
    messages = [user("How large?", picture(5, 800, 640))]
    ours, theirs = (
        each.media.processor.geometry(640, 800).num_tokens for each in (other_settings["size"], renderer)
    )
    assert ours > theirs
    length = len(other_settings["size"].render_ids(messages, add_generation_prompt=True))
    expected = {
        "features": f"has it: {theirs} of the token .*here: {ours} of the token",
        "content_parts": f"saw another prompt.*of {length}, got .*of {length - ours + theirs}",
    }[mode]
    with pytest.raises(EngineMismatchError, match=expected):
        ask(
            server,
            other_settings["size"],
            messages=messages,
            backend=VLLMBackend(images=mode),
            sampling_params=GREEDY,
        )


@only("default")
def test_stops_and_alternatives(server, renderer):
    messages = conversations()["text"]
    free = ask(server, renderer, messages=messages, sampling_params={**GREEDY, "logprobs": 3})
    for token, logprob, others in zip(
        free.completion_ids, free.logprobs, free.response.top_logprobs, strict=True
    ):
        assert others[0] == (token, logprob)
        assert [value for _, value in others] == sorted((value for _, value in others), reverse=True)
    stop = free.completion_ids[4]
    stopped = ask(server, renderer, messages=messages, sampling_params={**GREEDY, "stop_token_ids": [stop]})
    assert stopped.completion_ids == free.completion_ids[:5]
    assert (stopped.finish_reason, stopped.response.stop_reason) == ("stop", stop)


@only("default")
def test_overflow_before_and_after_sending(server, renderer):
    messages = [user("word " * 3000)]

    async def sent(way, **options):
        call = {"client": way, "renderer": renderer, "model": MODEL, "messages": messages}
        with pytest.raises(PromptTooLongError) as caught:
            await generate(**call, sampling_params=GREEDY, **options)
        return caught.value, way.sizes

    length = len(renderer.render_ids(messages, add_generation_prompt=True))
    before, sizes = running(server, sent)
    assert (before.prompt_len, before.max_prompt_len, sizes) == (length, 2047, [])
    after, sizes = running(server, lambda way: sent(way, max_prompt_len=100_000))
    assert (after.prompt_len, after.max_prompt_len, len(sizes)) == (length, 2047, 1)


@only("default")
def test_the_longest_prompt_is_one_less_than_the_context(server):
    async def work(way):
        backend = VLLMBackend()
        assert await backend.resolve_max_prompt_len(MODEL, way) == 2047
        request = EngineRequest(MODEL, [5] * 2047, {**GREEDY, "max_tokens": 1}, "longest")
        assert len((await backend.generate(request, way)).completion_ids) == 1
        request = EngineRequest(MODEL, [5] * 2048, {**GREEDY, "max_tokens": 1}, "too-long")
        with pytest.raises(PromptTooLongError):
            await backend.generate(request, way)
        with pytest.raises(EngineStatusError) as caught:
            await backend.generate(EngineRequest("other", [5], GREEDY, "unknown"), way)
        assert caught.value.status == 404

    running(server, work)


@only("default")
@pytest.mark.parametrize("aborts", [True, False], ids=["told", "disconnected"])
def test_a_cancelled_call_ends_on_the_server(server, renderer, aborts):
    finished = gauge(server, "request_success_total", finished_reason="length")

    async def work(way):
        call = generate(
            client=way,
            renderer=renderer,
            model=MODEL,
            messages=conversations()["text"],
            backend=VLLMBackend(abort_on_cancel=aborts),
            sampling_params=LONG,
        )
        task = asyncio.create_task(call)
        await until(lambda: gauge(server, "num_requests_running") == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: gauge(server, "num_requests_running") == 0)

    running(server, work)
    assert gauge(server, "request_success_total", finished_reason="length") == finished


@only("default")
def test_an_aborted_request_gives_what_it_has(server):
    async def work(way):
        backend = VLLMBackend()
        task = asyncio.create_task(
            backend.generate(EngineRequest(MODEL, [5, 6, 7], LONG, "to-be-aborted"), way)
        )
        await until(lambda: gauge(server, "num_requests_running") == 1)
        await way.request("POST", ABORT_PATH, json={"request_ids": ["generate-tokens-to-be-aborted"]})
        return await task

    response = running(server, work)
    assert response.finish_reason == "abort"
    assert len(response.completion_ids) == len(response.logprobs) < 1900
    assert response.request_id == "generate-tokens-to-be-aborted"


@only("default")
def test_weight_versions_are_spans_of_the_completion(server):
    async def work(way):
        await until(lambda: gauge(server, "num_requests_running") == 0)  # what earlier tests cancelled
        task = asyncio.create_task(
            VLLMBackend().generate(
                EngineRequest(MODEL, [5, 6, 7], {**LONG, "max_tokens": 800}, "versions"), way
            )
        )
        await until(lambda: gauge(server, "num_requests_running") == 1)
        await way.request("POST", "/pause?mode=keep", json={})
        await way.request("POST", "/update_weight_version", json={"new_version": "step-7"})
        await way.request("POST", "/resume", json={})
        return await task

    first, second = running(server, work).weight_versions
    assert (first.version, first.start, second.version, second.stop) == ("default", 0, "step-7", 800)
    assert first.stop == second.start


@only("no-cache")
def test_a_server_that_dies(server, renderer):
    """Last, since it ends the server."""

    async def work(way):
        call = {"client": way, "renderer": renderer, "model": MODEL, "messages": conversations()["text"]}
        task = asyncio.create_task(generate(**call, sampling_params=LONG))
        await until(lambda: gauge(server, "num_requests_running") == 1)
        await asyncio.to_thread(server.kill)
        with pytest.raises(EngineConnectionError):
            await task
        with pytest.raises(EngineConnectionError):
            await generate(**call, sampling_params=GREEDY)

    running(server, work)
    assert not server.alive
