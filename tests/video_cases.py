"""Videos for tests: frames, encoded files, and the reference's video processors without torchvision."""

import importlib
import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from mmrender.media.processor import ProcessorFiles
from mmrender.media.processors.patch_videos import PatchVideoProcessor
from mmrender.media.processors.reference import torchvision_hidden

MODULES = {
    "Qwen2VLVideoProcessor": "qwen2_vl",
    "Qwen3VLVideoProcessor": "qwen3_vl",
    "Glm4vVideoProcessor": "glm4v",
    "Glm46VVideoProcessor": "glm46v",
    "Qwen2VLProcessor": "qwen2_vl",
    "Qwen2_5_VLProcessor": "qwen2_5_vl",
    "Qwen3VLProcessor": "qwen3_vl",
    "Glm4vProcessor": "glm4v",
    "Glm46VProcessor": "glm46v",
}
TOKENS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}


def frames_of(count: int, height: int, width: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Return noise over a gradient that moves, uint8 `(count, height, width, 3)`."""
    rng = np.random.default_rng((seed, count, height, width))
    ramp = np.linspace(0, 255, height * width * 3).reshape(height, width, 3)
    moved = [(ramp + 9 * index) % 256 * 0.7 + rng.integers(0, 76, ramp.shape) for index in range(count)]
    return np.stack(moved).astype(np.uint8)


def encoded_video(
    frames: npt.NDArray[np.uint8],
    *,
    codec: str = "libx264",
    container: str = "mp4",
    fps: int = 24,
    options: Mapping[str, str] | None = None,
    stream_options: Mapping[str, str] | None = None,
    cover: npt.NDArray[np.uint8] | None = None,
    sound: npt.NDArray[np.float32] | None = None,
    sound_codec: str = "pcm_s16le",
) -> bytes:
    """Encode frames with PyAV, a key frame in every ten, with frames between that refer to later ones.

    A cover is a picture in a track before that of the frames. Sound is 16,000 samples a second, one row for
    each channel; MP4 does not take it as PCM.
    """
    av = pytest.importorskip("av", reason="encoded videos need PyAV (extra `video`)")
    with (
        tempfile.NamedTemporaryFile() as handle,  # an index in front is written by reading what was written
        av.open(handle.name, "w", format=container, options=dict(options or {})) as file,
    ):
        picture = None
        if cover is not None:
            picture = file.add_stream("mjpeg", rate=1)
            picture.height, picture.width = cover.shape[:2]
            picture.pix_fmt = "yuvj420p"
        stream = file.add_stream(codec, rate=fps)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt, stream.gop_size = "yuv420p", 10
        if codec == "libx264":
            stream.options = {"bf": "2", **(stream_options or {})}
        if picture is not None:
            file.mux(picture.encode(av.VideoFrame.from_ndarray(cover, format="rgb24")))
            file.mux(picture.encode())
        levels = None if sound is None else np.rint(np.atleast_2d(sound) * 32767).astype(np.int16)
        layout = "stereo" if levels is not None and len(levels) == 2 else "mono"
        track = None if levels is None else file.add_stream(sound_codec, rate=16_000, layout=layout)
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
        if levels is not None:
            block = av.AudioFrame.from_ndarray(levels.T.reshape(1, -1), format="s16", layout=layout)
            block.sample_rate = 16_000
            file.mux(track.encode(block))
            file.mux(track.encode())
        file.close()
        return handle.read()


def decoded_by_av(data: bytes) -> list[npt.NDArray[np.uint8]]:
    """Decode every frame in order, as the reference does."""
    import av

    with av.open(io.BytesIO(data)) as file:
        return [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]


def video_processor(
    folder: Path, video: str, whole: str, settings: Mapping[str, Any], name: str = "video_preprocessor_config"
) -> PatchVideoProcessor:
    """Build our processor from settings files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": whole}))
    (folder / f"{name}.json").write_text(json.dumps({"video_processor_type": video, **settings}))
    found = PatchVideoProcessor.from_files(ProcessorFiles.read(folder), **TOKENS)
    assert found is not None
    return found


class VideoReference:
    """The reference's own methods, run without the constructor that asks for torchvision.

    Only resizing is ours: `interpolate`, which torchvision's calls, and the arithmetic of its normalization.
    """

    def __init__(self, video: str, whole: str, settings: Mapping[str, Any]) -> None:
        self.video, self.whole = self._bare(video, "video_processing"), self._bare(whole, "processing")
        absent = (name for name in self.video.valid_kwargs.__annotations__ if not hasattr(self.video, name))
        self.video.__dict__.update({**dict.fromkeys(absent), **settings})
        edges = {"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
        self.whole.__dict__.update(TOKENS, video_processor=self.video, **edges)

    @staticmethod
    def _bare(name: str, kind: str) -> Any:
        module = MODULES[name]
        with torchvision_hidden():
            found = importlib.import_module(f"transformers.models.{module}.{kind}_{module}")
        cls = getattr(found, name)
        return cls.__new__(cls)

    def process(
        self, frames: npt.NDArray[np.uint8], metadata: Mapping[str, Any], *, sampled: bool
    ) -> SimpleNamespace:
        """Return `indices`, `text`, `grid`, `pixels` and `seconds` of a video."""
        from transformers.image_processing_backends import TorchvisionBackend
        from transformers.image_utils import SizeDict
        from transformers.video_utils import VideoMetadata

        told = VideoMetadata(**metadata)
        indices: Sequence[int] = range(len(frames))
        if not sampled and self.video.do_sample_frames:
            indices = self.video.sample_frames(told)
            told.frames_indices = indices
        elif not sampled:
            told.frames_indices = list(indices)
        levels = torch.from_numpy(frames[np.asarray(indices)]).permute(0, 3, 1, 2).contiguous()[None]
        kept = {name: getattr(self.video, name, None) for name in ("patch_size", "merge_size")}
        temporal = self.video.temporal_patch_size
        before = TorchvisionBackend.resize
        TorchvisionBackend.resize = _interpolated
        try:
            levels = self.video.resize(
                levels,
                SizeDict(**self.video.size),
                resample=3,
                factor=kept["patch_size"] * kept["merge_size"],
                temporal_factor=temporal,
                cap_pixels_per_frame=getattr(self.video, "cap_pixels_per_frame", None),
            )
        finally:
            TorchvisionBackend.resize = before
        mean, std = (torch.tensor(getattr(self.video, f"image_{name}")) * 255.0 for name in ("mean", "std"))
        values = (levels.float() - mean[:, None, None]) / std[:, None, None]
        pixels, *grid = self.video.patchify(values, temporal_patch_size=temporal, **kept)
        inputs = {"video_grid_thw": torch.tensor([grid]), "video_metadata": [told]}
        rate = told.sampled_fps
        return SimpleNamespace(
            indices=[int(index) for index in indices],
            text=self.whole.replace_video_token(inputs, 0),
            grid=tuple(grid),
            pixels=pixels[0].numpy(),
            seconds=np.float32(temporal / rate),
        )


def _interpolated(self: Any, image: torch.Tensor, size: Any, resample: Any) -> torch.Tensor:
    flat = image.flatten(0, 1)
    shape = (size.height, size.width)
    if flat.shape[-2:] != shape:
        flat = torch.nn.functional.interpolate(flat, shape, mode="bicubic", antialias=True)
    return flat.unflatten(0, image.shape[:2])
