"""Videos: sources and their limits, sampling, pixels and expansions as the reference gives them."""

import importlib.util
import re
import resource
import shutil
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import mmcodecs
from kit import error_of, shown
from mmrender import Renderer
from mmrender.errors import (
    MediaDecodeError,
    MediaError,
    MediaLimitError,
    MessageError,
    MissingDependencyError,
    MMRenderError,
)
from mmrender.media.encoded import ReferenceItem
from mmrender.media.policy import MediaPolicy
from mmrender.media.processors.patches import PatchItem
from mmrender.media.video import open_video
from mmrender.media.wire import item_from_wire, item_to_wire
from mmrender.messages import VideoPart
from reference_processors import expansion_text
from video_cases import (
    VideoReference,
    decoded_by_av,
    encoded_video,
    frames_of,
    video_processor,
)

SMALL = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
FAMILIES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("Qwen2VLVideoProcessor", "Qwen2VLProcessor", {}),
    ("Qwen2VLVideoProcessor", "Qwen2_5_VLProcessor", {"do_sample_frames": True, "fps": 2.0}),
    ("Qwen2VLVideoProcessor", "Qwen2_5_VLProcessor", {"do_sample_frames": True, "num_frames": 7}),
    ("Qwen2VLVideoProcessor", "Qwen2VLProcessor", {"cap_pixels_per_frame": True, "max_video_tokens": 60}),
    ("Qwen2VLVideoProcessor", "Qwen3VLProcessor", {}),
    ("Qwen3VLVideoProcessor", "Qwen3VLProcessor", {}),
    (
        "Qwen3VLVideoProcessor",
        "Qwen3VLProcessor",
        {"fps": None, "max_frames": 20, "cap_pixels_per_frame": True, "max_video_tokens": 6},
    ),
    ("Glm4vVideoProcessor", "Glm4vProcessor", {}),
    ("Glm4vVideoProcessor", "Glm4vProcessor", {"max_duration": 3, "fps": 3}),
    ("Glm46VVideoProcessor", "Glm46VProcessor", {}),
)
few = settings(max_examples=7, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
WHERE = "messages[0].content[0]"


def item_of(processor: Any, part: VideoPart, policy: MediaPolicy | None = None) -> PatchItem:
    with open_video(part, policy or MediaPolicy(), WHERE) as video:
        item = processor.prepare(video).finish()
    assert isinstance(item, PatchItem)
    return item


def outcome(run: Callable[[], Any], refusals: tuple[type[Exception], ...]) -> Any:
    try:
        return run()
    except refusals:
        return None


@pytest.mark.parametrize(("video", "whole", "given_"), FAMILIES)
@given(
    count=st.integers(1, 64),
    sides=st.tuples(st.integers(5, 60), st.integers(5, 60)),
    fps=st.sampled_from([1.0, 12.5, 30.0]),
    is_sampled=st.booleans(),
)
@few
def test_a_video_is_sampled_resized_and_spelled_as_by_the_reference(
    tmp_path, video, whole, given_, count, sides, fps, is_sampled
):
    own = {**SMALL, **given_, "size": {"shortest_edge": 12 * 64, "longest_edge": 40_000}}
    frames = frames_of(count, *sides)
    metadata: dict[str, Any] = {"total_num_frames": count, "fps": fps}
    if is_sampled:
        metadata = {"total_num_frames": 10 * count, "fps": fps}
        metadata["frames_indices"] = [10 * index + index % 7 for index in range(count)]
    part = VideoPart(frames, **{k: tuple(v) if isinstance(v, list) else v for k, v in metadata.items()})
    processor = video_processor(tmp_path, video, whole, own)
    ours = outcome(lambda: item_of(processor, part), (MediaError,))
    reference = VideoReference(video, whole, own)
    refusals = (ValueError, ZeroDivisionError)
    theirs = outcome(lambda: reference.process(frames, metadata, sampled=is_sampled), refusals)
    assert (ours is None) == (theirs is None)
    if ours is None:
        return
    tensors = ours.tensors()
    assert ours.grid == tuple(tensors["video_grid_thw"][0]) == theirs.grid
    assert expansion_text(ours.expansion) == theirs.text
    assert len(ours.frames) == len(theirs.indices) == len(ours.times)
    np.testing.assert_array_equal(tensors["pixel_values_videos"], theirs.pixels, strict=True)
    assert ("second_per_grid_ts" in tensors) == (whole == "Qwen2_5_VLProcessor")
    if whole == "Qwen2_5_VLProcessor":
        assert tensors["second_per_grid_ts"].tolist() == [theirs.seconds]
    again = item_from_wire(mmcodecs.decode(mmcodecs.encode(item_to_wire(ours))))
    assert again == ours
    assert again.tensors("bfloat16").keys() == tensors.keys()


@pytest.mark.parametrize(
    ("codec", "container"), [("libx264", "mp4"), ("libvpx-vp9", "webm"), ("mpeg4", "avi")]
)
def test_frames_of_a_file_are_those_that_decoding_all_of_it_gives(codec, container):
    data = encoded_video(frames_of(45, 48, 64), codec=codec, container=container, fps=25)
    every = decoded_by_av(data)
    chooser = np.random.default_rng(0)
    for count in (1, 3, 8, 45):
        wanted = sorted(chooser.integers(0, 45, count).tolist())
        with open_video(VideoPart(data), MediaPolicy(), WHERE) as video:
            frames = video.sample(lambda timeline, wanted=wanted: wanted)
            found = [image.array for image in frames.images]
        assert (video.timeline.total, video.timeline.fps, video.timeline.duration) == (45, 25.0, 1.8)
        assert frames.timeline.seconds == [index / 25 for index in wanted]
        np.testing.assert_array_equal(found, [every[index] for index in wanted])


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_frames_that_refer_to_others_before_their_key_frame_are_decoded(container):
    groups = {"x264-params": "open-gop=1:keyint=8:min-keyint=8:bframes=3:b-adapt=0:scenecut=0"}
    data = encoded_video(frames_of(40, 32, 48), container=container, stream_options=groups)
    every = decoded_by_av(data)
    for wanted in [[index] for index in range(40)] + [[3, 17, 18, 25, 39], [9, 9, 30]]:
        with open_video(VideoPart(data), MediaPolicy(), WHERE) as video:
            found = [image.array for image in video.sample(lambda _, wanted=wanted: wanted).images]
        np.testing.assert_array_equal(found, [every[index] for index in wanted])


def test_a_cover_is_not_the_video():
    data = encoded_video(frames_of(12, 32, 48), container="matroska", cover=frames_of(1, 8, 8)[0])
    with open_video(VideoPart(data), MediaPolicy(), WHERE) as video:
        assert (video.timeline.total, video.sample().height) == (12, 32)


@pytest.mark.parametrize("options", [{}, {"do_sample_frames": True, "fps": 2.0}])
def test_without_torch_a_video_asks_for_it_by_name(tmp_path, monkeypatch, options):
    processor = video_processor(tmp_path, "Qwen2VLVideoProcessor", "Qwen2VLProcessor", {**SMALL, **options})
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match="a video needs torch, which is not installed"):
        item_of(processor, VideoPart(frames_of(30, 37, 53), fps=10.0))


