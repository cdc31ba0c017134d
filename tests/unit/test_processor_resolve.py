import base64
import io
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from item_cases import media_part
from kit import encoded, error_of, raised
from mmrender.errors import MediaBlockedError, MediaDecodeError, MediaError, MediaLimitError, MessageError
from mmrender.media.load import LoadedImage
from mmrender.media.policy import MediaPolicy
from mmrender.media.processor import Geometry, MediaProcessor, Prepared
from mmrender.media.resolve import MediaCache, MediaResolver, source_fingerprint
from mmrender.messages import ImagePart, RequestMedia
from mmrender.sidecar import MediaItem, MultiModalData


@dataclass
class Counting(MediaProcessor):
    """A processor that counts what it does; items are the images' sizes and sums."""

    settings_digest: bytes = b"settings"
    prepared: int = 0
    finished: int = 0
    entered: Callable[[], None] = field(default=lambda: None)

    def geometry(self, height: int, width: int, *, num_images: int = 1) -> Geometry:
        raise NotImplementedError

    def prepare(self, loaded: LoadedImage, *, num_images: int = 1) -> Prepared:
        self.prepared += 1
        identity = f"{loaded.array.shape} {loaded.array.tobytes().hex()}"
        identity += f" {num_images}" if self.depends_on_image_count else ""

        def finish() -> MediaItem:
            self.finished += 1
            self.entered()
            return Sized(identity, 100)

        return Prepared(identity, finish)


@dataclass(frozen=True)
class Sized:
    identity: str
    nbytes: int


def png(color: tuple[int, int, int] = (1, 2, 3)) -> bytes:
    return encoded(Image.new("RGB", (4, 4), color))


def resolver(cache: MediaCache | None = None, **policy: Any) -> Any:
    return MediaResolver(Counting(), MediaPolicy(**policy), cache or MediaCache())


