"""Time from a decoded image to model inputs, against the reference image processors and a plain copy.

    python benchmarks/bench_media.py [MODEL_DIR ...] [--rounds 15] [--json FILE]

All contenders of a case take turns within one process, so that a change in the machine's speed falls on all
of them; the table gives medians in milliseconds and ratios of medians. "uint8", "bf16" and "f32" start from a
PIL image that was never seen: identity, resizing and, but for uint8, expansion. "warm" is a look-up by a
resolver that has seen the image. "memcpy" copies the float32 result once.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs")]

from mmrender.errors import MMRenderError  # noqa: E402
from mmrender.media.load import load_image  # noqa: E402
from mmrender.media.pixels import ImageBackend  # noqa: E402
from mmrender.media.policy import MediaPolicy  # noqa: E402
from mmrender.media.processor import MediaProcessor  # noqa: E402
from mmrender.media.processors.registry import load_processor  # noqa: E402
from mmrender.media.resolve import MediaCache, MediaResolver  # noqa: E402
from mmrender.messages import ImagePart  # noqa: E402
from mmrender.testing.reference import (  # noqa: E402
    has_reference_backend,
    load_reference_image_processor,
)

DEFAULT_MODELS = [ROOT.parent / "shared" / "models" / name for name in ("qwen3_vl", "qwen2_5_vl")]
SIZES = ((1024, 1024), (1365, 768), (1920, 1080), (3840, 2160))
BACKENDS: tuple[ImageBackend, ...] = ("torch", "pil")


def make_image(width: int, height: int) -> Image.Image:
    """Return noise over a gradient: neither constant, which flatters caches, nor unlike a photograph."""
    rng = np.random.default_rng(width * height)
    ramp = np.linspace(0, 200, height * width * 3, dtype=np.float32).reshape(height, width, 3)
    noise = rng.integers(0, 56, ramp.shape, dtype=np.uint8)
    return Image.fromarray(ramp.astype(np.uint8) + noise, "RGB")


def contenders(
    processor: MediaProcessor, reference: Any | None, image: Image.Image
) -> dict[str, Callable[[], object]]:
    """Return what is timed, by name."""
    resolver = MediaResolver(processor, MediaPolicy(), MediaCache())
    part = [("image", ImagePart(image))]
    item = resolver.resolve(part)[0]
    expanded = item.tensors()["pixel_values"]
    target = np.empty_like(expanded)

    def cold() -> Any:
        return processor.process(load_image(image))

    timed: dict[str, Callable[[], object]] = {
        "uint8": cold,
        "float32": lambda: cold().tensors("float32"),
        "bfloat16": lambda: cold().tensors("bfloat16"),
        "warm": lambda: resolver.resolve(part),
        "memcpy": lambda: np.copyto(target, expanded),
    }
    if reference is not None:
        timed["reference"] = lambda: reference(image, return_tensors="pt")
    return timed


def medians(timed: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median of each contender in milliseconds, all of them taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for turn in range(rounds + 1):
        for name, call in timed.items():
            start = time.perf_counter()
            result = call()
            elapsed = time.perf_counter() - start
            del result
            if turn:
                seconds[name].append(elapsed)
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def reference_for(directory: Path, backend: ImageBackend) -> Any | None:
    """Return the reference on the same back end where it can run here."""
    return load_reference_image_processor(directory, backend) if has_reference_backend(backend) else None


def bench(directory: Path, backend: ImageBackend, rounds: int) -> list[dict[str, Any]]:
    """Time all sizes for one model on one back end."""
    processor = load_processor(directory, image_backend=backend)
    if processor is None:
        return []
    reference = reference_for(directory, backend)
    rows = []
    for width, height in SIZES:
        image = make_image(width, height)
        times = medians(contenders(processor, reference, image), rounds)
        item = processor.process(load_image(image))
        full = item.tensors()["pixel_values"].nbytes
        rows.append(
            {
                "model": directory.name,
                "backend": backend,
                "size": f"{width}x{height}",
                "milliseconds": {name: round(value, 3) for name, value in times.items()},
                "item_bytes": item.nbytes,
                "float32_bytes": full,
            }
        )
    return rows


COLUMNS = ("uint8", "bfloat16", "float32", "warm", "memcpy", "reference")


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print medians, ratios to the reference on the same back end, and bytes kept of the float32 ones."""
    heads = ("uint8", "bf16", "f32", "warm", "memcpy", "reference", "x uint8", "x bf16", "x f32", "bytes")
    print(f"{'model':<13}{'mode':<7}{'size':<10}" + "".join(f"{head:>10}" for head in heads))
    for row in rows:
        times = row["milliseconds"]
        cells = [f"{times[name]:.2f}" if name in times else "not here" for name in COLUMNS]
        cells += [
            f"{times['reference'] / times[name]:.1f}" if "reference" in times else "-" for name in COLUMNS[:3]
        ]
        cells.append(f"1/{row['float32_bytes'] / row['item_bytes']:.0f}")
        print(f"{row['model']:<13}{row['backend']:<7}{row['size']:<10}" + "".join(f"{c:>10}" for c in cells))


def main() -> int:
    parser = argparse.ArgumentParser(description="Time image processing against the reference.")
    parser.add_argument("models", nargs="*", type=Path, default=DEFAULT_MODELS)
    parser.add_argument("--backend", choices=BACKENDS, action="append")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    arguments = parser.parse_args()
    rows = []
    for directory in arguments.models:
        for backend in arguments.backend or BACKENDS:
            try:
                rows += bench(directory, backend, arguments.rounds)
            except MMRenderError as error:
                print(f"{directory.name} {backend}: {error}", file=sys.stderr)
    print_table(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
