"""Photographs from a folder, for parity runs."""

from pathlib import Path

from PIL import Image

from mmrender.errors import InputError
from mmrender.media.load import load_image
from mmrender.media.policy import MediaPolicy

_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".tif", ".tiff", ".avif"}


def load_pictures(folder: Path) -> list[Image.Image]:
    """Load every image file of a folder as RGB.

    Raises:
        InputError: There is no such folder.
        MediaError: One of the files cannot be read.
    """
    if not folder.is_dir():
        raise InputError("no such folder", where=str(folder))
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in _SUFFIXES)
    return [load_image(file, MediaPolicy(), where=file.name).image for file in files]
