"""From the bytes of trajectories to a batch that is ready for the model, against the plain path.

    python benchmarks/bench_batch.py [--samples 64] [--images 4] [--side 512] [--rounds 5] [--clock cpu]
                                     [--quick] [--json FILE]

All start from one message in memory and end with a padded batch: token ids, masks, log-probabilities, pixels
and grids. The pictures are random, all different, of 320 x 448 pixels on average, or all of `--side`.

- mmrender: the codec's message of a group of trajectories; samples of it; `collate`. It also computes M-RoPE
  positions and token types, which the others leave to the model. Once on one thread, and once on as many as
  there are cores.
- plain, msgpack: tagged dicts of float32 patches in msgpack, arrays viewed, not copied, then `torch.cat`,
  and `pad_sequence` for what is aligned to tokens. bfloat16, which this form cannot carry, is a cast at the
  end.
- plain, base64: the same, each tensor in base64 of the standard library in JSON, as servers send them.
- collate: `collate` alone, of samples in memory.
- concatenated: `torch.cat` of float32 patches in memory that are ready, and a cast for bfloat16. Nothing else
  of a batch.

Every contender's batch is compared with the first one's before anything is timed. GB/s count the pixels of
the ready batch; memcpy is the copy of as many bytes between warm buffers. Memory is the peak of the resident
set over what it was before, the message included, divided by the pixels of the batch. With CUDA the batch
ends on the device, from page-locked memory or as the plain path does it.
"""

import argparse
import base64
import json
import os
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs")]

import torch  # noqa: E402
from batch_cases import FAMILY, IMAGE_ID, PAD_ID, PROCESSOR  # noqa: E402
from measure import Clock, Contender, machine, medians, memcpy_seconds, peak_resident, table  # noqa: E402
from PIL import Image  # noqa: E402

import mmcodecs  # noqa: E402
from mmrender.media.load import load_image  # noqa: E402
from mmrender.sidecar import MultiModalData, PlaceholderRange  # noqa: E402
from mmrender.training import TrainingBatch, collate  # noqa: E402
from mmrender.trajectory.sample import TrainingSample  # noqa: E402
from mmrender.trajectory.tree import Trajectory, trajectories_from_wire, trajectories_to_wire  # noqa: E402

TEXT = 150
DEVICE = "cuda" if torch.cuda.is_available() else None
Batch = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A group of trajectories and how much there is of it."""

    trajectories: list[Trajectory]
    pixel_values: int


def make_case(samples: int, images: int, side: int | None = None, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    trajectories, values = [], 0
    for index in range(samples):
        ids: list[int] = rng.integers(100, 1000, TEXT).tolist()
        entries = []
        for _ in range(images):
            height, width = 32 * rng.integers(8, 13), 32 * rng.integers(11, 18)
            height, width = (height, width) if side is None else (side, side)
            pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
            item: Any = PROCESSOR.process(load_image(Image.fromarray(pixels, "RGB")))
            count = item.grid[1] * item.grid[2] // 4
            entries.append((PlaceholderRange(len(ids), count), item))
            ids += [IMAGE_ID] * count + rng.integers(100, 1000, TEXT).tolist()
            values += int(np.prod(item.pixel_shape))
        completion = rng.integers(100, 1000, TEXT)
        trajectory = Trajectory(f"t{index}")
        logprobs = -rng.random(TEXT, dtype=np.float32)
        trajectory.append(ids, completion, logprobs=logprobs, multi_modal_data=MultiModalData.of(entries))
        trajectories.append(trajectory)
    return Case(trajectories, values)


def samples_of(group: list[Trajectory]) -> list[TrainingSample]:
    return [branch.sample() for trajectory in group for branch in trajectory.branches()]


def ours(message: Any, dtype: Any, executor: ThreadPoolExecutor | None) -> Batch:
    return collated(samples_of(trajectories_from_wire(mmcodecs.decode(message))), dtype, executor)


def collated(samples: list[TrainingSample], dtype: Any, executor: ThreadPoolExecutor | None = None) -> Batch:
    batch: TrainingBatch = collate(
        samples, FAMILY, pad_token_id=PAD_ID, dtype=dtype, device=DEVICE, executor=executor
    )
    inputs = batch.model_inputs()
    inputs |= {"loss_mask": batch.loss_mask, "logprobs": batch.logprobs}
    return _synchronised(inputs)


def as_plain(case: Case, tensor: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Payload of a worker that holds float32 tensors for each sample."""
    rows = []
    for trajectory in case.trajectories:
        sample = trajectory.branches()[0].sample()
        held = [item.tensors() for item in sample.multi_modal_data.mm_items["image"]]
        rows.append(
            {
                "token_ids": sample.token_ids.tolist(),
                "loss_mask": sample.loss_mask.tolist(),
                "logprobs": sample.logprobs.tolist(),
                **{name: [tensor(one[name]) for one in held] for name in held[0]},
            }
        )
    return rows