def test_a_processor_that_samples_nothing_is_named():
    with (
        pytest.raises(MediaDecodeError, match="no frame of the video is sampled"),
        open_video(VideoPart(frames_of(3, 8, 8)), MediaPolicy(), WHERE) as video,
    ):
        video.sample(lambda _: [])


@pytest.mark.parametrize(("codec", "container"), [("libx264", "mp4"), ("libvpx-vp9", "webm")])
def test_a_file_that_is_cut_gives_all_of_its_frames_or_an_error(codec, container):
    options = {"movflags": "faststart"} if container == "mp4" else {}
    data = encoded_video(frames_of(30, 32, 48), codec=codec, container=container, options=options)
    every = decoded_by_av(data)
    refused = 0
    for stop in range(0, len(data), len(data) // 40):
        try:
            with open_video(VideoPart(data[:stop] or b"\0"), MediaPolicy(), WHERE) as video:
                found = [image.array for image in video.sample().images]
        except MediaDecodeError:
            refused += 1
        else:
            np.testing.assert_array_equal(found, every)
    assert refused >= 38


def test_a_forged_duration_is_not_believed(sentence):
    data = encoded_video(frames_of(30, 32, 48))
    for box, place in ((b"mvhd", 20), (b"tkhd", 24), (b"mdhd", 20)):
        at = data.index(box) + place
        for forged in (1, 2**31 - 1):
            other = data[:at] + struct.pack(">I", forged) + data[at + 4 :]
            with open_video(VideoPart(other), MediaPolicy(), WHERE) as video:
                assert (video.timeline.total, video.timeline.fps) == (30, 24.0)
                assert len(list(video.sample().images)) == 30
    data = encoded_video(frames_of(30, 32, 48), codec="libvpx-vp9", container="webm")
    at = data.index(b"\x44\x89\x88") + 3
    with (
        pytest.raises(MediaDecodeError) as caught,
        open_video(VideoPart(data[:at] + struct.pack(">d", 9e9) + data[at + 8 :]), MediaPolicy(), WHERE),
    ):
        pass
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        ("max_pixels", 32 * 48 - 1),
        ("max_frames", 29),
        ("decode_timeout", 1e-3),
        ("max_video_bytes", 10_000),
        ("max_bytes", 100),
    ],
)
def test_limits_hold_for_a_small_file_that_becomes_large(tmp_path, limit, value, sentence):
    data = encoded_video(frames_of(30, 32, 48))
    processor = video_processor(tmp_path, "Qwen2VLVideoProcessor", "Qwen2VLProcessor", SMALL)
    began = time.monotonic()
    problem = error_of(MediaLimitError, item_of, processor, VideoPart(data), MediaPolicy(**{limit: value}))
    text = re.sub(r"got \d+ bytes", "got N bytes", problem)  # an encoder's size may change
    assert text == sentence
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("which", [0, -1])
def test_a_forged_size_of_a_frame_takes_no_memory(which):
    data = bytearray(encoded_video(frames_of(12, 32, 48), codec="libvpx", container="webm"))
    keys = [found.end() for found in re.finditer(rb"\x9d\x01\x2a", data)]
    struct.pack_into("<HH", data, keys[which], 9000, 9000)
    policy = MediaPolicy(max_pixels=10**6)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(MediaError), open_video(VideoPart(bytes(data)), policy, WHERE) as video:
        list(video.sample().images)
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert taken < 50_000  # kilobytes, of 120,000 that such a frame takes


