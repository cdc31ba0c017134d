"""Small files that take seconds or hours to decode are refused by name; what encoders write is not."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from mmrender.errors import MediaLimitError
from mmrender.media import bounds
from mmrender.media.load import load_image
from mmrender.media.policy import MediaPolicy


def saved(image_format, size=(8, 8), mode="RGB", **options):
    file = io.BytesIO()
    Image.new(mode, size, 90).save(file, image_format, **options)
    return file.getvalue()


def jpeg_of_scans(count, size=(1000, 1000)):
    """A progressive JPEG whose last scan is repeated; a scan of a flat picture takes a dozen bytes."""
    data = saved("JPEG", size, progressive=True)
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * count + b"\xff\xd9"


def after(head, more):
    """A JPEG with segments after its first marker."""
    data = saved("JPEG")
    return data[:2] + head + more + data[2:]


def chunk(kind, data=b""):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_with(chunks):
    data = saved("PNG")
    return data[:33] + chunks + data[33:]


def gif_with(blocks):
    data = saved("GIF", mode="P")
    start = 13 + (6 << (data[10] & 7))
    return data[:start] + blocks + data[start:]


def tiff_of_strips(count, big=False):
    """A grey TIFF of a line for each of some strips, and more offsets of strips than these."""
    entry, offset = ("<HHQQ", 16) if big else ("<HHII", 8)
    tags = [(256, 1, 8), (257, 1, 8), (258, 1, 8), (259, 1, 1), (262, 1, 1), (273, count, 0), (278, 1, 1)]
    start = offset + (8 if big else 2) + len(tags) * struct.calcsize(entry) + (8 if big else 4)
    tags = [(tag, number, start if tag == 273 else value) for tag, number, value in tags]
    head = struct.pack("<2sHHHQ", b"II", 43, 8, 0, 16) if big else struct.pack("<2sHI", b"II", 42, 8)
    head += struct.pack("<Q" if big else "<H", len(tags))
    head += b"".join(struct.pack(entry, tag, 4, number, value) for tag, number, value in tags)
    return head + bytes(8 if big else 4) + struct.pack("<I", 8) * count


def bmp_of_runs(data, size):
    head = struct.pack("<IiiHHIIiiII", 40, *size, 1, 8, 1, len(data), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 1078 + len(data), 0, 0, 1078) + head + bytes(1024) + data


def avif_of_items(count):
    """An AVIF that names further items, of a kind that nobody knows."""
    data = saved("AVIF", (16, 16))
    meta, table = data.index(b"meta") - 4, data.index(b"iinf") - 4
    (size,) = struct.unpack_from(">I", data, table)
    (known,) = struct.unpack_from(">H", data, table + 12)
    entry = struct.Struct(">I4sIHH4sB")
    items = b"".join(entry.pack(21, b"infe", 2 << 24, 100 + index, 0, b"zzzz", 0) for index in range(count))
    grown = bytearray(data[: table + size] + items + data[table + size :])
    struct.pack_into(">I", grown, table, size + len(items))
    struct.pack_into(">H", grown, table + 12, known + count)
    struct.pack_into(">I", grown, meta, struct.unpack_from(">I", data, meta)[0] + len(items))
    return bytes(grown)


BOMBS = {
    "scans of a JPEG": lambda: jpeg_of_scans(4300),
    "segments of a JPEG": lambda: after(b"", b"\xff\xfe\0\2" * 70_000),
    "fill bytes of a JPEG": lambda: after(b"", b"\xff" * 70_000),
    "Exif of a JPEG": lambda: after(b"", (b"\xff\xe1\0\xffExif\0\0" + bytes(247)) * 70),
    "chunks of a PNG": lambda: png_with(chunk(b"aaAa") * 70_000),
    "profiles of a PNG": lambda: png_with(chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(1 << 20), 9)) * 260),
    "texts of a PNG": lambda: png_with(chunk(b"zTXt", b"x\0\0" + zlib.compress(b"a")) * 260),
    "extensions of a GIF": lambda: gif_with(b"\x21\xf9\4\0\0\0\0\0" * 40_000),
    "comment of a GIF": lambda: gif_with(b"\x21\xfe" + b"\1a" * 70_000 + b"\0"),
    "zeros in a GIF": lambda: gif_with(bytes(70_000)),
    "strips of a TIFF": lambda: tiff_of_strips(140_000),
    "strips of a BigTIFF": lambda: tiff_of_strips(140_000, big=True),
    "tags of a BigTIFF": lambda: struct.pack("<2sHHHQQ", b"II", 43, 8, 0, 16, 70_000) + bytes(20 * 70_000),
    "empty lines of a BMP": lambda: bmp_of_runs(b"\1\5\0\0" * 3000, (3000, 3000)),
    "runs of a BMP": lambda: bmp_of_runs(b"\0\2\0\0" * 1_100_000, (8, 8)),
    "items of an AVIF": lambda: avif_of_items(4000),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_by_name(name):
    with pytest.raises(MediaLimitError, match=r"beside its pixels|scans of the JPEG") as caught:
        load_image(BOMBS[name](), where="messages[0].content[0]")
    assert caught.value.where == "messages[0].content[0]"
    assert caught.value.remedy


@pytest.mark.parametrize("name", [name for name in BOMBS if name != "scans of a JPEG"])
def test_no_more_is_read_of_a_bomb_than_the_bound(name):
    data = BOMBS[name]()
    image_format = name.rpartition(" ")[2].replace("BigTIFF", "TIFF")
    taken = []
    for pieces in bounds._PIECES[image_format](data):
        taken.append(pieces)
        if sum(taken[-1:]) > bounds.MAX_PIECES or len(taken) > bounds.MAX_PIECES:
            break
    assert len(taken) <= bounds.MAX_PIECES + 1


def test_scans_are_bounded_by_the_policy_and_metadata_has_none():
    assert load_image(jpeg_of_scans(1000, (64, 64))).width == 64
    data = jpeg_of_scans(60, (500, 500))
    load_image(data, MediaPolicy(max_pixels=1_000_000))
    with pytest.raises(MediaLimitError, match=r"at most 4000000 pixels in all scans.*max_pixels"):
        load_image(data, MediaPolicy(max_pixels=250_000))
    noise = b"\xff\xda\0\x08" * 16_000
    head = b"\xff\xe2" + struct.pack(">H", 2 + len(noise))
    data = jpeg_of_scans(0, (2000, 2000))
    assert load_image(data[:2] + head + noise + data[2:]).width == 2000


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("progressive", [False, True])
def test_scans_of_an_encoder_pass_at_the_largest_size(mode, progressive):
    picture = Image.fromarray(np.arange(300 * 400, dtype=np.uint32).astype(np.uint8).reshape(300, 400))
    file = io.BytesIO()
    picture.convert(mode).save(file, "JPEG", progressive=progressive, quality=95)
    assert load_image(file.getvalue(), MediaPolicy(max_pixels=300 * 400)).height == 300


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xd8\xff",
        b"\xff\xd8\xff\xe1",
        b"\xff\xd8\xff\xc0\0\2\xff\xda",
        b"GIF89a",
        b"II*\0\xff\xff\xff\xff",
        b"II+\0",
        b"MM\0+\0\x08\0\0",
        b"BM",
        b"\x89PNG\r\n\x1a\n\xff",
        b"\0\0\0\x18ftypavif\0\0\0\1meta\0\0\0\0\0\0\0\0",
        b"\0\0\0\x0cftypavif\0\0\0\x14meta\0\0\0\0\0\0\0\0iprp",
    ],
)
def test_files_that_end_early_are_damaged(data):
    for image_format, pieces in bounds._PIECES.items():
        assert sum(pieces(data)) < 100, image_format
    bounds.check_passes(data * 40, 1 << 30, MediaPolicy())
