"""Images and videos decoded in bounded processes: the same items, the same errors, and an end to what takes too much."""

import io
import pickle
from functools import cache

import numpy as np
import pytest
from PIL import Image

from kit import error_of, shown
from mmrender.errors import MediaDecodeError, MediaLimitError
from mmrender.media.load import load_image
from mmrender.media.policy import MediaPolicy
from mmrender.media.video import open_video
from mmrender.messages import VideoPart
from mmrender.processes import BoundedProcesses
from mmrender.renderer import Renderer
from video_cases import encoded_video, frames_of

PIXELS = np.random.default_rng(0).integers(0, 255, (60, 90, 4), np.uint8)


@pytest.fixture(scope="module")
def policy():
    with BoundedProcesses(cpu_seconds=20) as processes:
        yield MediaPolicy(max_pixels=10_000, processes=processes)


def saved(image_format, mode="RGB", **options):
    file = io.BytesIO()
    Image.fromarray(PIXELS).convert(mode).save(file, image_format, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        saved("PNG", "RGBA"),
        saved("JPEG"),
        saved("JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0\0\0\0\0"),
        saved("WebP", "RGBA", lossless=True),
        saved("GIF", "P"),
    ],
    ids=["png", "jpeg", "rotated", "webp", "gif"],
)
def test_pixels_are_those_decoded_here(data, policy):
    there, here = load_image(data, policy), load_image(data)
    assert np.array_equal(there.array, here.array)
    assert (there.height, there.width) == (here.height, here.width) == here.array.shape[:2]


def test_items_are_those_decoded_here(policy, tiny_model):
    messages = [{"role": "user", "content": [shown(saved("PNG"))]}]
    there = Renderer.from_pretrained(tiny_model, image_backend="pil", media_policy=policy).render(messages)
    here = Renderer.from_pretrained(tiny_model, image_backend="pil").render(messages)
    assert there == here
    assert there.multi_modal_data.mm_hashes == here.multi_modal_data.mm_hashes


@pytest.mark.parametrize(
    ("data", "kind", "problem"),
    [
        (saved("PNG")[:200], MediaDecodeError, "the PNG is damaged or truncated"),
        (b"no image", MediaDecodeError, "this is not an image"),
        (saved("PNG") * 1000, None, ""),
    ],
)
def test_errors_are_those_of_decoding_here(data, kind, problem, policy):
    if kind is None:
        assert load_image(data, policy).width == 90
        return
    with pytest.raises(kind, match=problem) as there:
        load_image(data, policy, where="messages[0]")
    assert str(there.value) == error_of(kind, load_image, data, where="messages[0]")


def test_the_policy_holds_in_the_process(policy):
    file = io.BytesIO()
    Image.new("RGB", (200, 200)).save(file, "PNG")
    assert "at most 10000 pixels" in error_of(MediaLimitError, load_image, file.getvalue(), policy)


@cache
def large():
    """A picture of 144 MB."""
    file = io.BytesIO()
    Image.new("RGBA", (6000, 6000)).save(file, "PNG", compress_level=1)
    return file.getvalue()


@pytest.mark.parametrize(
    "limits", [{"cpu_seconds": 0.05}, {"memory_bytes": 100 << 20}], ids=["time", "memory"]
)
def test_what_takes_too_much_is_ended_by_name_and_the_next_image_is_decoded(limits):
    data, small = large(), saved("PNG")
    with BoundedProcesses(**limits) as processes:
        policy = MediaPolicy(processes=processes)
        with pytest.raises(
            MediaLimitError, match=r"the process that decoded the file was ended|little memory"
        ):
            load_image(data, policy, where="messages[0]")
        if "memory_bytes" in limits:
            assert load_image(small, policy).width == 90


def test_a_video_is_that_decoded_here(policy):
    data = encoded_video(frames_of(12, 32, 48))

    def frames(under):
        with open_video(VideoPart(data), under, "video") as video:
            sampled = video.sample(lambda _: [0, 3, 3, 9])
            return video.timeline, [image.array.tolist() for image in sampled.images]

    assert frames(policy) == frames(MediaPolicy())


def test_a_pickled_policy_starts_processes_of_its_own(policy):
    other = pickle.loads(pickle.dumps(policy))
    with other.processes:
        assert other.processes is not policy.processes
        assert load_image(saved("PNG"), other).width == 90
