"""The image law: any picture becomes what the model's own processor makes of it, or both sides refuse it.

    python tests/image_law.py [--backend torch] MODEL_DIRECTORY ...

compares every odd picture, alone and in company, and exits with 1 where one differs.
"""

import argparse
import io
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from mmrender.errors import MMRenderError, ProcessorError
from mmrender.media.pixels import ImageBackend
from mmrender.renderer import Renderer
from mmrender.testing.difference import first_difference
from mmrender.testing.reference import ReferenceRenderer

Source = Image.Image | bytes
_ORIENTATION = 0x0112
_TOGETHER = 7
"""The pictures of odd sizes and one of another mode: images of one batch differ in their tiles."""


def noise(shape: tuple[int, ...], top: int = 256, dtype: Any = np.uint8) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).integers(0, top, shape).astype(dtype)


def saved(image: Image.Image, fmt: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, fmt, **options)
    return out.getvalue()


def png_of_16_bits(pixels: np.ndarray[Any, Any]) -> bytes:
    """Write a PNG of 16 bits a channel `(height, width, channels)`; Pillow writes grey ones only."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")

    height, width, channels = pixels.shape
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([16, kind, 0, 0, 0])
    rows = zlib.compress(b"".join(b"\0" + row.tobytes() for row in pixels.astype(">u2")))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def odd_pictures() -> Iterator[tuple[str, Source]]:
    """Give each kind of picture that a loader or a processor may trip over."""
    rgb = Image.fromarray(noise((61, 83, 3)))
    rgba = Image.fromarray(noise((61, 83, 4)))
    palette = rgb.quantize(32)
    for width, height in ((1, 1), (1, 40), (10, 2000), (2000, 10), (28, 28), (337, 335)):
        yield f"{width}x{height}", Image.fromarray(noise((height, width, 3)))
    for mode in ("1", "L", "P", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"):
        yield mode, rgb.convert(mode)
    yield "LA", rgba.convert("LA")
    yield "PA", palette.convert("PA")
    yield "RGBA", rgba
    yield "RGBa", rgba.convert("RGBa")
    hidden = noise((61, 83, 4))
    hidden[..., 3] = 0
    yield "RGBA with colours under a clear alpha", Image.fromarray(hidden)
    yield "RGBA that is opaque", rgb.convert("RGBA")
    yield "I", Image.fromarray(noise((61, 83), 100_000, np.int32) - 1000)
    yield "I;16", Image.fromarray(noise((61, 83), 65536, np.uint16))
    yield "F", Image.fromarray((noise((61, 83), 4000) / 10 - 50).astype(np.float32))
    yield "P with a transparent colour", saved(palette, "PNG", transparency=3)
    yield "P with an alpha table", saved(palette, "PNG", transparency=bytes(range(0, 256, 8)))
    yield "L with a transparent level", saved(rgb.convert("L"), "PNG", transparency=7)
    yield "16-bit PNG, RGB", png_of_16_bits(noise((13, 17, 3), 65536, np.uint16))
    yield "16-bit PNG, RGBA", png_of_16_bits(noise((13, 17, 4), 65536, np.uint16))
    moving = {"save_all": True, "append_images": [rgb.rotate(90)]}
    for fmt in ("GIF", "PNG", "WEBP", "TIFF"):
        yield f"{fmt} of two frames", saved(rgb, fmt, **moving)
    yield "TIFF, LAB", saved(rgb.convert("LAB"), "TIFF")
    yield "TIFF, 1 bit", saved(rgb.convert("1"), "TIFF")
    yield "JPEG, CMYK", saved(rgb.convert("CMYK"), "JPEG")
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[_ORIENTATION] = orientation
        yield f"JPEG, orientation {orientation}", saved(rgb, "JPEG", exif=exif)


def as_handed_over(source: Source) -> Image.Image:
    """Return the PIL image that the reference is given: upright, and on white where it is transparent.

    Which of the reference's loaders and processors do either depends on the release and on the family;
    `docs/media.md` states our rule, and `test_media_reference` compares it with the reference's functions.
    """
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(source)) if isinstance(source, bytes) else source)
    if image.mode not in ("RGBA", "LA", "PA", "RGBa") and image.info.get("transparency") is None:
        return image
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


@dataclass
class Outcome:
    """What the law found for one model: pictures that are equal, refused by both sides, and broken rules."""

    equal: int = 0
    refused: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


def image_law(directory: Path, backend: ImageBackend) -> Outcome:
    """Compare every odd picture alone, then some of very different sizes in one message."""
    reference = ReferenceRenderer(directory, backend)
    if reference.processor_missing is not None:
        raise ProcessorError("the images of this model cannot be compared", got=reference.processor_missing)
    renderer = Renderer.from_pretrained(directory, image_backend=backend, memo_bytes=0)
    outcome = Outcome()
    taken: list[Source] = []
    for name, source in odd_pictures():
        found = _compare(renderer, reference, [source])
        if found is None:
            outcome.equal += 1
            taken.append(source)
        elif found.startswith("refused by both"):
            outcome.refused.append(f"{name}: {found}")
        else:
            outcome.broken.append(f"{name}: {found}")
    together = taken[:_TOGETHER]
    if len(together) > 1 and (found := _compare(renderer, reference, together)) is not None:
        outcome.broken.append(f"the first {len(together)} together: {found}")
    return outcome


def _compare(renderer: Renderer, reference: ReferenceRenderer, sources: list[Source]) -> str | None:
    """Return what differs, or which refusals there were; None where all is equal."""

    def conversation(pictures: list[Any]) -> list[dict[str, Any]]:
        parts = [{"type": "image", "image": picture} for picture in pictures]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]

    ours = theirs = None
    refusals = []
    try:
        ours = renderer.render(conversation(sources))
    except MMRenderError as error:
        refusals.append(f"ours {type(error).__name__}: {error}")
    try:
        pictures = [as_handed_over(source) for source in sources]
        if not reference.processor.image_processor.do_convert_rgb:
            pictures = [picture.convert("RGB") for picture in pictures]  # as the reference's loader does
        theirs = reference.render(conversation(pictures))
    except Exception as error:
        refusals.append(f"theirs {type(error).__name__}: {error}")
    if ours is None or theirs is None:
        who = "both" if len(refusals) == 2 else "one side"
        return " | ".join([f"refused by {who}", *refusals])
    difference = first_difference(renderer, ours, theirs)
    if difference is not None:
        return str(difference)
    item = ours.multi_modal_data.mm_items["image"][0]
    # Tensors with a value for each token belong to the batch, not to an item.
    of_images = {name for name, values in theirs.tensors.items() if values.shape[1:2] != (len(ours),)}
    absent = of_images - set(item.tensors())
    return f"tensors that we lack: {sorted(absent)}" if absent and len(sources) == 1 else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--backend", choices=("torch", "pil"), default="pil")
    options = parser.parse_args()
    broken = 0
    for directory in options.models:
        try:
            outcome = image_law(directory, options.backend)
        except Exception as error:
            print(f"{directory.name} {options.backend}: not compared: {error}", flush=True)
            continue
        print(
            f"{directory.name} {options.backend}: {outcome.equal} equal, "
            f"{len(outcome.refused)} refused by both, {len(outcome.broken)} broken",
            flush=True,
        )
        for line in (*outcome.refused, *outcome.broken):
            print("   ", line, flush=True)
        broken += len(outcome.broken)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
