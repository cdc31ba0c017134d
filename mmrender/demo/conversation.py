"""The demonstration's conversation: a photograph, a chart, and a calculator."""

from dataclasses import dataclass
from importlib.resources import files
from io import BytesIO
from typing import Any

from PIL import Image

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "divide",
            "description": "Divide one number by another.",
            "parameters": {
                "type": "object",
                "properties": {"top": {"type": "number"}, "bottom": {"type": "number"}},
                "required": ["top", "bottom"],
            },
        },
    }
]
SYSTEM = {"role": "system", "content": "You look at pictures and answer in one sentence."}
ARGUMENTS = {"top": 131, "bottom": 259}
CALLING_MESSAGE = 4
"""Index of the message that calls the tool."""


@dataclass(frozen=True)
class Conversation:
    """Messages in Hugging Face form, their pictures in order, and options for `render`."""

    messages: list[Any]
    pictures: list[Image.Image]
    options: dict[str, Any]


def load_pictures() -> list[Image.Image]:
    """Return the photograph and the chart that the package ships, decoded."""
    pictures: list[Image.Image] = []
    for name in ("photo.jpg", "chart.png"):
        data = files("mmrender.testing").joinpath("data", name).read_bytes()
        pictures.append(Image.open(BytesIO(data)))
        pictures[-1].load()
    return pictures


def user_turn(text: str, *pictures: Image.Image) -> dict[str, Any]:
    """Return a user message that shows pictures and then asks."""
    shown = [{"type": "image", "image": picture} for picture in pictures]
    return {"role": "user", "content": [*shown, {"type": "text", "text": text}]}


def three_turns() -> Conversation:
    """Return three user turns with reasoning, a tool call and its result; the last turn is the user's."""
    photo, chart = load_pictures()
    call = {"id": "call-1", "type": "function", "function": {"name": "divide", "arguments": ARGUMENTS}}
    messages: list[dict[str, Any]] = [
        SYSTEM,
        user_turn("Which animal is this, and where is it?", photo),
        {
            "role": "assistant",
            "reasoning_content": "Horns, brown coat, and sand behind it.",
            "content": "A cow on a beach.",
        },
        user_turn("What part of June's harvest was March's?", chart),
        {
            "role": "assistant",
            "reasoning_content": "The bars say 131 tons in March and 259 in June.",
            "content": "",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": "call-1", "name": "divide", "content": "0.506"},
        {"role": "assistant", "content": "About half of it: 131 tons against 259."},
        user_turn("And which month was best?"),
    ]
    return Conversation(messages, [photo, chart], {"tools": TOOLS, "add_generation_prompt": True})
