"""Time from decoded images to model inputs, against the reference image processors and a plain copy.

    python benchmarks/bench_media.py [MODEL_DIR] [--backend pil|torch] [--sizes WxH ...] [--counts N ...]
                                     [--rounds N] [--clock wall|cpu] [--json FILE]

- sizes: one image that was never seen. "levels" are the items as they are kept: fingerprint, identity and
  resized planes; "float32" and "bfloat16" hold the expanded tensors too.
- counts: that many images of 1024² in one message, as levels: on one thread, on two, and again once seen.

"reference" is the image processor of Transformers on the same back end. The limits are copies between warm
buffers: of the float32 patches for them, of the planes for levels. "fingerprint" is what knowing an image
again takes, "hashes" that and its name, "resize" the bare resampling. Pixels of all are compared first; torch
uses one thread.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs")]

import numpy as np  # noqa: E402
from measure import Clock, Contender, machine, medians, shown_ms, shown_ratio, table  # noqa: E402
from PIL import Image  # noqa: E402
from render_cases import make_image  # noqa: E402

from mmrender.errors import MMRenderError  # noqa: E402
from mmrender.media.load import load_image  # noqa: E402
from mmrender.media.pixels import (  # noqa: E402
    ImageBackend,
    media_identity,
    resized_planes,
)
from mmrender.media.policy import MediaPolicy  # noqa: E402
from mmrender.media.processor import MediaProcessor  # noqa: E402
from mmrender.media.processors.registry import load_processor  # noqa: E402
from mmrender.media.resolve import MediaCache, MediaResolver, source_fingerprint  # noqa: E402
from mmrender.messages import ImagePart, RequestMedia  # noqa: E402
from mmrender.testing.reference import load_reference_image_processor  # noqa: E402

MODEL = ROOT.parent / "shared" / "models" / "qwen3_vl"
SIZES = ((1024, 1024), (1365, 768), (1920, 1080), (3840, 2160))
COUNTS = (1, 2, 4, 16, 64)
BACKENDS: tuple[ImageBackend, ...] = ("pil", "torch")
PACKAGES = ("numpy", "pillow", "torch", "torchvision", "transformers")


class Bench:
    """The contenders of one image back end."""

    def __init__(self, directory: Path, backend: ImageBackend, rounds: int, clock: Clock) -> None:
        processor = load_processor(directory, image_backend=backend)
        assert processor is not None
        self.processor: MediaProcessor = processor
        self.backend, self.rounds, self.clock = backend, rounds, clock
        self.reference: Any = None
        self.missing: str | None = None
        try:
            self.reference = load_reference_image_processor(directory, backend)
        except MMRenderError as error:
            self.missing = str(error)

    def resolver(self) -> MediaResolver:
        """A resolver that has seen nothing."""
        return MediaResolver(self.processor, MediaPolicy(), MediaCache())

    def size(self, width: int, height: int) -> dict[str, Any]:
        """Time one image."""
        image = make_image(width, height)

        def cold() -> Any:
            return self.resolver().resolve(_media([image]))[0][0]

        item = cold()
        expanded = item.tensors("float32")["pixel_values"]
        loaded = load_image(image)
        height, width = self.processor.geometry(loaded.height, loaded.width).resized or image.size[::-1]
        planes = np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))
        contenders = {
            "levels": Contender(cold),
            "float32": Contender(lambda: cold().tensors("float32")),
            "bfloat16": Contender(lambda: cold().tensors("bfloat16")),
            "fingerprint": Contender(lambda: source_fingerprint(image)),
            "hashes": Contender(lambda: (source_fingerprint(image), media_identity(b"", planes))),
            "copy of float32": Contender(_copy(expanded)),
            "copy of levels": Contender(_copy(item.frames)),
        }
        if (height, width) != image.size[::-1]:
            contenders["resize"] = Contender(lambda: self._resized(image, height, width))
        if self.reference is not None:
            _compare(expanded, self.reference(image, return_tensors="np")["pixel_values"])
            contenders["reference"] = Contender(lambda: self.reference(image, return_tensors="pt"))
        seconds = medians(contenders, rounds=self.rounds, clock=self.clock)
        return {"size": f"{image.width}x{image.height}", "backend": self.backend, "seconds": seconds}

    def _resized(self, image: Image.Image, height: int, width: int) -> object:
        if self.backend == "pil":
            return image.resize((width, height), Image.Resampling.BICUBIC)
        return resized_planes(load_image(image), height, width, self.backend)

    def count(self, count: int, executor: ThreadPoolExecutor) -> dict[str, Any]:
        """Time one message of several images."""
        images = [make_image(1024, 1024, seed) for seed in range(count)]
        seen = self.resolver()
        planes = np.concatenate([item.frames for (item,) in seen.resolve(_media(images))])  # type: ignore[attr-defined]
        contenders = {
            "levels": Contender(lambda: self.resolver().resolve(_media(images))),
            "levels, two threads": Contender(
                lambda: self.resolver().with_executor(executor).resolve(_media(images))
            ),
            "seen before": Contender(lambda: seen.resolve(_media(images))),
            "copy of levels": Contender(_copy(planes)),
        }
        if self.reference is not None:
            contenders["reference"] = Contender(lambda: self.reference(images, return_tensors="pt"))
        rounds = max(3, self.rounds // count)
        seconds = medians(contenders, rounds=rounds, clock=self.clock)
        return {"images": count, "backend": self.backend, "seconds": seconds}


def _media(images: Sequence[Image.Image]) -> list[RequestMedia]:
    """Return images as the media of a request, fingerprints included."""
    return [
        RequestMedia(f"image {index}", 0, index, "user", ImagePart(image), source_fingerprint(image))
        for index, image in enumerate(images)
    ]


def _copy(values: np.ndarray[Any, Any]) -> Any:
    target = np.zeros_like(values)
    return lambda: np.copyto(target, values)


def _compare(ours: Any, theirs: Any) -> None:
    if not np.array_equal(ours, theirs):
        raise SystemExit("pixels differ from the reference's: what is timed would not be the same work")


def shown(rows: Sequence[dict[str, Any]], first: str) -> str:
    """Medians in milliseconds, and how many times longer the reference takes."""
    names = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    forms = [name for name in ("levels", "float32") if name in names]
    lines = [
        [
            str(row[first]),
            row["backend"],
            *[shown_ms(row["seconds"].get(name)) for name in names],
            *[shown_ratio(row["seconds"].get("reference"), row["seconds"][name]) for name in forms],
        ]
        for row in rows
    ]
    return table([first, "mode", *names, *[f"reference/{name}" for name in forms]], lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Time image processing against the reference.")
    parser.add_argument("model", nargs="?", type=Path, default=MODEL)
    parser.add_argument("--backend", choices=BACKENDS, action="append")
    parser.add_argument("--sizes", nargs="+", default=[f"{width}x{height}" for width, height in SIZES])
    parser.add_argument("--counts", nargs="*", type=int, default=COUNTS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    sizes, counts = [], []
    for backend in options.backend or BACKENDS:
        bench = Bench(options.model, backend, options.rounds, options.clock)
        if bench.missing is not None:
            print(f"{backend}: without the reference: {bench.missing}", file=sys.stderr)
        sizes += [bench.size(*map(int, size.split("x"))) for size in options.sizes]
        with ThreadPoolExecutor(1) as executor:
            counts += [bench.count(count, executor) for count in options.counts]
    print("milliseconds, medians\n\n" + shown(sizes, "size"))
    if counts:
        print("\n" + shown(counts, "images"))
    if options.json:
        document = {"machine": machine(PACKAGES), "clock": options.clock, "sizes": sizes, "counts": counts}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
