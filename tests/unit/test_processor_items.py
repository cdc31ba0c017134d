import os
import pickle
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from item_cases import PROCESSOR, picture, same_tensors
from kit import error_of
from mmrender.errors import MediaError, MissingDependencyError
from mmrender.media.load import load_image
from mmrender.media.pixels import image_identity, media_identity, raw_pixels, rgb_planes
from mmrender.media.processors.patches import PatchItem, PatchProcessor, smart_resize
from mmrender.sidecar import MediaItem, Repeat


def processor(**changes: Any) -> PatchProcessor:
    return replace(PROCESSOR, **{"min_pixels": 65536, **changes})


@pytest.fixture
def item() -> PatchItem:
    made = processor().process(picture(256, 320))
    assert isinstance(made, PatchItem)
    return made


def test_the_item_of_an_image_has_the_levels_that_its_tensors_are_computed_from(item):
    assert isinstance(item, MediaItem)
    assert (item.size, item.grid) == ((256, 320), (1, 16, 20))
    assert item.expansion == (Repeat("<|image_pad|>", 80),)
    assert not item.frames.flags.writeable
    np.testing.assert_array_equal(item.frames[0], picture(256, 320).array.transpose(2, 0, 1))
    levels = item.levels()
    assert levels.dtype == np.uint8
    table = item.arithmetic.table()
    by_channel = levels.reshape(len(levels), 3, -1)
    values = np.stack([table[channel][by_channel[:, channel]] for channel in range(3)], axis=1)
    tensor = item.tensors()["pixel_values"]
    np.testing.assert_array_equal(values.reshape(levels.shape), tensor)
    tensor[:] = 0  # the caller's own
    assert item.tensors()["pixel_values"].any()
    again = pickle.loads(pickle.dumps(item))
    assert again == item
    assert same_tensors(again, item)


@pytest.mark.parametrize("size", [(1, 1), (7, 3), (300, 500), (2100, 2200)], ids=str)
def test_identity_of_an_image_is_that_of_its_planes(size):
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    expected = media_identity(b"settings", np.ascontiguousarray(pixels.transpose(2, 0, 1)), b"context")
    for given in (pixels, Image.fromarray(pixels)):  # the last size is held in several blocks
        assert image_identity(b"settings", load_image(given), b"context") == expected


_GROWTH = """
import gc, sys
from pathlib import Path
import numpy as np
from PIL import Image
from item_cases import PROCESSOR
from mmrender.media.load import load_image
from dataclasses import replace

resident = lambda: 4096 * int(Path("/proc/self/statm").read_text().split()[1])
pictures = [Image.new("RGB", (3840, 2165), (shade, 0, 0)) for shade in range(4)]
for backend in ("torch", "pil"):
    processor = replace(PROCESSOR, image_backend=backend, max_pixels=1 << 24)
    processor.process(load_image(pictures[0].resize((200, 100))))
    gc.collect()
    before, kept = resident(), []
    for picture in pictures:
        kept.append(processor.process(load_image(picture)))
    items = sum(item.nbytes for item in kept)
    print(items, resident() - before, end=" ")
    kept.clear()
    print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_large_items_take_their_bytes_alone():
    command = [sys.executable, "-c", _GROWTH]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    printed = subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout
    for line in printed.splitlines():
        items, grew, left = map(int, line.split())
        assert items > 4 * 3 * 3840 * 2160 * 0.99
        assert grew < 1.1 * items
        assert left < 0.1 * items
    assert len(printed.splitlines()) == 2


def test_identity_is_of_pixels_and_settings_not_of_the_form():
    image, made = picture(64, 96), processor()
    identity = made.process(image).identity
    assert made.process(load_image(np.asarray(image.image))).identity == identity
    assert made.process(image, num_images=4).identity == identity
    assert processor(min_pixels=3136).process(image).identity != identity
    assert made.process(picture(64, 96, seed=1)).identity != identity
    black = [made.process(load_image(np.zeros((*size, 3), np.uint8))) for size in ((64, 96), (96, 64))]
    assert black[0].identity != black[1].identity


@pytest.mark.parametrize("backend", ["torch", "pil"])
def test_an_array_is_resized_as_the_image_of_it_and_its_own_planes_alone_are_kept(backend):
    made = processor(image_backend=backend)
    image = picture(100, 131)
    assert same_tensors(made.process(image), made.process(load_image(np.asarray(image.image))))
    image = picture(1001, 1501)
    tracemalloc.start()
    prepared = made.prepare(image)
    after_identity, _ = tracemalloc.get_traced_memory()
    item = prepared.finish()
    after_finish, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after_identity < 100_000
    assert after_finish < item.nbytes + 100_000


def test_long_and_thin(sentence):
    assert error_of(MediaError, processor().process, picture(5, 1001)) == sentence
    enlarged = partial(smart_resize, 5, 1001, factor=28, min_pixels=1, max_pixels=9**9, frames=2)
    assert "got 1001x5 pixels, a ratio of 200.2" in error_of(MediaError, enlarged)


@pytest.mark.parametrize("size", [(1, 1), (7, 3), (1024, 1024), (2300, 2000)])
def test_planes_of_small_and_of_many_blocks(size):
    pixels = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(pixels, "RGB")
    assert (raw_pixels(image) is None) == (size[0] * size[1] > 1 << 22)
    np.testing.assert_array_equal(rgb_planes(load_image(image)), pixels.transpose(2, 0, 1))
    np.testing.assert_array_equal(rgb_planes(load_image(pixels)), pixels.transpose(2, 0, 1))


def test_raw_pixels_outlive_their_image():
    pixels = raw_pixels(Image.new("RGB", (512, 512), (1, 2, 3)))
    for _ in range(3):
        Image.new("RGB", (512, 512), (9, 9, 9))
    assert (pixels[..., :3] == (1, 2, 3)).all()


@pytest.mark.parametrize(
    ("mode", "bytes_per_pixel"), [("L", 1), ("P", 1), ("RGBA", 4), ("I", 4), ("F", 4), ("I;16", 2)]
)
def test_raw_pixels_are_whole_in_every_mode(mode, bytes_per_pixel):
    image = Image.new(mode, (5, 3))
    image.putpixel((4, 2), (7, 8, 9, 10) if mode == "RGBA" else 7)
    pixels = raw_pixels(image)
    assert pixels.shape == (3, 5, bytes_per_pixel)
    assert pixels[2, 4].any()
    assert not pixels[:2].any()


def test_without_torch_its_tensors_are_refused_by_name(item, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match='framework="torch" needs torch, which is not installed'):
        item.tensors(framework="torch")
