"""The rollouts of `bench_turn.py`: messages that an environment adds, and the answers of the model.

Needs numpy and Pillow alone, as it is read in the environments of peers too.
"""

import base64
import io
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIDE = 512
TURNS = 16
ROLLOUTS = 64
_ANSWER_WORDS, _RESULT_WORDS = 60, 40
SYSTEM = (
    "You are an agent that looks at screens. Say what you see, and call a tool if you need to look closer."
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "zoom",
            "description": "Enlarge a part of the picture.",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}, "by": {"type": "number"}},
                "required": ["x", "y"],
            },
        },
    }
]


@cache
def _words() -> list[str]:
    corpus = Path(__file__).resolve().parent.parent / "mmrender" / "testing" / "data" / "corpus.txt"
    return corpus.read_text("utf-8").split()


def answers() -> list[str]:
    """Return the texts of the model's answers. The even ones call a tool."""
    texts = []
    for turn in range(TURNS):
        text = " ".join(random.Random(turn).choices(_words(), k=_ANSWER_WORDS))
        if turn % 2 == 0:
            call = json.dumps({"name": "zoom", "arguments": {"x": 31 * turn, "y": 17, "by": 2.5}})
            text = f"{text}\n<tool_call>\n{call}\n</tool_call>"
        texts.append(text)
    return texts


def picture(seed: int) -> bytes:
    """Return a JPEG of a picture of which no two are the same, with about the bytes of a photograph."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 160, SIDE, dtype=np.float32)
    levels = (
        ramp[:, None, None] * rng.random(3, np.float32)
        + ramp[None, ::-1, None] * rng.random(3, np.float32) / 2
    )
    for _ in range(24):
        top, left = rng.integers(0, SIDE - 32, 2)
        height, width = rng.integers(8, 96, 2)
        levels[top : top + height, left : left + width] = rng.integers(0, 200, 3)
    levels += rng.integers(0, 12, levels.shape)
    buffer = io.BytesIO()
    Image.fromarray(levels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def opening(rollout: int) -> list[dict[str, Any]]:
    """Return the messages before the first turn."""
    return [{"role": "system", "content": SYSTEM}, asked(rollout, 0)]


def asked(rollout: int, turn: int) -> dict[str, Any]:
    """Return the user's message before a turn, with a picture as OpenAI's clients send it."""
    url = f"data:image/jpeg;base64,{base64.b64encode(picture(1000 * rollout + turn)).decode()}"
    text = " ".join(random.Random(1000 * rollout + turn).choices(_words(), k=_RESULT_WORDS))
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}],
    }


def following(rollout: int, turn: int, call_ids: list[str]) -> dict[str, Any]:
    """Return the message after a turn: the result of its call, or the user's next picture."""
    if not call_ids:
        return asked(rollout, turn + 1)
    text = " ".join(random.Random(1000 * rollout + turn).choices(_words(), k=_RESULT_WORDS))
    return {"role": "tool", "tool_call_id": call_ids[0], "name": "zoom", "content": text}


def conversations(rollouts: range) -> list[list[dict[str, Any]]]:
    """Return for each rollout the messages that its environment adds. None is made while it is timed."""
    return [
        [following(rollout, turn, ["call"] if turn % 2 == 0 else []) for turn in range(TURNS - 1)]
        for rollout in rollouts
    ]
