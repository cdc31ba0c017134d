"""What tests of every room share: pictures, messages, errors and waiting.

pytest and Hypothesis are imported where they are used: processes that tests start need neither.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import random
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from hypothesis import strategies as st

Kind = type[BaseException] | tuple[type[BaseException], ...]


def noise(seed: int = 0, width: int = 96, height: int = 64) -> Image.Image:
    """A picture whose every pixel differs, the same for equal arguments."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels, "RGB")


def blocks(seed: int = 0, width: int = 128, height: int = 128) -> Image.Image:
    """A picture of sixteen colours with edges, the same for equal arguments."""
    return noise(seed, 4, 4).resize((width, height), Image.Resampling.NEAREST)


def encoded(image: Image.Image, fmt: str = "PNG", **options: Any) -> bytes:
    """The bytes of an image file."""
    out = io.BytesIO()
    image.save(out, fmt, **options)
    return out.getvalue()


def data_url(image: Image.Image) -> str:
    """A `data:` URL of the picture as PNG."""
    return "data:image/png;base64," + base64.b64encode(encoded(image)).decode()


def text(content: str) -> dict[str, Any]:
    """A part of text."""
    return {"type": "text", "text": content}


def shown(image: Any) -> dict[str, Any]:
    """A part with an image, from any source."""
    return {"type": "image", "image": image}


def user(words: str, *images: Any) -> dict[str, Any]:
    """A user's message: images, then text. A message without images has a string as its content."""
    return {"role": "user", "content": [*map(shown, images), text(words)] if images else words}


def assistant(content: Any = "This.", **fields: Any) -> dict[str, Any]:
    """A message of the assistant."""
    return {"role": "assistant", "content": content, **fields}


def sources() -> st.SearchStrategy[random.Random]:
    """Sources of randomness: `make test` draws seeds, which is quick, and `make fuzz` draws that shrink."""
    from hypothesis import settings
    from hypothesis import strategies as st

    return st.randoms(use_true_random=settings.get_current_profile_name() == "fixed")


def conversations(*arguments: Any, **options: Any) -> st.SearchStrategy[Any]:
    """Messages and options for `render` of the kinds that a template takes; arguments of `ConversationMaker`."""
    from mmrender.testing.conversations import ConversationMaker

    return sources().map(ConversationMaker(*arguments, **options).make)


def raised(kind: Kind, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
    """The error that a call raises."""
    import pytest

    with pytest.raises(kind) as caught:
        call(*arguments, **options)
    return caught.value


def error_of(kind: Kind, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> str:
    """The sentence of the error that a call raises."""
    return str(raised(kind, call, *arguments, **options))


async def raised_by(kind: Kind, awaitable: Awaitable[Any]) -> Any:
    """The error that an awaitable raises."""
    import pytest

    with pytest.raises(kind) as caught:
        await awaitable
    return caught.value


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until a condition of this event loop holds; the limit is for what hangs."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has, below the range from which the kernel gives out its own.

    A server may take many seconds to bind its port, and a connection made meanwhile must not be given that one.
    """
    for _ in range(200):
        port = random.SystemRandom().randint(
            20_000, 32_000
        )  # two runs side by side must not try the same ones
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port between 20000 and 32000")


def media_inputs(data: Any, length: int) -> dict[str, Any]:
    """The media arguments of a Qwen-VL model for a sidecar: patches, grids, and the kinds of `length` tokens."""
    import torch

    from mmrender.sidecar import mm_token_type_ids

    spans = data.spans(length)
    tensors = [span.item.tensors("float32", framework="torch") for span in spans]
    keys = {key for entry in tensors for key in entry}
    joined = {key: torch.cat([entry[key] for entry in tensors if key in entry]) for key in keys}
    return {**joined, "mm_token_type_ids": torch.from_numpy(mm_token_type_ids(spans, length))[None]}
