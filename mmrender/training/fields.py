"""The images of a batch, expanded straight into its buffers: one tensor per keyword of the model.

Every distinct item is expanded once, and copied where it occurs again. Nothing but the buffers is written;
only where a family pads its tensors does a smaller item pass through memory of its own.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias, TypedDict

import numpy as np

from mmrender.errors import BatchError, PlaceholderError
from mmrender.media.item import ReferenceItem, TensorSpec, expand_into, tensor_specs
from mmrender.media.levels import STORAGE
from mmrender.media.resolve import map_shared
from mmrender.spans import MediaItem, MediaSpan, TensorDtype
from mmrender.training.families import FieldRule, ModelFamily
from mmrender.training.tensor_list import TensorList, torch
from mmrender.trajectory.sample import TrainingSample

Fields: TypeAlias = dict[str, TensorList]
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


def media_of(samples: Sequence[TrainingSample], index: int) -> list[tuple[str, MediaSpan]]:
    """Return the media of one of the samples with their paths for errors, in prompt order.

    Raises:
        PlaceholderError: The sidecar does not fit the tokens.
    """
    name = samples[index].sample_id or f"samples[{index}]"
    try:
        return [(f"{name}.{span.where}", span) for span in samples[index].media_spans]
    except PlaceholderError as error:
        error.where = f"{name}.{error.where}"
        raise


@dataclass(slots=True)
class _Keyword:
    """The tensor of one keyword of the model: its rule, form, and the lengths of its rows so far."""

    rule: FieldRule
    spec: TensorSpec
    trailing: tuple[int, ...]
    lengths: list[int]
    total: int = 0


@dataclass(frozen=True, slots=True)
class _Slot:
    """One tensor of one item: which rows of the buffer of its keyword it takes, with the item's own form."""

    name: str
    rows: slice
    shape: tuple[int, ...]
    spec: TensorSpec


def collate_fields(
    rows: Sequence[Sequence[Sequence[tuple[str, MediaSpan]]]],
    family: ModelFamily,
    *,
    dtype: Any = torch.float32,
    device: Any = None,
    pin_memory: bool | None = None,
    executor: Executor | None = None,
) -> Fields:
    """Expand the items of all rows into one tensor per keyword.

    Args:
        rows: The media of each sample of each row, as `media_of` gives them.
        family: How tensors are joined.
        dtype: As in `ExpandOptions`, and so the following.
        device: Where the tensors go.
        pin_memory: Whether to write into page-locked memory.
        executor: Threads that share the work.

    Raises:
        BatchError: The dtype is another, an item is by reference only, or tensors cannot be joined.
    """
    if dtype not in _DTYPES:
        raise BatchError("pixels come in float32, float16 or bfloat16", where="dtype", got=str(dtype))
    name_of_dtype = _DTYPES[dtype]
    pin = torch.cuda.is_available() if pin_memory is None else pin_memory
    keywords: dict[str, _Keyword] = {}
    known: dict[tuple[str, type], list[_Slot]] = {}
    jobs: list[tuple[MediaItem, list[_Slot]]] = []
    copies: list[tuple[_Slot, _Slot]] = []
    for row, samples in enumerate(rows):
        for where, span in (entry for sample in samples for entry in sample):
            if isinstance(span.item, ReferenceItem):
                raise BatchError(
                    "an item is by reference only",
                    where=where,
                    remedy="Process it again with resolve_references",
                )
            slots = [
                _slot(keywords, name, spec, rule=family.rule(name), row=row, rows=len(rows), where=where)
                for name, spec in tensor_specs(span.item, name_of_dtype).items()
                if family.rule(name).layout != "counts"
            ]
            first = known.setdefault((span.item.identity, type(span.item)), slots)
            if first is slots:
                jobs.append((span.item, slots))
                continue
            if [(slot.name, slot.spec) for slot in first] != [(slot.name, slot.spec) for slot in slots]:
                raise BatchError(
                    "one identity stands for two different items",
                    where=where,
                    expected=str({slot.name: list(slot.shape) for slot in first}),
                    got=str({slot.name: list(slot.shape) for slot in slots}),
                )
            copies += zip(first, slots, strict=True)
    buffers = {name: _allocated(keyword, dtype, pin) for name, keyword in keywords.items()}
    views = {
        name: (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()
        for name, values in buffers.items()
    }
    map_shared(partial(_expand, views, name_of_dtype), jobs, executor)
    for source, target in copies:
        views[source.name][target.rows] = views[source.name][source.rows]
    lists = {name: TensorList(buffers[name], tuple(keyword.lengths)) for name, keyword in keywords.items()}
    for name, rule in family.rules.items():
        if rule.layout == "counts" and lists:
            counts = [[len(sample) for sample in row if sample] for row in rows]
            flat = torch.tensor([count for row in counts for count in row], dtype=torch.int64)
            lists[name] = TensorList(flat, tuple(map(len, counts)))
    if device is None:
        return lists
    return {name: values.to(device, non_blocking=pin) for name, values in lists.items()}


def _slot(
    keywords: dict[str, _Keyword],
    name: str,
    spec: TensorSpec,
    *,
    rule: FieldRule,
    row: int,
    rows: int,
    where: str,
) -> _Slot:
    """Give a tensor the next place in its keyword's buffer; check that it can be joined to those before."""
    if rule.layout == "rows" and spec.shape[0] != 1:
        raise BatchError(
            "an item of this family holds one image on its first axis",
            where=f"{where}.{name}",
            got=str(list(spec.shape)),
        )
    shape = spec.shape[1:] if rule.layout == "rows" else spec.shape
    keyword = keywords.setdefault(name, _Keyword(rule, spec, shape[1:], [0] * rows))
    same_kind = (spec.dtype, spec.floating) == (keyword.spec.dtype, keyword.spec.floating)
    fits = keyword.trailing == shape[1:] or (rule.padded and len(keyword.trailing) == len(shape) - 1)
    if not (same_kind and fits):
        raise BatchError(
            "tensors of two images cannot be joined",
            where=f"{where}.{name}",
            expected=f"{keyword.spec.dtype} {['...', *keyword.trailing]}",
            got=f"{spec.dtype} {['...', *shape[1:]]}",
            remedy="Put samples of different kinds into different batches",
        )
    keyword.trailing = tuple(map(max, keyword.trailing, shape[1:]))
    start, keyword.total = keyword.total, keyword.total + shape[0]
    keyword.lengths[row] += shape[0]
    return _Slot(name, slice(start, keyword.total), shape, spec)


def _allocated(keyword: _Keyword, dtype: Any, pinned: bool) -> Any:
    """Return the tensor of a keyword, not written yet unless parts of it stay padding."""
    shape = (keyword.total, *keyword.trailing)
    zero, storage = keyword.rule.padded, keyword.spec.dtype
    if pinned:
        held = torch.from_numpy(np.empty(0, storage)).dtype
        values = (torch.zeros if zero else torch.empty)(shape, dtype=held, pin_memory=True)
    else:
        # numpy asks for huge pages, so that a large buffer is first written to several times faster.
        values = torch.from_numpy((np.zeros if zero else np.empty)(shape, storage))
    return values.view(dtype) if keyword.spec.floating else values


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
            targets[name] = np.empty(spec.shape, STORAGE[dtype] if spec.floating else spec.dtype)
    expand_into(item, targets, dtype)
    for place, buffer in smaller:
        place[tuple(slice(0, side) for side in buffer.shape)] = buffer
