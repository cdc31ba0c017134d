import pathlib
from typing import Any

import numpy as np
import PIL.Image
import pydantic
import pytest

from mmrender.content.messages import normalize_messages
from mmrender.content.parts import PART_TYPES, attach_media, normalize_content, normalize_part
from mmrender.errors import MessageError
from mmrender.messages import ImagePart, VideoPart

URL = "https://host/cat.png"
PICTURE = PIL.Image.new("RGB", (2, 2))
ARRAY = np.zeros((2, 2, 3), dtype=np.uint8)
PATH = pathlib.Path("cat.png")
BYTES = b"\x89PNG"


def error_of(part: Any) -> str:
    with pytest.raises(MessageError) as caught:
        normalize_messages([{"role": "user", "content": ["x", part]}])
    return str(caught.value).removesuffix(".")


@pytest.mark.parametrize("source", [PICTURE, ARRAY, PATH], ids=type)
def test_objects_pass_through_as_they_are(source):
    parts = [
        {"type": kind, key: source}
        for kind, key in [("image", "image"), ("image_pil", "image_pil"), ("image", "path")]
    ]
    if source is not PATH:
        (whole,) = normalize_content(source, "c")
        assert whole.source is source
        parts.append(source)
    for part in [*parts, {"image": source}]:
        result = normalize_part(part, "p")
        assert type(result) is ImagePart
        assert result.source is source
    assert normalize_part({"video": source}, "p").source is source


def test_videos():
    frames = [PICTURE, {"url": URL}, BYTES]
    assert normalize_part({"video": frames, "fps": 2}, "p") == VideoPart((PICTURE, URL, BYTES), 2.0)
    assert normalize_part({"video": "a.mp4", "fps": np.float32(0.5)}, "p") == VideoPart("a.mp4", 0.5)


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


SOURCE = (
    "expected a PIL image, numpy array, bytes, pathlib.Path, str (URL or path) or dict of one of 'bytes', "
    "'path', 'url', 'base64', 'data'"
)
ONE_KEY = "expected exactly one of 'bytes', 'path', 'url', 'base64', 'data'"
TYPES = ", ".join(PART_TYPES[:-1]) + f" or {PART_TYPES[-1]}"


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "input_audio", "input_audio": {}}, f".type: unknown part type - expected {TYPES}, got "
         "'input_audio'"),
        ({"type": "tool_use", "name": "f"}, f".type: unknown part type - expected {TYPES}, got 'tool_use'. "
         "Pass tool calls as tool_calls of an assistant message"),
        ({"type": "document", "source": {}}, f".type: unknown part type - expected {TYPES}, got 'document'. "
         "Render its pages as images, or pass its text"),
        ({"answer": 42}, ": the part names no type, and its keys do not settle it - expected a 'type' key, "
         "got key 'answer'. To pass a tool's JSON result as text, use json.dumps"),
        (None, ": cannot be read - expected a part: a dict with a type, a str, a PIL image or a numpy array, "
         "got None"),
        ({"type": "text"}, ": the part holds no text - expected one key of 'text' or 'refusal', got no keys"),
        ({"type": "text", "text": "a", "refusal": "b"}, ": the part holds two texts - expected one key of "
         "'text' or 'refusal', got keys 'text', 'refusal'"),
        ({"type": "text", "text": "hi", "image": PICTURE}, ": the part is text, yet it also holds 'image' - "
         "expected a part of one kind"),
        ({"type": "image", "image": URL, "url": URL}, ": the part gives more than one image - expected one "
         "source, got keys 'image', 'url'"),
        ({"type": "image_url", "image_url": None},
         ": the part has no image - expected a key 'image_url', got no keys. "
         'Write {"type": "image"} for one that is supplied beside the messages'),
        ({"type": "image", "image": 5}, f".image: is not an image - {SOURCE}, got 5"),
        ({"type": "image", "image": ""}, f".image: the image is empty - {SOURCE}, got ''"),
        ({"type": "image", "image": {"bytes": None, "path": None}}, ".image: does not say which image it is "
         f"- {ONE_KEY}, got no keys"),
        ({"type": "image", "source": {"type": "file", "file_id": "f1"}},
         f".source: does not say which image it is - {ONE_KEY}, got key 'file_id' and type 'file'"),
        ({"type": "image_url", "image_url": {"url": URL, "min_pixels": 1}},
         f".image_url: does not say which image it is - {ONE_KEY}, got keys 'url', 'min_pixels'"),
        ({"type": "image", "base64": ""}, ".base64: the base64 text is empty"),
        ({"type": "image", "image": URL, "min_pixels": 3136}, ".min_pixels: unknown key in a part - expected "
         "the keys of an image part, got 3136. Remove the key, or set it to None; a processor has the same "
         "settings for all parts"),
        ({"type": "text", "text": "a", "colour": "red"}, ".colour: unknown key in a part - expected the keys "
         "of a text part, got 'red'. Remove the key, or set it to None"),
        ({"type": "video", "fps": 0}, ".fps: fps is not a frame rate - expected a number above 0, got 0"),
        ({"type": "video", "video": []}, ".video: is not a video - expected a list of frames"
         + SOURCE.removeprefix("expected a PIL image") + ", got list of length 0"),
        ({"type": "video", "video": [URL, 1]}, f".video[1]: is not an image - {SOURCE}, got 1"),
    ],
)  # fmt: skip
def test_errors(part, text):
    assert error_of(part) == "messages[0].content[1]" + text


