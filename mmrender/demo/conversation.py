"""The demonstration's conversation: a photograph, a chart, and a calculator."""

from dataclasses import dataclass
from importlib.resources import files
from io import BytesIO
from typing import Any

from PIL import Image

_NUMBERS = {"top": {"type": "number"}, "bottom": {"type": "number"}}
_DIVIDE = {
    "name": "divide",
    "description": "Divide one number by another.",
    "parameters": {"type": "object", "properties": _NUMBERS, "required": ["top", "bottom"]},
}
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
    folder = files("mmrender.testing").joinpath("data")
    pictures = [
        Image.open(BytesIO(folder.joinpath(name).read_bytes())) for name in ("photo.jpg", "chart.png")
    ]
    for picture in pictures:
        picture.load()
    return list(pictures)


def user_turn(text: str, *pictures: Image.Image) -> dict[str, Any]:
    """Return a user message that shows pictures and then asks."""
    shown = [{"type": "image", "image": picture} for picture in pictures]
    return {"role": "user", "content": [*shown, {"type": "text", "text": text}]}


def three_turns() -> Conversation:
    """Return three user turns with reasoning, a tool call and its result; the last turn is the user's."""
    photo, chart = load_pictures()

    def answer(content: str, thought: str, **fields: Any) -> dict[str, Any]:
        return {"role": "assistant", "reasoning_content": thought, "content": content, **fields}

    call = {"id": "call-1", "type": "function", "function": {"name": "divide", "arguments": ARGUMENTS}}
    messages = [
        SYSTEM,
        user_turn("Which animal is this, and where is it?", photo),
        answer("A cow on a beach.", "Horns, brown coat, and sand behind it."),
        user_turn("What part of June's harvest was March's?", chart),
        answer("", "The bars say 131 tons in March and 259 in June.", tool_calls=[call]),
        {"role": "tool", "tool_call_id": "call-1", "name": "divide", "content": "0.506"},
        {"role": "assistant", "content": "About half of it: 131 tons against 259."},
        user_turn("And which month was best?"),
    ]
    tools = [{"type": "function", "function": _DIVIDE}]
    return Conversation(messages, [photo, chart], {"tools": tools, "add_generation_prompt": True})
