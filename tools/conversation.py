"""The conversation that `check_package.py` renders in two environments, and how each reports it."""

import hashlib
import json
from importlib.resources import files
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

IMAGE_TOKEN = "<|image_pad|>"
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Answer in one sentence."},
    {
        "role": "user",
        "content": [
            {"type": "image"},
            {"type": "text", "text": "What stands on the beach?\n\nNaïve guesses count: 牛?"},
        ],
    },
    {"role": "assistant", "content": "A white cow.", "reasoning_content": "Four legs, two horns."},
    {"role": "user", "content": "Where does it look?"},
]


def load_picture() -> Image.Image:
    """Open the photograph that the package ships."""
    return Image.open(BytesIO(files("mmrender.testing").joinpath("data", "photo.jpg").read_bytes()))


def with_picture(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the photograph in the place of each image."""
    return [{**message, "content": _filled(message["content"])} for message in messages]


def _filled(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [{**part, "image": load_picture()} if part["type"] == "image" else part for part in content]


def print_result(token_ids: list[int], pixels: npt.NDArray[Any]) -> None:
    """Print ids and pixels as JSON, the pixels by shape, dtype and digest."""
    digest = hashlib.sha256(np.ascontiguousarray(pixels).tobytes()).hexdigest()
    result = {
        "token_ids": token_ids,
        "pixel_shape": list(pixels.shape),
        "pixel_dtype": str(pixels.dtype),
        "pixel_digest": digest,
    }
    print(json.dumps(result))
