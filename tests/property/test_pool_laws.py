"""Rendering is the same from many threads: one pool against a renderer that nobody else uses."""

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrender import Renderer
from mmrender.errors import TemplateError
from mmrender.media.resolve import MediaCache
from mmrender.renderer import RendererPool
from mmrender.testing.conversations import ConversationMaker, sample_images
from mmrender.tokens.rendered import RenderedTokens

THREADS = 16
PICTURES = sample_images(random.Random(11), 5, largest=200)


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> Renderer:
    return Renderer.from_pretrained(tiny_model, image_backend="pil", memo_bytes=0)


def conversations(renderer: Renderer, seed: int, count: int) -> list[tuple[list[Any], dict[str, Any]]]:
    maker = ConversationMaker(renderer.profile, PICTURES, ("<|im_end|>", "<|image_pad|>"), max_turns=3)
    source = random.Random(seed)
    made: list[tuple[list[Any], dict[str, Any]]] = []
    while len(made) < count:
        messages, options = maker.make(source)
        try:
            renderer.render_text(messages, **options)
        except TemplateError:
            continue
        made.append((messages, options))
    return made


def assert_same(rendered: RenderedTokens, expected: RenderedTokens) -> None:
    for name in ("token_ids", "spans", "roles", "tool_names", "text", "rewritten"):
        assert getattr(rendered, name) == getattr(expected, name)
    sidecar, other = rendered.multi_modal_data, expected.multi_modal_data
    assert sidecar.mm_hashes == other.mm_hashes
    assert sidecar.mm_placeholders == other.mm_placeholders
    for item, twin in zip(sidecar.mm_items.get("image", ()), other.mm_items.get("image", ()), strict=True):
        assert item.identity == twin.identity
        np.testing.assert_array_equal(item.tensors()["pixel_values"], twin.tensors()["pixel_values"])


@settings(max_examples=2)
@given(seed=st.integers(0, 1 << 32), cache_bytes=st.sampled_from([1 << 30, 20_000, 0]))
def test_rendering_is_the_same_from_sixteen_threads(
    tiny_model: Path, alone: Renderer, seed: int, cache_bytes: int
) -> None:
    """Fresh tables and caches each time, so that threads meet while these are being filled and emptied."""
    given_ones = conversations(alone, seed, 6)
    expected = [alone.render(messages, **options) for messages, options in given_ones]
    cache = MediaCache(cache_bytes)
    renderer = Renderer.from_pretrained(tiny_model, image_backend="pil", media_cache=cache, memo_bytes=50_000)
    together = threading.Barrier(THREADS)

    def work(number: int) -> list[tuple[int, RenderedTokens]]:
        order = random.Random(number).sample(range(len(given_ones)), len(given_ones))
        together.wait(timeout=60)
        return [(index, pool.render(given_ones[index][0], **given_ones[index][1])) for index in order]

    with RendererPool(renderer, media_threads=2) as pool, ThreadPoolExecutor(THREADS) as executor:
        for results in executor.map(work, range(THREADS)):
            for index, rendered in results:
                assert_same(rendered, expected[index])


@settings(max_examples=3)
@given(seed=st.integers(0, 1 << 32), workers=st.integers(1, 5), queue_size=st.integers(0, 3))
def test_rendering_is_the_same_from_coroutines_of_many_loops(
    tiny_model: Path, alone: Renderer, seed: int, workers: int, queue_size: int
) -> None:
    given_ones = conversations(alone, seed, 5)
    expected = [alone.render(messages, **options) for messages, options in given_ones]
    renderer = Renderer.from_pretrained(tiny_model, image_backend="pil")

    async def main(number: int) -> list[RenderedTokens | BaseException]:
        """Render all, and as many again that are cancelled at some moment."""
        kept = [asyncio.create_task(pool.arender(messages, **options)) for messages, options in given_ones]
        dropped = [asyncio.create_task(pool.arender(messages, **options)) for messages, options in given_ones]
        for index, task in enumerate(dropped):
            asyncio.get_running_loop().call_later(0.001 * (index + number), task.cancel)
        await asyncio.gather(*dropped, return_exceptions=True)
        return await asyncio.gather(*kept)

    def work(number: int) -> list[Any]:
        return asyncio.run(main(number))

    with (
        RendererPool(renderer, workers=workers, queue_size=queue_size) as pool,
        ThreadPoolExecutor(4) as executor,
    ):
        for results in executor.map(work, range(4)):
            for rendered, reference in zip(results, expected, strict=True):
                assert_same(rendered, reference)
        # Every place comes back, those of calls that were cancelled while they ran included.
        asyncio.run(asyncio.wait_for(full_house(pool), timeout=60))


async def full_house(pool: Renderer) -> None:
    await asyncio.gather(*[pool.arender([{"role": "user", "content": "hi"}]) for _ in range(20)])
