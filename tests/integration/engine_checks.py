"""What every engine's tier compares with: conversations, the engine's own chat route, and Transformers."""

import asyncio
import base64
import io
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from integration.engine_server import EngineServer
from mmrender.client.http import HTTPTransport
from mmrender.client.types import Generation
from mmrender.renderer import Renderer
from mmrender.spans import MultiModalData

MODEL = "tiny"
"""Name under which every tier serves the tiny model."""


def picture(seed: int, width: int, height: int) -> Image.Image:
    """A picture with edges and noise, the same for equal arguments."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (4, 4, 3), np.uint8)
    big = np.asarray(
        Image.fromarray(coarse, "RGB").resize((width, height), Image.Resampling.NEAREST), np.int16
    )
    noise = rng.integers(-30, 31, big.shape, np.int16)
    return Image.fromarray(np.clip(big + noise, 0, 255).astype(np.uint8), "RGB")


def user(text: str, *images: Image.Image) -> dict[str, Any]:
    """A user message: images, then text."""
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}] if images else text}


def conversations() -> dict[str, list[dict[str, Any]]]:
    """By name: text; one image, which is resized; three images, of which two are the same."""
    cow, kiwi = picture(1, 150, 133), picture(2, 256, 128)
    return {
        "text": [{"role": "system", "content": "You count."}, user("How many are seven and five?")],
        "one image": [user("What is on it?", cow)],
        "three images": [user("Compare these.", cow, kiwi, picture(1, 150, 133))],
    }


def as_openai(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same messages for an engine's chat route, each image as the PNG of its original pixels."""
    return [{**message, "content": _content(message["content"])} for message in messages]


def _content(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [
        {"type": "image_url", "image_url": {"url": data_url(part["image"])}}
        if part["type"] == "image"
        else part
        for part in content
    ]


def data_url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def chat_answer(server: EngineServer, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """What the engine's chat route answers to a conversation, greedily and with logprobs."""
    body = {
        "model": MODEL,
        "messages": as_openai(messages),
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 1,
        **options,
    }
    return server.post("/v1/chat/completions", body)


@lru_cache(maxsize=1)
def reference_model(directory: Path) -> Any:
    """The tiny model in this process, in float32."""
    import torch
    from transformers import AutoModelForImageTextToText

    torch.set_num_threads(1)
    return AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()


def reference_logprobs(
    directory: Path, prompt_ids: list[int], completion_ids: list[int], data: MultiModalData
) -> np.ndarray:
    """Logprobs that Transformers gives each completion token, in one forward pass over float32 pixels."""
    import torch

    items = data.mm_items.get("image", ())
    tensors = [item.tensors("float32", framework="torch") for item in items]
    joined = {key: torch.cat([entry[key] for entry in tensors]) for key in tensors[0]} if tensors else {}
    ids = torch.tensor([[*prompt_ids, *completion_ids]])
    kinds = torch.zeros_like(ids)
    for place in data.mm_placeholders.get("image", ()):
        kinds[0, place.offset : place.offset + place.length] = 1
    with torch.inference_mode():
        logits = reference_model(directory)(input_ids=ids, mm_token_type_ids=kinds, **joined).logits[0]
    logprobs = torch.log_softmax(logits.float(), -1)
    positions = torch.arange(len(prompt_ids) - 1, ids.shape[1] - 1)
    return logprobs[positions, ids[0, len(prompt_ids) :]].numpy()


def assert_reference(directory: Path, generation: Generation) -> None:
    """The logprobs of a generation equal those of Transformers to 1e-2."""
    expected = reference_logprobs(
        directory, generation.prompt_ids, generation.completion_ids, generation.multi_modal_data
    )
    np.testing.assert_allclose(generation.logprobs, expected, rtol=0, atol=1e-2)


async def roll_out(renderer: Renderer, ask: Any, turns: int = 4) -> list[Generation]:
    """Sample turns with `await ask(rendered)`, each bridged to the last and with an image of its own."""
    rendered = renderer.render([user("Look.", picture(10, 128, 128))], add_generation_prompt=True)
    done: list[Generation] = []
    for turn in range(turns):
        last = await ask(rendered)
        done.append(last)
        bridged = renderer.bridge_to_next_turn(
            last.prompt_ids,
            last.completion_ids,
            [user(f"And this, number {turn}?", picture(11 + turn, 128 + 32 * turn, 160))],
            previous_multi_modal_data=last.multi_modal_data,
        )
        assert bridged is not None, renderer.why_not_bridged
        sampled = [*last.prompt_ids, *last.completion_ids]
        assert bridged.token_ids[: len(sampled)] == sampled
        rendered = bridged
    return done


def connected(server: EngineServer, work: Any, wrap: Any = None) -> Any:
    """Run `await work(transport)` over a transport of its own, which `wrap` may put another around."""

    async def run() -> Any:
        transport = HTTPTransport(server.base_url)
        way = transport if wrap is None else wrap(transport)
        try:
            return await work(way)
        finally:
            await transport.aclose()

    return asyncio.run(run())
