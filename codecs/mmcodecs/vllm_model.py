"""What a multimodal item of vLLM is made of, as plain classes. The wire form is described in `vllm_items`."""

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

RAW_VIEW: Final = 3
"""msgpack extension code of a tensor's elements."""

Slices: TypeAlias = slice | tuple["Slices", ...]
NestedTensors: TypeAlias = Any
"""A numpy array, torch tensor or `RawTensor`; an int, float or bool; or a list of these, nested."""


@dataclass(frozen=True, slots=True)
class BatchedField:
    """The items' data is stacked along a new first dimension."""

    keep_on_cpu: bool = False


@dataclass(frozen=True, slots=True)
class FlatField:
    """The items' data is concatenated along `dim`; `slices` say what of the whole belongs to each item."""

    slices: Slices
    dim: int = 0
    keep_on_cpu: bool = False


@dataclass(frozen=True, slots=True)
class SharedField:
    """All `batch_size` items hold the same data."""

    batch_size: int
    keep_on_cpu: bool = False


Field: TypeAlias = BatchedField | FlatField | SharedField


@dataclass(frozen=True, slots=True, eq=False)
class FieldElem:
    """One keyword of an item: its data, `None` where the receiver holds it already, and how it is joined."""

    data: NestedTensors | None
    field: Field


KwargsItem: TypeAlias = dict[str, FieldElem]
