"""Decode a Pillow image whole or raise, whatever `PIL.ImageFile.LOAD_TRUNCATED_IMAGES` says.

Programs set that flag to survive damaged files; Pillow then fills what is missing with zeros. An image that
is grey from the middle down is a silent error here, so the rule of the flag being off holds always. The flag
is read, never written, since other threads may rely on it.

While it is set, the checksums that stand before the pixels of a PNG are checked here, each tile of
the image is decoded through `_WholeDecoder`, which raises where Pillow would look away, and the file is read
through a function that raises at its early end.
"""

import struct
import zlib
from collections.abc import Callable
from typing import Any

from PIL import Image, ImageFile

_CODEC = "mmrender_whole"


def check_png_header(data: bytes) -> None:
    """Check what stands before the pixel data of a PNG, if the flag makes Pillow skip some of the check.

    Raises:
        OSError: the checksum of a chunk is wrong, or a chunk is cut off.
    """
    if not ImageFile.LOAD_TRUNCATED_IMAGES:
        return
    start, name = 8, b""
    while name != b"IDAT":
        length = int.from_bytes(data[start : start + 4], "big")
        name, end = data[start + 4 : start + 8], start + 8 + length
        checksum = data[end : end + 4]
        if name != b"IDAT" and zlib.crc32(data[start + 4 : end]).to_bytes(4, "big") != checksum:
            raise OSError(f"broken PNG file (bad header checksum in {name!r})")
        start = end + 4


def load_whole(image: Image.Image) -> None:
    """Decode the current frame of `image` in place.

    Raises:
        OSError: the pixel data is truncated or damaged; Pillow's plugins raise other types too.
    """
    tiles = getattr(image, "tile", None)
    if (
        not tiles
        or not ImageFile.LOAD_TRUNCATED_IMAGES
        or not isinstance(image, ImageFile.ImageFile)
        or getattr(image, "use_load_libtiff", False)  # libtiff's errors are raised with the flag on as well
    ):
        _load_or_stay_unloaded(image, tiles)
        return
    image.tile = [tile._replace(codec_name=_CODEC, args=(tile.codec_name, tile.args)) for tile in tiles]
    image.__dict__["load_read"] = _whole_read(image)
    try:
        _load_or_stay_unloaded(image, tiles)
    finally:
        image.__dict__.pop("load_read", None)


def _load_or_stay_unloaded(image: Image.Image, tiles: Any) -> None:
    try:
        image.load()
    except BaseException:
        # Pillow forgets the tiles first and raises then: a second load() would give the half-decoded pixels.
        if isinstance(image, ImageFile.ImageFile):
            image.tile = tiles
        raise


def _whole_read(image: ImageFile.ImageFile) -> Callable[[int], bytes]:
    # The PNG plugin's own reader steps from chunk to chunk. The JPEG plugin's invents an end marker.
    read_chunk: Callable[[int], bytes] | None = (
        getattr(image, "load_read", None) if image.format == "PNG" else None
    )

    def whole(count: int) -> bytes:
        try:
            # `fp` is looked up on each call: some plugins replace it while they load.
            data: bytes = read_chunk(count) if read_chunk else image.fp.read(count)  # type: ignore[union-attr]
        except (IndexError, struct.error):
            data = b""
        if not data:
            raise OSError("image file is truncated")
        return data

    return whole


class _WholeDecoder:
    """A Pillow decoder that stands in for another and raises on its error codes."""

    def __init__(self, mode: str, codec: str, args: Any, *extra: Any) -> None:
        self._inner = Image._getdecoder(mode, codec, args, extra)
        self.pulls_fd = self._inner.pulls_fd

    def setimage(self, im: Any, extents: Any) -> None:
        self._inner.setimage(im, extents)

    def setfd(self, fd: Any) -> None:
        self._inner.setfd(fd)

    def decode(self, buffer: bytes) -> tuple[int, int]:
        consumed, code = self._inner.decode(buffer)
        if code < 0 and (consumed < 0 or self.pulls_fd):
            raise OSError(f"decoder error {code} when reading image file")
        return consumed, code

    def cleanup(self) -> None:
        self._inner.cleanup()


Image.register_decoder(_CODEC, _WholeDecoder)  # type: ignore[arg-type]
