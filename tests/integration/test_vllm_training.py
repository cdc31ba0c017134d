"""A real vLLM at both ends of training: what it samples, and what its render route makes of images."""

import asyncio

import numpy as np
import pytest

from end_to_end import FAULTS, completions_of, no_placeholders, roll_out_many, ship_to_trainer
from integration.engine_checks import MODEL, conversations, picture, user
from integration.engine_server import needs_tier, start_vllm
from kit import encoded
from mmrender.client.vllm import VLLMBackend
from mmrender.errors import EngineMismatchError
from mmrender.remote import EncodedTextChunk, ImageChunk, ModelInput, VLLMRenderer
from mmrender.rollout.client import RendererClient
from mmrender.training import decode_mm_kwargs

pytestmark = needs_tier("vllm")


@pytest.fixture(scope="module")
def trajectories(vllm_servers, renderer):
    server = vllm_servers.with_flags()
    client = RendererClient(
        renderer,
        server.base_url,
        model=MODEL,
        backend=VLLMBackend(),
        sampling_params=no_placeholders(renderer),
    )
    return asyncio.run(roll_out_many(client, 45, concurrency=8))


def test_the_trainer_sees_what_vllm_sampled(tiny_model, trajectories, tmp_path):
    assert completions_of(trajectories) >= 200
    address = f"unix://{tmp_path}/trainer.sock"
    seen = asyncio.run(ship_to_trainer(trajectories, address, tiny_model, tolerance=1e-2))
    assert seen["completions"] == completions_of(trajectories)
    assert seen["images"] == [1, 2, 3, 4, 5, 6]
    assert seen["ok"], seen["text"]
    assert max(seen["largest"], seen["padded"], seen["packed"]) < 1e-2
    print(f"largest {seen['largest']:.2e}, packed {seen['packed']:.2e}, KL {seen['kl']:.1e}")


def test_faults_planted_after_vllm_are_named(tiny_model, trajectories, tmp_path):
    address = f"unix://{tmp_path}/trainer.sock"
    seen = asyncio.run(ship_to_trainer(trajectories[:6], address, tiny_model, tolerance=1e-2, plant="all"))
    causes = {name: {cause for cause, _ in found} for name, found in seen.items()}
    expected = {
        name: {"tokens" if name in ("ids shifted", "sampled pad token") else "pixels"} for name in FAULTS
    }
    assert causes == expected, seen


def in_chunks(rendered, images):
    """A rendered prompt as chunks: its text, and in place of each range the encoded image."""
    chunks, start = [], 0
    for found, image in zip(rendered.multi_modal_data.mm_placeholders["image"], images, strict=True):
        chunks.append(EncodedTextChunk(rendered.token_ids[start : found.offset]))
        chunks.append(ImageChunk(encoded(image), "png", expected_tokens=found.length))
        start = found.offset + found.length
    return ModelInput([*chunks, EncodedTextChunk(rendered.token_ids[start:])])


@pytest.fixture(scope="module", params=["levels", "floats"])
def render_server(request, tiny_model, tmp_path_factory):
    # Values come in the model's dtype, which the tiny model's configuration leaves to vLLM.
    floats = ["--no-mm-device-do-normalize", "--dtype", "float32"]
    flags = floats if request.param == "floats" else []
    log = tmp_path_factory.mktemp("render") / "server.log"
    with start_vllm(tiny_model, flags, render_only=True, log=log) as server:
        yield request.param, server


def pictures_of(messages):
    parts = [
        part for message in messages for part in message["content"] if isinstance(message["content"], list)
    ]
    return [part["image"] for part in parts if part["type"] == "image"]


def test_a_render_server_makes_of_images_what_the_renderer_does(render_server, renderer):
    form, server = render_server
    cases = [
        conversations()["one image"],
        conversations()["three images"],
        [user("Small.", picture(9, 40, 300))],
    ]
    own = [renderer.render(messages, add_generation_prompt=True) for messages in cases]
    inputs = [
        in_chunks(rendered, pictures_of(messages)) for rendered, messages in zip(own, cases, strict=True)
    ]
    text = ModelInput([EncodedTextChunk(own[0].token_ids[:5])])

    async def render():
        remote = VLLMRenderer(server.base_url, MODEL)
        try:
            return await remote.render([*inputs, text])
        finally:
            await remote.aclose()

    *served, plain = asyncio.run(render())
    assert plain.prompt_ids == own[0].token_ids[:5]
    for rendered, reply in zip(own, served, strict=True):
        assert reply.prompt_ids == rendered.token_ids
        assert reply.multi_modal_placeholders == {"image": rendered.multi_modal_data.mm_placeholders["image"]}
        items = rendered.multi_modal_data.mm_items["image"]
        tensors = [item.tensors() for item in items]
        arithmetic = items[0].arithmetic if form == "levels" else None
        kwargs = decode_mm_kwargs(reply.multi_modal_kwargs, arithmetic=arithmetic)
        grids = np.concatenate([tensor["image_grid_thw"] for tensor in tensors])
        assert np.array_equal(kwargs["image_grid_thw"].numpy(), grids)
        pixels = kwargs["pixel_values"].numpy()
        expected = np.concatenate([tensor["pixel_values"] for tensor in tensors])
        # Levels are normalised here by the reference's own arithmetic; floats came from the server's.
        assert np.abs(pixels - expected).max() <= (0 if form == "levels" else 1e-6)


def test_a_render_server_is_held_to_the_tokens_expected(render_server, renderer):
    _, server = render_server
    image = picture(3, 64, 64)
    rendered = renderer.render([user("x", image)])
    whole = in_chunks(rendered, [image])
    chunk = whole.chunks[1]
    short = ImageChunk(chunk.data, chunk.format, expected_tokens=chunk.expected_tokens - 1)

    async def render():
        remote = VLLMRenderer(server.base_url, MODEL)
        try:
            return await remote.render([ModelInput([short])])
        finally:
            await remote.aclose()

    with pytest.raises(EngineMismatchError, match="another number of tokens at the server than expected"):
        asyncio.run(render())
