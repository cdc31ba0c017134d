"""The processor of images and the family of models that benchmarks of samples, files and batches share."""

from mmrender.media.levels import PixelArithmetic
from mmrender.media.processors.patches import PatchLayout, PatchProcessor
from mmrender.training import ModelFamily

IMAGE_ID, PAD_ID = 90, 0
PROCESSOR = PatchProcessor(
    name="Qwen2VLImageProcessor",
    image_backend="pil",
    image_token="<|image_pad|>",
    video_token="<|video_pad|>",
    layout=PatchLayout(16, 2, 2),
    arithmetic=PixelArithmetic((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255, "pil"),
    min_pixels=32 * 32,
    max_pixels=2048 * 2048,
    counts_frames=False,
)
FAMILY = ModelFamily.from_config(
    {"model_type": "qwen3_vl", "image_token_id": IMAGE_ID, "vision_config": {"spatial_merge_size": 2}}
)
