"""What every source and mode becomes, and what each bad one says."""

import base64
import io
import os
import threading
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from item_cases import Unseekable
from kit import encoded, error_of, noise
from mmrender.errors import MediaBlockedError, MediaDecodeError, MediaFetchError, MediaLimitError
from mmrender.media import sources
from mmrender.media.load import LoadedImage, load_image
from mmrender.media.policy import MediaPolicy
from mmrender.media.resolve import source_fingerprint
from mmrender.media.sources import read_source

WHERE = "messages[0].content[1]"


PIXELS = np.array(noise(7, 9, 6))
PNG = encoded(Image.fromarray(PIXELS))
BASE64 = base64.b64encode(PNG).decode()


@pytest.fixture
def png_file(tmp_path: Path) -> Path:
    path = tmp_path / "a picture #1.png"
    path.write_bytes(PNG)
    return path


# ------------------------------------------------------------------------------------------ sources


def test_local_files_by_name_need_a_root(png_file, tmp_path, sentence) -> None:
    policy = MediaPolicy(local_roots=(tmp_path,))
    for source in (
        png_file,
        str(png_file),
        png_file.as_uri(),
        png_file.as_uri().replace("file://", "file:"),
        png_file.as_uri().replace("file://", "FILE://localhost"),
    ):
        np.testing.assert_array_equal(load_image(source, policy).array, PIXELS)
    np.testing.assert_array_equal(load_image(png_file).array, PIXELS)
    for source in (str(png_file), png_file.as_uri()):
        problem = error_of(MediaBlockedError, load_image, source, where=WHERE)
        assert problem.replace(str(png_file.parent), "FOLDER") == sentence


