import PIL.Image
import pytest

from mmrender.content import normalize_messages
from mmrender.content.parts import attach_media
from mmrender.errors import MessageError

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
    picture = PIL.Image.new("RGB", (1, 1))
    filled = attach_media(MESSAGES, images=[picture, {"bytes": b"x", "path": None}], videos=("v.mp4",))
    assert sources(filled) == [picture, "own.png", "v.mp4", b"x"]
    assert sources(MESSAGES) == [None, "own.png", None, None]
    assert [message.role for message in filled] == [message.role for message in MESSAGES]
    assert filled[1].content[1] is MESSAGES[1].content[1]


def test_one_modality_may_be_left_waiting():
    assert sources(attach_media(MESSAGES, images=["1", "2"])) == ["1", "own.png", None, "2"]
    assert sources(attach_media(MESSAGES, videos=["v"])) == [None, "own.png", "v", None]


def test_nothing_to_attach():
    assert attach_media(MESSAGES) == MESSAGES
    assert attach_media(MESSAGES[:1], images=[], videos=[]) == MESSAGES[:1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"images": ["1"]},
            "messages[3].content[0]: no image is left for this part - expected 2 images, got 1. "
            'Each {"type": "image"} part without a source of its own takes one, in order',
        ),
        (
            {"images": ["1", "2", "3"]},
            "images[2]: no part waits for this image - expected 2 images, got 3. "
            'Each {"type": "image"} part without a source of its own takes one, in order',
        ),
        (
            {"videos": []},
            "messages[1].content[3]: no video is left for this part - expected 1 video, got 0. "
            'Each {"type": "video"} part without a source of its own takes one, in order',
        ),
        ({"images": "1"}, "images: images come in a list - expected a list, got '1'"),
        (
            {"images": ["1", None]},
            "images[1]: is not an image - expected a PIL image, numpy array, bytes, pathlib.Path, str (URL or "
            "path) or dict of one of 'bytes', 'path', 'url', 'base64', 'data', got None",
        ),
    ],
)
def test_errors(arguments, text):
    with pytest.raises(MessageError) as caught:
        attach_media(MESSAGES, **arguments)
    assert str(caught.value).removesuffix(".") == text
