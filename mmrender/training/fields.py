"""The images of a batch, expanded straight into its buffers: one tensor per keyword of the model.

Every distinct item is expanded once, and copied to its further places. Only if a family pads its tensors does
a smaller item pass through memory of its own.

Pixels that are kept as uint8 levels travel to the device that trains as levels, and become floats there.
Levels have an eighth of the bytes of float32 patches that repeat an image for two time steps. Each becomes
its value by a table of 256 for each channel, computed once as the reference computes it, so the result has
the same bits on every device.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt

from mmcodecs import BufferPool
from mmrender.errors import BatchError, PlaceholderError
from mmrender.media.encoded import ReferenceItem
from mmrender.media.item import ProcessedItem, TensorSpec, expand_into, tensor_specs
from mmrender.media.levels import Levels, PixelArithmetic
from mmrender.media.processors.patches import PatchItem
from mmrender.media.resolve import map_shared
from mmrender.sidecar import MediaItem, MediaSpan, TensorDtype
from mmrender.training.families import FieldRule, ModelFamily
from mmrender.training.tensor_list import TensorList, torch
from mmrender.trajectory.sample import TrainingSample

_DTYPES: Final[dict[Any, TensorDtype]] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
_LEVELS: Final = 256
_memory = BufferPool(max_idle_bytes=4 << 30)
"""Memory of batches that are gone: fresh pages, which the system zeroes, cost several times the expansion."""
_RowsOfMedia: TypeAlias = Sequence[Sequence[tuple[str, Sequence[MediaSpan]]]]
"""For each row the names of its samples, and their media, from `media_of`."""


class ExpandOptions(TypedDict, total=False):
    """Place and dtype of expanded images.

    Attributes:
        dtype: Of floating tensors: torch's float32 (the default), float16 or bfloat16. Integers keep theirs.
        device: Device of the tensors, by default the CPU. Page-locked ones move without waiting. Pixels that
            are kept as levels travel as levels and are expanded there, with the same bits.
        pin_memory: Whether to write into page-locked memory, by default if CUDA is available and the process
            is no worker of a `DataLoader`, which must not touch the device.
        executor: Threads that share the expansion.
    """

    dtype: Any
    device: Any
    pin_memory: bool | None
    executor: Executor | None


def pins(pin_memory: bool | None) -> bool:
    """Return `pin_memory`, or its default: see `ExpandOptions`."""
    if pin_memory is not None:
        return pin_memory
    return bool(torch.cuda.is_available()) and torch.utils.data.get_worker_info() is None


def media_of(samples: Sequence[TrainingSample], index: int) -> tuple[str, list[MediaSpan]]:
    """Return the name of one of the samples, for errors, and its media in prompt order.

    Raises:
        PlaceholderError: The sidecar does not fit the tokens.
    """
    name = samples[index].sample_id or f"samples[{index}]"
    try:
        return name, samples[index].media_spans
    except PlaceholderError as error:
        error.where = f"{name}.{error.where}"
        raise


@dataclass(slots=True)
class _Buffer:
    """The tensor of one keyword of the model: its rule and form, the lengths of its rows, then its memory.

    `values` is the tensor, in its final dtype. `memory` is its memory as it is written: an array, or on a
    device a tensor.
    """

    rule: FieldRule
    spec: TensorSpec
    trailing: tuple[int, ...]
    lengths: list[int]
    total: int = 0
    values: Any = None
    memory: Any = None
    on_device: bool = False

    def take(self, spec: TensorSpec, row: int, where: str) -> slice:
        """Reserve the next place in the buffer for a tensor."""
        if self.rule.layout == "rows" and spec.shape[0] != 1:
            problem = "an item of this family has one image on its first axis"
            raise BatchError(problem, where=where, got=str(list(spec.shape)))
        trailing = self.rule.trailing(spec.shape)
        joins = (spec.dtype, spec.floating, len(trailing)) == (
            self.spec.dtype,
            self.spec.floating,
            len(self.trailing),
        )
        if not joins or (trailing != self.trailing and not self.rule.padded):
            raise BatchError(
                "tensors of two images cannot be joined",
                where=where,
                expected=f"{self.spec.dtype} {['...', *self.trailing]}",
                got=f"{spec.dtype} {['...', *trailing]}",
                remedy="Put samples of different kinds into different batches",
            )
        self.trailing = tuple(map(max, self.trailing, trailing))
        start, self.total = self.total, self.total + spec.shape[-len(trailing) - 1]
        self.lengths[row] += self.total - start
        return slice(start, self.total)

    def allocate(self, dtype: Any, device: Any, pin: bool) -> None:
        """Make the memory of the whole buffer. Integers stay on the CPU, which numbers positions by them."""
        shape, zero = (self.total, *self.trailing), self.rule.padded
        if device is not None and self.spec.floating:
            self.values = (torch.zeros if zero else torch.empty)(shape, dtype=dtype, device=device)
            self.memory, self.on_device = self.values, True
            return
        if pin:
            storage = torch.from_numpy(np.empty(0, self.spec.dtype)).dtype
            self.values = (torch.zeros if zero else torch.empty)(shape, dtype=storage, pin_memory=True)
        else:
            array = _memory.array(shape, self.spec.dtype)
            if zero:
                array.fill(0)
            self.values = torch.from_numpy(array)
        self.memory = self.values.numpy()
        self.values = self.values.view(dtype) if self.spec.floating else self.values


class _Expansion(NamedTuple):
    """An item, the form of its tensors, and their rows by buffer. A batch may lack some buffers."""

    item: MediaItem
    specs: dict[str, TensorSpec]
    places: dict[str, slice]


def collate_fields(
    rows: _RowsOfMedia,
    family: ModelFamily,
    *,
    dtype: Any = torch.float32,
    device: Any = None,
    pin_memory: bool | None = None,
    executor: Executor | None = None,
) -> dict[str, TensorList]:
    """Expand the items of all rows into one tensor per keyword.

    Args:
        rows: The media of each sample of each row, from `media_of`.
        family: The rules by which tensors are joined.
        dtype: This and the rest are `ExpandOptions`.
        device: Device of floating tensors. Integers stay on the CPU, where positions are numbered by them.
        pin_memory: Whether to write into page-locked memory.
        executor: Threads that share the work.

    Raises:
        BatchError: The dtype is another, an item is by reference only, or tensors cannot be joined.
    """
    if dtype not in _DTYPES:
        raise BatchError("pixels come in float32, float16 or bfloat16", where="dtype", got=str(dtype))
    pin = pins(pin_memory)
    buffers, distinct, copies = _plan(rows, family, _DTYPES[dtype])
    for buffer in buffers.values():
        buffer.allocate(dtype, device, pin)
    map_shared(partial(_expand, buffers, dtype, pin), distinct, executor)
    for name, source, target in copies:
        buffers[name].memory[target] = buffers[name].memory[source]
    fields = {name: TensorList(buffer.values, tuple(buffer.lengths)) for name, buffer in buffers.items()}
    for name, rule in family.rules.items():
        if rule.layout == "counts" and buffers:
            counts = [[len(spans) for _, spans in row if spans] for row in rows]
            flat = torch.tensor([count for row in counts for count in row], dtype=torch.int64)
            fields[name] = TensorList(flat, tuple(map(len, counts)))
    return fields


def _plan(
    rows: _RowsOfMedia, family: ModelFamily, dtype: TensorDtype
) -> tuple[dict[str, _Buffer], list[_Expansion], list[tuple[str, slice, slice]]]:
    """Return the buffers, the items to expand, and rows to copy then: buffer, source and target."""
    buffers: dict[str, _Buffer] = {}
    distinct: dict[tuple[str, type], _Expansion] = {}
    copies = []
    for row, sample_name, span in [
        (row, name, span) for row, samples in enumerate(rows) for name, spans in samples for span in spans
    ]:
        item = span.item
        try:
            if isinstance(item, ReferenceItem):
                remedy = "Process it again with resolve_references"
                raise BatchError("an item is by reference only", remedy=remedy)
            new = _Expansion(item, tensor_specs(item, dtype), {})
            for name, spec in new.specs.items():
                rule = family.rule(name)
                if rule.layout != "counts":
                    if name not in buffers:
                        buffers[name] = _Buffer(rule, spec, rule.trailing(spec.shape), [0] * len(rows))
                    new.places[name] = buffers[name].take(spec, row, f".{name}")
            first = distinct.setdefault((item.identity, type(item)), new)
            if first.specs != new.specs:
                expected, got = (
                    str({name: list(spec.shape) for name, spec in one.specs.items()}) for one in (first, new)
                )
                raise BatchError("two different items have one identity", expected=expected, got=got)
        except BatchError as error:
            error.where = f"{sample_name}.{span.where}{error.where or ''}"
            raise
        if first is not new:
            copies += [(name, first.places[name], place) for name, place in new.places.items()]
    return buffers, [*distinct.values()], copies


def _expand(buffers: Mapping[str, _Buffer], dtype: Any, pin: bool, expansion: _Expansion) -> None:
    """Write the tensors of an item to their places."""
    item = expansion.item
    written: dict[str, npt.NDArray[Any]] = {}  # by the item, at their places if they fit
    later: list[tuple[_Buffer, Any, Any]] = []  # places that values are copied to
    for name, spec in expansion.specs.items():
        if name not in expansion.places:  # the batch does not take this tensor
            written[name] = np.empty(spec.shape, spec.dtype)
            continue
        buffer, place = buffers[name], buffers[name].memory[expansion.places[name]]
        fits = math.prod(place.shape) == math.prod(spec.shape)
        has_levels = buffer.on_device and _has_levels(item, name)
        if has_levels:
            values = place.view(spec.shape) if fits else place.new_empty(spec.shape)
            _expand_on_device(item, name, values, pin)
        elif fits and not buffer.on_device:
            values = written[name] = place.reshape(spec.shape)
        else:
            values = written[name] = np.empty(spec.shape, spec.dtype)
        if not fits or (buffer.on_device and not has_levels):
            later.append((buffer, place, values))
    if written:
        expand_into(item, written, _DTYPES[dtype])
    for buffer, place, values in later:
        is_here = buffer.on_device and isinstance(values, np.ndarray)
        there = torch.from_numpy(values).view(dtype).to(place.device) if is_here else values
        shape = there.shape[-place.ndim :]
        place[tuple(slice(0, side) for side in shape)] = there.reshape(shape)


def _has_levels(item: MediaItem, name: str) -> bool:
    """Whether a tensor of an item is kept as levels."""
    if isinstance(item, PatchItem):
        return name.startswith("pixel_values")
    return isinstance(item, ProcessedItem) and isinstance(item.parts.get(name), Levels)


def _expand_on_device(item: MediaItem, name: str, out: Any, pin: bool) -> None:
    """Write a tensor that is kept as levels into `out`, of its shape, on the device of `out`."""
    if isinstance(item, PatchItem):
        levels = _moved(item.frames, out.device, pin)
        out.copy_(values_of_levels(_patches(levels, item), item.arithmetic, out.dtype).reshape(out.shape))
        return
    part: Any = item.parts[name] if isinstance(item, ProcessedItem) else None
    tiles = out.view(-1, *part.shape[-3:])
    tiles.zero_()
    if part.held:
        levels = _moved(part.values, out.device, pin)
        values = values_of_levels(levels.reshape(*levels.shape[:2], -1), part.arithmetic, out.dtype)
        filled = torch.tensor(part.held, dtype=torch.int64, device=out.device)
        tiles.index_copy_(0, filled, values.view(levels.shape))


def _moved(levels: npt.NDArray[np.uint8], device: Any, pin: bool) -> Any:
    # Copied: items are read-only, and only page-locked memory moves without waiting.
    staged = torch.empty(levels.shape, dtype=torch.uint8, pin_memory=pin)
    staged.numpy()[...] = levels
    return staged.to(device, non_blocking=pin)


def _patches(frames: Any, item: PatchItem) -> Any:
    """Return frames `(n, 3, height, width)` as patches `(patches, 3, temporal * patch ** 2)`."""
    (steps, height, width), layout = item.grid, item.layout
    merge, patch, temporal = layout.merge, layout.patch, layout.temporal
    cut = frames.view(-1, 3, height // merge, merge, patch, width // merge, merge, patch)
    by_patch = cut.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, height * width, 3, patch**2)
    missing = steps * temporal - len(by_patch)  # the last frame fills its time step
    by_patch = torch.cat((by_patch, by_patch[-1:].expand(missing, -1, -1, -1))) if missing else by_patch
    whole = by_patch.view(steps, temporal, height * width, 3, patch**2).permute(0, 2, 3, 1, 4)
    return whole.reshape(steps * height * width, 3, temporal * patch**2)


def values_of_levels(levels: Any, arithmetic: PixelArithmetic, dtype: Any) -> Any:
    """Return the values of levels `(n, 3, m)` by the table of their channel."""
    table = torch.from_numpy(arithmetic.table().copy()).to(dtype).reshape(-1).to(levels.device)
    first = torch.arange(0, 3 * _LEVELS, _LEVELS, dtype=torch.int32, device=levels.device)
    places = levels.to(torch.int32) + first[:, None]
    return table.index_select(0, places.view(-1)).view(levels.shape)
