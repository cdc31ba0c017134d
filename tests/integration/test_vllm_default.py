"""`VLLMBackend` against a vLLM without developer routes, as its documentation starts it: run by `make integration-vllm`.

Nothing proves its cache, so images go by uuid. The last server has no cache.
"""

import pytest

from integration.engine_checks import GREEDY, MODEL, assert_reference, connected, picture, rolled_out, user
from integration.engine_server import needs_tier, start_vllm
from integration.test_vllm_wire import Counted
from kit import encoded
from mmrender import generate
from mmrender.client.server_facts import facts_of
from mmrender.client.vllm import VLLMBackend

pytestmark = needs_tier("vllm")

CLOSED = {"VLLM_SERVER_DEV_MODE": "0"}
SERVERS = {"default": (), "no-cache": ("--mm-processor-cache-gb", "0")}


@pytest.fixture(scope="module", params=list(SERVERS))
def server(request, tiny_model, tmp_path_factory):
    log = tmp_path_factory.mktemp("closed") / "server.log"
    with start_vllm(tiny_model, SERVERS[request.param], environment=CLOSED, log=log) as running:
        yield running


@pytest.mark.parametrize("server", ["default"], indirect=True)
def test_each_turn_sends_its_own_image(server, renderer, tiny_model):
    sampling = {"temperature": 1.0, "seed": 7, "max_tokens": 10}
    turns, way = rolled_out(server, renderer, tiny_model, Counted, sampling_params=sampling)
    assert len(way.sizes) == len(turns) == 4
    images = turns[-1].multi_modal_data.mm_items["image"]
    for size, item in zip(way.sizes, images, strict=True):
        assert item.frames.nbytes < size < 1.4 * item.frames.nbytes + 2000
    for turn in turns:
        assert_reference(tiny_model, turn)


@pytest.mark.parametrize("form", ["in memory", "JPEG"])
def test_logprobs_are_those_of_tensors(server, renderer, form):
    """With and without a cache, at each of three calls, which send the image, its uuid, or both.

    A JPEG goes as it is, since the server decodes noise as we do.
    """
    pictures = [picture(31, 160, 128), picture(32, 128, 160)]  # of sizes that the model keeps
    files = [encoded(each, "JPEG") for each in pictures]
    messages = [user("Compare.", *(files if form == "JPEG" else pictures))]

    async def both(way):
        call = {"client": way, "renderer": renderer, "model": MODEL, "messages": messages}
        call["sampling_params"] = GREEDY
        tensors = await generate(**call, backend=VLLMBackend(images="features"))
        return tensors, [await generate(**call) for _ in range(3)], way.sizes

    tensors, others, sizes = connected(server, both, Counted)
    pixels = sum(item.frames.nbytes for item in tensors.multi_modal_data.mm_items["image"])
    assert (sizes[1] < pixels) is (form == "JPEG")
    for other in others:
        assert other.completion_ids == tensors.completion_ids
        assert other.logprobs == pytest.approx(tensors.logprobs, abs=1e-4)


@pytest.mark.parametrize("server", ["default"], indirect=True)
def test_an_image_that_the_server_dropped_costs_one_request(server, renderer):
    rendered = renderer.render([user("Never seen.", picture(98, 128, 96))], add_generation_prompt=True)
    (identity,) = rendered.multi_modal_data.mm_hashes["image"]

    async def forgotten(way):
        call = {"client": way, "renderer": renderer, "model": MODEL, "sampling_params": GREEDY}
        facts_of(way).hashes.put(f"{identity}-image", True)  # as if the server had dropped it since
        missed = await generate(**call, prompt_attribution=rendered)
        whole = await generate(**call, prompt_attribution=rendered, backend=VLLMBackend(images="features"))
        return missed, whole, way.sizes

    missed, whole, sizes = connected(server, forgotten, Counted)
    assert sizes[0] < 4000 < sizes[1] < sizes[2]
    assert missed.completion_ids == whole.completion_ids
    assert missed.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
