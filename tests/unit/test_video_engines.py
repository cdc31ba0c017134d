"""Videos on vLLM's wire: whole, or by time steps where text lies between these."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kit import shown, text
from mmrender import Renderer, Trajectory, generate
from mmrender.client.local import LocalBackend
from mmrender.client.vllm_fields import PixelDtype, WireForm, layout_for
from mmrender.client.vllm_images import dense_spans, features_of
from mmrender.errors import EngineUnsupportedError
from mmrender.media.item import tensor_specs
from mmrender.media.policy import MediaPolicy
from mmrender.media.video import open_video
from mmrender.media.vllm_items import decode_mm_kwargs_item
from mmrender.messages import VideoPart
from mmrender.rollout.client import RendererClient
from mmrender.sidecar import MediaSpan, MultiModalData
from mmrender.testing.memory_transport import MemoryTransport
from mmrender.training import ModelFamily, collate, token_logprobs
from mmrender.trajectory.files import load_trajectories, save_trajectories
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
    features = sent(dense_spans(spans), pixels)
    assert features["mm_hashes"].keys() == {"image"}
    assert len(set(features["mm_hashes"]["image"])) == 3
    runs = [(7 + start, stop - start) for start, stop in span.range.embed_spans or ()]
    assert [(place["offset"], place["length"]) for place in features["mm_placeholders"]["image"]] == runs
    steps = [
        decode_mm_kwargs_item(bytes(data.data)[1:-1].decode()) for data in features["kwargs_data"]["image"]
    ]
    whole = span.item.tensors()["pixel_values_videos"] if pixels == "float32" else span.item.levels()
    np.testing.assert_array_equal(
        np.concatenate([np.asarray(step["pixel_values"].data) for step in steps]), whole
    )


def test_a_video_without_text_goes_whole(tmp_path: Path) -> None:
    (span,) = spans = video_spans(tmp_path, "Qwen2VLVideoProcessor", "Qwen2_5_VLProcessor")
    assert dense_spans(spans) == spans
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
        dense_spans([short])


def test_a_video_that_cannot_go_as_tensors_is_refused_for_the_first_reason(renderer: Renderer) -> None:
    """Its time steps could be sent as encoded images, which is not what the prompt shows."""
    video = {"type": "video", "video": frames_of(5, 64, 96), "times": [0.0, 0.5, 1.0, 1.5, 2.0]}
    prompt = renderer.render([{"role": "user", "content": [video]}], add_generation_prompt=True)
    server = MemoryTransport({"GET /v1/models": {"data": []}})
    with pytest.raises(EngineUnsupportedError, match="the server does not render images"):
        asyncio.run(
            generate(client=server, renderer=renderer, model="m", backend="vllm", prompt_attribution=prompt)
        )


async def test_a_rollout_with_a_video_is_saved_batched_and_scored(tmp_path: Path, tiny_model: Path) -> None:
    """Two turns, the second bridged and with an image; files, samples and batches hold the video."""
    renderer = Renderer.from_pretrained(tiny_model)
    backend = LocalBackend(tiny_model)
    sampling = {"max_tokens": 8, "seed": 3, "temperature": 1.0}
    client = RendererClient(renderer, backend=backend, sampling_params=sampling)
    frames = frames_of(5, 64, 96)
    video = {"type": "video", "video": frames, "times": [0.0, 0.5, 1.0, 1.5, 2.0]}
    messages: list[Any] = [{"role": "user", "content": [video, text("What happens?")]}]
    trajectory = Trajectory("group")
    first = await client.create_completion(messages, trajectory=trajectory)
    question = {"role": "user", "content": [shown(frames[3])]}
    second = await client.create_completion([*messages, first.message, question], trajectory=trajectory)
    assert second.why_rendered is None  # it was bridged
    save_trajectories(tmp_path / "saved.mmc", [trajectory])
    (saved,) = load_trajectories(tmp_path / "saved.mmc")
    (branch,) = saved.branches()
    sample = branch.sample()
    assert [span.modality for span in sample.media_spans] == ["video", "image"]
    batch = collate([sample], ModelFamily.from_config(tiny_model), pad_token_id=0)
    with torch.inference_mode():
        scored = token_logprobs(backend.model(**batch.model_inputs()).logits, batch)
    np.testing.assert_allclose(scored[batch.loss_mask], batch.logprobs[batch.loss_mask], rtol=0, atol=1e-3)
