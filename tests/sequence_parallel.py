"""One rank of a training step that is parallel along the sequence, against single forwards.

Run as `python sequence_parallel.py RANK WORLD_SIZE FOLDER`; `tests/parity/test_training_gradients.py` starts the ranks. Rank 0
prints, for each family and layout, by how much loss and gradients summed over the ranks part from those of
single forwards. Attention is that of a kernel for sequences of varying length, written plainly: it knows the
bounds that it is given and its rank, and nothing of how mmrender splits.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AttentionInterface

from mmrender.training import collate, token_logprobs
from mmrender.training.segments import recurrent_segments
from training_models import FAMILIES, PAD_ID, TinyFamily, make_samples, tiny_family

COUNTS = (1, 0, 2, 1)
LAYOUTS: dict[str, dict[str, Any]] = {
    "right": {},
    "left": {"padding_side": "left"},
    "packed": {"rows": [[3, 1, 0], [2], []]},
}
SPLITS = {"ring": ("right", "packed"), "ulysses": ("right", "left", "packed")}


class Gather(torch.autograd.Function):
    """The tensors of all ranks, one after another along a new first axis."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, values.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        summed = gradient.clone()
        dist.all_reduce(summed)
        return summed[dist.get_rank()]


class Exchange(torch.autograd.Function):
    """Part `i` along the first axis goes to rank `i`, and comes from it."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(values)
        dist.all_to_all_single(out, values.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return Exchange.apply(gradient)


def attend(query: Any, key: Any, value: Any, seen: Any, scaling: float) -> torch.Tensor:
    """Plain attention `(..., tokens, size)`; `seen` is a boolean or an additive mask."""
    scores = query @ key.transpose(-1, -2) * scaling
    scores = scores.masked_fill(~seen, -1e30) if seen.dtype == torch.bool else scores + seen
    return scores.softmax(-1) @ value


def sequences(bounds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Number, place and length of the sequence that each token belongs to."""
    lengths = bounds.diff().long()
    number = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return number, torch.arange(len(number)) - bounds[number], lengths[number]


def ring(query: Any, key: Any, value: Any, scaling: float, bounds: Any, window: int | None) -> Any:
    """Keys and values of all ranks; each sequence's first and last parts at the first rank, and so on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    number, place, length = sequences(bounds)
    half = length // 2
    places = [
        torch.where(place < half, one * half + place, (2 * size - 1 - one) * half + place - half)
        for one in range(size)
    ]
    flat = [one.transpose(1, 2).flatten(0, 1).transpose(0, 1) for one in (query, key, value)]
    keys, values = (torch.cat([*Gather.apply(one)], dim=1) for one in flat[1:])
    distance = places[rank][:, None] - torch.cat(places)
    seen = (number[:, None] == number.repeat(size)) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    out = attend(flat[0], keys, values, seen, scaling)
    return out.transpose(0, 1).unflatten(0, (len(query), -1))


def ulysses(q: Any, k: Any, v: Any, scaling: float, bounds: Any, window: int | None, mask: Any) -> Any:
    """Whole rows for a part of the heads."""
    size = dist.get_world_size()

    def whole_rows(values: Any) -> Any:  # (rows, heads, tokens, d) -> (rows, heads / size, width, d)
        own = Exchange.apply(torch.stack(values.chunk(size, dim=1)))
        return torch.cat([*own], dim=2)

    seen = mask
    q, k, v = map(whole_rows, (q, k, v))
    if seen is None:
        number, place, _ = sequences(bounds)
        number, place = (one.view(len(q), 1, -1) for one in (number, place))
        distance = place[..., :, None] - place[..., None, :]
        seen = (number[..., :, None] == number[..., None, :]) & (distance >= 0)
        if window is not None:
            seen &= distance < window
    out = attend(q, k, v, seen, scaling)
    return torch.cat([*Exchange.apply(torch.stack(out.chunk(size, dim=2)))], dim=1).transpose(1, 2)


def attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    groups = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(groups, dim=1) for one in (key, value))
    bounds, window = kwargs["cu_seq_lens_q"], kwargs.get("sliding_window")
    given = (query, key, value, kwargs["scaling"], bounds, window)
    if SPLIT[0] == "ring":
        assert attention_mask is None
        return ring(*given), None
    return ulysses(*given, attention_mask), None


SPLIT = [""]
AttentionInterface.register("sequence_parallel", attention)


def policy_loss(logprobs: Any, held: Any) -> Any:
    """The clipped loss of a policy gradient, weighted by token."""
    ratio = torch.where(held.loss_mask, logprobs - held.logprobs, 0.0).exp()
    gain = torch.minimum(ratio * held.advantages, ratio.clamp(0.8, 1.2) * held.advantages)
    return -(gain * held.loss_weights * held.loss_mask).sum()


def samples_of(tiny: TinyFamily) -> list[Any]:
    """Samples of odd lengths; one of them is trained on nowhere."""
    samples = []
    for number, one in enumerate(make_samples(tiny, COUNTS, seed=3)):
        rng = np.random.default_rng(number)
        mask = (rng.random(len(one)) < 0.4) & (number != 1)
        mask[0] = False
        for span in one.media_spans:
            mask[span.start : span.stop] = False
        values = rng.normal(size=(2, len(one))).astype(np.float32)
        weights = np.where(mask, values[1] ** 2, 0).astype(np.float32)
        samples.append(replace(one, loss_mask=mask, advantages=values[0], loss_weights=weights))
    return samples


def summed_gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """The loss and all gradients, summed over the ranks."""
    model.zero_grad(set_to_none=True)
    if loss.requires_grad:
        loss.backward()
    found = {"loss": loss.detach().clone()}
    for name, parameter in model.named_parameters():
        found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
    for values in found.values():
        dist.all_reduce(values)
    return found


def difference(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference, relative to the largest gradient of the tensor."""
    # Some gradients are zero but for rounding, such as that of a bias of keys under softmax.
    floor = 1e-3 * max(float(one.abs().max()) for one in expected.values())
    return max(
        float((got[name] - one).abs().max()) / max(floor, float(one.abs().max()))
        for name, one in expected.items()
    )


