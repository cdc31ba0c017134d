import copy
import pathlib
from typing import Any

import numpy as np
import PIL.Image
import pydantic
import pytest

from mmrender.content.messages import normalize_messages
from mmrender.content.parts import PART_TYPES, normalize_content, normalize_part
from mmrender.errors import MessageError
from mmrender.messages import ImagePart, TextPart, ThinkingPart, VideoPart

URL = "https://host/cat.png"
PICTURE = PIL.Image.new("RGB", (2, 2))
ARRAY = np.zeros((2, 2, 3), dtype=np.uint8)
FRAMES = np.zeros((4, 2, 2, 3), dtype=np.uint8)
PATH = pathlib.Path("cat.png")
BYTES = b"\x89PNG"
ARROW = {"index": None, "image_url": None, "video": None, "fps": None}


def error_of(part: Any) -> str:
    with pytest.raises(MessageError) as caught:
        normalize_messages([{"role": "user", "content": ["x", part]}])
    return str(caught.value).removesuffix(".")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "output_text", "text": "hi", "annotations": [], "logprobs": []},
        {"type": "refusal", "refusal": "hi"},
        {"type": None, "text": "hi"},
        {"type": "text", "text": "hi", "image": None, **ARROW},
        {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "index": 0, "id": "x"},
    ],
)
def test_text(part):
    assert normalize_part(part, "p") == TextPart("hi")


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ({"type": "image", "image": PICTURE}, PICTURE),
        ({"type": "image", "image": ARRAY}, ARRAY),
        ({"type": "image", "image": PATH}, PATH),
        ({"type": "image", "image": BYTES}, BYTES),
        ({"type": "image", "image": bytearray(BYTES)}, BYTES),
        ({"type": "image", "image": memoryview(BYTES)}, BYTES),
        ({"type": "image", "image": {"bytes": BYTES, "path": "cat.png"}}, BYTES),
        ({"type": "image", "image": {"bytes": None, "path": "cat.png"}}, "cat.png"),
        ({"type": "image", "text": None, "image": {"bytes": BYTES, "path": None}, **ARROW}, BYTES),
        ({"type": "image", "path": PATH}, PATH),
        ({"type": "image", "base64": "iVBO"}, "data:application/octet-stream;base64,iVBO"),
        ({"type": "image", "base64": b"iVBO"}, "data:application/octet-stream;base64,iVBO"),
        ({"type": "image", "base64": "data:image/png;base64,iVBO"}, "data:image/png;base64,iVBO"),
        ({"type": "image", "data": "iVBO", "mimeType": "image/png"}, "data:image/png;base64,iVBO"),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBO"}},
            "data:image/png;base64,iVBO",
        ),
        ({"type": "image_url", "image_url": URL, "uuid": "1"}, URL),
        ({"type": "image_pil", "image_pil": PICTURE}, PICTURE),
        ({"image": PICTURE}, PICTURE),
        ({"type": "image", "image": None}, None),
        (PICTURE, PICTURE),
        (ARRAY, ARRAY),
    ],
)
def test_images(part, source):
    before = copy.copy(part)
    result = normalize_part(part, "p")
    assert type(result) is ImagePart
    # Pixels pass through as the same object, so identity is the right question for them.
    assert result.source is source or result.source == source
    assert part is before or np.all(part == before)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "video", "video": FRAMES}, VideoPart(FRAMES)),
        ({"type": "video", "video": "a.mp4", "fps": 2}, VideoPart("a.mp4", 2.0)),
        ({"type": "video", "video": "a.mp4", "fps": np.float32(0.5)}, VideoPart("a.mp4", 0.5)),
        ({"type": "video", "video": [PICTURE, {"url": URL}, BYTES]}, VideoPart((PICTURE, URL, BYTES))),
        ({"type": "video", "path": "a.mp4"}, VideoPart("a.mp4")),
        ({"video": PATH}, VideoPart(PATH)),
    ],
)
def test_videos(part, expected):
    result = normalize_part(part, "p")
    assert type(result) is VideoPart
    assert result.fps == expected.fps
    assert result.source is expected.source or result.source == expected.source


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "hm", "signature": "x"},
        {"type": "reasoning", "text": "hm"},
        {"type": "reasoning", "reasoning": "hm"},
        {"type": "reasoning_text", "text": "hm"},
        {"thinking": "hm"},
    ],
)
def test_thinking(part):
    assert normalize_part(part, "p") == ThinkingPart("hm")


