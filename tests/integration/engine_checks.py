"""What the tiers of all engines do alike, and compare with: the engine's own chat route, and Transformers."""

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from integration.engine_server import EngineServer
from kit import data_url, media_inputs, user
from mmrender import generate
from mmrender.client.http import HTTPTransport
from mmrender.client.types import EngineRequest, EngineResponse, Generation
from mmrender.errors import EngineConnectionError, EngineStatusError, PromptTooLongError
from mmrender.renderer import Renderer
from mmrender.sidecar import MultiModalData
from mmrender.tokens.rendered import RenderedTokens

MODEL = "tiny"
"""Name under which every tier serves the tiny model."""
GREEDY = {"temperature": 0.0, "max_tokens": 12}
LONG = {"temperature": 0.0, "max_tokens": 1900, "ignore_eos": True}


def picture(seed: int, width: int, height: int) -> Image.Image:
    """A picture with edges and noise, the same for equal arguments."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (4, 4, 3), np.uint8)
    big = np.asarray(
        Image.fromarray(coarse, "RGB").resize((width, height), Image.Resampling.NEAREST), np.int16
    )
    noise = rng.integers(-30, 31, big.shape, np.int16)
    return Image.fromarray(np.clip(big + noise, 0, 255).astype(np.uint8), "RGB")


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

    ids = torch.tensor([[*prompt_ids, *completion_ids]])
    with torch.inference_mode():
        logits = reference_model(directory)(input_ids=ids, **media_inputs(data, ids.shape[1])).logits[0]
    logprobs = torch.log_softmax(logits.float(), -1)
    positions = torch.arange(len(prompt_ids) - 1, ids.shape[1] - 1)
    return logprobs[positions, ids[0, len(prompt_ids) :]].numpy()


def assert_reference(directory: Path, generation: Generation, atol: float = 3e-2) -> None:
    """The logprobs of a generation equal those of Transformers.

    Engines were at most 0.011 apart in hundreds of turns. An image that is mirrored moves some by 0.12 or more.
    """
    expected = reference_logprobs(
        directory, generation.prompt_ids, generation.completion_ids, generation.multi_modal_data
    )
    np.testing.assert_allclose(generation.logprobs, expected, rtol=0, atol=atol)


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


def ask(server: EngineServer, renderer: Renderer, **call: Any) -> Generation:
    """One call of `generate`, greedily where nothing else is said."""
    call.setdefault("sampling_params", GREEDY)
    return connected(server, lambda way: generate(client=way, renderer=renderer, model=MODEL, **call))


def ask_directly(server: EngineServer, backend: Any, ids: list[int], **fields: Any) -> EngineResponse:
    """One call of a backend, without a renderer, greedily where nothing else is said."""
    request = request_of(ids, **fields)
    return connected(server, lambda way: backend.generate(request, way))


def request_of(ids: list[int], **fields: Any) -> EngineRequest:
    values = {"model": MODEL, "sampling_params": GREEDY, "request_id": "direct", **fields}
    return EngineRequest(prompt_ids=ids, **values)


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until a condition holds."""
    for _ in range(int(seconds / 0.05)):
        if await asyncio.to_thread(condition):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"did not come true within {seconds} s")


async def cancelled(way: Any, renderer: Renderer, backend: Any, begun: Callable[[], bool]) -> None:
    """Begin a long call, and cancel it once it has `begun`."""
    task = _long_call(way, renderer, backend)
    await until(begun)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def interrupted(
    server: EngineServer,
    backend: Any,
    begun: Callable[[], bool],
    posts: dict[str, Any],
    max_tokens: int = 1900,
    request_id: str = "direct",
) -> EngineResponse:
    """The response to a long call during which, once it has `begun`, each path of `posts` gets its body."""

    async def work(way: Any) -> EngineResponse:
        request = request_of(
            [5, 6, 7], sampling_params={**LONG, "max_tokens": max_tokens}, request_id=request_id
        )
        task = asyncio.create_task(backend.generate(request, way))
        await until(begun)
        for path, body in posts.items():
            await way.request("POST", path, json=body)
        return await task

    return connected(server, work)