def step(tiny: TinyFamily, shard: Any) -> dict[str, torch.Tensor]:
    labels, count = shard.shift_labels, shard.whole.loss_mask.sum()
    with shard.cut(tiny.model, group=dist.group.WORLD):
        output = tiny.model(
            **shard.model_inputs(), labels=labels, shift_labels=labels, num_items_in_batch=count
        )
        logprobs = shard.token_logprobs(output.logits)
        losses = torch.stack([output.loss, -logprobs[shard.loss_mask].sum() / count])
        dist.all_reduce(losses)
        torch.testing.assert_close(losses[0], losses[1])
        return summed_gradients(tiny.model, policy_loss(logprobs, shard))


def cuts_an_image(shard: Any) -> bool:
    """Whether neighbouring tokens of one image are at different ranks."""
    images = shard.whole.token_types == 1
    held = torch.zeros_like(images).scatter(
        1, shard.columns, torch.ones_like(shard.columns, dtype=torch.bool)
    )
    return bool((images[:, 1:] & images[:, :-1] & (held[:, 1:] != held[:, :-1])).any())


def compare(name: str, folder: Path) -> dict[str, float]:
    tiny = tiny_family(name, folder)
    model, samples = tiny.model, samples_of(tiny)
    own = [
        collate([one], tiny.family, pad_token_id=PAD_ID)
        for one in samples[dist.get_rank() :: dist.get_world_size()]
    ]
    losses = [policy_loss(token_logprobs(model(**one.model_inputs()).logits, one), one) for one in own]
    expected = summed_gradients(model, sum(losses))
    assert float(expected["loss"].abs()) > 1e-3
    assert any("vis" in key and float(one.abs().max()) > 1e-3 for key, one in expected.items())
    found: dict[str, float] = {}
    for layout, options in LAYOUTS.items():
        batch = collate(samples, tiny.family, pad_token_id=PAD_ID, **options)
        with recurrent_segments(model, batch):
            logits = model(**batch.model_inputs()).logits
            # Each rank has the whole loss.
            loss = policy_loss(token_logprobs(logits, batch), batch) / dist.get_world_size()
            found[layout] = difference(summed_gradients(model, loss), expected)
    decoder = model.get_decoder()
    shard: Any = None
    decoder.config._attn_implementation = "sequence_parallel"
    cut: list[bool] = []
    for split, layouts in SPLITS.items():
        if split in tiny.family.refused:
            continue
        SPLIT[0] = split
        for layout in layouts:
            batch = collate(samples, tiny.family, pad_token_id=PAD_ID, **LAYOUTS[layout])
            shard = batch.shard(rank=dist.get_rank(), world_size=dist.get_world_size(), layout=split)
            cut.append(cuts_an_image(shard))
            found[f"{split} {layout}"] = difference(step(tiny, shard), expected)
    assert any(cut)
    # The trainer's attention is proved, and one that does not exchange anything is found out.
    assert shard.difference(model, group=dist.group.WORLD) < 1e-4
    decoder.config._attn_implementation = "sdpa"
    if not tiny.family.image_blocks:  # whole masks do not fit one rank's tokens
        alone = torch.tensor(shard.difference(model, group=dist.group.WORLD))
        dist.all_reduce(alone, dist.ReduceOp.MAX)
        assert alone > 0.1, name
    return found


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=size)
    own = folder / str(rank)
    own.mkdir()
    found = {name: compare(name, own) for name in FAMILIES}
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
