"""The trainer's side: samples become the model's keyword arguments, in batches that are padded or packed.

Nothing here imports what the worker that samples needs: a trainer installs no HTTP client. Names are imported
from their modules at first use, so that torch is not imported before.
"""

from typing import TYPE_CHECKING, Final

from mmrender._lazy import at_first_use

if TYPE_CHECKING:
    from mmrender.training.aligned import check_feature_tokens
    from mmrender.training.batch import Segment, TrainingBatch
    from mmrender.training.collation import collate
    from mmrender.training.dummy import blank_dummy, dummy_sample, smallest_dummy
    from mmrender.training.families import FieldRule, ModelFamily
    from mmrender.training.inputs import block_diagonal_mask, labels
    from mmrender.training.logprobs import token_logprobs
    from mmrender.training.mm_kwargs import collate_mm_kwargs
    from mmrender.training.packing import balance, compute_cost, first_fit_decreasing
    from mmrender.training.planning import MicroBatch, StepPlan, collate_micro_batch, plan_steps
    from mmrender.training.positions import MRope, mrope_position_ids
    from mmrender.training.recurrent import recurrent_segments
    from mmrender.training.references import ProcessorLoader, resolve_references
    from mmrender.training.tensor_list import TensorList
    from mmrender.training.truncation import truncate
    from mmrender.training.vllm_kwargs import MultiModalKwargs, decode_mm_kwargs

__all__ = [
    "FieldRule",
    "MRope",
    "MicroBatch",
    "ModelFamily",
    "MultiModalKwargs",
    "ProcessorLoader",
    "Segment",
    "StepPlan",
    "TensorList",
    "TrainingBatch",
    "balance",
    "blank_dummy",
    "block_diagonal_mask",
    "check_feature_tokens",
    "collate",
    "collate_micro_batch",
    "collate_mm_kwargs",
    "compute_cost",
    "decode_mm_kwargs",
    "dummy_sample",
    "first_fit_decreasing",
    "labels",
    "mrope_position_ids",
    "plan_steps",
    "recurrent_segments",
    "resolve_references",
    "smallest_dummy",
    "token_logprobs",
    "truncate",
]

_HOMES: Final = {
    "FieldRule": "families",
    "MRope": "positions",
    "MicroBatch": "planning",
    "ModelFamily": "families",
    "MultiModalKwargs": "vllm_kwargs",
    "ProcessorLoader": "references",
    "Segment": "batch",
    "StepPlan": "planning",
    "TensorList": "tensor_list",
    "TrainingBatch": "batch",
    "balance": "packing",
    "blank_dummy": "dummy",
    "block_diagonal_mask": "inputs",
    "check_feature_tokens": "aligned",
    "collate": "collation",
    "collate_micro_batch": "planning",
    "collate_mm_kwargs": "mm_kwargs",
    "compute_cost": "packing",
    "decode_mm_kwargs": "vllm_kwargs",
    "dummy_sample": "dummy",
    "first_fit_decreasing": "packing",
    "labels": "inputs",
    "mrope_position_ids": "positions",
    "plan_steps": "planning",
    "recurrent_segments": "recurrent",
    "resolve_references": "references",
    "smallest_dummy": "dummy",
    "token_logprobs": "logprobs",
    "truncate": "truncation",
}

__getattr__, __dir__ = at_first_use(__name__, _HOMES)
