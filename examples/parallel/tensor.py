"""Tensor parallel: every rank computes some heads and inner units of each layer, for the same batch.

Weights of attention and MLP are split by columns, then by rows. Vision tower, embedding and head are whole on
every rank. Norms of queries and keys see the rank's heads alone, so their gradients are added up.
"""

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mmrender.training.losses import step_counts
from parallel.case import largest_difference, loss_of, model_and_samples, one_process, packed_batch

PLAN = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}
OF_SOME_HEADS = ("q_norm", "k_norm")


def split(model: Any) -> None:
    """Split the layers of the language model."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.language_model.layers:
        parallelize_module(layer, mesh, PLAN)


def gradient(name: str, parameter: Any) -> Any:
    """Return the whole gradient of a parameter."""
    if isinstance(parameter.grad, DTensor):
        return parameter.grad.full_tensor()
    if any(part in name for part in OF_SOME_HEADS):
        dist.all_reduce(parameter.grad)
    return parameter.grad


def compare() -> float:
    """Take one step, and return how far its gradients differ from one process."""
    model, samples = model_and_samples()
    expected = one_process(model, samples)
    split(model)
    batch = packed_batch(model, samples)
    loss = loss_of(model, batch, step_counts([batch]).tokens)
    loss.backward()
    parameters = [(name, one) for name, one in model.named_parameters() if one.grad is not None]
    found = {"loss": loss.detach()} | {name: gradient(name, one) for name, one in parameters}
    return largest_difference(expected, found)