def test_roots_hold_against_links_and_dots(png_file: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link.png").symlink_to(png_file)
    (tmp_path / "root2").mkdir()
    (tmp_path / "root2" / "x.png").write_bytes(PNG)
    policy = MediaPolicy(local_roots=(root,))
    outside = [root / "link.png", root / ".." / png_file.name, tmp_path / "root2" / "x.png"]
    for path in outside:
        assert "got a path outside" in error_of(MediaBlockedError, load_image, str(path), policy)
    missing = error_of(MediaBlockedError, load_image, str(tmp_path / "nothing.png"), policy)
    assert "No such file" not in missing
    # A root that is itself a link is its target.
    (tmp_path / "alias").symlink_to(root)
    (root / "in.png").write_bytes(PNG)
    policy = MediaPolicy(local_roots=(tmp_path / "alias",))
    assert load_image(str(root / "in.png"), policy).width == 9


def test_unreadable_files(tmp_path: Path, sentence) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none.png", tmp_path, tmp_path / "pipe", Path("/dev/zero"), tmp_path / "\0"):
        source_fingerprint(path)
        problem = error_of(MediaFetchError, load_image, path, where=WHERE)
        assert problem.replace(str(tmp_path), "FOLDER") == sentence


@pytest.mark.parametrize(
    "url", ["file://host/a.png", "file:a.png", "file:///a.png#x", "file:///a.png?x", "file:///a%00"]
)
def test_file_urls_that_name_no_local_file(url: str, sentence) -> None:
    problem = error_of(MediaFetchError, load_image, url, MediaPolicy(local_roots=(Path("/"),)), where=WHERE)
    assert problem == sentence


def test_streams_are_read_from_the_start_and_put_back(png_file: Path, sentence) -> None:
    memory = io.BytesIO(PNG)
    memory.seek(0, io.SEEK_END)
    assert load_image(memory).width == 9
    assert memory.tell() == len(PNG)
    with png_file.open("rb") as file:
        file.seek(5)
        assert load_image(file).width == load_image(file).width == 9
        assert file.tell() == 5
    with png_file.open("r", encoding="latin-1") as text, pytest.raises(MediaDecodeError) as caught:
        load_image(text, where=WHERE)
    assert str(caught.value) == sentence


NO_IMAGES = {
    "none": None,
    "dict": {"bytes": PNG},
    "empty": b"",
    "html": b" <!DOCTYPE html><p>not found",
    "pointer": b"version https://git-lfs.github.com/spec/v1",
    "other image": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
    "unknown": b"8BPS\0\1",
    "video": b"\x00\x00\x00\x18ftypisom\x00\x00\x00\x00isommp42",
    "base64": "data:image/png;base64," + "A" * 1_000_001,
    "no comma": "data:image/png;base64",
    "no rows": np.zeros((0, 5, 3), np.uint8),
    "no columns": Image.new("RGB", (0, 4)),
    "empty text": "",
    "long text": "x" * 5000,
}


@pytest.mark.parametrize("name", NO_IMAGES)
def test_sources_that_hold_no_image(name: str, sentence) -> None:
    assert error_of(MediaDecodeError, load_image, NO_IMAGES[name], where=WHERE) == sentence


def test_base64_is_strict() -> None:
    for text in (BASE64[:-1], BASE64[:90] + " " + BASE64[90:], BASE64[:90] + "*" + BASE64[91:]):
        assert "the base64 is broken" in error_of(MediaDecodeError, load_image, text)
        with pytest.raises(MediaDecodeError, match="the base64 is broken"):
            load_image(f"data:image/png;base64,{text}")


def test_schemes_are_a_choice(sentence) -> None:
    policy = MediaPolicy(schemes=frozenset({"https"}), local_roots=(Path("/"),))
    for source in (f"data:image/png;base64,{BASE64}", "http://a/b.png", "/b.png"):
        assert error_of(MediaBlockedError, load_image, source, policy, where=WHERE) == sentence
    assert error_of(MediaBlockedError, load_image, "s3://bucket/key?secret=1", where=WHERE) == sentence


def test_byte_limit_of_every_source(png_file: Path, sentence) -> None:
    policy = MediaPolicy(max_bytes=len(PNG) - 1, local_roots=(png_file.parent,))
    encoded_as_percent = "data:," + "".join(f"%{byte:02x}" for byte in PNG)
    sources = (PNG, memoryview(PNG), BASE64, f"data:;base64,{BASE64}", encoded_as_percent,
               png_file, str(png_file), io.BytesIO(PNG), Unseekable(PNG))  # fmt: skip
    texts = {error_of(MediaLimitError, load_image, source, policy, where=WHERE) for source in sources}
    (text,) = texts
    assert text == sentence
    policy = MediaPolicy(max_bytes=len(PNG), local_roots=(png_file.parent,))
    for source in (PNG, BASE64, encoded_as_percent, png_file, Unseekable(PNG)):
        assert load_image(source, policy).width == 9


# ------------------------------------------------------------------------------------------ no needless work


def test_images_and_arrays_are_neither_copied_nor_changed() -> None:
    image = Image.fromarray(PIXELS)
    assert load_image(image).image is image
    loaded = load_image(PIXELS)
    assert np.shares_memory(loaded.array, PIXELS)
    assert PIXELS.flags.writeable
    assert repr(loaded) == "LoadedImage(height=6, width=9)"
    exif = Image.Exif()
    exif[0x0112] = 6
    for mode in ("RGB", "RGBA", "L", "P"):
        opened = Image.open(io.BytesIO(encoded(Image.fromarray(PIXELS).convert(mode), exif=exif)))
        before = opened.copy()
        info = dict(opened.info)
        assert load_image(opened).height == 9
        assert (opened.size, opened.mode) == ((9, 6), mode)
        assert opened.info == info
        assert opened.getexif()[0x0112] == 6
        assert opened.tobytes() == before.tobytes()


def test_lazily_opened_image_shared_by_threads() -> None:
    exif = Image.Exif()
    exif[0x0112] = 8
    data = encoded(noise(7, 300, 400), exif=exif)
    expected = load_image(data).array
    gate = threading.Barrier(8)

    def load(opened: Image.Image) -> LoadedImage:
        gate.wait()
        return load_image(opened)

    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            for loaded in pool.map(load, [Image.open(io.BytesIO(data))] * 8):
                np.testing.assert_array_equal(loaded.array, expected)


# ------------------------------------------------------------------------------------------ arrays


def test_array_channels() -> None:
    grey = PIXELS[:, :, 0]
    for array in (grey, grey[:, :, None]):
        np.testing.assert_array_equal(load_image(array).array, np.dstack([grey] * 3))
    # One image of every (colour, alpha): round(c * a / 255 + 255 - a), as a float computation gives it.
    alpha, colour = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    rgba = np.stack([colour, colour, colour, alpha], axis=-1)
    share = alpha / 255
    onto_white = np.round(share * colour + (1 - share) * 255).astype(np.uint8)
    np.testing.assert_array_equal(load_image(rgba).array, np.dstack([onto_white] * 3))
    np.testing.assert_array_equal(load_image(Image.fromarray(rgba)).array, np.dstack([onto_white] * 3))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 5, 6), "uint8"), ((2, 5, 6, 3), "uint8"), ((5, 6, 3), "float32"), ((5, 6, 3), "int64")],
    ids=["channels first", "video", "float32", "int64"],
)
def test_arrays_that_are_refused(shape: tuple[int, ...], dtype: str, sentence) -> None:
    assert error_of(MediaDecodeError, load_image, np.zeros(shape, dtype), where=WHERE) == sentence


