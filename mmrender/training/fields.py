"""The images of a batch, expanded straight into its buffers: one tensor per keyword of the model.

Every distinct item is expanded once, and copied where it occurs again. Nothing but the buffers is written;
only where a family pads its tensors does a smaller item pass through memory of its own.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypedDict

import numpy as np

from mmrender.errors import BatchError, PlaceholderError
from mmrender.media.item import ReferenceItem, TensorSpec, expand_into, tensor_specs
from mmrender.media.resolve import map_shared
from mmrender.spans import MediaItem, MediaSpan, TensorDtype
from mmrender.training.families import FieldRule, ModelFamily
from mmrender.training.tensor_list import TensorList, torch
from mmrender.trajectory.sample import TrainingSample

_DTYPES: Final[dict[Any, TensorDtype]] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


class ExpandOptions(TypedDict, total=False):
    """Where and how images are expanded.

    Attributes:
        dtype: Of floating tensors: torch's float32 (the default), float16 or bfloat16. Integers keep theirs.
        device: Where the tensors go; page-locked ones without waiting for them. The default is memory.
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


@dataclass(frozen=True, slots=True)
class _Slot:
    """One tensor of one item: which rows of the buffer of its keyword it takes, with the item's own form."""

    name: str
    rows: slice
    shape: tuple[int, ...]
    spec: TensorSpec


@dataclass(slots=True)
class _Keyword:
    """The tensor of one keyword of the model: its rule, form, and the lengths of its rows so far."""

    rule: FieldRule
    spec: TensorSpec
    trailing: tuple[int, ...]
    lengths: list[int]
    total: int = 0

    def add(self, name: str, spec: TensorSpec, row: int, span: MediaSpan) -> _Slot:
        """Give a tensor the next place in the buffer."""
        shape = spec.shape
        if self.rule.layout == "rows":
            if spec.shape[0] != 1:
                raise BatchError(
                    "an item of this family holds one image on its first axis",
                    where=f"{span.where}.{name}",
                    got=str(list(spec.shape)),
                )
            shape = spec.shape[1:]
        same_kind = (spec.dtype, spec.floating) == (self.spec.dtype, self.spec.floating)
        fits = self.trailing == shape[1:] or (self.rule.padded and len(self.trailing) == len(shape) - 1)
        if not (same_kind and fits):
            raise BatchError(
                "tensors of two images cannot be joined",
                where=f"{span.where}.{name}",
                expected=f"{self.spec.dtype} {['...', *self.trailing]}",
                got=f"{spec.dtype} {['...', *shape[1:]]}",
                remedy="Put samples of different kinds into different batches",
            )
        self.trailing = tuple(map(max, self.trailing, shape[1:]))
        start, self.total = self.total, self.total + shape[0]
        self.lengths[row] += shape[0]
        return _Slot(name, slice(start, self.total), shape, spec)


@dataclass(slots=True)
class _Plan:
    """Which items are expanded into which rows of which buffer, and what is copied where they occur again."""

    family: ModelFamily
    dtype: TensorDtype
    rows: int
    keywords: dict[str, _Keyword] = field(default_factory=dict)
    known: dict[tuple[str, type], list[_Slot]] = field(default_factory=dict)
    jobs: list[tuple[MediaItem, list[_Slot]]] = field(default_factory=list)
    copies: list[tuple[_Slot, _Slot]] = field(default_factory=list)

    def add(self, span: MediaSpan, row: int) -> None:
        """Give each tensor of an item its place; `where` of errors is relative to the sample."""
        item = span.item
        if isinstance(item, ReferenceItem):
            remedy = "Process it again with resolve_references"
            raise BatchError("an item is by reference only", where=span.where, remedy=remedy)
        slots = []
        for name, spec in tensor_specs(item, self.dtype).items():
            rule = self.family.rule(name)
            if rule.layout != "counts":
                trailing = spec.shape[2:] if rule.layout == "rows" else spec.shape[1:]
                keyword = self.keywords.setdefault(name, _Keyword(rule, spec, trailing, [0] * self.rows))
                slots.append(keyword.add(name, spec, row, span))
        first = self.known.setdefault((item.identity, type(item)), slots)
        if [(slot.name, slot.spec) for slot in first] != [(slot.name, slot.spec) for slot in slots]:
            raise BatchError(
                "one identity stands for two different items",
                where=span.where,
                expected=str({slot.name: list(slot.shape) for slot in first}),
                got=str({slot.name: list(slot.shape) for slot in slots}),
            )
        if first is slots:
            self.jobs.append((item, slots))
        else:
            self.copies += zip(first, slots, strict=True)


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
        device: Where the tensors go.
        pin_memory: Whether to write into page-locked memory.
        executor: Threads that share the work.

    Raises:
        BatchError: The dtype is another, an item is by reference only, or tensors cannot be joined.
    """
    if dtype not in _DTYPES:
        raise BatchError("pixels come in float32, float16 or bfloat16", where="dtype", got=str(dtype))
    pin = torch.cuda.is_available() if pin_memory is None else pin_memory
    plan = _Plan(family, _DTYPES[dtype], len(rows))
    for row, samples in enumerate(rows):
        for sample_name, spans in samples:
            try:
                for span in spans:
                    plan.add(span, row)
            except BatchError as error:
                error.where = f"{sample_name}.{error.where}"
                raise
    lists, views = {}, {}
    for name, keyword in plan.keywords.items():
        shape, zero, storage = (keyword.total, *keyword.trailing), keyword.rule.padded, keyword.spec.dtype
        if pin:
            held = torch.from_numpy(np.empty(0, storage)).dtype
            values = (torch.zeros if zero else torch.empty)(shape, dtype=held, pin_memory=True)
        else:
            # numpy asks for huge pages, so that a large buffer is first written to several times faster.
            values = torch.from_numpy((np.zeros if zero else np.empty)(shape, storage))
        views[name] = values.numpy()
        values = values.view(dtype) if keyword.spec.floating else values
        lists[name] = TensorList(values, tuple(keyword.lengths))
    map_shared(partial(_expand, views, plan.dtype), plan.jobs, executor)
    for source, target in plan.copies:
        views[source.name][target.rows] = views[source.name][source.rows]
    for name in [name for name, rule in family.rules.items() if rule.layout == "counts" and lists]:
        counts = [[len(spans) for _, spans in row if spans] for row in rows]
        flat = torch.tensor([count for row in counts for count in row], dtype=torch.int64)
        lists[name] = TensorList(flat, tuple(map(len, counts)))
    if device is None:
        return lists
    return {name: values.to(device, non_blocking=pin) for name, values in lists.items()}


def _expand(views: Mapping[str, Any], dtype: TensorDtype, job: tuple[MediaItem, list[_Slot]]) -> None:
    item, slots = job
    targets, smaller = {}, []
    for slot in slots:
        place = views[slot.name][slot.rows]
        whole = place.shape == slot.shape
        buffer = place if whole else np.empty(slot.shape, place.dtype)
        targets[slot.name] = buffer.reshape(slot.spec.shape)
        if not whole:
            smaller.append((place, buffer))
    for name, spec in tensor_specs(item, dtype).items():
        if name not in targets:  # a tensor that the batch does not take from the item
            targets[name] = np.empty(spec.shape, spec.dtype)
    expand_into(item, targets, dtype)
    for place, buffer in smaller:
        place[tuple(slice(0, side) for side in buffer.shape)] = buffer
