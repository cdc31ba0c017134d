"""Conversations and pictures that `bench_render.py` times."""

import random
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from PIL import Image

from mmrender.testing.bench import make_image


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


def make_conversation(case: Case) -> tuple[list[dict[str, Any]], list[Image.Image]]:
    """Return messages that hold decoded pictures, and the pictures."""
    source = random.Random(case.turns)
    words = files("mmrender.testing").joinpath("data", "corpus.txt").read_text("utf-8").split()
    images = [make_image(1024, 1024, seed) for seed in range(case.images)]
    messages: list[dict[str, Any]] = []
    for turn in range(case.turns):
        question = " ".join(source.choices(words, k=_WORDS_USER))
        parts: list[dict[str, Any]] = [{"type": "text", "text": question}]
        if turn < case.images:
            parts.insert(0, {"type": "image", "image": images[turn]})
        messages.append({"role": "user", "content": parts})
        if turn < case.turns - 1:
            answer = " ".join(source.choices(words, k=_WORDS_ASSISTANT))
            messages.append({"role": "assistant", "content": answer})
    return messages, images
