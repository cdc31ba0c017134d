"""FSDP2: every rank holds a part of each weight, and trains on samples of its own.

The ranks follow one plan, so each takes as many micro-batches as the others, all with images or all without.
The loss is divided by the tokens of the whole step. FSDP averages gradients over ranks, hence the factor.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mmrender.training import Descriptor, ModelFamily, collate_micro_batch, plan_steps, smallest_dummy
from mmrender.training.losses import step_counts
from parallel.case import PAD, largest_difference, loss_of, model_and_samples, one_process


def shard(model: Any) -> None:
    """Shard the layers of both towers one by one, and the rest, head included, with the model."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model.model.visual.blocks, *model.model.language_model.layers):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def compare() -> float:
    """Take one step, and return how far its gradients differ from one process."""
    model, samples = model_and_samples()
    expected = one_process(model, samples)
    shard(model)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    family, dummy = ModelFamily.from_config(model.config), smallest_dummy(samples)
    plan = plan_steps(
        [Descriptor.of(sample) for sample in samples],
        family,
        ranks=ranks,
        max_tokens=256,
        dummy_tokens=len(dummy),
    )
    mine = [collate_micro_batch(samples, turn[rank], family, pad_token_id=PAD, dummy=dummy) for turn in plan]
    counts = step_counts(mine, group=dist.group.WORLD)
    total = torch.zeros(())
    for number, batch in enumerate(mine):
        model.set_requires_gradient_sync(number == len(mine) - 1)  # gradients are added up before
        loss = loss_of(model, batch, counts.tokens)
        (loss * ranks).backward()
        total += loss.detach()
    dist.all_reduce(total)
    found = {"loss": total} | {
        name: one.grad.full_tensor() for name, one in model.named_parameters() if one.grad is not None
    }
    return largest_difference(expected, found)
