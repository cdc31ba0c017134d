"""Refuse encoded images that take far longer to open and decode than their pixels do.

Decoders take time for each chunk, segment, tag and item of a file, however little it adds to the picture. A
progressive JPEG writes all its pixels again for each scan of ten bytes, and libavif compares all items with
each other. Here these pieces are counted before anything is decoded, and no further than the bound.
"""

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np

from mmrender.errors import MediaLimitError
from mmrender.media.policy import MediaPolicy

MAX_PASSES: Final = 16
"""Maximum number of times that a JPEG writes the pixels of the largest allowed image. Encoders need 5."""
MAX_PIECES: Final = 1 << 16
"""Maximum number of pieces of a file besides its pixels. Reading one takes about five microseconds."""

_SOS: Final = 0xDA
"""JPEG marker at the start of a scan."""
_MARKER: Final = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")
"""A marker of a JPEG outside the data of scans."""
_FRAMES: Final = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
"""Markers of segments with the number of components."""
_TIFF_BYTES: Final = frozenset({1, 2, 6, 7})
"""Types of TIFF tags that Pillow reads at once. For other types it makes an object of each number."""
_AVIF_TABLES: Final = frozenset({b"iinf", b"iloc", b"iref", b"ipma"})


def check_pieces(name: str, data: bytes) -> None:
    """Refuse a file with too many pieces. Call it before the file is opened.

    Args:
        name: One of `FORMATS`.
        data: The file.

    Raises:
        MediaLimitError: There are more than `MAX_PIECES`.
    """
    count = 0
    for pieces in _PIECES[name](data) if name in _PIECES else ():
        count += pieces
        if count > MAX_PIECES:
            raise MediaLimitError(
                f"the {name} has too many pieces beside its pixels",
                expected=f"at most {MAX_PIECES} chunks, segments, tags or items",
                got="more",
                remedy="Save it again, or decode it yourself and pass the PIL.Image.",
            )


def check_passes(data: bytes, pixels: int, policy: MediaPolicy) -> None:
    """Refuse a JPEG whose scans write its pixels too often.

    Args:
        data: The file.
        pixels: Number of pixels of the image.
        policy: Bounds the pixels by its `max_pixels`.

    Raises:
        MediaLimitError: All passes over the pixels write more than `MAX_PASSES` times `max_pixels`.
    """
    bound = MAX_PASSES * policy.max_pixels
    passes, components, is_progressive = 0.0, 1, False
    for marker, payload, _ in _segments(data):
        if marker in _FRAMES:
            components, is_progressive = max(1, *data[payload + 5 : payload + 6]), marker & 3 == 2
        elif marker == _SOS:
            scanned = max(1, *data[payload : payload + 1])
            is_whole = scanned == components and not is_progressive
            if not passes and (is_whole or _max_scans(data) * pixels <= bound):
                return  # libjpeg does not read beyond a scan of all components
            passes += scanned / components
    if passes * pixels > bound:
        raise MediaLimitError(
            "the scans of the JPEG write its pixels too often",
            expected=f"at most {bound} pixels in all scans",
            got=f"{passes:.0f} x {pixels}",
            remedy="Raise MediaPolicy(max_pixels=...) if you trust the source.",
        )


def _max_scans(data: bytes) -> int:
    """Return an upper bound of the number of scans: how often the two bytes at their start occur."""
    values = np.frombuffer(data, np.uint8)
    return int(np.count_nonzero((values[:-1] == 0xFF) & (values[1:] == _SOS)))


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield each segment of a JPEG: its marker, the start of its payload, and the bytes skipped before it."""
    position = 2
    while (match := _MARKER.search(data, position)) is not None and match[1] != b"\xd9":
        start = match.end()
        yield match[1][0], start + 2, match.start() - position
        has_length = match[1] not in b"\x01\xd8"
        position = start + (max(2, int.from_bytes(data[start : start + 2])) if has_length else 0)


def _jpeg_pieces(data: bytes) -> Iterator[int]:
    for marker, payload, skipped in _segments(data):
        # Pillow reads bytes between segments one by one, and copies all Exif data with each Exif segment.
        yield 1 + skipped
        if marker == 0xE1 and data.startswith(b"Exif", payload):
            yield 1024
        if marker == _SOS:
            return


def _png_pieces(data: bytes) -> Iterator[int]:
    position = 8
    while position + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        position += 12 + length
        # Each of these is decompressed, to a mebibyte at most.
        yield 256 if kind in (b"iCCP", b"iTXt", b"zTXt") else 1


def _gif_pieces(data: bytes) -> Iterator[int]:
    flags = data[10] if len(data) > 10 else 0
    position = 13 + (6 << (flags & 7) if flags & 0x80 else 0)
    is_extension = False
    while position < len(data):
        yield 1
        if is_extension:
            is_extension = data[position] > 0
            position += 1 + data[position]
        elif data[position] in b",;":  # a frame, or the end
            return
        else:
            is_extension = data[position] == ord("!")
            position += 2 if is_extension else 1


def _tiff_pieces(data: bytes) -> Iterator[int]:
    order = "<" if data[:2] == b"II" else ">"
    head, entry = ("Q", "HHQ8x") if 43 in data[2:4] else ("H", "HHI4x")
    try:
        (position,) = struct.unpack_from(order + ("Q" if head == "Q" else "I"), data, 8 if head == "Q" else 4)
        (count,) = struct.unpack_from(order + head, data, position)
        position += struct.calcsize(head)
        for _ in range(count):
            _, kind, numbers = struct.unpack_from(order + entry, data, position)
            position += struct.calcsize(order + entry)
            yield 1 if kind in _TIFF_BYTES else 1 + min(numbers, len(data)) // 2
    except struct.error:  # it ends here
        return


def _bmp_pieces(data: bytes) -> Iterator[int]:
    size, width, height = struct.unpack_from("<Iii", data.ljust(34, b"\0"), 14)
    if size >= 40 and data[30:34] in (b"\1\0\0\0", b"\2\0\0\0"):
        # Python code decodes run lengths.
        yield (len(data) + abs(width * height)) >> 6


def _avif_pieces(data: bytes) -> Iterator[int]:
    for kind, start, stop in _boxes(data, 0, len(data)):
        if kind == b"meta":
            for inner, begin, end in _boxes(data, start + 4, stop):
                within = _boxes(data, begin, end) if inner == b"iprp" else [(inner, begin, end)]
                yield sum(end - begin for inner, begin, end in within if inner in _AVIF_TABLES)


def _boxes(data: bytes, start: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield kind, start and end of the payload of each box of ISO/IEC 14496-12 in a part of a file."""
    while start + 8 <= stop:
        size, kind = struct.unpack_from(">I4s", data, start)
        payload = start + 8
        if size == 1 and payload + 8 <= stop:
            (size,) = struct.unpack_from(">Q", data, payload)
            payload += 8
        end = min(stop, start + size) if size else stop
        if end < payload:
            return
        yield kind, payload, end
        start = end


_PIECES: Final[Mapping[str, Callable[[bytes], Iterator[int]]]] = {
    "JPEG": _jpeg_pieces,
    "PNG": _png_pieces,
    "GIF": _gif_pieces,
    "TIFF": _tiff_pieces,
    "BMP": _bmp_pieces,
    "AVIF": _avif_pieces,
}
"""The pieces of each format, in parts. libwebp reads pieces of WebP fast enough."""