def parts(*sources: Any) -> list[RequestMedia]:
    return [media_part(ImagePart(source), f"messages[0].content[{i}]") for i, source in enumerate(sources)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "image.png"
    path.write_bytes(png())
    return path


def test_one_item_for_all_forms_of_one_image_loaded_once(path):
    image = Image.open(path)
    made = resolver()
    items = [item for (item,) in made.resolve(parts(png(), path, image, np.asarray(image), png()))]
    assert all(item is items[0] for item in items)
    assert made.processor.finished == 1
    sources = parts(png((9, 9, 9)), path, Image.new("RGB", (8, 8)))
    made = resolver()
    first = made.resolve(sources)
    assert made.resolve(sources) == first
    assert made.processor.prepared == 3


def test_a_lazily_opened_image_is_loaded_once_in_a_call_and_known_from_then_on():
    image = Image.open(io.BytesIO(png()))
    made = resolver()
    assert source_fingerprint(image) is None
    assert isinstance(image, PngImagePlugin.PngImageFile)
    assert image.tile  # not decoded for its fingerprint
    made.resolve(parts(image, image))
    made.resolve(parts(image))
    assert made.processor.prepared == 1


def test_an_image_changed_in_place_and_a_file_written_again_are_others(path):
    image = Image.new("RGB", (8, 8))
    made = resolver()
    before = made.resolve(parts(image, path))
    image.putpixel((7, 7), (0, 0, 1))
    path.write_bytes(png((2, 2, 2)))
    os.utime(path, ns=(1, 1))
    for (old,), (new,) in zip(before, made.resolve(parts(image, path)), strict=True):
        assert old.identity != new.identity


def test_a_shared_cache_does_not_lend_what_a_policy_forbids():
    cache = MediaCache()
    data = "data:image/png;base64," + base64.b64encode(png()).decode()
    resolver(cache).resolve(parts(data))
    with pytest.raises(MediaBlockedError):
        resolver(cache, schemes=frozenset({"https"})).resolve(parts(data))


def test_errors_name_the_part(sentence):
    assert error_of(MessageError, resolver().resolve, parts(png(), None)) == sentence
    with pytest.raises(MediaDecodeError, match=r"^messages\[0\]\.content\[1\]: "):
        resolver().resolve(parts(png(), b"not an image"))


def test_the_images_of_a_conversation_are_bounded_with_those_of_earlier_turns():
    images = resolver(max_items=3)
    given = parts(*[png((index, 0, 0)) for index in range(3)])
    assert len(images.resolve(given)) == 3
    with pytest.raises(MediaLimitError, match="too many media - expected at most 3, got 4"):
        images.resolve(given[:1], earlier=MultiModalData({"image": ["1"], "video": ["2", "3"]}))


def test_the_number_of_images_is_part_of_the_key_only_where_it_matters():
    made = resolver()
    made.processor.depends_on_image_count = True
    [(alone,)] = made.resolve(parts(png()))
    (together,), _ = made.resolve(parts(png(), png((5, 5, 5))))
    assert alone.identity != together.identity
    [(again,)] = made.resolve(parts(png()), earlier=MultiModalData({"image": ["1"]}))
    assert again is together


def test_fingerprints_see_all_that_pixels_are_made_of():
    image = Image.new("P", (4, 4))
    image.putpalette([0, 0, 0, 255, 0, 0])
    prints = [source_fingerprint(image)]
    image.putpalette([0, 0, 0, 0, 255, 0])
    prints.append(source_fingerprint(image))
    image.info["transparency"] = 0
    prints.append(source_fingerprint(image))
    image.getexif()[0x0112] = 6
    prints.append(source_fingerprint(image))
    assert None not in prints
    assert len(set(prints)) == 4
    grey = Image.frombytes("L", (4, 1), b"abcd"), Image.frombytes("L", (1, 4), b"abcd")
    assert source_fingerprint(grey[0]) != source_fingerprint(grey[1])
    array = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    before = source_fingerprint(array)
    assert source_fingerprint(array.copy()) == before
    assert source_fingerprint(array.reshape(2, 8, 3)) != before
    assert source_fingerprint(array[:, ::-1]) != before
    array[0, 0, 0] = 9
    assert source_fingerprint(array) != before


def test_what_may_change_under_its_name_and_a_frame_of_an_animation_have_no_fingerprint(shared_images):
    for source in (
        "https://example.com/a.png",
        "file:///a.png",
        "a.png",
        io.BytesIO(b"x"),
        Path("/nowhere"),
        3,
    ):
        assert source_fingerprint(source) is None
    with Image.open(shared_images / "progress.gif") as image:
        image.load()
        assert source_fingerprint(image) is None


def prepared(name: str, nbytes: int = 100) -> Prepared:
    return Prepared(name, lambda: Sized(name, nbytes))


def test_least_recently_used_items_go_first_and_are_made_again_from_their_source():
    cache = MediaCache(max_bytes=250)
    for name in "abac":
        cache.get_or_load(name, lambda name=name: prepared(name))
    assert [cache.get(name) is not None for name in "abc"] == [True, False, True]
    stats = cache.stats
    assert (stats.entries, stats.size, stats.evictions, stats.misses, stats.hits) == (2, 200, 1, 3, 3)
    cache.clear()
    assert cache.get("a") is None
    assert cache.stats.size == 0
    cache = MediaCache(max_bytes=100)
    loaded = []

    def load(name: str, nbytes: int = 100) -> Prepared:
        loaded.append(name)
        return prepared(name, nbytes)

    for name in ("a", "b", "a"):
        assert cache.get_or_load(f"source {name}", lambda name=name: load(name)).identity == name
    assert loaded == ["a", "b", "a"]
    cache.clear()
    assert cache.get_or_load(None, lambda: load("c", 101)).identity == "c"
    assert (cache.stats.entries, cache.stats.size) == (0, 0)


def test_threads_that_ask_at_once_load_and_compute_once():
    cache = MediaCache()
    loaded: list[int] = []
    first_is_in, others_wait = threading.Event(), threading.Event()

    def load() -> Prepared:
        loaded.append(1)
        first_is_in.set()
        assert others_wait.wait(60)
        return prepared("a")

    with ThreadPoolExecutor(8) as pool:
        leader = pool.submit(cache.get_or_load, "source", load)
        assert first_is_in.wait(60)
        followers = [pool.submit(cache.get_or_load, "source", load) for _ in range(7)]
        others_wait.set()
        items = [future.result(60) for future in (leader, *followers)]
    assert len(loaded) == 1
    assert all(item is items[0] for item in items)


def test_a_failure_is_the_callers_own():
    cache = MediaCache()
    barrier = threading.Barrier(4)

    def ask(number: int) -> str:
        def fail() -> Prepared:
            raise MediaError("broken", where=f"messages[{number}]")

        barrier.wait(60)
        caught = raised(MediaError, cache.get_or_load, "a", fail)
        return str(caught.where)

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(ask, range(4))) == [f"messages[{number}]" for number in range(4)]
    assert cache.get_or_load("a", lambda: prepared("a")).identity == "a"


def test_a_fingerprint_that_the_caller_took_is_not_taken_again(monkeypatch):
    image = Image.new("RGB", (8, 8))
    made, media = resolver(), parts(image)
    monkeypatch.setattr("mmrender.media.resolve.source_fingerprint", lambda _: pytest.fail("taken again"))
    [(item,)] = made.resolve(media)
    assert made.resolve(media) == [(item,)]
    assert made.processor.prepared == 1