MESSAGES = normalize_messages(
    [
        {"role": "system", "content": "s"},
        {
            "role": "user",
            "content": [{"type": "image"}, "a", {"type": "image", "image": "own.png"}, {"type": "video"}],
        },
        {"role": "assistant", "content": ["b"]},
        {"role": "tool", "content": [{"type": "image"}]},
    ]
)


def sources(messages):
    return [part.source for message in messages for _, part in message.media()]


def test_sources_fill_the_parts_that_wait_in_order():
    picture = PICTURE
    filled = attach_media(MESSAGES, images=[picture, {"bytes": b"x", "path": None}], videos=("v.mp4",))
    assert sources(filled) == [picture, "own.png", "v.mp4", b"x"]
    assert sources(MESSAGES) == [None, "own.png", None, None]
    assert [message.role for message in filled] == [message.role for message in MESSAGES]
    assert filled[1].content[1] is MESSAGES[1].content[1]


def test_one_modality_or_both_may_be_left_waiting():
    assert sources(attach_media(MESSAGES, images=["1", "2"])) == ["1", "own.png", None, "2"]
    assert sources(attach_media(MESSAGES, videos=["v"])) == [None, "own.png", "v", None]
    assert attach_media(MESSAGES) == MESSAGES
    assert attach_media(MESSAGES[:1], images=[], videos=[]) == MESSAGES[:1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"images": ["1"]},
         "messages[3].content[0]: no image is left for this part - expected 2 images, got 1. "
         'Each {"type": "image"} part without a source of its own takes one, in order'),
        ({"images": ["1", "2", "3"]}, "images[2]: no part waits for this image - expected 2 images, got 3. "
         'Each {"type": "image"} part without a source of its own takes one, in order'),
        ({"videos": []}, "messages[1].content[3]: no video is left for this part - expected 1 video, got 0. "
         'Each {"type": "video"} part without a source of its own takes one, in order'),
        ({"images": "1"}, "images: images come in a list - expected a list, got '1'"),
        ({"images": ["1", None]}, f"images[1]: is not an image - {SOURCE}, got None"),
    ],
)  # fmt: skip
def test_media_beside_messages_that_do_not_fit(arguments, text):
    with pytest.raises(MessageError) as caught:
        attach_media(MESSAGES, **arguments)
    assert str(caught.value).removesuffix(".") == text
