"""Videos with sound tracks against the processors of Qwen's omni models: ids, ranges and tensors."""

import io
from collections import Counter
from typing import Any

import numpy as np
import pytest

from audio_cases import RATE, asked, clip, film, heard, qwen2_5_omni, qwen3_omni, with_videos
from kit import noise, shown
from mmrender import Renderer
from mmrender.media.policy import MediaPolicy
from mmrender.media.tracks import load_track
from mmrender.messages import VideoPart
from mmrender.testing.difference import id_difference, range_difference, tensor_difference
from mmrender.testing.reference import ReferenceRendering, has_reference_backend, import_torchvision

av = pytest.importorskip("av")
pytestmark = [
    pytest.mark.skipif(not has_reference_backend("torch"), reason="needs torchvision"),
    pytest.mark.filterwarnings("ignore:__array__ implementation"),  # Transformers makes arrays of tensors
]
FAMILIES = {"qwen2_5_omni": (qwen2_5_omni, 14), "qwen3_omni": (qwen3_omni, 16)}


def reference_of(processor: Any, text: str, parts: list[Any]) -> ReferenceRendering:
    """What the processor makes of a text, with the frames and samples of its media."""
    media: dict[str, list[Any]] = {"images": [], "videos": [], "audio": []}
    metadata, places = [], []
    for part in parts:
        if not isinstance(part, dict):
            continue
        if part["type"] == "image":
            media["images"].append(part["image"])
        elif part["type"] == "audio":
            places.append(None)
            media["audio"].append(np.array(part["audio"]))
        else:
            track = load_track(VideoPart(part["video"]), RATE, MediaPolicy(), "video")
            if track is not None:
                places.append(len(media["videos"]))
                media["audio"].append(np.array(track.samples))
            with av.open(io.BytesIO(part["video"])) as file:
                frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
            media["videos"].append(np.stack(frames))
            count = len(frames)
            metadata.append({"fps": 2.0, "total_num_frames": count, "frames_indices": list(range(count))})
    options: dict[str, Any] = {name: items for name, items in media.items() if items}
    if metadata:
        options |= {"video_metadata": metadata, "do_sample_frames": False, "load_audio_from_video": True}
        options["audio_from_video_indices"] = places
    output = processor(text=text, return_tensors="pt", **options)
    tensors = {name: np.asarray(value) for name, value in output.items() if name != "attention_mask"}
    return ReferenceRendering(text, tensors.pop("input_ids").reshape(-1).tolist(), tensors)


@pytest.mark.parametrize("name", FAMILIES)
def test_sound_tracks_are_the_references(name: str, tmp_path: Any) -> None:
    import_torchvision()
    from transformers import AutoProcessor

    build, patch = FAMILIES[name]
    folder = with_videos(build(tmp_path / name), patch)
    processor: Any = AutoProcessor.from_pretrained(folder)
    renderer = Renderer.from_pretrained(folder, image_backend="torch", use_audio_in_video=True)
    rng = np.random.default_rng(7)
    seen: Counter[str] = Counter()
    for _ in range(25):
        parts: list[Any] = []
        for kind in rng.choice(["film", "film", "silent", "clip", "image"], rng.integers(1, 5)):
            seed = int(rng.integers(6))
            if kind == "image":
                parts.append(shown(noise(seed, 84, 56)))
            elif kind == "clip":
                parts.append(heard(clip(0.3 + seed / 2, seed)))
            else:
                parts.append(film(4 + 2 * seed, 0 if kind == "silent" else 0.7 + 1.3 * seed, seed))
            parts.append("and")
            seen[kind] += 1
        messages = [asked(*parts, "What is heard?")]
        ours = renderer.render(messages, add_generation_prompt=True)
        text = str(renderer.render_text(messages, add_generation_prompt=True))
        theirs = reference_of(processor, text, parts)
        assert id_difference(renderer, ours.token_ids, theirs.ids) is None
        assert range_difference(renderer, ours) is None
        assert tensor_difference(ours, theirs) is None
    assert min(seen.values()) > 3
