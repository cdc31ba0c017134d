"""Prompts with videos against what vLLM's own processors make of the same frames.

Part of `make integration-vllm`.
"""

import json
import pickle
import shutil
import subprocess
from typing import Any

import pytest
from PIL import Image

from integration.engine_server import environment_of, needs_tier
from mmrender import Renderer
from mmrender.errors import MediaError
from video_cases import frames_of

pytestmark = [needs_tier("vllm"), pytest.mark.timeout(700)]

FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        "qwen2_5_vl",
        {"model_type": "qwen2_vl"},
        {"video_processor_type": "Qwen2VLVideoProcessor", "processor_class": "Qwen2VLProcessor"},
    ),
    "qwen2_5_vl": ("qwen2_5_vl", {}, {"video_processor_type": "Qwen2VLVideoProcessor"}),
    "qwen3_vl": ("qwen3_vl", {}, {"video_processor_type": "Qwen3VLVideoProcessor"}),
    "qwen3_5": ("qwen3_5", {}, {"video_processor_type": "Qwen3VLVideoProcessor"}),
    "glm4_5v": ("glm4_5v", {}, {"video_processor_type": "Glm4vVideoProcessor"}),
    "glm4_6v": (
        "glm4_5v",
        {"model_type": "glm46v"},
        {"video_processor_type": "Glm46VVideoProcessor", "processor_class": "Glm46VProcessor"},
    ),
}
"""Directory under `shared/models`, changes to its configuration, and its settings for videos, by family."""
BOUNDS = {"shortest_edge": 4096, "longest_edge": 900_000}
MARKS = {"video_start_token_id": "<|begin_of_video|>", "video_end_token_id": "<|end_of_video|>"}


def directory_of(shared_models, folder, name):
    """Copy a model directory, with its settings for videos in a file of their own."""
    source, changes, videos = FAMILIES[name]
    copy = folder / name
    shutil.copytree(shared_models / source, copy, ignore=shutil.ignore_patterns("*preprocessor_config.json"))
    images = json.loads((shared_models / source / "preprocessor_config.json").read_text())
    if whole := videos.get("processor_class"):
        images["processor_class"] = whole
    if name == "glm4_6v":
        images["image_processor_type"] = "Glm46VImageProcessor"
    (copy / "preprocessor_config.json").write_text(json.dumps(images))
    of_both = {key: value for key, value in images.items() if key.endswith(("_size", "_mean", "_std"))}
    settings = {**of_both, "size": BOUNDS, **videos}
    (copy / "video_preprocessor_config.json").write_text(json.dumps(settings))
    config = {**json.loads((copy / "config.json").read_text()), **changes}
    if name.startswith("glm"):
        added = json.loads((copy / "tokenizer.json").read_text())["added_tokens"]
        ids = {token["content"]: token["id"] for token in added}
        config |= {key: ids[token] for key, token in MARKS.items()}
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def conversations():
    """Yield messages with a video and an image, and both as vLLM takes them."""
    image = Image.fromarray(frames_of(1, 70, 80)[0])
    for count, rate in ((count, rate) for count in (1, 2, 5, 24) for rate in (1.0, 12.5, 30.0)):
        frames = frames_of(count, *[(64, 64), (60, 91), (97, 45)][count % 3])
        given = {"total_num_frames": count, "fps": rate}
        sampled = [40 * index + index % 7 for index in range(count)]
        chosen = {"total_num_frames": 40 * count, "fps": rate, "frames_indices": sampled}
        for told in (given, chosen):
            lasting = told["total_num_frames"] / rate
            # Of less than half a second vLLM's copy of GLM-4V's rule names no frame, whose processor takes one.
            if told is given and lasting < 0.5:
                continue
            told = {**told, "duration": lasting}
            parts = [
                {"type": "text", "text": ["a ", "x\n", "", "Ja<"][count % 4] + "seen"},
                {"type": "video", "video": frames, **told},
                {"type": "text", "text": "> 1.0 seconds?"},
                {"type": "image", "image": image},
            ]
            told["frames_indices"] = told.get("frames_indices", list(range(count)))
            told["video_backend"] = "opencv"
            yield [{"role": "user", "content": parts}], image, frames, told


def test_vllm_widens_videos_as_they_are_here(shared_models, tmp_path):
    cases: dict[str, list[Any]] = {}
    expected: dict[str, list[Any]] = {}
    for name in FAMILIES:
        directory = directory_of(shared_models, tmp_path, name)
        renderer = Renderer.from_pretrained(directory, image_backend="torch")
        samples = renderer.media.processor.videos.settings["do_sample_frames"]
        for messages, image, frames, told in conversations():
            given = len(frames) == told["total_num_frames"]
            video = (frames, {**told, "do_sample_frames": given and samples})
            plain = [
                part if part["type"] == "text" else {"type": part["type"]} for part in messages[0]["content"]
            ]
            case = {
                "messages": [{"role": "user", "content": plain}],
                "data": {"image": [image], "video": [video]},
            }
            cases.setdefault(str(directory), []).append(case)
            expected.setdefault(str(directory), []).append(rendered(renderer, messages))
    (tmp_path / "cases").write_bytes(pickle.dumps(cases))
    python = environment_of("MMRENDER_VLLM_ENV", ".venv-vllm")
    command = [python, __file__.replace("test_", ""), tmp_path / "cases", tmp_path / "answer"]
    subprocess.run(list(map(str, command)), check=True, timeout=600)
    answers = json.loads((tmp_path / "answer").read_text())
    for directory, ours in expected.items():
        theirs = [None if "error" in found else found for found in answers[directory]]
        assert theirs == ours, directory
        assert sum(found is not None for found in ours) >= 14


def rendered(renderer, messages):
    """Return our tokens and places of features, or None where the video is refused."""
    try:
        found = renderer.render(messages, add_generation_prompt=True)
    except MediaError:
        return None
    places: dict[str, list[list[int]]] = {}
    for span in found.multi_modal_data.spans(len(found)):
        runs = span.range.embed_spans or ((0, span.range.length),)
        held = [span.start + index for start, stop in runs for index in range(start, stop)]
        places.setdefault(span.modality, []).append(held)
    return {"ids": found.token_ids, "places": places}
