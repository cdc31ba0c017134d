"""Multimodal items in the form of the recorded files, and batches for every field layout."""

from typing import Any

import numpy as np
import torch

from mmcodecs.arrays import RawTensor
from mmrender.client.vllm_fields import Batched, Flat, Layout, Shared
from mmrender.media.vllm_items import FlatField, SharedField


def described(data):
    """A value in the form of the recorded files."""
    if isinstance(data, RawTensor):
        return {"dtype": data.dtype, "shape": list(data.shape), "hex": data.bits.tobytes().hex()}
    if isinstance(data, np.ndarray):
        return {"dtype": data.dtype.name, "shape": list(data.shape), "hex": data.tobytes().hex()}
    if isinstance(data, torch.Tensor):
        # An empty tensor may have strides of 0, which cannot be viewed as bytes.
        raw = data.flatten().contiguous().view(torch.uint8).numpy().tobytes() if data.numel() else b""
        return {"dtype": str(data.dtype).removeprefix("torch."), "shape": list(data.shape), "hex": raw.hex()}
    return [described(entry) for entry in data] if isinstance(data, list) else data


def described_field(field):
    options = {"keep_on_cpu": field.keep_on_cpu}
    if isinstance(field, FlatField):
        options |= {"dim": field.dim, "slices": described_slices(field.slices)}
    elif isinstance(field, SharedField):
        options["batch_size"] = field.batch_size
    return [type(field).__name__.removesuffix("Field").lower(), options]


def described_slices(slices):
    if isinstance(slices, slice):
        return {"slice": [slices.start, slices.stop, slices.step]}
    return [described_slices(part) for part in slices]


def described_item(item):
    return {key: {"data": described(e.data), "field": described_field(e.field)} for key, e in item.items()}


def outputs_of(layout: Layout, modality: str) -> list[dict[str, Any]]:
    """A processor's outputs for two images or videos, each with every field of a layout's modality."""
    batch = batch_of(layout, modality)
    outputs: list[dict[str, Any]] = [{}, {}]
    for key, value in batch.items():
        spec = layout.fields[key]
        if isinstance(spec, Shared):
            cuts = [slice(None)] * 2
        elif isinstance(spec, Flat):
            sizes = batch[spec.sizes] if spec.unit == "value" else batch[spec.sizes].prod(-1)
            first = int(sizes[0]) // (4 if spec.unit == "merged grid" else 1)
            before = (slice(None),) * spec.dim
            cuts = [(*before, slice(0, first)), (*before, slice(first, None))]
        else:
            cuts = [slice(0, 1), slice(1, None)]
        for output, cut in zip(outputs, cuts, strict=True):
            output[key] = value if isinstance(spec, Shared) else value[cut]
    return outputs


def batch_of(layout: Layout, modality: str) -> dict[str, Any]:
    """Inputs for two items that hold every field of a layout's modality."""
    fields = {key: spec for key, spec in layout.fields.items() if spec.modality == modality}
    units = {spec.sizes: spec.unit for spec in fields.values() if isinstance(spec, Flat)}
    counts = {spec.sizes for spec in fields.values() if isinstance(spec, Flat | Shared)}
    inputs: dict[str, Any] = {}
    for key in counts:
        two_sides = key.endswith("hws")
        grids = [[4, 4], [2, 6]] if two_sides else [[1, 4, 4], [1, 2, 6]]
        inputs[key] = np.array([3, 2] if units.get(key, "value") == "value" else grids)
    for key, spec in fields.items():
        if key in inputs:
            continue
        if isinstance(spec, Batched):
            inputs[key] = np.arange(6, dtype=np.float32).reshape(2, 3)
        elif isinstance(spec, Shared):
            inputs[key] = np.array(7)
        else:
            rows = {"value": 5, "grid": 28, "merged grid": 7}[spec.unit]
            values = np.arange(rows * 2, dtype=np.uint8)
            inputs[key] = values.reshape(2, rows) if spec.dim else values.reshape(rows, 2)
    return inputs
