"""Conversations and pictures that the benchmarks time."""

import random
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
from PIL import Image

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A conversation whose last turn is the user's; one picture in each of the first `images` user turns."""

    name: str
    turns: int
    images: int


CASES = (
    Case("1 turn, no image", 1, 0),
    Case("1 turn, one 1024²", 1, 1),
    Case("4 turns, four 1024²", 4, 4),
    Case("16 turns, no image", 16, 0),
    Case("16 turns, four 1024²", 16, 4),
)
LARGE = (3840, 2160)
_WORDS_USER, _WORDS_ASSISTANT = 75, 200
_WORDS = files("mmrender.testing").joinpath("data", "corpus.txt").read_text("utf-8").split()


def make_conversation(case: Case) -> tuple[Messages, list[Image.Image]]:
    """Return messages that hold decoded pictures, and the pictures."""
    source = random.Random(case.turns)
    images = [make_image(1024, 1024, seed) for seed in range(case.images)]
    messages: Messages = []
    for turn in range(case.turns):
        question = " ".join(source.choices(_WORDS, k=_WORDS_USER))
        parts: list[dict[str, Any]] = [{"type": "text", "text": question}]
        if turn < case.images:
            parts.insert(0, {"type": "image", "image": images[turn]})
        messages.append({"role": "user", "content": parts})
        if turn < case.turns - 1:
            answer = " ".join(source.choices(_WORDS, k=_WORDS_ASSISTANT))
            messages.append({"role": "assistant", "content": answer})
    return messages, images


def conversation(turns: int, seed: int, *, system: bool) -> Messages:
    """Return a conversation of words that ends with the user's turn; all have the same system prompt."""
    source = random.Random(seed)
    messages: Messages = []
    if system:
        messages.append({"role": "system", "content": " ".join(random.Random(0).choices(_WORDS, k=600))})
    for turn in range(turns):
        messages.append({"role": "user", "content": " ".join(source.choices(_WORDS, k=_WORDS_USER))})
        if turn < turns - 1:
            messages.append(
                {"role": "assistant", "content": " ".join(source.choices(_WORDS, k=_WORDS_ASSISTANT))}
            )
    return messages


def make_image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return noise over a gradient: neither constant, which flatters caches, nor unlike a photograph."""
    rng = np.random.default_rng((width, height, seed))
    ramp = np.linspace(0, 200, height * width * 3, dtype=np.float32).reshape(height, width, 3)
    noise = rng.integers(0, 56, ramp.shape, dtype=np.uint8)
    return Image.fromarray(ramp.astype(np.uint8) + noise)
