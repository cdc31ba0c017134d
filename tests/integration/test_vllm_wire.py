"""`VLLMBackend` against a running vLLM: run by `make integration-vllm`.

Servers are started three times: as they are by default, with `--no-mm-device-do-normalize`, and without a
processor cache. The last test ends the last one by force.
"""

import asyncio
from typing import Any

import pytest

from integration.engine_checks import (
    GREEDY,
    MODEL,
    ask,
    ask_directly,
    assert_death,
    assert_logprobs,
    assert_overflow,
    assert_reference,
    assert_stops_and_alternatives,
    cancelled,
    chat_answer,
    connected,
    conversations,
    interrupted,
    picture,
    rolled_out,
    until,
    user,
    with_settings,
)
from integration.engine_server import needs_tier
from mmrender import generate
from mmrender.client.http import encode_json, joined
from mmrender.client.server_facts import Process
from mmrender.client.vllm import ABORT_PATH, VLLMBackend
from mmrender.client.vllm_images import GENERATE_PATH
from mmrender.errors import EngineMismatchError, EngineStatusError, EngineUnsupportedError, PromptTooLongError
from video_cases import frames_of

pytestmark = needs_tier("vllm")

SERVERS = {
    "default": (),
    "floats": ("--no-mm-device-do-normalize",),
    "no-cache": ("--mm-processor-cache-gb", "0"),
}


@pytest.fixture(scope="session", params=list(SERVERS))
def server(request, vllm_servers):
    return vllm_servers.with_flags(*SERVERS[request.param])


def only(*names):
    """Run a test with these servers alone."""
    return pytest.mark.parametrize("server", names, indirect=True)


@pytest.fixture(params=["auto", "features", "hash_only", "content_parts"])
def mode(request, server):
    if request.param == "hash_only" and not multimodal_settings(server)["mm_processor_cache_gb"]:
        pytest.skip("refused there: see test_hashes_alone_are_refused_without_a_cache")
    return request.param


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
            self.sizes.append(len(joined(encode_json(json))))
        return await self.transport.request(method, path, json=json, **options)

    def stream(self, *arguments: Any, **options: Any):
        return self.transport.stream(*arguments, **options)

    async def aclose(self):
        await self.transport.aclose()


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


def runs(server, count: int):
    return lambda: gauge(server, "num_requests_running") == count


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

    async def twice(way):
        call = {"client": way, "renderer": renderer, "model": MODEL, "messages": messages}
        backend = VLLMBackend(images=mode)
        answers = [await generate(**call, backend=backend, sampling_params=GREEDY) for _ in range(2)]
        return answers, way.sizes

    answers, sizes = connected(server, twice, Counted)
    for generation in answers:
        assert generation.prompt_ids == chat["prompt_token_ids"]
        assert generation.completion_ids == choice["token_ids"]
        assert_logprobs(generation.logprobs, chat)
        assert generation.finish_reason == choice["finish_reason"] == "length"
        assert generation.usage.prompt_tokens == chat["usage"]["prompt_tokens"]
        assert [span.stop for span in generation.weight_versions] == [12]
        assert_reference(tiny_model, generation)
    first, *_, last = sizes
    if mode == "features" or name == "text":
        assert abs(last - first) < 100
    elif multimodal_settings(server)["mm_processor_cache_gb"]:
        assert last < 4000 < first
    else:  # a server without a cache refuses the uuid, and is sent tensors from then on
        assert min(first, last) > 4000


def test_a_bridged_rollout_with_an_image_a_turn(server, renderer, tiny_model, mode):
    sampling = {"temperature": 1.0, "seed": 7, "max_tokens": 10}
    backend = VLLMBackend(images=mode)
    turns, way = rolled_out(server, renderer, tiny_model, Counted, backend=backend, sampling_params=sampling)
    if mode == "hash_only":
        # The first turn was sent by no earlier mode's test, and each later one brings one image.
        last = turns[-1].multi_modal_data.mm_items["image"][-1]
        bytes_per_value = 1 if multimodal_settings(server)["mm_device_do_normalize"] else 4
        assert way.sizes[-1] < 1.4 * bytes_per_value * last.levels().nbytes