def test_pydantic_parts():
    class Link(pydantic.BaseModel):
        url: str
        detail: str | None = None

    class Part(pydantic.BaseModel):
        type: str
        image_url: Link | None = None
        text: str | None = None

    content = [
        Part(type="image_url", image_url=Link(url=URL)),
        {"type": "image_url", "image_url": Link(url=URL)},
    ]
    assert normalize_content(content, "c") == (ImagePart(URL), ImagePart(URL))


@pytest.mark.parametrize("make", [bytearray, lambda data: memoryview(bytearray(data))])
def test_buffers_are_not_shared_with_the_caller(make):
    buffer = make(BYTES)
    part = normalize_part({"type": "image", "image": buffer}, "p")
    buffer[0] = 0
    assert type(part.source) is bytes
    assert part.source == BYTES


@pytest.mark.parametrize(
    "value",
    [
        PICTURE,
    ],
)
def test_a_single_image_as_content_counts_as_a_list_of_one(value):
    (part,) = normalize_content(value, "c")
    assert part.source is value


SOURCE = (
    "expected a PIL image, numpy array, bytes, pathlib.Path, str (URL or path) or dict of one of 'bytes', "
    "'path', 'url', 'base64', 'data'"
)
ONE_KEY = "expected exactly one of 'bytes', 'path', 'url', 'base64', 'data'"
TYPES = ", ".join(PART_TYPES[:-1]) + f" or {PART_TYPES[-1]}"


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (
            {"type": "input_audio", "input_audio": {}},
            f".type: unknown part type - expected {TYPES}, got 'input_audio'",
        ),
        (
            {"type": "tool_use", "name": "f"},
            f".type: unknown part type - expected {TYPES}, got 'tool_use'. "
            "Pass tool calls as tool_calls of an assistant message",
        ),
        (
            {"type": "document", "source": {}},
            f".type: unknown part type - expected {TYPES}, got 'document'. "
            "Render its pages as images, or pass its text",
        ),
        (
            {"answer": 42},
            ": the part names no type, and its keys do not settle it - expected a 'type' key, "
            "got key 'answer'. To pass a tool's JSON result as text, use json.dumps",
        ),
        (
            None,
            ": cannot be read - expected a part: a dict with a type, a str, a PIL image or a numpy array, "
            "got None",
        ),
        ({"type": "text"}, ": the part holds no text - expected one key of 'text' or 'refusal', got no keys"),
        (
            {"type": "text", "text": "a", "refusal": "b"},
            ": the part holds two texts - expected one key of 'text' or 'refusal', got keys 'text', "
            "'refusal'",
        ),
        (
            {"type": "text", "text": "hi", "image": PICTURE},
            ": the part is text, yet it also holds 'image' - expected a part of one kind",
        ),
        (
            {"type": "image", "image": URL, "url": URL},
            ": the part gives more than one image - expected one source, got keys 'image', 'url'",
        ),
        (
            {"type": "image_url", "image_url": None},
            ": the part has no image - expected a key 'image_url', got no keys. "
            'Write {"type": "image"} for one that is supplied beside the messages',
        ),
        ({"type": "image", "image": 5}, f".image: is not an image - {SOURCE}, got 5"),
        ({"type": "image", "image": ""}, f".image: the image is empty - {SOURCE}, got ''"),
        (
            {"type": "image", "image": {"bytes": None, "path": None}},
            f".image: does not say which image it is - {ONE_KEY}, got no keys",
        ),
        (
            {"type": "image", "source": {"type": "file", "file_id": "f1"}},
            f".source: does not say which image it is - {ONE_KEY}, got key 'file_id' and type 'file'",
        ),
        (
            {"type": "image_url", "image_url": {"url": URL, "min_pixels": 1}},
            f".image_url: does not say which image it is - {ONE_KEY}, got keys 'url', 'min_pixels'",
        ),
        ({"type": "image", "base64": ""}, ".base64: the base64 text is empty"),
        (
            {"type": "image", "image": URL, "min_pixels": 3136},
            ".min_pixels: unknown key in a part - expected the keys of an image part, got 3136. "
            "Remove the key, or set it to None; a processor has the same settings for all parts",
        ),
        (
            {"type": "text", "text": "a", "colour": "red"},
            ".colour: unknown key in a part - expected the keys of a text part, got 'red'. "
            "Remove the key, or set it to None",
        ),
        ({"type": "video", "fps": 0}, ".fps: fps is not a frame rate - expected a number above 0, got 0"),
        (
            {"type": "video", "video": []},
            ".video: is not a video - expected a list of frames"
            + SOURCE.removeprefix("expected a PIL image")
            + ", got list of length 0",
        ),
        ({"type": "video", "video": [URL, 1]}, f".video[1]: is not an image - {SOURCE}, got 1"),
    ],
)
def test_errors(part, text):
    assert error_of(part) == "messages[0].content[1]" + text
