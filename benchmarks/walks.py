"""Five operations to profile: each `walk_*` prepares one, end to end, and returns the callable to measure.

Everything is real: the tiny model, an HTTP stub on 127.0.0.1 with vLLM's generate route, a Unix socket.
"""

import asyncio
import atexit
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import numpy as np
from aiohttp import web
from PIL import Image

from mmrender import Renderer, RendererClient, Trajectory
from mmrender.client import HTTPTransport, VLLMBackend
from mmrender.shipping import Receiver, Sender
from mmrender.testing.tiny_model import build_tiny_model
from mmrender.training import ModelFamily, collate

MODEL = Path(tempfile.mkdtemp()) / "tiny"
build_tiny_model(MODEL, weights=False)
RENDERER = Renderer.from_pretrained(MODEL, image_backend="pil")
STOP = RENDERER.get_stop_token_ids()[0]
LOOP = asyncio.new_event_loop()
OPEN = AsyncExitStack()
atexit.register(lambda: LOOP.run_until_complete(OPEN.aclose()))


def conversation(seed):
    picture = Image.fromarray(np.random.default_rng(seed).integers(0, 255, (512, 512, 3), dtype=np.uint8))
    return [
        {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "what?"}]}
    ]


async def _generate(request):
    body = msgspec.json.decode(await request.read())
    tokens = [50, 51, 52, STOP]
    content = [{"token_id": token, "logprob": -1.0} for token in tokens]
    choice = {"index": 0, "finish_reason": "stop", "token_ids": tokens, "logprobs": {"content": content}}
    return web.json_response(
        {"request_id": "r", "usage": {"prompt_tokens": len(body["token_ids"])}, "choices": [choice]}
    )


async def _models(_):
    return web.json_response({"data": [{"id": "m", "max_model_len": 32768}]})


async def _client():
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/inference/v1/generate", _generate)
    app.router.add_get("/v1/models", _models)
    runner = web.AppRunner(app)
    await runner.setup()
    OPEN.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    transport = HTTPTransport(f"http://127.0.0.1:{port}")
    OPEN.push_async_callback(transport.aclose)
    return RendererClient(
        RENDERER,
        transport,
        model="m",
        backend=VLLMBackend(pixels="uint8"),
        sampling_params={"max_tokens": 16},
    )


CLIENT = LOOP.run_until_complete(_client())


def played(turns, seed):
    trajectory, messages = Trajectory(f"game-{seed}"), conversation(seed)
    for _ in range(turns):
        turn = LOOP.run_until_complete(CLIENT.create_completion(messages, trajectory=trajectory))
        messages = [*messages, turn.message, {"role": "user", "content": "again?"}]
    return trajectory, messages


def walk_render_one_new_image():
    RENDERER.render(conversation(100), add_generation_prompt=True)
    new = conversation(101)
    return lambda: RENDERER.render(new, add_generation_prompt=True)


def walk_bridge_known_shape():
    prompt = RENDERER.render(conversation(0), add_generation_prompt=True)

    def bridge():
        return RENDERER.bridge_to_next_turn(
            prompt.token_ids,
            [50, 51, STOP],
            [{"role": "user", "content": "and"}],
            previous_multi_modal_data=prompt.multi_modal_data,
        )

    assert bridge() is not None
    return bridge


def walk_bridged_turn_vllm():
    played(3, 1)
    trajectory, messages = played(2, 2)
    return lambda: LOOP.run_until_complete(CLIENT.create_completion(messages, trajectory=trajectory))


def walk_ship_and_receive():
    first, _ = played(1, 9)
    trajectory, _ = played(3, 3)
    address = f"unix://{tempfile.mkdtemp()}/s.sock"

    async def ends():
        receiver = await OPEN.enter_async_context(Receiver(address))
        sender = await OPEN.enter_async_context(Sender(address))
        delivery = await sender.send(first)
        await receiver.receive(10)
        await delivery
        return receiver, sender

    receiver, sender = LOOP.run_until_complete(ends())

    async def ship():
        delivery = await sender.send(trajectory)
        await receiver.receive(10)
        await delivery

    return lambda: LOOP.run_until_complete(ship())


def walk_collate_two_samples():
    family = ModelFamily.from_config(MODEL)

    def batch(*seeds):
        samples = [sample for seed in seeds for sample in played(2, seed)[0].samples()]
        return collate(samples, family, pad_token_id=0)

    batch(6, 7)  # the first batch makes the table of pixel values, and memory that later ones use again
    one, _ = played(2, 4)
    two, _ = played(2, 5)
    return lambda: collate([*one.samples(), *two.samples()], family, pad_token_id=0).model_inputs()
