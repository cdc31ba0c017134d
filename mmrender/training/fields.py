"""The images of a batch, expanded straight into its buffers: one tensor per keyword of the model.

Every distinct item is expanded once, and copied where it occurs again. Nothing but the buffers is written;
only where a family pads its tensors does a smaller item pass through memory of its own.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypedDict

import numpy as np

from mmrender.errors import BatchError, PlaceholderError
from mmrender.media.item import (
    ReferenceItem,
    TensorItem,
    TensorSpec,
    expand_into,
    tensor_specs,
)
from mmrender.media.resolve import map_shared
from mmrender.sidecar import MediaItem, MediaSpan, TensorDtype
from mmrender.training.expand import can_expand, expand_on
from mmrender.training.families import FieldRule, ModelFamily
from mmrender.training.tensor_list import TensorList, torch
from mmrender.trajectory.sample import TrainingSample

_DTYPES: Final[dict[Any, TensorDtype]] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


class ExpandOptions(TypedDict, total=False):
    """Place and dtype of expanded images.

    Attributes:
        dtype: Of floating tensors: torch's float32 (the default), float16 or bfloat16. Integers keep theirs.
        device: Where the tensors go; page-locked ones without waiting for them. The default is memory. Pixels
            that are held as levels travel as such and are expanded there, with the same bits.
        pin_memory: Whether to write into page-locked memory; by default where CUDA is available.
        executor: Threads that share the expansion.
    """

    dtype: Any
    device: Any
    pin_memory: bool | None
    executor: Executor | None


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
    """The tensor of one keyword of the model: its rule, its form, and the lengths of its rows so far."""

    rule: FieldRule
    spec: TensorSpec
    trailing: tuple[int, ...]
    lengths: list[int]
    total: int = 0

    def take(self, spec: TensorSpec, row: int, where: str) -> slice:
        """Give a tensor the next place in the buffer."""
        if self.rule.layout == "rows" and spec.shape[0] != 1:
            problem = "an item of this family holds one image on its first axis"
            raise BatchError(problem, where=where, got=str(list(spec.shape)))
        trailing = self.rule.trailing(spec.shape)
        rows = spec.shape[-len(trailing) - 1]
        alike = (spec.dtype, spec.floating, len(trailing)) == (
            self.spec.dtype,
            self.spec.floating,
            len(self.trailing),
        )
        if not alike or (trailing != self.trailing and not self.rule.padded):
            raise BatchError(
                "tensors of two images cannot be joined",
                where=where,
                expected=f"{self.spec.dtype} {['...', *self.trailing]}",
                got=f"{spec.dtype} {['...', *trailing]}",
                remedy="Put samples of different kinds into different batches",
            )
        self.trailing = tuple(map(max, self.trailing, trailing))
        start, self.total = self.total, self.total + rows
        self.lengths[row] += rows
        return slice(start, self.total)


class _Expansion(NamedTuple):
    """An item, the form of its tensors, and which rows of which buffers they take."""

    item: MediaItem
    specs: dict[str, TensorSpec]
    places: dict[str, slice]


def collate_fields(
    rows: Sequence[Sequence[tuple[str, Sequence[MediaSpan]]]],
    family: ModelFamily,
    *,
    dtype: Any = torch.float32,
    device: Any = None,
    pin_memory: bool | None = None,
    executor: Executor | None = None,
) -> dict[str, TensorList]:
    """Expand the items of all rows into one tensor per keyword.

    Args:
        rows: The media of each sample of each row, as `media_of` gives them.
        family: How tensors are joined.
        dtype: This and what follows are `ExpandOptions`.
        device: Where floating tensors go; integers stay in memory, where positions are made of them.
        pin_memory: Whether to write into page-locked memory.
        executor: Threads that share the work.

    Raises:
        BatchError: The dtype is another, an item is by reference only, or tensors cannot be joined.
    """
    if dtype not in _DTYPES:
        raise BatchError("pixels come in float32, float16 or bfloat16", where="dtype", got=str(dtype))
    pin = torch.cuda.is_available() if pin_memory is None else pin_memory
    buffers, distinct, copies = _plan(rows, family, _DTYPES[dtype])
    lists, views = {}, {}
    on_device: dict[str, Any] = {}
    for name, buffer in buffers.items():
        shape, zero, storage = (buffer.total, *buffer.trailing), buffer.rule.padded, buffer.spec.dtype
        if device is not None and buffer.spec.floating:
            values = (torch.zeros if zero else torch.empty)(shape, dtype=dtype, device=device)
            lists[name], on_device[name] = TensorList(values, tuple(buffer.lengths)), values
            continue
        if pin:
            held = torch.from_numpy(np.empty(0, storage)).dtype
            values = (torch.zeros if zero else torch.empty)(shape, dtype=held, pin_memory=True)
        else:
            # numpy asks for huge pages, so that a large buffer is first written to several times faster.
            values = torch.from_numpy((np.zeros if zero else np.empty)(shape, storage))
        views[name] = values.numpy()
        values = values.view(dtype) if buffer.spec.floating else values
        lists[name] = TensorList(values, tuple(buffer.lengths))
    expand = partial(_expand, views, on_device, dtype, pin)
    if executor is None:
        for one in distinct:
            expand(one)
    else:
        map_shared(expand, distinct, executor)
    for name, source, target in copies:
        held = on_device if name in on_device else views
        held[name][target] = held[name][source]
    for name in [name for name, rule in family.rules.items() if rule.layout == "counts" and lists]:
        counts = [[len(spans) for _, spans in row if spans] for row in rows]
        flat = torch.tensor([count for row in counts for count in row], dtype=torch.int64)
        lists[name] = TensorList(flat, tuple(map(len, counts)))
    return lists


def _plan(
    rows: Sequence[Sequence[tuple[str, Sequence[MediaSpan]]]], family: ModelFamily, dtype: TensorDtype
) -> tuple[dict[str, _Buffer], list[_Expansion], list[tuple[str, slice, slice]]]:
    """Return the buffers, what is expanded into them, and which rows are copies of which."""
    buffers: dict[str, _Buffer] = {}
    distinct: dict[tuple[str, type], _Expansion] = {}
    copies = []
    for row, sample_name, span in [
        (row, name, span) for row, samples in enumerate(rows) for name, spans in samples for span in spans
    ]:
        item, where = span.item, f"{sample_name}.{span.where}"
        if isinstance(item, ReferenceItem):
            remedy = "Process it again with resolve_references"
            raise BatchError("an item is by reference only", where=where, remedy=remedy)
        new = _Expansion(item, tensor_specs(item, dtype), {})
        for name, spec in new.specs.items():
            rule = family.rule(name)
            if rule.layout != "counts":
                if name not in buffers:
                    buffers[name] = _Buffer(rule, spec, rule.trailing(spec.shape), [0] * len(rows))
                new.places[name] = buffers[name].take(spec, row, f"{where}.{name}")
        known = distinct.setdefault((item.identity, type(item)), new)
        if known.specs != new.specs:
            shapes = [{name: list(spec.shape) for name, spec in one.specs.items()} for one in (known, new)]
            problem = "two different items have one identity"
            raise BatchError(problem, where=where, expected=str(shapes[0]), got=str(shapes[1]))
        if known is not new:
            copies += [(name, known.places[name], place) for name, place in new.places.items()]
    return buffers, [*distinct.values()], copies


def _expand(
    views: Mapping[str, Any], on_device: Mapping[str, Any], dtype: Any, pin: bool, one: _Expansion
) -> None:
    targets, smaller, moved = {}, [], []
    for name, spec in one.specs.items():
        if name in on_device and name in one.places and can_expand(one.item, name):
            place = on_device[name][one.places[name]]
            whole = place.numel() == np.prod(spec.shape)
            target = place.view(spec.shape) if whole else place.new_empty(spec.shape)
            expand_on(one.item, name, target, pin_memory=pin)
            if not whole:
                smaller.append((place, target.view(spec.shape[-place.ndim :])))
            continue
        place = views[name][one.places[name]] if name in one.places and name in views else None
        if place is not None and place.size == np.prod(spec.shape):
            targets[name] = place.reshape(spec.shape)
            continue
        targets[name] = np.empty(spec.shape, spec.dtype)
        if name in on_device and name in one.places:
            moved.append((on_device[name][one.places[name]], name))
        elif place is not None:  # where it is None, the batch does not take this tensor
            smaller.append((place, targets[name].reshape(spec.shape[-place.ndim :])))
    if targets.keys() == one.specs.keys():
        expand_into(one.item, targets, _DTYPES[dtype])
    elif targets and isinstance(one.item, TensorItem):
        one.item.write(targets, _DTYPES[dtype])
    for place, name in moved:
        values = torch.from_numpy(targets[name]).view(dtype).reshape(targets[name].shape[-place.ndim :])
        smaller.append((place, values.to(place.device)))
    for place, values in smaller:
        place[tuple(slice(0, side) for side in values.shape)] = values
