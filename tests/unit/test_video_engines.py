"""Videos on vLLM's wire: whole, or by time steps where text lies between these."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmcodecs.vllm import decode_mm_kwargs_item
from mmrender.client.vllm_images import PixelDtype, WireForm, features_of, in_runs, layout_for
from mmrender.errors import EngineUnsupportedError
from mmrender.media.item import tensor_specs
from mmrender.media.policy import MediaPolicy
from mmrender.media.video import open_video
from mmrender.messages import VideoPart
from mmrender.spans import MediaSpan, MultiModalData
from training_cases import item_tokens
from video_cases import frames_of, video_processor

SMALL = {"patch_size": 4, "size": {"shortest_edge": 512, "longest_edge": 6400}, "image_mean": [0.5] * 3}


def video_spans(folder: Path, video: str, whole: str) -> list[MediaSpan]:
    processor = video_processor(folder, video, whole, SMALL)
    part = VideoPart(frames_of(5, 30, 40), times=(0.0, 1.0, 2.0, 3.0, 4.5))
    with open_video(part, MediaPolicy(), "video") as opened:
        item = processor.prepare(opened).finish()
    ids, placeholder = item_tokens(item)
    return MultiModalData.of([(placeholder.shifted(7), item)]).spans(len(ids) + 7)


def sent(spans: list[MediaSpan], pixels: PixelDtype) -> dict[str, Any]:
    forms = {
        span.item.identity: WireForm(layout_for(tensor_specs(span.item), modality=span.item.modality), pixels)
        for span in spans
    }
    features: dict[str, Any] = features_of(spans, forms)["features"]
    return features


@pytest.mark.parametrize("pixels", ["float32", "uint8"])
def test_time_steps_between_text_go_as_images(tmp_path: Path, pixels: PixelDtype) -> None:
    (span,) = spans = video_spans(tmp_path, "Qwen3VLVideoProcessor", "Qwen3VLProcessor")
    features = sent(in_runs(spans), pixels)
    assert features["mm_hashes"].keys() == {"image"}
    assert len(set(features["mm_hashes"]["image"])) == 3
    runs = [(7 + start, stop - start) for start, stop in span.range.embed_spans or ()]
    assert [(place["offset"], place["length"]) for place in features["mm_placeholders"]["image"]] == runs
    steps = [
        decode_mm_kwargs_item(bytes(data.data)[1:-1].decode()) for data in features["kwargs_data"]["image"]
    ]
    whole = span.item.tensors()["pixel_values_videos"] if pixels == "float32" else span.item.levels()  # type: ignore[attr-defined]
    np.testing.assert_array_equal(
        np.concatenate([np.asarray(step["pixel_values"].data) for step in steps]), whole
    )


def test_a_video_without_text_goes_whole(tmp_path: Path) -> None:
    (span,) = spans = video_spans(tmp_path, "Qwen2VLVideoProcessor", "Qwen2_5_VLProcessor")
    assert in_runs(spans) == spans
    features = sent(spans, "uint8")
    (data,) = features["kwargs_data"]["video"]
    item = decode_mm_kwargs_item(bytes(data.data)[1:-1].decode())
    assert item.keys() == {"pixel_values_videos", "video_grid_thw", "second_per_grid_ts"}
    assert np.asarray(item["pixel_values_videos"].data).dtype == np.uint8
    expected = span.item.tensors()["second_per_grid_ts"]
    np.testing.assert_array_equal(np.asarray(item["second_per_grid_ts"].data).reshape(-1), expected)


def test_a_video_that_holds_no_frames_is_refused(tmp_path: Path) -> None:
    (span,) = video_spans(tmp_path, "Glm4vVideoProcessor", "Glm4vProcessor")
    short = span._replace(range=type(span.range)(7, span.range.length, (span.range.embed_spans or ())[:1]))
    with pytest.raises(EngineUnsupportedError, match="loses which tokens of a video hold features"):
        in_runs([short])
