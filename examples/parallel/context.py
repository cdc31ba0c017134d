"""Context parallel: every rank has some tokens of each row, and gathers keys and values of the others.

`SequenceShard` splits tokens, positions and everything that the loss needs. Two hooks do the rest. The rows
are cut where the language model begins, after the features of images are in their places. Attention gathers
keys and values over the ranks (Llama Team, "The Llama 3 Herd of Models", 2024, section 3.3.2), and tokens see
earlier tokens of their sample. Losses and gradients add up over the ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from transformers import AttentionInterface, AttentionMaskInterface

from mmrender.training import SequenceShard
from mmrender.training.losses import step_counts
from mmrender.training.segments import take_columns
from parallel.case import largest_difference, loss_of, model_and_samples, one_process, packed_batch

NAME = "gathered"


class Gathered(torch.autograd.Function):
    """Keys or values `(rows, heads, tokens, size)` of all ranks, one rank after another."""

    @staticmethod
    def forward(ctx: Any, local: Any) -> Any:
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, local)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), 2)[dist.get_rank()]


def attention_of(shard: SequenceShard) -> Any:
    """Return attention of a rank's queries to the keys and values of all ranks."""
    seen = shard.take(shard.whole.block_diagonal_mask()[:, 0])  # (rows, tokens, width)
    everyone = [
        SequenceShard.of(shard.whole, rank=rank, world_size=shard.world_size, layout=shard.layout)
        for rank in range(shard.world_size)
    ]
    order = torch.cat([one.columns for one in everyone], 1)
    mask = torch.stack([row[:, columns] for row, columns in zip(seen, order, strict=True)])[:, None]

    def attention(
        module: Any, query: Any, key: Any, value: Any, *_: Any, scaling: Any = None, **options: Any
    ) -> Any:
        gathered = (Gathered.apply(one.contiguous()) for one in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, *gathered, attn_mask=mask, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None

    return attention


def cut(shard: SequenceShard) -> Any:
    """Return a hook that passes the rank's tokens to the language model."""

    def hook(module: Any, inputs: Any, options: dict[str, Any]) -> Any:
        options = dict(options)
        options["inputs_embeds"] = shard.take(options["inputs_embeds"])
        options["position_ids"] = take_columns(
            options["position_ids"], shard.columns, options["position_ids"].ndim - 2
        )
        if (features := options.get("deepstack_visual_embeds")) is not None:
            # Qwen3-VL adds features of images to the hidden states of its first layers, too.
            images = options["visual_pos_masks"]
            options["visual_pos_masks"] = shard.take(images)
            options["deepstack_visual_embeds"] = [
                shard.take(
                    images.new_zeros((*images.shape, one.shape[-1]), dtype=one.dtype).masked_scatter(
                        images[..., None], one
                    )
                )[options["visual_pos_masks"]]
                for one in features
            ]
        return inputs, options

    return hook


@contextmanager
def split(model: Any, shard: SequenceShard) -> Iterator[None]:
    """Let a model's language model run on the tokens of a shard, within the block."""
    language, before = model.model.language_model, model.model.language_model.config._attn_implementation
    AttentionInterface.register(NAME, attention_of(shard))
    AttentionMaskInterface.register(NAME, lambda *_, **options: None)
    language.set_attn_implementation(NAME)
    handle = language.register_forward_pre_hook(cut(shard), with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
        language.set_attn_implementation(before)


def compare() -> float:
    """Take one step, and return how far its gradients differ from one process."""
    model, samples = model_and_samples()
    expected = one_process(model, samples)
    batch = packed_batch(model, samples)
    shard = SequenceShard.of(batch, rank=dist.get_rank(), world_size=dist.get_world_size(), layout="ring")
    with split(model, shard):
        loss = loss_of(model, shard, step_counts([batch]).tokens)
        loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    found = {"loss": total}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            found[name] = parameter.grad
    return largest_difference(expected, found)
