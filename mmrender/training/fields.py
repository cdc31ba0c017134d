"""The images of a batch, expanded straight into its buffers: one tensor per keyword of the model.

An item that stands more than once is expanded once and copied. Nothing else is written than the buffers; only
where a family pads its tensors does an item that is smaller pass through memory of its own.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from mmrender.errors import BatchError
from mmrender.media.item import ReferenceItem, TensorSpec, expand_into, tensor_specs
from mmrender.media.levels import STORAGE
from mmrender.media.resolve import map_shared
from mmrender.spans import MediaItem, TensorDtype
from mmrender.training._torch import torch
from mmrender.training.families import FieldRule, ModelFamily
from mmrender.training.placing import Placed
from mmrender.training.tensor_list import TensorList

Fields = dict[str, TensorList]
_DTYPES: Final[dict[Any, TensorDtype]] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where one tensor of one item goes: rows `[start, start + length)` of the buffer of its keyword."""

    name: str
    start: int
    spec: TensorSpec
    rule: FieldRule

    @property
    def length(self) -> int:
        return self.shape[0]

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.length)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape[1:] if self.rule.layout == "rows" else self.spec.shape


def collate_fields(
    rows: Sequence[Sequence[Sequence[Placed]]],
    family: ModelFamily,
    *,
    dtype: Any,
    pin_memory: bool,
    executor: Executor | None = None,
) -> Fields:
    """Expand the items of all rows into one tensor per keyword.

    Args:
        rows: The items of each sample of each row.
        family: How tensors are joined.
        dtype: Of floating tensors: torch's float32, float16 or bfloat16.
        pin_memory: Whether the tensors lie in page-locked memory.
        executor: Threads that share the work.

    Raises:
        BatchError: The dtype is another, an item is by reference only, or tensors cannot be joined.
    """
    if dtype not in _DTYPES:
        raise BatchError("pixels come in float32, float16 or bfloat16", where="dtype", got=str(dtype))
    plan = _Plan(family, _DTYPES[dtype])
    for row in rows:
        plan.add_row([placed for sample in row for placed in sample])
    out = plan.allocate(dtype, pin_memory)
    plan.fill(out, executor)
    lists = {name: TensorList(values, plan.lengths(name)) for name, values in out.items()}
    for name, rule in family.rules.items():
        if rule.layout == "counts" and lists:
            counts = [[len(sample) for sample in row if sample] for row in rows]
            flat = torch.tensor([count for row in counts for count in row], dtype=torch.int64)
            lists[name] = TensorList(flat, tuple(map(len, counts)))
    return lists