def test_a_bridged_rollout_with_a_video(server, renderer, tiny_model, mode):
    frames = frames_of(5, 96, 128)  # the time stamps between its steps are no features
    video = {"type": "video", "video": frames, "times": [0.0, 0.5, 1.0, 1.5, 2.0]}
    opening = {"role": "user", "content": [video, {"type": "text", "text": "What happens?"}]}
    sampling = {"temperature": 1.0, "seed": 7, "max_tokens": 10}
    call = {"backend": VLLMBackend(images=mode), "sampling_params": sampling, "opening": opening}
    if mode == "content_parts":
        with pytest.raises(EngineUnsupportedError, match="only images can be sent to this engine"):
            rolled_out(server, renderer, tiny_model, **call)
        return
    turns, _ = rolled_out(server, renderer, tiny_model, **call)
    for turn in turns:
        assert turn.multi_modal_data.mm_placeholders["video"][0].embed_spans is not None
        assert_reference(tiny_model, turn, atol=1e-3)


@only("default", "floats")
def test_a_hash_whose_data_the_server_lacks_is_sent_with_it(server, renderer):
    rendered = renderer.render([user("Never seen.", picture(99, 128, 96))], add_generation_prompt=True)
    (identity,) = rendered.multi_modal_data.mm_hashes["image"]

    async def forgotten(way):
        call = {"client": way, "renderer": renderer, "model": MODEL, "sampling_params": GREEDY}
        # As if the server had dropped it since.
        process = await Process.answering(way)
        for pixels in ("uint8", "float32"):
            process.facts.hashes.put(f"{identity}-{pixels}", True)
        missed = await generate(**call, prompt_attribution=rendered, backend=VLLMBackend())
        whole = await generate(**call, prompt_attribution=rendered, backend=VLLMBackend(images="features"))
        return missed, whole, way.sizes

    missed, whole, sizes = connected(server, forgotten, Counted)
    assert sizes[0] < 4000 < sizes[1] == sizes[2]
    assert (missed.completion_ids, missed.logprobs) == (whole.completion_ids, whole.logprobs)


@only("default", "floats")
def test_a_request_that_is_split_is_answered_as_the_whole(server, renderer):
    messages = [user("What are these?", *(picture(60 + number, 128, 96) for number in range(4)))]

    async def both(way):
        call = {"client": way, "renderer": renderer, "model": MODEL, "messages": messages}
        call["sampling_params"] = GREEDY
        whole = await generate(**call, backend=VLLMBackend(images="features"))
        limit = max(way.sizes) // 2
        return whole, await generate(**call, backend=VLLMBackend(max_body_bytes=limit)), limit, way.sizes

    whole, split, limit, sizes = connected(server, both, Counted)
    assert len(sizes) > 2
    assert max(sizes[1:]) <= limit
    assert split.completion_ids == whole.completion_ids
    assert split.logprobs == pytest.approx(whole.logprobs, abs=1e-3)


@only("no-cache")
def test_hashes_alone_are_refused_without_a_cache(server, renderer):
    messages = conversations()["one image"]
    backend = VLLMBackend(images="hash_only", trust_cache=True)
    with pytest.raises(EngineUnsupportedError) as caught:
        ask(server, renderer, messages=messages, backend=backend)
    assert str(caught.value) == (
        f"{server.base_url}: the server's settings make a hash without data fatal to its engine - "
        "got its processor cache is off. Send the data each time: VLLMBackend(images='features')"
    )
    assert ask(server, renderer, messages=messages).completion_ids


@only("default", "floats")
def test_pixels_of_the_other_kind_would_pass_silently(server, renderer, request):
    """Why the handshake is there: the server takes what it cannot use, and answers with other numbers."""
    other = "float32" if request.node.callspec.params["server"] == "default" else "uint8"
    messages = [user("Which is it?", picture(77, 128, 128))]
    wrong = ask(server, renderer, messages=messages, backend=VLLMBackend(pixels=other))
    right = ask(server, renderer, messages=messages)
    chat = chat_answer(server, messages, max_tokens=12)["choices"][0]["logprobs"]["content"]
    assert abs(right.logprobs[0] - chat[0]["logprob"]) < 1e-3
    assert abs(wrong.logprobs[0] - chat[0]["logprob"]) > 1e-2


