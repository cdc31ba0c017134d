"""Media items and their tensors, in the smallest exact form or expanded.

The reference's `pixel_values` repeats an image for each time step of a patch in float32: eight times the
bytes of the pixels. An item keeps the smallest exact form and expands it on demand, also straight into the
caller's buffers, such as the rows of a training batch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from mmcodecs import BufferPool
from mmrender.errors import importing
from mmrender.media.levels import STORAGE, Compact, Floats, Integers, storage_of
from mmrender.messages import Modality
from mmrender.sidecar import (
    Count,
    Expansion,
    Framework,
    MediaItem,
    TensorDtype,
)

Identity: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
"""Hex digest of content and processor settings."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of an item.

    Attributes:
        shape: Its shape.
        dtype: Of the numpy array; uint16 for bfloat16.
        floating: Whether the requested dtype applies to it. Integers keep their own.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    floating: bool


_memory = BufferPool(max_idle_bytes=64 << 20)
"""Memory of expanded tensors: fresh pages, which the system zeroes, cost as much as writing the tensors."""


class Item(msgspec.Struct, frozen=True, eq=False, kw_only=True, tag_field="kind"):
    """Base of the items here. See `MediaItem`. Equal identities make equal items."""

    identity: Identity
    size: tuple[Count, Count]
    grid: tuple[Count, ...]
    expansion: Expansion
    modality: Modality = "image"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Item) and type(other) is type(self) and other.identity == self.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.modality} {self.identity[:12]}, grid={self.grid})"


class TensorItem(Item, frozen=True, eq=False, kw_only=True):
    """An item that has tensors."""

    def specs(self, dtype: TensorDtype) -> dict[str, TensorSpec]:
        """Return the spec of each tensor by name. See `tensor_specs`."""
        raise NotImplementedError

    def write(self, out: Mapping[str, npt.NDArray[Any]], dtype: TensorDtype) -> None:
        """Write the tensors that `out` names into its arrays, which follow the specs."""
        raise NotImplementedError

    def tensors(self, dtype: TensorDtype = "float32", *, framework: Framework = "numpy") -> dict[str, Any]:
        """Expand to the tensors that the model's processor returns, floating ones in `dtype`.

        Each call writes new arrays, which the caller owns. Memory that is no longer referenced, at most 64
        MiB, is reused.

        Raises:
            MissingDependencyError: `framework="torch"` without torch.
        """
        specs = self.specs(dtype)
        arrays = {name: _memory.array(spec.shape, spec.dtype) for name, spec in specs.items()}
        self.write(arrays, dtype)
        if framework == "numpy":
            return arrays
        with importing("torch", "torch", 'framework="torch"', otherwise='choose framework="numpy"'):
            import torch

        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if dtype == "bfloat16":
            tensors |= {name: tensors[name].view(torch.bfloat16) for name in specs if specs[name].floating}
        return tensors


class DeferredParts(Mapping[str, Compact]):
    """Parts that are computed when they are asked for. A copy in another process has the parts themselves.

    Args:
        compute: Returns the parts. It keeps them, if they are to be computed once.
        source: The file that they are computed from.
    """

    def __init__(self, compute: Callable[[], Mapping[str, Compact]], source: bytes) -> None:
        self._compute = compute
        self.source = source

    def __getitem__(self, name: str) -> Compact:
        return self._compute()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._compute())

    def __len__(self) -> int:
        return len(self._compute())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self._compute()),)


def nbytes_of(parts: Mapping[str, Compact]) -> int:
    """Return the bytes of parts in their kept form."""
    return sum(part.values.nbytes for part in parts.values())


class ProcessedItem(TensorItem, frozen=True, eq=False, kw_only=True, tag="processed"):
    """One medium as the model's own processor made it, each tensor in its smallest exact form.

    The parts of a clip may be `DeferredParts`.
    """

    parts: Mapping[str, Compact]

    @property
    def compact(self) -> bool:
        """Whether all pixels are kept as uint8."""
        return not any(isinstance(part, Floats) for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in their kept form, or of the file that they are computed from."""
        if isinstance(self.parts, DeferredParts):
            return len(self.parts.source)
        return nbytes_of(self.parts)

    def specs(self, dtype: TensorDtype) -> dict[str, TensorSpec]:
        """Return the spec of each tensor by name. See `tensor_specs`."""
        return {
            name: TensorSpec(part.shape, storage_of(part, dtype), not isinstance(part, Integers))
            for name, part in self.parts.items()
        }

    def write(self, out: Mapping[str, npt.NDArray[Any]], dtype: TensorDtype) -> None:
        """Write the tensors that `out` names into its arrays, which follow the specs."""
        for name, part in self.parts.items():
            if name in out:
                part.write(out[name], dtype)


def tensor_specs(item: MediaItem, dtype: TensorDtype = "float32") -> dict[str, TensorSpec]:
    """Return the spec of each tensor of an item by name, in the order of `item.tensors(dtype)`.

    An item of another package's class is expanded for it.

    Raises:
        MediaError: The item is a reference, without tensors.
    """
    if isinstance(item, TensorItem):
        return item.specs(dtype)
    storage = np.dtype(STORAGE[dtype])
    return {
        name: TensorSpec(values.shape, values.dtype, values.dtype == storage)
        for name, values in item.tensors(dtype).items()
    }


def expand_into(item: MediaItem, out: Mapping[str, npt.NDArray[Any]], dtype: TensorDtype = "float32") -> None:
    """Write an item's tensors into arrays, such as slices of a batch.

    Compact pixels are expanded in place, without a copy in between.

    Args:
        item: Any media item with tensors.
        out: For each name of `tensor_specs(item, dtype)` a C-contiguous array of that shape and dtype. Items
            of the classes here may be written in part.
        dtype: Of the floating-point tensors; bfloat16 is written to uint16 arrays.

    Raises:
        MediaError: The item is a reference, without tensors.
    """
    if isinstance(item, TensorItem):
        item.write(out, dtype)
        return
    for name, values in item.tensors(dtype).items():
        np.copyto(out[name], values)
