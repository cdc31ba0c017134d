import pathlib

import numpy as np
import PIL.Image
import pydantic
import pytest

from kit import error_of
from mmrender.content.messages import normalize_messages
from mmrender.content.parts import attach_media, normalize_content, normalize_part
from mmrender.errors import MessageError
from mmrender.messages import AudioPart, ImagePart, VideoPart

URL = "https://host/cat.png"
PICTURE = PIL.Image.new("RGB", (2, 2))
ARRAY = np.zeros((2, 2, 3), dtype=np.uint8)
PATH = pathlib.Path("cat.png")
BYTES = b"\x89PNG"
SAMPLES = np.zeros(8, np.float32)


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


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "audio", "audio": "a.wav"}, AudioPart("a.wav")),
        ({"type": "audio", "url": URL}, AudioPart(URL)),
        ({"type": "audio", "path": PATH}, AudioPart(PATH)),
        ({"type": "audio_url", "audio_url": {"url": URL}}, AudioPart(URL)),
        (
            {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
            AudioPart("data:wav;base64,UklGRg=="),
        ),
        ({"audio": BYTES}, AudioPart(BYTES)),
        ({"type": "audio"}, AudioPart(None)),
    ],
)
def test_encoded_audio(part, expected):
    assert normalize_part(part, "p") == expected


@pytest.mark.parametrize(
    "part",
    [
        {"type": "audio", "audio": SAMPLES, "sampling_rate": 8000.0},
        {"type": "audio", "audio": (SAMPLES, np.int64(8000))},
        {"type": "audio", "audio": {"array": SAMPLES, "sampling_rate": 8000, "path": "x.wav"}},
    ],
)
def test_samples_with_their_rate(part):
    result = normalize_part(part, "p")
    assert result.source is SAMPLES
    assert result.sampling_rate == 8000
    assert type(result.sampling_rate) is int


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


ERRORS = {
    "unknown type": {"type": "hologram", "hologram": {}},
    "a tool call": {"type": "tool_use", "name": "f"},
    "a document": {"type": "document", "source": {}},
    "no type": {"answer": 42},
    "None": None,
    "no text": {"type": "text"},
    "two texts": {"type": "text", "text": "a", "refusal": "b"},
    "two kinds": {"type": "text", "text": "hi", "image": PICTURE},
    "two images": {"type": "image", "image": URL, "url": URL},
    "no image": {"type": "image_url", "image_url": None},
    "a number": {"type": "image", "image": 5},
    "an empty image": {"type": "image", "image": ""},
    "an empty record": {"type": "image", "image": {"bytes": None, "path": None}},
    "a file id": {"type": "image", "source": {"type": "file", "file_id": "f1"}},
    "a setting in a record": {"type": "image_url", "image_url": {"url": URL, "min_pixels": 1}},
    "empty base64": {"type": "image", "base64": ""},
    "a setting": {"type": "image", "image": URL, "min_pixels": 3136},
    "unknown key": {"type": "text", "text": "a", "colour": "red"},
    "fps": {"type": "video", "fps": 0},
    "times": {"type": "video", "times": [-1]},
    "frames_indices": {"type": "video", "frames_indices": [0.5]},
    "total_num_frames": {"type": "video", "total_num_frames": 1.5},
    "duration": {"type": "video", "duration": "long"},
    "unknown metadata": {"type": "video", "video_metadata": {"codec": "h264"}},
    "an empty video": {"type": "video", "video": []},
    "a frame": {"type": "video", "video": [URL, 1]},
    "no audio": {"type": "input_audio", "input_audio": {}},
    "a list of samples": {"type": "audio", "audio": [0.0, 0.5]},
    "an empty audio": {"type": "audio", "audio": b""},
    "a sampling rate": {"type": "audio", "audio": SAMPLES, "sampling_rate": 0.5},
    "a rate beside an array": {"type": "audio", "audio": (SAMPLES, None, 1)},
    "two audios": {"type": "audio", "audio": URL, "url": URL},
    "a setting of audio": {"type": "audio", "audio": URL, "n_mels": 80},
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case, sentence):
    assert (
        error_of(MessageError, normalize_messages, [{"role": "user", "content": ["x", ERRORS[case]]}])
        == sentence
    )


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


def test_sources_fill_the_parts_that_wait_in_order_and_of_each_modality():
    picture = PICTURE
    filled = attach_media(MESSAGES, images=[picture, {"bytes": b"x", "path": None}], videos=("v.mp4",))
    assert sources(filled) == [picture, "own.png", "v.mp4", b"x"]
    assert sources(MESSAGES) == [None, "own.png", None, None]
    assert [message.role for message in filled] == [message.role for message in MESSAGES]
    assert filled[1].content[1] is MESSAGES[1].content[1]
    assert sources(attach_media(MESSAGES, images=["1", "2"])) == ["1", "own.png", None, "2"]
    assert sources(attach_media(MESSAGES, videos=["v"])) == [None, "own.png", "v", None]
    assert attach_media(MESSAGES) == MESSAGES
    assert attach_media(MESSAGES[:1], images=[], videos=[]) == MESSAGES[:1]


MISFITS = {
    "too few images": {"images": ["1"]},
    "too many images": {"images": ["1", "2", "3"]},
    "too few videos": {"videos": []},
    "no list": {"images": "1"},
    "None": {"images": ["1", None]},
}


@pytest.mark.parametrize("case", MISFITS)
def test_media_besides_messages_that_do_not_fit(case, sentence):
    assert error_of(MessageError, attach_media, MESSAGES, **MISFITS[case]) == sentence


def test_audio_is_attached_with_its_rate():
    messages = normalize_messages([{"role": "user", "content": [{"type": "audio"}, {"type": "audio"}]}])
    (message,) = attach_media(messages, audio=[(SAMPLES, 8000), "a.wav"])
    first, second = message.content
    assert (first.source is SAMPLES, first.sampling_rate) == (True, 8000)
    assert second == AudioPart("a.wav")
    assert error_of(MessageError, attach_media, messages, audio=["a.wav"]) == (
        "messages[0].content[1]: fewer audio than audio parts without a source - expected 2 audio, got 1. "
        'Each {"type": "audio"} part without a source takes one, in order'
    )