def test_no_file_that_names_others_is_opened():
    pytest.importorskip("av", reason="encoded videos need PyAV (extra `video`)")
    for text in (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", b"ffconcat version 1.0\nfile /etc/passwd\n"):
        with pytest.raises(MediaDecodeError) as caught, open_video(VideoPart(text), MediaPolicy(), WHERE):
            pass
        assert "this is not a video that can be decoded" in str(caught.value)


def test_one_video_is_one_item_however_it_comes(tmp_path):
    processor = video_processor(tmp_path, "Qwen3VLVideoProcessor", "Qwen3VLProcessor", SMALL)
    frames = frames_of(6, 20, 30)
    forms: list[Any] = [
        frames,
        tuple(frames),
        tuple(Image.fromarray(frame) for frame in frames),
        torch.from_numpy(frames),
        np.asfortranarray(frames),
    ]
    known = {item_of(processor, VideoPart(form, fps=2.0)).identity for form in forms}
    timed = VideoPart(frames, times=(0.0, 0.5, 1.0, 1.5, 2.0, 2.5))
    numbered = VideoPart(frames, fps=4.0, frames_indices=(0, 2, 4, 6, 8, 10), total_num_frames=12)
    assert {item_of(processor, part).identity for part in (timed, numbered)} == known
    others = [
        VideoPart(frames, fps=3.0),
        VideoPart(frames[::-1], fps=2.0),
        VideoPart(frames[:-1], fps=2.0),
        VideoPart(frames, times=(0.0, 0.5, 1.0, 1.5, 2.0, 9.0)),
    ]
    found = {item_of(processor, part).identity for part in others}
    assert len(found) == len(others)
    assert not found & known


STILL = np.zeros((2, 8, 9, 3), np.uint8)
NO_VIDEOS = {
    "no frames": VideoPart(()),
    "channels first": VideoPart(np.zeros((2, 3, 8, 9), np.uint8)),
    "floats": VideoPart(torch.zeros(2, 8, 9, 3)),
    "sizes": VideoPart((np.zeros((8, 9, 3), np.uint8), np.zeros((9, 8, 3), np.uint8))),
    "falling times": VideoPart(STILL, times=(1.0, 0.5)),
    "number": VideoPart(STILL, total_num_frames=3),
    "times of a file": VideoPart(b"\x00\x00\x00\x20ftypisom", fps=2.0),
}


@pytest.mark.parametrize("name", NO_VIDEOS)
def test_what_is_no_video_is_refused_by_name(tmp_path, name, sentence):
    processor = video_processor(tmp_path, "Qwen2VLVideoProcessor", "Qwen2VLProcessor", SMALL)
    assert error_of(MMRenderError, item_of, processor, NO_VIDEOS[name]) == sentence


def test_a_video_by_reference_is_resolved_to_the_same_item(tmp_path, tiny_model):
    renderer = Renderer.from_pretrained(tiny_model)
    data = encoded_video(frames_of(6, 40, 56), fps=3)
    rendered = renderer.render([{"role": "user", "content": [{"type": "video", "video": data}]}])
    (item,) = rendered.multi_modal_data.mm_items["video"]
    reference = ReferenceItem.of(item, data, rendered.multi_modal_data.mm_placeholders["video"][0].length)
    resolved = reference.resolve(renderer.media.processor)
    assert (resolved.identity, resolved.expansion) == (item.identity, item.expansion)
    other = ReferenceItem.of(item, encoded_video(frames_of(4, 40, 56)), reference.expected_length)
    with pytest.raises(MediaError, match="processing again gives another identity"):
        other.resolve(renderer.media.processor)


def test_a_conversation_of_images_and_videos(tiny_model):
    renderer = Renderer.from_pretrained(tiny_model, image_backend="torch")
    frames = frames_of(5, 40, 56)
    told = {"fps": 30, "frames_indices": [0, 9, 20, 31, 40], "total_num_frames": 60, "height": 40}
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "video", "video": frames, "video_metadata": told},
                shown(frames[0]),
                {"type": "text", "text": "and"},
                {"type": "video", "video": list(frames), "fps": 2},
            ],
        }
    ]
    rendered = renderer.render(messages)
    videos = rendered.multi_modal_data.mm_items["video"]
    assert [item.modality for item in videos] == ["video", "video"]
    assert videos[0].identity != videos[1].identity
    assert [len(item.times) for item in videos if isinstance(item, PatchItem)] == [5, 5]
    spans = rendered.multi_modal_data.spans(len(rendered))
    assert [span.modality for span in spans] == ["video", "image", "video"]
    assert {span.kind for span in rendered.spans} >= {"video", "image"}
    # The second time nothing is loaded: items come from the cache, and then the memo.
    before = renderer.media.cache.stats if renderer.media is not None else None
    again = renderer.render(messages, add_generation_prompt=True)
    assert again.multi_modal_data.mm_items["video"][0] is videos[0]
    assert renderer.media.cache.stats.misses == before.misses
    with pytest.raises(MessageError, match="unknown key in the metadata of a video"):
        renderer.render([{"role": "user", "content": [{"video": frames, "video_metadata": {"speed": 2}}]}])


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_family_that_is_not_native_asks_for_torchvision_by_name(tmp_path, tiny_model):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "video_preprocessor_config.json").write_text('{"resample": 2}')
    renderer = Renderer.from_pretrained(folder)
    with pytest.raises(MissingDependencyError) as caught:
        renderer.render([{"role": "user", "content": [{"type": "video", "video": frames_of(2, 8, 8)}]}])
    assert caught.value.where == WHERE
    assert str(caught.value).startswith(
        f"{WHERE}: videos of this family need Transformers and torchvision, which cannot be imported"
    )


def test_videos_count_among_the_media_of_a_conversation(shared_models):
    frames = {"type": "video", "video": frames_of(2, 32, 32)}
    renderer = Renderer.from_pretrained(
        shared_models / "qwen3_vl", image_backend="pil", media_policy=MediaPolicy(max_items=2)
    )
    with pytest.raises(MediaLimitError, match="too many media - expected at most 2, got 3"):
        renderer.render([{"role": "user", "content": [frames, frames, frames]}])
