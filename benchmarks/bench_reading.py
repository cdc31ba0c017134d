"""Reading of many samples by many ranks: bytes, time to the first batch, and the time of a plan.

    python benchmarks/bench_reading.py [--samples 100000] [--ranks 16] [--measured 16] [--json FILE]

A file of groups of eight rollouts is generated, which share an image of 256² (196,608 bytes as uint8) and
have some 300 tokens each. Every rank is a process of its own, with a page cache that is cold for the file,
and two kinds alternate: with the index beside the file, and without, as for a file of an earlier release.
Counted are the ranges that the reader asks for, and the bytes that the system reads from the disk for them. A
whole pass of a rank makes all of its samples. The first batch is eight samples, collated in float32. Times
are wall and processor time. `--measured` runs the first ranks alone, and cannot tell whether every sample is
read. A plan assigns samples of log-normal lengths to micro-batches of 256 ranks, by descriptors.
`docs/scale-reading.json` has the figures of docs/scale.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs"), str(ROOT / "benchmarks")]

from batch_cases import FAMILY, IMAGE_ID, PAD_ID, PROCESSOR  # noqa: E402
from measure import machine  # noqa: E402

from mmcodecs.files import MappedFile  # noqa: E402
from mmrender import Trajectory  # noqa: E402
from mmrender.media.load import load_image  # noqa: E402
from mmrender.sidecar import MultiModalData, PlaceholderRange  # noqa: E402
from mmrender.training import Descriptor, TrajectoryDataset, collate, plan_steps  # noqa: E402
from mmrender.trajectory import TrajectoryWriter  # noqa: E402
from mmrender.trajectory.index import IndexWriter  # noqa: E402

SIDE, GROUP, BATCH = 256, 8, 8
PLANNED_RANKS, PLANNED_SAMPLES, PLANS = 256, 4096, 7


def write(path: Path, samples: int) -> tuple[float, float]:
    """Write the file, and return the seconds that appending took, and those of them for the index."""
    rng, seconds, indexing = np.random.default_rng(0), 0.0, 0.0
    append = IndexWriter.append

    def timed(*arguments: Any) -> None:
        nonlocal indexing
        begun = time.perf_counter()
        append(*arguments)
        indexing += time.perf_counter() - begun

    IndexWriter.append = timed  # type: ignore[method-assign]
    with TrajectoryWriter(path) as file:
        for number in range(samples // GROUP):
            pixels = rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
            item = PROCESSOR.process(load_image(Image.fromarray(pixels, "RGB")))
            count = item.grid[1] * item.grid[2] // 4
            prompt = [*rng.integers(100, 1000, 100).tolist(), *[IMAGE_ID] * count, *range(100, 140)]
            data = MultiModalData.of([(PlaceholderRange(100, count), item)])
            group = [Trajectory(f"{number}/{place}", extra={"group": str(number)}) for place in range(GROUP)]
            for one in group:
                sampled = rng.integers(100, 1000, int(rng.integers(40, 160))).tolist()
                version = [(f"step-{number // 128}", 0, len(sampled))]
                one.append(
                    prompt,
                    sampled,
                    logprobs=[-0.5] * len(sampled),
                    multi_modal_data=data,
                    weight_versions=version,
                )
            begun = time.perf_counter()
            file.append(group)
            seconds += time.perf_counter() - begun
    IndexWriter.append = append  # type: ignore[method-assign]
    return seconds, indexing


def disk_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def read(path: Path, rank: int, world: int, batches: int | None) -> dict[str, Any]:
    """One rank: to the first batch, and then through `batches` of them, or its whole pass."""
    asked: dict[str, int] = {}
    ranged = MappedFile.read

    def counted(file: MappedFile, start: int, stop: int, *, ahead: int = 0) -> memoryview:
        asked[str(file)] = asked.get(str(file), 0) + stop - start
        return ranged(file, start, stop, ahead=ahead)

    MappedFile.read = counted  # type: ignore[method-assign]
    for file in path.parent.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before, begun, used = disk_bytes(), time.perf_counter(), time.process_time()
    samples = iter(TrajectoryDataset(path, rank=rank, world=world))
    batch = list(islice(samples, BATCH))
    collate(batch, FAMILY, pad_token_id=PAD_ID)
    first, first_used = time.perf_counter() - begun, time.process_time() - used
    count = len(batch) + sum(1 for _ in islice(samples, batches and (batches - 1) * BATCH))
    seconds = time.perf_counter() - begun
    return {
        "samples": count,
        "first_batch_seconds": first,
        "first_batch_processor_seconds": first_used,
        "seconds": seconds,
        "file_bytes": asked.get(str(path), 0),
        "index_bytes": asked.get(f"{path}.index", 0),
        "disk_bytes": disk_bytes() - before,
    }


def of_process(path: Path, rank: int, world: int, batches: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--read", str(path), str(rank), str(world), str(batches)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def plan_seconds(ranks: int, samples: int) -> tuple[float, float]:
    """Median wall and processor seconds of one plan."""
    seconds, used = [], []
    for seed in range(PLANS):
        lengths = np.random.default_rng(seed).lognormal(7, 1, samples).clip(100, 16384).astype(int)
        tensors = frozenset({("pixel_values", "float32", (256, 1536)), ("image_grid_thw", "int64", (1, 3))})
        step = [
            Descriptor(int(length), 50, int(seen), tensors if seen else frozenset())
            for length, seen in zip(lengths, np.arange(samples) % 3, strict=True)
        ]
        begun, started = time.perf_counter(), time.process_time()
        plan_steps(step, FAMILY, ranks=ranks, max_tokens=16640, dummy_tokens=64)
        seconds.append(time.perf_counter() - begun)
        used.append(time.process_time() - started)
    return statistics.median(seconds), statistics.median(used)


def describe_seconds(path: Path) -> tuple[float, float, int]:
    begun, started = time.perf_counter(), time.process_time()
    step = TrajectoryDataset(path).describe()
    return time.perf_counter() - begun, time.process_time() - started, len(step)


def measure(folder: Path, samples: int, ranks: int, measured: int) -> dict[str, Any]:
    indexed, plain = folder / "indexed" / "run.mmc", folder / "plain" / "run.mmc"
    for path in (indexed, plain):
        path.parent.mkdir()
    appending, indexing = write(indexed, samples)
    os.link(indexed, plain)
    index = indexed.with_name("run.mmc.index").stat().st_size
    os.sync()
    found: dict[str, list[dict[str, Any]]] = {"indexed": [], "plain": []}
    for rank in range(measured):
        found["indexed"].append(of_process(indexed, rank, ranks, 0))
        found["plain"].append(of_process(plain, rank, ranks, 1))
    share = indexed.stat().st_size / ranks
    described, described_used, count = describe_seconds(indexed)
    planned, planned_used = plan_seconds(PLANNED_RANKS, PLANNED_SAMPLES)
    ours, before = found["indexed"], found["plain"]
    if count != samples or (measured == ranks and sum(one["samples"] for one in ours) != samples):
        raise SystemExit("not every sample was read once")
    return {
        "machine": machine(("numpy", "torch", "msgspec")),
        "samples": samples,
        "records": samples // GROUP,
        "ranks": ranks,
        "measured": measured,
        "load": os.getloadavg()[0],
        "file_bytes": indexed.stat().st_size,
        "index_bytes_a_sample": index / samples,
        "append_seconds": appending,
        "indexing_share": indexing / appending,
        "read_over_share": max((one["file_bytes"] + one["index_bytes"]) / share for one in ours),
        "disk_over_share": max(one["disk_bytes"] / share for one in ours),
        "pass_seconds": statistics.median(one["seconds"] for one in ours),
        "first_batch_seconds": max(one["first_batch_seconds"] for one in ours),
        "first_batch_processor_seconds": max(one["first_batch_processor_seconds"] for one in ours),
        "first_batch_processor_seconds_without_index": max(
            one["first_batch_processor_seconds"] for one in before
        ),
        "first_batch_seconds_without_index": max(one["first_batch_seconds"] for one in before),
        "first_batch_disk_bytes_without_index": max(one["disk_bytes"] for one in before),
        "describe_seconds": described,
        "describe_processor_seconds": described_used,
        "planned_ranks": PLANNED_RANKS,
        "planned_samples": PLANNED_SAMPLES,
        "plan_seconds": planned,
        "plan_processor_seconds": planned_used,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--measured", type=int, help="ranks that are run; all by default")
    parser.add_argument("--folder", type=Path, help="where the file is written; 2.6 GB for 100,000 samples")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        path, rank, world, batches = options.read
        print(json.dumps(read(Path(path), int(rank), int(world), int(batches) or None)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        text = json.dumps(
            measure(Path(folder), options.samples, options.ranks, options.measured or options.ranks), indent=2
        )
    print(text)
    if options.json:
        options.json.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