def rolled_out(
    server: EngineServer,
    renderer: Renderer,
    directory: Path,
    wrap: Any = None,
    opening: dict[str, Any] | None = None,
    **call: Any,
) -> tuple[list[Generation], Any]:
    """Four turns, each bridged to the last and with an image of its own, and the transport that they took."""
    opening = opening or user("Look.", picture(10, 128, 128))

    async def work(way: Any) -> tuple[list[Generation], Any]:
        rendered = renderer.render([opening], add_generation_prompt=True)
        turns: list[Generation] = []
        for turn in range(4):
            last = await generate(
                client=way, renderer=renderer, model=MODEL, prompt_attribution=rendered, **call
            )
            turns.append(last)
            rendered = bridged(
                renderer, last, user(f"And this, number {turn}?", picture(11 + turn, 128 + 32 * turn, 160))
            )
        return turns, way

    turns, way = connected(server, work, wrap)
    assert [len(turn.multi_modal_data.spans()) for turn in turns] == [1, 2, 3, 4]
    for turn in turns:
        assert_reference(directory, turn)
    return turns, way


def bridged(renderer: Renderer, last: Generation, message: dict[str, Any]) -> RenderedTokens:
    """The next turn's prompt, of which what was sampled is the beginning."""
    rendered = renderer.bridge_to_next_turn(
        last.prompt_ids, last.completion_ids, [message], previous_multi_modal_data=last.multi_modal_data
    )
    assert rendered is not None, renderer.why_not_bridged
    sampled = [*last.prompt_ids, *last.completion_ids]
    assert rendered.token_ids[: len(sampled)] == sampled
    return rendered


def assert_logprobs(ours: Sequence[float], chat: dict[str, Any]) -> None:
    """Logprobs are those of the chat route's answer."""
    theirs = [entry["logprob"] for entry in chat["choices"][0]["logprobs"]["content"]]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-3)


def assert_stops_and_alternatives(server: EngineServer, backend: Any) -> None:
    """Alternatives begin with the token itself, greedily, and a stop token belongs to the completion."""
    free = ask_directly(server, backend, [10, 11, 12], sampling_params={**GREEDY, "logprobs": 3})
    assert free.top_logprobs is not None
    for token, logprob, others in zip(free.completion_ids, free.logprobs, free.top_logprobs, strict=True):
        assert others[0] == (token, logprob)
        assert len(others) == 3
        assert [value for _, value in others] == sorted((value for _, value in others), reverse=True)
    stop = free.completion_ids[4]
    sampling = {**GREEDY, "stop_token_ids": [stop]}
    stopped = ask_directly(server, backend, [10, 11, 12], sampling_params=sampling)
    first = free.completion_ids.index(stop)
    assert stopped.completion_ids == free.completion_ids[: first + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)


def assert_overflow(server: EngineServer, renderer: Renderer, backend: Any, longest: int, told: int) -> None:
    """A prompt longer than `longest` is refused before it is sent, and by the server, which tells its limit."""
    messages = [user("word " * 3000)]
    length = len(renderer.render_ids(messages, add_generation_prompt=True))
    for options, limit, cause in (
        ({}, longest, type(None)),
        ({"max_prompt_len": 100_000}, told, EngineStatusError),
    ):
        with pytest.raises(PromptTooLongError) as caught:
            ask(server, renderer, backend=backend, messages=messages, **options)
        assert (caught.value.prompt_len, caught.value.max_prompt_len) == (length, limit)
        assert isinstance(caught.value.__cause__, cause)


def assert_death(server: EngineServer, renderer: Renderer, backend: Any, begun: Callable[[], bool]) -> None:
    """A server that dies ends the call under way, and the next one, as a broken connection."""

    async def work(way: Any) -> None:
        task = _long_call(way, renderer, backend)
        await until(begun)
        await asyncio.to_thread(server.kill)
        for call in (task, _long_call(way, renderer, backend)):
            with pytest.raises(EngineConnectionError):
                await call

    connected(server, work)
    assert not server.alive


def _long_call(way: Any, renderer: Renderer, backend: Any) -> asyncio.Task[Generation]:
    messages = conversations()["text"]
    call = {"renderer": renderer, "model": MODEL, "messages": messages, "backend": backend}
    return asyncio.create_task(generate(client=way, sampling_params=LONG, **call))


def with_settings(directory: Path, folder: Path, **changes: Any) -> Renderer:
    """A renderer of the same model whose processor has other settings."""
    shutil.copytree(directory, folder)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return Renderer.from_pretrained(folder)