class _Plan:
    """Where each tensor of each item goes, before any is expanded."""

    def __init__(self, family: ModelFamily, dtype: TensorDtype) -> None:
        self._family = family
        self._dtype = dtype
        self._slots: list[tuple[MediaItem, list[_Slot]]] = []
        self._first: dict[tuple[str, type], list[_Slot]] = {}
        self._rows: list[dict[str, int]] = []
        self._totals: dict[str, int] = {}
        self._trailing: dict[str, tuple[int, ...]] = {}
        self._kinds: dict[str, tuple[np.dtype[Any], bool]] = {}

    def add_row(self, row: Sequence[Placed]) -> None:
        """Give the tensors of a row's items the next places."""
        lengths: dict[str, int] = {}
        for placed in row:
            slots = list(self._slots_of(placed))
            for slot in slots:
                self._totals[slot.name] = slot.start + slot.length
                lengths[slot.name] = lengths.get(slot.name, 0) + slot.length
            self._admit_again(placed, slots)
            self._slots.append((placed.item, slots))
        self._rows.append(lengths)

    def _slots_of(self, placed: Placed) -> Iterator[_Slot]:
        if isinstance(placed.item, ReferenceItem):
            raise BatchError(
                "an item is by reference only",
                where=placed.where,
                remedy="Process it again with resolve_references",
            )
        for name, spec in tensor_specs(placed.item, self._dtype).items():
            rule = self._family.rule(name)
            if rule.layout != "counts":
                slot = _Slot(name, self._totals.get(name, 0), spec, rule)
                self._admit(slot, placed.where)
                yield slot

    def _admit(self, slot: _Slot, where: str) -> None:
        """Check that a tensor can be joined to those before, and note how large the buffer must be."""
        name, shape = slot.name, slot.shape
        if slot.rule.layout == "rows" and slot.spec.shape[0] != 1:
            raise BatchError(
                "an item of this family holds one image on its first axis",
                where=f"{where}.{name}",
                got=str(list(slot.spec.shape)),
            )
        trailing = self._trailing.setdefault(name, shape[1:])
        kind = self._kinds.setdefault(name, (slot.spec.dtype, slot.spec.floating))
        joined = len(trailing) == len(shape) - 1 and kind == (slot.spec.dtype, slot.spec.floating)
        if not joined or (trailing != shape[1:] and not slot.rule.padded):
            raise BatchError(
                "tensors of two images cannot be joined",
                where=f"{where}.{name}",
                expected=f"{kind[0]} {['...', *trailing]}",
                got=f"{slot.spec.dtype} {['...', *shape[1:]]}",
                remedy="Put samples of different kinds into different batches",
            )
        self._trailing[name] = tuple(max(pair) for pair in zip(trailing, shape[1:], strict=True))

    def _admit_again(self, placed: Placed, slots: list[_Slot]) -> None:
        """Note where an item stands first, and check that equal identities have equal tensors, as to form."""
        known = self._first.setdefault((placed.item.identity, type(placed.item)), slots)
        if [(slot.name, slot.spec) for slot in known] != [(slot.name, slot.spec) for slot in slots]:
            raise BatchError(
                "one identity stands for two different items",
                where=placed.where,
                expected=str({slot.name: list(slot.shape) for slot in known}),
                got=str({slot.name: list(slot.shape) for slot in slots}),
            )

    def allocate(self, dtype: Any, pin_memory: bool) -> dict[str, Any]:
        """Return a tensor for each keyword, not written yet unless parts of it stay padding."""
        out = {}
        for name, total in self._totals.items():
            kind, floating = self._kinds[name]
            shape = (total, *self._trailing[name])
            storage = np.dtype(STORAGE[self._dtype]) if floating else kind
            values = _buffer(shape, storage, zero=self._family.rule(name).padded, pinned=pin_memory)
            out[name] = values.view(dtype) if floating else values
        return out

    def fill(self, out: Mapping[str, Any], executor: Executor | None) -> None:
        """Expand each distinct item to its first place, then copy it to its others."""
        jobs: list[tuple[MediaItem, list[_Slot]]] = []
        copies: list[tuple[_Slot, _Slot]] = []
        for item, slots in self._slots:
            known = self._first[item.identity, type(item)]
            if known is slots:
                jobs.append((item, slots))
            else:
                copies += zip(known, slots, strict=True)
        views = {name: _as_numpy(values) for name, values in out.items()}
        map_shared(partial(_expand, views, self._dtype), jobs, executor)
        for source, target in copies:
            array = views[source.name]
            array[target.rows] = array[source.rows]

    def lengths(self, name: str) -> tuple[int, ...]:
        """Length of each row in the tensor of a keyword."""
        return tuple(row.get(name, 0) for row in self._rows)


def _buffer(shape: tuple[int, ...], storage: np.dtype[Any], *, zero: bool, pinned: bool) -> Any:
    if pinned:
        held = torch.from_numpy(np.empty(0, storage)).dtype
        return (torch.zeros if zero else torch.empty)(shape, dtype=held, pin_memory=True)
    # numpy asks for huge pages, so that a large buffer is first written to several times faster.
    return torch.from_numpy((np.zeros if zero else np.empty)(shape, storage))


def _as_numpy(values: Any) -> Any:
    return (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()


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
    expand_into(item, _with_unused(item, targets, dtype), dtype)
    for place, buffer in smaller:
        place[tuple(slice(0, side) for side in buffer.shape)] = buffer


def _with_unused(item: MediaItem, targets: dict[str, Any], dtype: TensorDtype) -> dict[str, Any]:
    """Add a buffer for what an item holds and the batch does not take from it."""
    for name, spec in tensor_specs(item, dtype).items():
        if name not in targets:
            targets[name] = np.empty(spec.shape, spec.dtype if not spec.floating else STORAGE[dtype])
    return targets


def model_kwargs(fields: Mapping[str, TensorList], family: ModelFamily) -> dict[str, Any]:
    """Return the fields as the model takes them; those without a single image are left out."""
    return {
        name: rows.padded() if family.rule(name).layout == "rows" else rows.values
        for name, rows in fields.items()
        if rows.values.shape[0]
    }
