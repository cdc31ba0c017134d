"""Small processor directories of two tiled families, as `adapter_models` has of others."""

from pathlib import Path

from adapter_models import HALF, _write


def internvl(directory: Path) -> Path:
    """Tiles of 28 x 28, four tokens each, and a thumbnail."""
    image = {**HALF, "image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 28, "width": 28}}
    image |= {"crop_to_patches": True, "min_patches": 1, "max_patches": 4, "resample": 3}
    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    return _write(
        directory,
        image,
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        [*names.values()],
        extra_special_tokens=names,
    )


def idefics3(directory: Path) -> Path:
    """Tiles of 32 x 32, four tokens each, rows and columns named, and the whole image."""
    image = {**HALF, "image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 96}}
    image |= {
        "max_image_size": {"longest_edge": 32},
        "do_image_splitting": True,
        "do_pad": True,
        "resample": 1,
    }
    tokens = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
    tokens += [f"<row_{row + 1}_col_{column + 1}>" for row in range(6) for column in range(6)]
    return _write(directory, image, {"processor_class": "Idefics3Processor", "image_seq_len": 4}, tokens)