@only("floats")
def test_another_mean_is_found_by_the_handshake(server, tiny_model, tmp_path):
    other = with_settings(tiny_model, tmp_path / "mean", image_mean=[0.4, 0.5, 0.5])
    with pytest.raises(
        EngineMismatchError, match=r"processes an image differently.*values of pixel_values.*0\.2"
    ):
        ask(server, other, messages=conversations()["one image"])


@only("default")
def test_another_size_is_found(server, renderer, tiny_model, tmp_path):
    size = {"shortest_edge": 16384, "longest_edge": 4 << 20}
    other = with_settings(tiny_model, tmp_path / "size", size=size)
    messages = [user("How large?", picture(5, 800, 640))]
    ours, theirs = (each.media.processor.geometry(640, 800).num_tokens for each in (other, renderer))
    assert ours > theirs
    length = len(other.render_ids(messages, add_generation_prompt=True))
    for mode, expected in {
        "features": f"has it: {theirs} of the token .*here: {ours} of the token",
        "content_parts": f"saw another prompt.*of {length}, got .*of {length - ours + theirs}",
    }.items():
        with pytest.raises(EngineMismatchError, match=expected):
            ask(server, other, messages=messages, backend=VLLMBackend(images=mode))


@only("default")
def test_stops_and_alternatives(server):
    assert_stops_and_alternatives(server, VLLMBackend())


@only("default")
def test_overflow_before_and_after_sending(server, renderer):
    assert_overflow(server, renderer, VLLMBackend(), 2047, told=2047)


@only("default")
def test_the_longest_prompt_is_one_less_than_the_context(server):
    backend, one = VLLMBackend(), {**GREEDY, "max_tokens": 1}
    assert connected(server, lambda way: backend.resolve_max_prompt_len(MODEL, way)) == 2047
    assert len(ask_directly(server, backend, [5] * 2047, sampling_params=one).completion_ids) == 1
    with pytest.raises(PromptTooLongError):
        ask_directly(server, backend, [5] * 2048, sampling_params=one)
    with pytest.raises(EngineStatusError) as caught:
        ask_directly(server, backend, [5], model="other")
    assert caught.value.status == 404


@only("default")
@pytest.mark.parametrize("aborts", [True, False], ids=["told", "disconnected"])
def test_a_cancelled_call_ends_on_the_server(server, renderer, aborts):
    finished = gauge(server, "request_success_total", finished_reason="length")

    async def work(way):
        await cancelled(way, renderer, VLLMBackend(abort_on_cancel=aborts), runs(server, 1))
        await until(runs(server, 0))

    connected(server, work)
    assert gauge(server, "request_success_total", finished_reason="length") == finished


@only("default")
def test_an_aborted_request_gives_what_it_has(server):
    posts = {ABORT_PATH: {"request_ids": ["generate-tokens-direct"]}}
    response = interrupted(server, VLLMBackend(), runs(server, 1), posts)
    assert response.finish_reason == "abort"
    assert len(response.completion_ids) == len(response.logprobs) < 1900
    assert response.request_id == "generate-tokens-direct"


@only("default")
def test_weight_versions_are_spans_of_the_completion(server):
    asyncio.run(until(runs(server, 0)))  # what earlier tests cancelled
    server.post("/update_weight_version", {"new_version": "step-6"})
    posts = {"/pause?mode=keep": {}, "/update_weight_version": {"new_version": "step-7"}, "/resume": {}}
    response = interrupted(server, VLLMBackend(), runs(server, 1), posts, max_tokens=800)
    first, second = response.weight_versions
    assert (first.version, first.start, second.version, second.stop) == ("step-6", 0, "step-7", 800)
    assert first.stop == second.start


@only("no-cache")
def test_a_server_that_dies(server, renderer):
    """Last, since it ends the server."""
    assert_death(server, renderer, VLLMBackend(), runs(server, 1))