def tagged(array: Any) -> dict[str, Any]:
    described = {"dtype": str(array.dtype), "shape": list(array.shape)}
    return {"__torch_tensor__": True, **described, "data": array.tobytes()}


def tagged_text(array: Any) -> dict[str, Any]:
    return tagged(array) | {"data": base64.b64encode(array.tobytes()).decode()}


def untagged(value: dict[str, Any]) -> Any:
    if "__torch_tensor__" not in value:
        return value
    data = value["data"]
    data = base64.b64decode(data) if isinstance(data, str) else data
    return np.frombuffer(data, value["dtype"]).reshape(value["shape"])


def plain(rows: list[dict[str, Any]], dtype: Any) -> Batch:
    """Join decoded samples as collators do: concatenate, cast, pad."""

    def joined(name: str) -> Any:
        return torch.cat([_viewed(array) for row in rows for array in row[name]])

    def padded(name: str, kind: Any, fill: int = 0) -> Any:
        tensors = [torch.tensor(row[name], dtype=kind) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=fill)

    batch = {
        "pixel_values": joined("pixel_values").to(dtype),
        "image_grid_thw": joined("image_grid_thw"),
        "input_ids": padded("token_ids", torch.int64, PAD_ID),
        "loss_mask": padded("loss_mask", torch.bool),
        "logprobs": padded("logprobs", torch.float32),
    }
    attention = [torch.ones(len(row["token_ids"]), dtype=torch.int64) for row in rows]
    batch["attention_mask"] = torch.nn.utils.rnn.pad_sequence(attention, batch_first=True)
    if DEVICE:
        batch = {name: value.to(DEVICE) for name, value in batch.items()}
    return _synchronised(batch)


def _placed(tensor: Any) -> Any:
    return tensor.to(DEVICE) if DEVICE else tensor


def _viewed(array: Any) -> Any:
    """A tensor over an array that may be read-only; nothing writes to it here."""
    dtype = {"float32": torch.float32, "int64": torch.int64}[str(array.dtype)]
    return torch.frombuffer(memoryview(array).cast("B"), dtype=dtype).reshape(array.shape)


def _synchronised(batch: Batch) -> Batch:
    if DEVICE:
        torch.cuda.synchronize()
    return batch


def check_same(expected: Batch, got: Batch, name: str) -> None:
    for key in ("pixel_values", "image_grid_thw", "input_ids", "attention_mask", "loss_mask", "logprobs"):
        if key not in got and name == "concatenated":
            continue
        if expected[key].dtype != got[key].dtype or not torch.equal(expected[key], got[key]):
            raise SystemExit(f"{name} gives another {key}")


