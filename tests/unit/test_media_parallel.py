import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from item_cases import media_part
from kit import error_of
from mmrender.errors import MediaError, ProcessorError
from mmrender.media.policy import MediaPolicy
from mmrender.media.processors.registry import load_processor
from mmrender.media.resolve import MediaCache, MediaResolver, map_shared
from mmrender.messages import ImagePart, VideoPart


def test_without_an_executor_and_for_one_alone_the_calling_thread_works():
    threads: list[int] = []

    def note(one: int) -> int:
        threads.append(threading.get_ident())
        return -one

    assert map_shared(note, [1, 2, 3]) == [-1, -2, -3]
    with ThreadPoolExecutor(2) as executor:
        assert map_shared(note, [4], executor) == [-4]
        assert map_shared(note, [], executor) == []
    assert set(threads) == {threading.get_ident()}


def test_the_work_is_shared_also_in_turn_and_comes_back_in_order():
    together = threading.Barrier(3)

    def meet(one: int) -> int:
        together.wait(timeout=60)  # passes only if three threads are at it
        return one * one

    with ThreadPoolExecutor(2) as executor:
        assert map_shared(meet, [3, 1, 2], executor) == [9, 1, 4]
    with ThreadPoolExecutor(1) as executor:
        nested = map_shared(lambda row: map_shared(abs, row, executor), [[-1, -2], [-3, -4]], executor)
    assert nested == [[1, 2], [3, 4]]


def test_an_executor_that_is_busy_or_was_shut_down_does_not_stall_the_calling_thread():
    release = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        executor.submit(release.wait)
        assert map_shared(abs, [-1, -2, -3], executor) == [1, 2, 3]
        release.set()
    assert map_shared(abs, [-1, -2], executor) == [1, 2]


def test_the_first_error_in_order_is_raised_and_the_rest_not_begun():
    begun: list[int] = []
    second_failed = threading.Event()

    def fail(one: int) -> int:
        begun.append(one)
        if one == 0:
            assert second_failed.wait(timeout=60)
        if one == 1:
            second_failed.set()
        if one < 2:
            raise ValueError(f"number {one}")
        release.wait(timeout=60)
        return one

    release = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        assert "number 0" in error_of(ValueError, map_shared, fail, list(range(50)), executor)
        release.set()
    assert len(begun) <= 3


def resolver(model: Path, executor: ThreadPoolExecutor | None = None, **options: Any) -> MediaResolver:
    processor = load_processor(model, **options)
    assert processor is not None
    return MediaResolver(processor, MediaPolicy(), MediaCache(), executor=executor)


def pictures(count: int) -> list[Image.Image]:
    return [Image.new("RGB", (100 + 30 * index, 90), (index, 7, 9)) for index in range(count)]


def test_a_resolver_with_threads_gives_what_it_gives_without(tiny_model):
    parts = [media_part(ImagePart(image), f"part[{index}]") for index, image in enumerate(pictures(6) * 2)]
    with ThreadPoolExecutor(3) as executor:
        shared = [item for (item,) in resolver(tiny_model, executor).resolve(parts)]
    alone = [item for (item,) in resolver(tiny_model).resolve(parts)]
    assert [item.identity for item in shared] == [item.identity for item in alone]
    for one, other in zip(shared, alone, strict=True):
        assert one.expansion == other.expansion
        np.testing.assert_array_equal(one.tensors()["pixel_values"], other.tensors()["pixel_values"])
    assert shared[:6] == shared[6:]


def test_the_error_is_that_of_the_first_part_that_fails(tiny_model):
    sources = [*pictures(2), b"broken", b"broken too", *pictures(2)]
    parts = [media_part(ImagePart(source), f"part[{index}]") for index, source in enumerate(sources)]
    with ThreadPoolExecutor(3) as executor, pytest.raises(MediaError) as caught:
        resolver(tiny_model, executor).resolve(parts)
    assert caught.value.where == "part[2]"


def test_a_video_is_refused_by_name_before_anything_is_loaded(tmp_path, tiny_model, sentence):
    images_alone = resolver(tiny_model)
    images_alone.processor.videos = None
    with pytest.raises(ProcessorError) as caught:
        images_alone.resolve([media_part(VideoPart(tmp_path / "nothing.mp4"), "video")])
    assert str(caught.value) == sentence
