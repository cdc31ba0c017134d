"""What stands in a batch where there is no token, and rows of nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from mmrender.errors import BatchError
from mmrender.training._torch import torch
from mmrender.training.tensor_list import TensorList

if TYPE_CHECKING:
    from mmrender.training.batch import TrainingBatch

ALIGNED: Final[Mapping[str, Any]] = {
    "attention_mask": False,
    "loss_mask": False,
    "logprobs": 0.0,
    "token_types": 0,
    "advantages": 0.0,
    "rewards": 0.0,
}
"""Tensors `(rows, width)` and what stands where there is no token; `input_ids` has the pad token there."""


def check_multiple(multiple: int) -> None:
    """Refuse a number that no width can be a multiple of.

    Raises:
        BatchError: It is not positive.
    """
    if multiple < 1:
        raise BatchError(
            "a width is a multiple of a positive number",
            where="multiple",
            expected="1 or more",
            got=str(multiple),
        )


def filler_experts(experts: Any) -> Any:
    """Return router choices `(layers, top_k)` for a token that has none: distinct ones, as a router's are."""
    layers, top_k = experts.shape[-2:]
    return torch.arange(top_k, device=experts.device).to(experts.dtype).expand(layers, top_k)


def padding_rows(batch: TrainingBatch, count: int) -> TrainingBatch:
    """Return padding rows alone, as wide as the batch and with the tensors that it has."""
    shape = (count, batch.width)
    device = batch.input_ids.device
    blank = {
        name: torch.full(shape, fill, dtype=getattr(batch, name).dtype, device=device)
        for name, fill in {**ALIGNED, "input_ids": batch.pad_token_id}.items()
        if getattr(batch, name) is not None
    }
    blank["attention_mask"][:, 0 if batch.padding_side == "right" else -1] = True
    experts = batch.routed_experts
    if experts is not None:
        blank["routed_experts"] = filler_experts(experts).repeat(*shape, 1, 1)
    positions = torch.zeros((batch.positions.shape[0], *shape), dtype=torch.int64, device=device)
    fields = {
        name: TensorList.empty(count, rows.trailing, dtype=rows.dtype, device=rows.device)
        for name, rows in batch.fields.items()
    }
    return replace(batch, segments=((),) * count, positions=positions, fields=fields, **blank)
