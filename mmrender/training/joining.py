"""Images of several batches in one: lists of rows joined by keyword, filled up where the family pads."""

from collections.abc import Mapping, Sequence

from mmrender.errors import BatchError
from mmrender.training._torch import torch
from mmrender.training.families import ModelFamily
from mmrender.training.tensor_list import TensorList


def joined_fields(
    fields: Sequence[Mapping[str, TensorList]], rows: Sequence[int], family: ModelFamily
) -> dict[str, TensorList]:
    """Return the images of all batches by keyword, with empty rows for batches that lack one.

    Args:
        fields: Those of each batch.
        rows: Number of rows of each batch.
        family: Which trailing dimensions may differ.

    Raises:
        BatchError: dtypes differ, or trailing dimensions that the family does not pad.
    """
    out = {}
    for name in dict.fromkeys(name for held in fields for name in held):
        lists = [
            held[name] if name in held else TensorList.empty(count)
            for held, count in zip(fields, rows, strict=True)
        ]
        try:
            out[name] = TensorList.cat(_alike(lists) if family.rule(name).padded else lists)
        except BatchError as error:
            error.where = f"fields[{name!r}]"
            raise
    return out


def _alike(lists: Sequence[TensorList]) -> list[TensorList]:
    """Return lists with equal trailing dimensions, the largest of each; empty ones as they are."""
    holding = [rows.trailing for rows in lists if rows.values.shape[0]]
    if len({len(shape) for shape in holding}) != 1:
        return list(lists)
    largest = tuple(map(max, zip(*holding, strict=True)))
    return [_filled(rows, largest) if rows.values.shape[0] else rows for rows in lists]


def _filled(rows: TensorList, trailing: Sequence[int]) -> TensorList:
    """Return rows with zeros at the ends of their trailing dimensions."""
    ends: list[int] = []
    for side, own in zip(reversed(trailing), reversed(rows.trailing), strict=True):
        ends += [0, side - own]
    return TensorList(torch.nn.functional.pad(rows.values, ends), rows.lengths)
