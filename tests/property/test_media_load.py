"""Laws of media loading: hostile input only raises the named errors; the form of a source does not matter."""

import base64
import io
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from PIL import Image

from item_cases import Unseekable
from kit import encoded
from mmrender.errors import MediaError
from mmrender.media.load import load_image
from mmrender.media.policy import MediaPolicy

WHERE = "messages[0].content[0]"
# Small limits, so that a header that lies about its size costs nothing; nothing may be fetched.
POLICY = MediaPolicy(max_pixels=100_000, max_bytes=200_000, schemes=frozenset({"data", "file"}))
FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "GIF", "TIFF", "LZW", "BMP", "APNG", "PALETTE", "EXIF")

rgb_arrays = npst.arrays(
    np.uint8, npst.array_shapes(min_dims=2, max_dims=2, max_side=12).map(lambda s: (*s, 3))
)


@lru_cache
def sample(name: str) -> bytes:
    pixels = np.random.default_rng(3).integers(0, 256, (24, 31, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    options: dict[str, Any] = {}
    fmt = {"LZW": "TIFF", "APNG": "PNG", "PALETTE": "PNG", "EXIF": "JPEG"}.get(name, name)
    if name == "LZW":
        options["compression"] = "tiff_lzw"
    elif name in ("GIF", "APNG"):
        options.update(save_all=True, append_images=[image.rotate(90), image.rotate(180)], duration=40)
    elif name == "PALETTE":
        image, options["transparency"] = image.quantize(16), 3
    elif name == "EXIF":
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = 6
    return encoded(image, fmt, **options)


def loads_or_names_the_error(source: object) -> None:
    message = WHERE
    try:
        loaded = load_image(source, POLICY, where=WHERE)
        assert loaded.array.shape == (loaded.height, loaded.width, 3)
        assert loaded.image.size == (loaded.width, loaded.height)
    except MediaError as caught:
        message = str(caught)
    assert message.startswith(WHERE)
    assert len(message) < 1000


def damaged(name: str, edits: list[tuple[float, int]], keep: float) -> bytes:
    """A file with some bytes changed and its end cut off."""
    data = bytearray(sample(name))
    for place, value in edits:
        data[int(place * len(data))] = value
    return bytes(data[: int(keep * len(data)) + 1])


def with_header(name: str, place: int, written: bytes) -> bytes:
    data = bytearray(sample(name))
    data[place : place + len(written)] = written
    return bytes(data)


def begun(name: str, data: bytes, keep: int) -> bytes:
    """The true beginning of a file, and something else."""
    return sample(name)[:keep] + data


formats = st.sampled_from(FORMATS)
bytes_ = st.binary(max_size=200)
edits = st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), min_size=1, max_size=8)
schemes = st.sampled_from(["{}", "data:{}", "data:image/png;base64,{}", "file:///{}", "http://{}"])
fields = st.dictionaries(st.sampled_from(["bytes", "path", "x"]), st.none() | st.text() | st.binary())
dtypes = st.sampled_from([np.uint8, np.bool_, np.float32, np.uint16, np.int64])
shapes = npst.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=5)
SOURCES: dict[str, tuple[int, st.SearchStrategy[Any]]] = {
    "bytes": (150, st.binary(max_size=300)),
    "bytes after a true beginning": (150, st.builds(begun, formats, bytes_, st.integers(0, 64))),
    "damaged files": (200, st.builds(damaged, formats, edits, st.floats(0.01, 1))),
    "damaged headers": (
        150,
        st.builds(with_header, formats, st.integers(0, 120), st.binary(min_size=1, max_size=4)),
    ),
    "text": (150, st.builds(str.format, schemes, st.text(max_size=60))),
    "other values": (50, st.none() | st.integers() | st.lists(st.integers(), max_size=3) | fields),
    "arrays": (60, npst.arrays(dtypes, shapes)),
}
"""By name: how many sources are tried, and of which kind."""


@pytest.mark.parametrize("name", SOURCES)
def test_any_source_loads_or_names_the_error(name: str) -> None:
    count, sources = SOURCES[name]
    settings(max_examples=count)(given(sources)(loads_or_names_the_error))()


@settings(max_examples=60)
@given(rgb_arrays)
def test_the_form_of_a_source_does_not_matter(array: np.ndarray[Any, Any]) -> None:
    data = encoded(Image.fromarray(array))
    text = base64.b64encode(data).decode()
    for source in (
        array,
        array[:, ::-1].copy()[:, ::-1],
        Image.fromarray(array),
        Image.open(io.BytesIO(data)),
        data,
        bytearray(data),
        memoryview(b"x".join(bytes([byte]) for byte in data))[::2],
        io.BytesIO(data),
        Unseekable(data),
        text,
        base64.encodebytes(data).decode(),
        f"data:image/png;base64,{text}",
        f"DATA:;BASE64,{base64.encodebytes(data).decode()}",
        "data:image/png;base64," + text.replace("+", "%2B").replace("=", "%3D"),
        "data:image/png," + "".join(f"%{byte:02x}" for byte in data),
    ):
        loaded = load_image(source, POLICY)
        np.testing.assert_array_equal(loaded.array, array)
        np.testing.assert_array_equal(np.asarray(loaded.image), array)
        assert loaded.array.flags.c_contiguous
        assert not loaded.array.flags.writeable
        assert loaded.image.mode == "RGB"
