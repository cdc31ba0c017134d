"""Items as encoded images: for servers with a processor of their own, and a reference in place of tensors."""

import io
import struct
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
import pybase64
from blake3 import blake3
from PIL import Image

from mmrender.caching import LRUCache
from mmrender.errors import MediaError, located
from mmrender.media.item import Item
from mmrender.media.load import Coding, load_image, open_image, orientation_of
from mmrender.media.pixels import picture_of, rgb_planes
from mmrender.media.policy import MediaPolicy
from mmrender.media.processor import MediaProcessor
from mmrender.media.processors.patches import PatchItem
from mmrender.media.sources import sniff
from mmrender.messages import UNKNOWN_PARTS
from mmrender.sidecar import Count, Framework, MediaItem, TensorDtype

_PNG_COMPRESSION: Final = 1
"""zlib level: on photographs level 6 saves a tenth of the bytes and takes four times as long."""
_BITMAP_HEADER: Final = struct.Struct("<2sIHHI IiiHHIIiiII")
"""Header of a Windows bitmap file and of its image, 54 bytes."""
_VERBATIM: Final = {"PNG": "image/png", "JPEG": "image/jpeg", "WebP": "image/webp"}
"""Formats that are passed on unchanged. Servers decode them with the same libraries."""


class ReferenceItem(Item, frozen=True, eq=False, kw_only=True, tag="reference"):
    """One item without tensors: for servers that process images, and trainers that process items again.

    It holds the encoded image, video or clip or its URL, and the expected result of processing it, so two
    sides that process differently are detected instead of trained on.

    Attributes:
        identity: Of the item that processing `source` must produce; 64 hex digits.
        expected_length: Number of tokens of the placeholder range in the prompt.
        source: The encoded image, video or clip, or its URL.
    """

    expected_length: Count
    source: bytes | str

    @classmethod
    def of(cls, item: MediaItem, source: bytes | str, expected_length: int) -> "ReferenceItem":
        """Return the reference to an item of `source`."""
        return cls(
            identity=item.identity,
            size=item.size,
            grid=tuple(item.grid),
            expansion=item.expansion,
            expected_length=expected_length,
            source=source,
            modality=item.modality,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded image or of the URL."""
        return len(self.source)

    def tensors(self, dtype: TensorDtype = "float32", *, framework: Framework = "numpy") -> dict[str, Any]:
        """Raise: a reference has no tensors until it is processed.

        Raises:
            MediaError: Always.
        """
        raise MediaError(
            "an item by reference has no tensors",
            where=f"item {self.identity[:12]}",
            expected=f"{framework} tensors of {dtype}",
            got="a URL" if isinstance(self.source, str) else f"{len(self.source)} encoded bytes",
            remedy="Process it first: item.resolve(processor)",
        )

    def resolve(
        self, processor: MediaProcessor, policy: MediaPolicy | None = None, *, num_images: int = 1
    ) -> MediaItem:
        """Load and process the source, and compare the item with the expected one.

        Args:
            processor: The model's, with the settings of the sampling side.
            policy: Limits of loading. See `mmrender.media.policy`.
            num_images: Number of images in the conversation, this one included.

        Raises:
            MediaError: It cannot be loaded, or becomes an unexpected item.
            ProcessorError: The model does not take media of this modality.
        """
        part = msgspec.structs.replace(UNKNOWN_PARTS[self.modality], source=self.source)
        where = f"item {self.identity[:12]}"
        item = processor.load_part(part, policy or MediaPolicy(), where, num_images=num_images).finish()
        for name in ("identity", "grid", "expansion"):
            expected, got = getattr(self, name), getattr(item, name)
            if expected != got:
                raise MediaError(
                    f"processing again gives another {name}",
                    where=where,
                    expected=str(expected),
                    got=str(got),
                    remedy="Sample and train with the same image, processor settings and image back end",
                )
        return item


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An encoded image and its MIME type, such as `image/png`."""

    data: bytes | bytearray = field(repr=False)
    mime: str

    @property
    def data_url(self) -> str:
        """The image as a `data:` URL."""
        return f"data:{self.mime};base64,{pybase64.b64encode_as_string(self.data)}"

    @property
    def image(self) -> Image.Image:
        """The image, for processors of others."""
        return Image.open(io.BytesIO(self.data))

    @property
    def json_url(self) -> bytes:
        """The `data:` URL as a JSON text."""
        return b"".join([b'"data:', self.mime.encode(), b";base64,", pybase64.b64encode(self.data), b'"'])


_encoded: LRUCache[tuple[str, type], EncodedImage] = LRUCache(64 << 20, size_of=lambda image: len(image.data))


def encoded_image(item: MediaItem) -> EncodedImage:
    """Return an item as an encoded image that a server's own processor turns into the same tensors.

    - For a `PatchItem` of an image: a PNG of its resized pixels. Families resize an image of these sides to
      the same size or to another number of tokens, so a server that expands it to the item's number of tokens
      has resized nothing.
    - For a `ReferenceItem` with bytes: the bytes, if every decoder reads them equally (PNG, JPEG or WebP in
      RGB, without an orientation), else a PNG of the pixels that mmrender loads from them. The server resizes
      it with its own back end.

    The last 64 MiB of encoded images are kept, so an item of many turns is encoded once.

    Raises:
        MediaError: The item is a video, or has neither pixels nor an encoded image.
        MediaDecodeError: A reference's bytes are not an image.
    """
    with located(f"item {item.identity[:12]}"):
        return _encoded.get_or_compute((item.identity, type(item)), lambda: _encode(item))


def _encode(item: MediaItem) -> EncodedImage:
    if isinstance(item, PatchItem) and is_encodable(item):
        return _png(picture_of(item.frames[0]))
    if isinstance(item, ReferenceItem) and isinstance(item.source, bytes) and is_encodable(item):
        mime = _VERBATIM.get(sniff(item.source) or "")
        if mime is not None:
            opened = open_image(item.source, MediaPolicy())
            is_plain = opened.mode == "RGB" and not getattr(opened, "is_animated", False)
            if is_plain and orientation_of(opened) is None:
                return EncodedImage(item.source, mime)
        return _png(load_image(item.source).image)
    raise MediaError(
        "an item cannot be sent as an encoded image",
        expected="an image of the Qwen2-VL kind, or a reference with the encoded image",
        got="a time step of a video"
        if isinstance(item, PatchItem) and item.modality == "image"
        else f"{type(item).__name__} of modality {item.modality!r}",
        remedy="Send tensors, to an engine that takes them, or keep the encoded image as a ReferenceItem",
    )


def bitmap(item: MediaItem) -> EncodedImage:
    """Return an item as `encoded_image` does, with a `PatchItem` as an uncompressed BMP.

    For servers that are sent an image once: a PNG has a third of the bytes and takes fifty times as long, and
    Pillow's bitmap takes three times as long. The result is not kept.

    Raises:
        MediaError: As for `encoded_image`.
    """
    if not isinstance(item, PatchItem) or not is_encodable(item):
        return encoded_image(item)
    planes = item.frames[0]
    _, height, width = planes.shape
    stride = -(-3 * width // 4) * 4  # rows are whole words
    start, size = _BITMAP_HEADER.size, stride * height
    data = bytearray(start + size)
    _BITMAP_HEADER.pack_into(
        data, 0, b"BM", start + size, 0, 0, start, 40, width, height, 1, 24, 0, size, 0, 0, 0, 0
    )
    rows = np.frombuffer(data, np.uint8, offset=start).reshape(height, stride)
    for channel, plane in enumerate(planes):
        rows[::-1, 2 - channel : 3 * width : 3] = plane  # the lowest row first
    return EncodedImage(data, "image/bmp")


_originals: LRUCache[str, tuple[EncodedImage, Coding]] = LRUCache(
    64 << 20, size_of=lambda kept: len(kept[0].data)
)


def keep_original(item: MediaItem, encoded: tuple[bytes, Coding]) -> None:
    """Keep the bytes that an item's image was decoded from, if the image was not resized. The last 64 MiB."""
    if isinstance(item, PatchItem) and item.frames.shape[-2:] == item.size:
        data, coding = encoded
        _originals.put(item.identity, (EncodedImage(data, coding.mime), coding))


def coding_of(item: MediaItem) -> Coding | None:
    """Return the coding of an item's original bytes, while they are kept."""
    kept = _originals.get(item.identity)
    return None if kept is None else kept[1]


def original(item: MediaItem) -> EncodedImage:
    """Return an item's original bytes, for servers that decode them as we do. Without them, its `bitmap`."""
    kept = _originals.get(item.identity)
    return bitmap(item) if kept is None else kept[0]


def probe_of(item: PatchItem, coding: Coding) -> tuple[EncodedImage, PatchItem]:
    """Return noise in a coding, and the item that it is to become, of the size of another item.

    Decoders that differ, in their arithmetic or in how they enlarge colour, differ on noise.
    """
    _, _, height, width = item.frames.shape
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))
    if coding.mime == "image/png":
        encoded = _saved(noise, "PNG")
    else:
        options = {"subsampling": coding.sampling, "progressive": coding.is_progressive}
        encoded = _saved(noise, "JPEG", quality=90, **options)
    frames = rgb_planes(load_image(encoded.data))[None]
    identity = blake3(encoded.data).hexdigest()
    return encoded, msgspec.structs.replace(item, identity=identity, frames=frames)


def is_encodable(item: MediaItem) -> bool:
    """Whether `encoded_image` can return the item. A time step of a video is more than one image."""
    if isinstance(item, PatchItem):
        return item.modality == "image" and not item.times
    return isinstance(item, ReferenceItem) and item.modality == "image" and isinstance(item.source, bytes)


def _png(image: Image.Image) -> EncodedImage:
    return _saved(image, "PNG", compress_level=_PNG_COMPRESSION)


def _saved(image: Image.Image, kind: str, **options: Any) -> EncodedImage:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return EncodedImage(buffer.getvalue(), f"image/{kind.lower()}")
