"""Items as encoded images: the same pixels come out of a server's decoder and processor."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from PIL import Image

from kit import encoded, error_of
from mmrender.errors import MediaError
from mmrender.media.encoded import EncodedImage, ReferenceItem, bitmap, encoded_image
from mmrender.media.item import ProcessedItem
from mmrender.media.load import load_image
from mmrender.media.processors.patches import smart_resize
from mmrender.renderer import Renderer
from mmrender.sidecar import Repeat


def photo(width, height, seed=0, mode="RGB"):
    shape = (height, width) if mode == "L" else (height, width, len(mode))
    values = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return Image.fromarray(values, mode)


@pytest.fixture(scope="module")
def processor(tiny_model):
    return Renderer.from_pretrained(tiny_model).media.processor


@pytest.mark.parametrize("size", [(128, 128), (33, 500), (900, 700), (1, 1), (640, 31)])
@pytest.mark.parametrize("backend", ["torch", "pil"])
def test_the_servers_processing_of_the_image_gives_the_same_tensors(tiny_model, size, backend):
    ours = Renderer.from_pretrained(tiny_model, image_backend=backend).media.processor
    other = Renderer.from_pretrained(tiny_model, image_backend="pil" if backend == "torch" else "torch")
    item = ours.process(load_image(photo(*size)))
    sent = encoded_image(item)
    assert sent.mime == "image/png"
    served = other.media.processor.process(load_image(sent.data))
    assert served.grid == item.grid
    # Nothing was resampled, so not even the back end makes a difference to the levels.
    assert np.array_equal(served.frames, item.frames)
    again = ours.process(load_image(sent.data))
    for name, values in item.tensors("float32").items():
        assert np.array_equal(again.tensors("float32")[name], values)


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([28, 32]),
    st.integers(1, 1 << 21),
    st.integers(1, 1 << 21),
    st.booleans(),
)
def test_a_size_in_whole_tokens_is_kept_or_changes_its_number_of_tokens(high, wide, factor, one, two, frames):
    least, most = sorted((one, two))
    if max(high, wide) > 200 * min(high, wide):
        return
    height, width = high * factor, wide * factor
    resized = smart_resize(
        height, width, factor=factor, min_pixels=least, max_pixels=most, frames=2 if frames else None
    )
    same_count = resized[0] * resized[1] == height * width
    assert same_count == (resized == (height, width))


def test_an_image_is_encoded_once_and_a_data_url_holds_the_bytes(processor):
    item = processor.process(load_image(photo(256, 256, 1)))
    assert encoded_image(item) is encoded_image(processor.process(load_image(photo(256, 256, 1))))
    assert EncodedImage(b"\x00\xff", "image/png").data_url == "data:image/png;base64,AP8="


SMALL = {"size": (16, 24), "grid": (1, 1, 1), "expansion": (Repeat("x", 1),)}


def reference(number, source):
    return ReferenceItem(**SMALL, identity=f"{number:064x}", expected_length=1, source=source)


@pytest.mark.parametrize(
    ("name", "mime"), [("PNG", "image/png"), ("JPEG", "image/jpeg"), ("WEBP", "image/webp")]
)
def test_plain_encoded_images_are_passed_on_as_they_are(name, mime):
    data = encoded(photo(24, 16), fmt=name)
    assert encoded_image(reference(len(data), data)) == EncodedImage(data, mime)


def turned(orientation=6):
    image = photo(24, 16)
    exif = image.getexif()
    exif[0x0112] = orientation
    return encoded(image, fmt="JPEG", exif=exif)


@pytest.mark.parametrize(
    ("number", "data"),
    [
        (1, turned()),
        (2, encoded(photo(24, 16, mode="RGBA"), fmt="PNG")),
        (3, encoded(photo(24, 16, mode="L"), fmt="PNG")),
        (4, encoded(photo(24, 16), fmt="BMP")),
        (5, encoded(photo(24, 16, mode="CMYK"), fmt="JPEG")),
    ],
    ids=["turned", "alpha", "grey", "bmp", "cmyk"],
)
def test_images_that_decoders_disagree_on_are_sent_as_the_pixels_they_stand_for(number, data):
    sent = encoded_image(reference(number, data))
    assert sent.mime == "image/png"
    # A plain decoder, which knows no orientation, sees what mmrender loads.
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(sent.data))), load_image(data).array)


@pytest.mark.parametrize("kind", ["processed", "video", "step of a video", "url"])
def test_what_holds_no_image_is_refused(kind, processor, sentence):
    image = processor.process(load_image(photo(64, 64)))
    item = {
        "processed": ProcessedItem(**SMALL, identity="ab" * 32, parts={}),
        "video": replace(image, modality="video", identity="ab" * 32),
        "step of a video": replace(image, times=(0.0, 0.5), identity="ab" * 32),
        "url": replace(reference(0, "https://images.test/a.png"), identity="ab" * 32),
    }[kind]
    refusal = error_of(MediaError, encoded_image, item)
    assert refusal == sentence
    assert error_of(MediaError, bitmap, item) == refusal