def test_torch_tensor_is_refused_with_the_conversion() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(MediaDecodeError, match=r"got torch.Tensor. Pass a uint8 array of shape \(H, W, 3\)"):
        load_image(torch.zeros(3, 4, 4))


# ------------------------------------------------------------------------------------------ limits and damage


def test_pixel_limit_is_checked_before_decoding(sentence) -> None:
    # A valid header of 50000 x 50000 pixels, and no pixel data at all: decoding would fail in another way.
    header = bytearray(encoded(Image.new("1", (8, 8))))
    header[16:24] = (50_000).to_bytes(4, "big") * 2
    header[29:33] = zlib.crc32(header[12:29]).to_bytes(4, "big")
    assert error_of(MediaLimitError, load_image, bytes(header), where=WHERE) == sentence


@pytest.mark.parametrize("fmt", ["PNG", "JPEG", "WEBP", "AVIF", "GIF", "TIFF", "BMP"])
def test_pixel_limit_of_every_format_and_form(fmt: str) -> None:
    data = encoded(Image.fromarray(PIXELS), fmt)
    for source in (data, Image.open(io.BytesIO(data)), PIXELS):
        assert load_image(source, MediaPolicy(max_pixels=54)).width == 9
        with pytest.raises(MediaLimitError, match="expected at most 53 pixels, got 9x6 = 54"):
            load_image(source, MediaPolicy(max_pixels=53))


def test_pillows_own_limit_plays_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    for fmt in ("PNG", "JPEG", "AVIF", "GIF", "BMP"):
        assert load_image(encoded(Image.fromarray(PIXELS), fmt)).width == 9
    problem = error_of(MediaLimitError, load_image, encoded(Image.fromarray(PIXELS), "WEBP"), where=WHERE)
    assert problem.endswith(
        "If you trust it, raise MediaPolicy(max_pixels=...) and PIL.Image.MAX_IMAGE_PIXELS."
    )


@pytest.mark.parametrize(
    ("fmt", "options"),
    [("PNG", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("WEBP", {}), ("AVIF", {}), ("GIF", {}),
     ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"}), ("BMP", {})],
)  # fmt: skip
def test_truncated_images_are_errors(fmt: str, options: dict[str, Any]) -> None:
    data = encoded(noise(7, 90, 120), fmt, **options)
    whole = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(load_image(data).array, whole)
    np.testing.assert_array_equal(load_image(Image.open(io.BytesIO(data))).array, whole)
    for keep in (len(data) // 3, len(data) // 2, len(data) * 9 // 10):
        problem = error_of(MediaDecodeError, load_image, data[:keep], where=WHERE)
        assert problem.startswith(f"{WHERE}: the {fmt.replace('WEBP', 'WebP')} is damaged or truncated (")
        assert problem.endswith("Check that the file was written and transferred whole.")


def test_nothing_is_decoded_while_pillow_fills_gaps(monkeypatch: pytest.MonkeyPatch, sentence) -> None:
    opened, loaded = Image.open(io.BytesIO(PNG)), Image.fromarray(PIXELS)
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    for source in (PNG, opened):
        assert error_of(MediaDecodeError, load_image, source, where=WHERE) == sentence
    assert load_image(loaded).width == load_image(PIXELS).width == 9


def test_damaged_pixel_data_stays_an_error() -> None:
    data = bytearray(encoded(noise(7, 90, 120)))
    data[2000:2040] = b"\xff\x00" * 20
    assert "the PNG is damaged or truncated" in error_of(MediaDecodeError, load_image, bytes(data))
    shared = Image.open(io.BytesIO(bytes(data)))
    for _ in range(2):
        assert "the PNG is damaged or truncated" in error_of(MediaDecodeError, load_image, shared)


def test_percent_encoded_urls_cost_a_few_times_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_PIECE", 1 << 12)  # a sixteenth, and so is the picture
    data = encoded(noise(7, 240, 200))
    url = "data:image/png," + "".join(f"%{byte:02x}" for byte in data)
    in_base64 = "data:image/png;base64," + "".join(f"%{byte:02x}" for byte in base64.b64encode(data))
    for source in (url, in_base64):
        tracemalloc.start()
        read = read_source(source, MediaPolicy())
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert read == data
        assert peak < 3 * len(source)
