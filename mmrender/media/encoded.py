"""Items as encoded images again, for servers that take pictures and process them themselves.

What is sent is chosen so that the server's processing adds nothing: for items of the Qwen2-VL kind the pixels
as they were resized already, lossless. Their sides are multiples of a merged patch, and for such an image the
families' rule (`mmrender.media.processors.geometry`) either gives the same size or one with another number of
tokens. So a server that widens the placeholder to the same number of tokens has resized nothing, and what it
normalises are the item's own pixels, whichever back end it resizes with.
"""

import io
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pybase64
from PIL import ExifTags, Image

from mmrender.errors import MediaError
from mmrender.media.decode import open_image, sniff
from mmrender.media.item_reference import ReferenceItem
from mmrender.media.load import load_image
from mmrender.media.policy import MediaPolicy
from mmrender.media.processors.patches import PatchItem
from mmrender.spans import MediaItem

_COMPRESSION: Final = 1
"""zlib level: on photographs level 6 saves a tenth of the bytes and takes four times as long."""
_VERBATIM: Final = {"PNG": "image/png", "JPEG": "image/jpeg", "WebP": "image/webp"}
"""Formats that are passed on as they came; servers decode them with the same libraries."""


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An encoded image and its MIME type, such as `image/png`."""

    data: bytes = field(repr=False)
    mime: str

    @property
    def data_url(self) -> str:
        """The image as a `data:` URL."""
        return f"data:{self.mime};base64,{pybase64.b64encode_as_string(self.data)}"


class EncodedImages:
    """Encoded images by the identity of their items, the least recently used dropped first. Thread-safe.

    Args:
        max_bytes: Bound of the encoded bytes that are kept; 0 keeps none.
    """

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, type], EncodedImage] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def of(self, item: MediaItem) -> EncodedImage:
        """Return the item as an encoded image; see `encoded_image`."""
        key = (item.identity, type(item))
        with self._lock:
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
                return known
        made = _encode(item)
        with self._lock:
            if key not in self._kept and len(made.data) <= self._max_bytes:
                self._kept[key] = made
                self._nbytes += len(made.data)
            while self._nbytes > self._max_bytes:
                _, dropped = self._kept.popitem(last=False)
                self._nbytes -= len(dropped.data)
        return made


_images = EncodedImages()


def encoded_image(item: MediaItem) -> EncodedImage:
    """Return an item as an encoded image that a server's own processor turns into the same tensors.

    - A `PatchItem` that is an image gives a PNG of its resized pixels. The server must be seen to widen it to
      as many tokens as the item has; then the pixels that it normalises are equal.
    - A `ReferenceItem` that holds bytes gives these where every decoder reads them alike (PNG, JPEG or WebP
      in RGB, without an orientation), and otherwise a PNG of the pixels that mmrender loads from them. The
      server resizes it with its own back end.

    The last 64 MiB of encoded images are kept, so an item of many turns is encoded once.

    Raises:
        MediaError: The item is a video, or holds neither pixels nor an encoded image.
        MediaDecodeError: A reference's bytes are no image.
    """
    return _images.of(item)


def _encode(item: MediaItem) -> EncodedImage:
    if isinstance(item, PatchItem) and item.modality == "image":
        return _png(Image.fromarray(np.ascontiguousarray(item.frames[0].transpose(1, 2, 0)), "RGB"))
    if isinstance(item, ReferenceItem) and isinstance(item.source, bytes):
        return _original(item.source, f"item {item.identity[:12]}")
    raise MediaError(
        "an item cannot be sent as an encoded image",
        where=f"item {item.identity[:12]}",
        expected="an image of the Qwen2-VL kind, or a reference that holds the encoded image",
        got=f"{type(item).__name__} of modality {item.modality!r}",
        remedy="Send tensors, to an engine that takes them, or keep the encoded image as a ReferenceItem",
    )


def _original(data: bytes, where: str) -> EncodedImage:
    mime = _VERBATIM.get(sniff(data) or "")
    if mime is not None:
        opened = open_image(data, MediaPolicy(), where=where)
        upright = opened.getexif().get(ExifTags.Base.Orientation, 1) in (0, 1)
        if opened.mode == "RGB" and upright and not getattr(opened, "is_animated", False):
            return EncodedImage(data, mime)
    return _png(load_image(data, where=where).image)


def _png(image: Image.Image) -> EncodedImage:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=_COMPRESSION)
    return EncodedImage(buffer.getvalue(), "image/png")
