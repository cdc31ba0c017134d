"""What the demonstration talks about: a photograph, a chart, and a calculator."""

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

SYSTEM = "You look at pictures and answer in one sentence."


def load_pictures() -> list[Image.Image]:
    """Return the two pictures that the package ships, decoded: the photograph and the chart."""
    return [_picture(name) for name in ("photo.jpg", "chart.png")]


def _picture(name: str) -> Image.Image:
    data = files("mmrender.testing").joinpath("data", name).read_bytes()
    image = Image.open(BytesIO(data))
    image.load()
    return image


@dataclass(frozen=True)
class Conversation:
    """Messages in Hugging Face form, their pictures in order, and options for `render`."""

    messages: list[dict[str, Any]]
    pictures: list[Image.Image]
    options: dict[str, Any]


def three_turns() -> Conversation:
    """Return a conversation of three user turns, with reasoning, a tool call and its result.

    Its last turn is the user's, and a prompt for the model is made of it.
    """
    photo, chart = load_pictures()
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": [_image(photo), _text("Which animal is this, and where does it stand?")]},
        {
            "role": "assistant",
            "reasoning_content": "Horns, brown coat, and sand behind it.",
            "content": "A cow that stands on a beach.",
        },
        {"role": "user", "content": [_image(chart), _text("What part of June's harvest was March's?")]},
        {
            "role": "assistant",
            "reasoning_content": "The bars say 131 tons in March and 259 in June.",
            "content": "",
            "tool_calls": [_call("divide", top=131, bottom=259)],
        },
        {"role": "tool", "tool_call_id": "call-1", "name": "divide", "content": "0.506"},
        {"role": "assistant", "content": "About half of it: 131 tons against 259."},
        {"role": "user", "content": "And which month was best?"},
    ]
    return Conversation(messages, [photo, chart], {"tools": TOOLS, "add_generation_prompt": True})


def _image(picture: Image.Image) -> dict[str, Any]:
    return {"type": "image", "image": picture}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "call-1", "type": "function", "function": {"name": name, "arguments": arguments}}
