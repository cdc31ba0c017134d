"""From a processor's outputs to vLLM's items, and from items back to the model's keyword arguments."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np

from mmcodecs.errors import CodecError, DecodeError, EncodeError
from mmcodecs.tensors import RawTensor
from mmcodecs.vllm_fields import Batched, Flat, Inputs, Layout, Shared, Spec
from mmcodecs.vllm_model import BatchedField, Field, FieldElem, FlatField, KwargsItem, SharedField

Items: TypeAlias = dict[str, list[KwargsItem]]


def split_items(layout: Layout, inputs: Inputs, *, spatial_merge_size: int | None = None) -> Items:
    """Cut a processor's output for a whole batch into one item per image or video, by modality.

    Tensors are views where slicing gives views. `spatial_merge_size` is needed for image or video embeddings
    of the Qwen kind only.

    Raises:
        EncodeError: The layout lacks a key, a key that it needs is missing, or numbers of items or rows
            differ.
    """
    items: Items = {}
    for key, value in inputs.items():
        spec = layout.fields.get(key)
        if spec is None:
            raise EncodeError(
                f"the layout {layout.name} has no such field, and vLLM would drop it",
                where=f"$.{key}",
                expected=f"some of {', '.join(layout.fields)}",
            )
        elems = _elems(spec, key, value, inputs, spatial_merge_size)
        found = items.setdefault(spec.modality, [{} for _ in elems])
        if len(found) != len(elems):
            raise EncodeError(
                "the fields of a modality differ in their number of items",
                where=f"$.{key}",
                expected=str(len(found)),
                got=str(len(elems)),
            )
        for item, elem in zip(found, elems, strict=True):
            item[key] = elem
    return items


def _elems(spec: Spec, key: str, value: Any, inputs: Inputs, merge: int | None) -> list[FieldElem]:
    if isinstance(spec, Batched):
        field: Field = BatchedField(spec.keep_on_cpu)
        return [FieldElem(_take(value, index), field) for index in range(_length(value))]
    if isinstance(spec, Shared):
        count = _length(_sizes_entry(spec.sizes, key, inputs))
        return [FieldElem(value, SharedField(count, spec.keep_on_cpu))] * count
    ends = [0, *accumulate(_sizes(spec, key, inputs, merge))]
    if ends[-1] != _length(value):
        raise EncodeError(
            f"{spec.sizes} does not add up to the rows",
            where=f"$.{key}",
            expected=f"{ends[-1]} rows",
            got=str(_length(value)),
        )
    cuts = [slice(start, stop) for start, stop in pairwise(ends)]
    field = FlatField(tuple((cut,) for cut in cuts), 0, spec.keep_on_cpu)
    return [FieldElem(_take(value, cut), field) for cut in cuts]


def _sizes_entry(name: str, key: str, inputs: Inputs) -> Any:
    if name not in inputs:
        raise EncodeError(
            f"{key} cannot be cut without {name}", where="$", expected=name, got=", ".join(inputs)
        )
    return inputs[name]


def _sizes(spec: Flat, key: str, inputs: Inputs, merge: int | None) -> list[int]:
    sizes = np.asarray(_sizes_entry(spec.sizes, key, inputs))
    if spec.unit != "value":
        sizes = sizes.prod(-1)
    if spec.unit == "merged grid":
        if merge is None:
            raise EncodeError(f"{key} needs the model's spatial_merge_size", where=f"$.{key}")
        sizes = sizes // merge // merge
    if sizes.ndim != 1 or sizes.dtype.kind not in "iu":
        raise EncodeError(
            "sizes are one integer, or one grid, per item",
            where=f"$.{spec.sizes}",
            got=f"{sizes.dtype} {list(sizes.shape)}",
        )
    return [int(size) for size in sizes]


def collate_items(
    layout: Layout, outputs: Sequence[Inputs], *, spatial_merge_size: int | None = None
) -> list[KwargsItem]:
    """Make one item of each output of a processor that was run on one image (or one video) at a time.

    The items are those that one run on the whole batch would give, slices of the whole batch included, and no
    tensor is joined on the way.

    Raises:
        EncodeError: As `split_items`; or an output holds another number of items than one, or other fields
            than the first.
    """
    items: list[KwargsItem] = []
    for index, output in enumerate(outputs):
        try:
            split = split_items(layout, output, spatial_merge_size=spatial_merge_size)
        except CodecError as error:
            raise error.under(f"[{index}]") from None
        if [len(found) for found in split.values()] != [1] or (items and items[0].keys() != output.keys()):
            raise EncodeError(
                "each output must hold one item, with the same fields as the others",
                where=f"$[{index}]",
                got=", ".join(f"{len(found)} {modality}" for modality, found in split.items()) or "none",
            )
        items.extend(*split.values())
    fields = {key: _whole_batch([item[key] for item in items]) for key in (items[0] if items else ())}
    return [{key: replace(elem, field=fields[key]) for key, elem in item.items()} for item in items]


def _whole_batch(elems: list[FieldElem]) -> Field:
    field = elems[0].field
    if isinstance(field, FlatField):
        ends = [0, *accumulate(_length(elem.data) for elem in elems)]
        return replace(field, slices=tuple((slice(start, stop),) for start, stop in pairwise(ends)))
    return replace(field, batch_size=len(elems)) if isinstance(field, SharedField) else field


def join_items(items: Sequence[Mapping[str, FieldElem]]) -> dict[str, Any]:
    """Join the items of one modality to the model's keyword arguments, as vLLM's engine does.

    Batched tensors of one shape are stacked, of several shapes listed; flat ones are concatenated along their
    dimension; shared ones are taken from the first item.

    Raises:
        DecodeError: The items differ in their fields, hold no data, or cannot be concatenated.
    """
    joined = {}
    for key in items[0] if items else ():
        elems = []
        for index, item in enumerate(items):
            elem = item.get(key)
            if (
                item.keys() != items[0].keys()
                or elem is None
                or type(elem.field) is not type(items[0][key].field)
            ):
                raise DecodeError("items of one batch must have the same fields", where=f"$[{index}].{key}")
            if elem.data is None:
                raise DecodeError("an item has no data, only its hash", where=f"$[{index}].{key}")
            elems.append(elem)
        try:
            joined[key] = _join(elems)
        except (ValueError, RuntimeError, TypeError) as error:
            raise DecodeError("the items cannot be joined", where=f"$.{key}", got=str(error)) from error
    return joined


def _join(elems: list[FieldElem]) -> Any:
    field = elems[0].field
    data: list[Any] = [elem.data for elem in elems]
    if isinstance(field, SharedField):
        return data[0]
    if not all(hasattr(entry, "shape") for entry in data):
        if isinstance(field, BatchedField):
            return data
        return [row for entry in data for row in entry]
    if isinstance(field, FlatField):
        return _along(data, field.dim, "concatenate", "cat")
    same = len({(tuple(entry.shape), str(entry.dtype)) for entry in data}) == 1
    return _along(data, 0, "stack", "stack") if same else data


def _along(data: list[Any], dim: int, of_numpy: str, of_torch: str) -> Any:
    if len({str(entry.dtype) for entry in data}) != 1:
        raise ValueError(f"dtypes differ: {', '.join(sorted({str(entry.dtype) for entry in data}))}")
    if isinstance(data[0], RawTensor):
        return RawTensor(data[0].dtype, getattr(np, of_numpy)([entry.bits for entry in data], axis=dim))
    if isinstance(data[0], np.ndarray):
        return getattr(np, of_numpy)(data, axis=dim)
    import torch

    return getattr(torch, of_torch)(data, dim=dim)


def _take(value: Any, index: int | slice) -> Any:
    if isinstance(value, RawTensor):
        return RawTensor(value.dtype, np.asarray(value.bits[index]))
    taken = value[index]
    # numpy makes a scalar of a vector's element; vLLM has a tensor without dimensions there.
    return np.asarray(taken) if isinstance(taken, np.generic) else taken


def _length(value: Any) -> int:
    return int(value.shape[0]) if hasattr(value, "shape") and len(value.shape) else len(value)
