"""Resizing rules as pure arithmetic: `(height, width)` in, `(height, width)` out.

Each function computes what the reference implementation of the same name in Transformers computes, in the
same order of floating-point operations: `floor` and `ceil` of a quotient that is off by one unit in the last
place would move an image by a row of patches.
"""

import math

from mmrender.errors import MediaError

MAX_ASPECT_RATIO = 200


def smart_resize(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return the size that the Qwen2-VL kind of processors resizes an image to.

    Both sides become multiples of `factor`, their product falls within `[min_pixels, max_pixels]` where that
    is possible, and the aspect ratio is kept as well as that allows. Source: `smart_resize` of
    `transformers.models.qwen2_vl`.

    Raises:
        MediaError: One side is over 200 times the other.
    """
    _check_aspect_ratio(height, width)
    resized_height = round(height / factor) * factor
    resized_width = round(width / factor) * factor
    if resized_height * resized_width > max_pixels:
        return _shrunk(height, width, math.sqrt((height * width) / max_pixels), factor)
    if resized_height * resized_width < min_pixels:
        return _grown(height, width, math.sqrt(min_pixels / (height * width)), factor)
    return resized_height, resized_width


def smart_resize_frames(
    frames: int, height: int, width: int, *, factor: int, temporal: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return the size that the GLM-4V kind of processors resizes an image or the frames of a video to.

    The bounds count pixels over all frames; an image counts as `temporal` frames. A side below `factor` is
    scaled up first, and the aspect ratio is checked after that. Source: `smart_resize` of
    `transformers.models.glm4v`.

    Raises:
        MediaError: One side is over 200 times the other, or there are fewer than `temporal` frames.
    """
    if frames < temporal:
        raise MediaError(
            "the video is too short for this model", expected=f"at least {temporal} frames", got=str(frames)
        )
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_aspect_ratio(height, width)
    resized_height = round(height / factor) * factor
    resized_width = round(width / factor) * factor
    volume = round(frames / temporal) * temporal * resized_height * resized_width
    if volume > max_pixels:
        return _shrunk(height, width, math.sqrt((frames * height * width) / max_pixels), factor)
    if volume < min_pixels:
        return _grown(height, width, math.sqrt(min_pixels / (frames * height * width)), factor)
    return resized_height, resized_width


def _shrunk(height: int, width: int, beta: float, factor: int) -> tuple[int, int]:
    return (
        max(factor, math.floor(height / beta / factor) * factor),
        max(factor, math.floor(width / beta / factor) * factor),
    )


def _grown(height: int, width: int, beta: float, factor: int) -> tuple[int, int]:
    return math.ceil(height * beta / factor) * factor, math.ceil(width * beta / factor) * factor


def _check_aspect_ratio(height: int, width: int) -> None:
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise MediaError(
            "the image is too long and thin for this model",
            expected=f"an aspect ratio of at most {MAX_ASPECT_RATIO}",
            got=f"{width}x{height} pixels, a ratio of {ratio:.1f}",
            remedy="Crop or pad it before rendering.",
        )
