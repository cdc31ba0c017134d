"""Bytes of one large image, measured in a fresh process: retained when processed, and at the peak of it.

    python benchmarks/render_memory.py ours|reference MODEL_DIR BACKEND

Prints JSON. Peaks are of resident memory above that of the loaded model and the decoded picture; Linux only.
"""

import gc
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs")]

import render_cases  # noqa: E402

from mmrender.media.policy import MediaPolicy  # noqa: E402
from mmrender.media.processors.registry import load_processor  # noqa: E402
from mmrender.media.resolve import MediaCache, MediaResolver, source_fingerprint  # noqa: E402
from mmrender.messages import ImagePart, RequestMedia  # noqa: E402
from mmrender.testing.reference import load_reference_image_processor  # noqa: E402


def resident(field: str) -> int:
    """Return VmRSS or VmHWM in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def process(contender: str, directory: Path, backend: str, image: object) -> tuple[object, int]:
    """Process the picture; return what a caller keeps, and its bytes by its own account."""
    if contender == "ours":
        processor = load_processor(directory, image_backend=backend)
        media = [RequestMedia("image", 0, 0, "user", ImagePart(image), source_fingerprint(image))]
        item = MediaResolver(processor, MediaPolicy(), MediaCache()).resolve(media)[0][0]
        return item, item.nbytes
    output = load_reference_image_processor(directory, backend)(image, return_tensors="pt")
    return output, sum(value.nbytes for value in output.values())


def main() -> None:
    contender, directory, backend = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    # Once with a small picture that is resized, so that imports and tables are not counted.
    process(contender, directory, backend, render_cases.make_image(300, 280))
    image = render_cases.make_image(*render_cases.LARGE)
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # start a new peak
    kept, counted = process(contender, directory, backend, image)
    peak = resident("VmHWM") - before
    gc.collect()
    retained = resident("VmRSS") - before
    print(json.dumps({"kept_bytes": counted, "retained_rss": retained, "peak_rss": peak}))
    del kept


if __name__ == "__main__":
    main()