def measured(case: Case, dtype: Any, rounds: int, clock: Clock) -> list[dict[str, Any]]:
    """Time and memory of each contender for one dtype of pixels."""
    message = mmcodecs.encode(trajectories_to_wire(case.trajectories, share=False))
    packed = msgpack.packb(as_plain(case, tagged))
    text = json.dumps(as_plain(case, tagged_text))
    threads = os.cpu_count() or 1
    executor = ThreadPoolExecutor(threads - 1) if threads > 1 else None
    contenders: dict[str, tuple[Callable[[], Batch], int]] = {
        "mmrender, one thread": (lambda: ours(message, dtype, None), len(message)),
        f"mmrender, {threads} threads": (lambda: ours(message, dtype, executor), len(message)),
        "plain, msgpack": (lambda: plain(msgpack.unpackb(packed, object_hook=untagged), dtype), len(packed)),
        "plain, base64": (lambda: plain(json.loads(text, object_hook=untagged), dtype), len(text)),
    }
    samples = samples_of(case.trajectories)
    ready = [
        torch.from_numpy(item.tensors()["pixel_values"])
        for sample in samples
        for item in sample.multi_modal_data.mm_items["image"]
    ]
    contenders["collate"] = (lambda: collated(samples, dtype), 0)
    contenders["concatenated"] = (lambda: {"pixel_values": _placed(torch.cat(ready).to(dtype))}, 0)
    first = next(iter(contenders.values()))[0]()
    for name, (run, _) in contenders.items():
        check_same(first, run(), name)
    del first
    nbytes = case.pixel_values * torch.empty(0, dtype=dtype).element_size()
    # Memory that one contender leaves in pieces would otherwise slow the next one's large pages.
    timed = {
        name: Contender(run, lambda: np.ones(2 * nbytes, np.uint8)) for name, (run, _) in contenders.items()
    }
    seconds = medians(timed, rounds=rounds, slice_s=0, clock=clock)
    memcpy = memcpy_seconds(nbytes, rounds=max(3, rounds), clock=clock)
    rows = []
    for name, (run, shipped) in contenders.items():
        peak = peak_resident(run)
        rows.append(
            {
                "contender": name,
                "dtype": str(dtype).removeprefix("torch."),
                "seconds": seconds[name],
                "gb_per_s": nbytes / seconds[name] / 1e9,
                "over_memcpy": seconds[name] / memcpy,
                "plain_over_it": seconds["plain, msgpack"] / seconds[name],
                "peak_over_batch": None if peak is None else peak / nbytes,
                "shipped_mb": shipped / 1e6,
                "batch_mb": nbytes / 1e6,
                "memcpy_seconds": memcpy,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--images", type=int, default=4, help="images of a sample")
    parser.add_argument("--side", type=int, help="side of each image in pixels, a multiple of 32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu where others work too")
    parser.add_argument("--quick", action="store_true", help="8 samples, 3 rounds")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    samples, rounds = (8, 3) if options.quick else (options.samples, options.rounds)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nothing writes to it
    case = make_case(samples, options.images, options.side)
    rows = [
        row
        for dtype in (torch.float32, torch.bfloat16)
        for row in measured(case, dtype, rounds, options.clock)
    ]
    print(f"{samples} samples of {options.images} images, to {DEVICE or 'memory'}, {options.clock} time")
    headings = ["", "dtype", "shipped MB", "batch MB", "s", "GB/s", "/ memcpy", "plain / it", "peak / batch"]
    print(
        table(
            headings,
            [
                [
                    row["contender"],
                    row["dtype"],
                    f"{row['shipped_mb']:.0f}",
                    f"{row['batch_mb']:.0f}",
                    f"{row['seconds']:.3f}",
                    f"{row['gb_per_s']:.2f}",
                    f"{row['over_memcpy']:.1f}",
                    f"{row['plain_over_it']:.2f}",
                    "-" if row["peak_over_batch"] is None else f"{row['peak_over_batch']:.2f}",
                ]
                for row in rows
            ],
        )
    )
    if options.json:
        packages = ("numpy", "torch", "msgpack")
        described = machine(packages) | {"clock": options.clock}
        described["device"] = torch.cuda.get_device_name() if DEVICE else None
        options.json.write_text(json.dumps({"machine": described, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
