"""Gradients of batches equal those of single forwards for eight families, whether padded or packed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmrender.training import collate, recurrent_segments, token_logprobs
from training_models import FAMILIES, PAD_ID, TinyFamily, make_samples, tiny_family

LAYOUTS: dict[str, dict[str, Any]] = {
    "right": {},
    "left": {"padding_side": "left"},
    "packed": {"rows": [[3, 1, 0], [2], []]},
}


def samples_of(tiny: TinyFamily) -> list[Any]:
    """Samples of odd lengths; one of them is trained on nowhere."""
    samples = []
    for number, one in enumerate(make_samples(tiny, (1, 0, 2, 1), seed=3)):
        rng = np.random.default_rng(number)
        mask = (rng.random(len(one)) < 0.4) & (number != 1)
        mask[0] = False
        for span in one.media_spans:
            mask[span.start : span.stop] = False
        values = rng.normal(size=(2, len(one))).astype(np.float32)
        weights = np.where(mask, values[1] ** 2, 0).astype(np.float32)
        samples.append(replace(one, loss_mask=mask, advantages=values[0], loss_weights=weights))
    return samples


def policy_loss(model: Any, batch: Any) -> Any:
    """The clipped loss of a policy gradient, weighted by token."""
    with recurrent_segments(model, batch):
        logprobs = token_logprobs(model(**batch.model_inputs()).logits, batch)
    ratio = torch.where(batch.loss_mask, logprobs - batch.logprobs, 0.0).exp()
    gain = torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)
    return -(gain * batch.loss_weights * batch.loss_mask).sum()


def gradients(model: Any, batches: list[Any]) -> dict[str, torch.Tensor]:
    """The loss, summed over batches, and all gradients."""
    model.zero_grad(set_to_none=True)
    losses = [policy_loss(model, batch) for batch in batches]
    loss = sum(losses)
    loss.backward()
    return {"loss": loss.detach()} | {
        name: torch.zeros_like(one) if one.grad is None else one.grad.clone()
        for name, one in model.named_parameters()
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_equal_those_of_single_forwards(name: str, tmp_path: Path) -> None:
    tiny = tiny_family(name, tmp_path)
    samples = samples_of(tiny)
    expected = gradients(tiny.model, [collate([one], tiny.family, pad_token_id=PAD_ID) for one in samples])
    assert float(expected["loss"].abs()) > 1e-3
    assert any("vis" in key and float(one.abs().max()) > 1e-3 for key, one in expected.items())
    # Some gradients are zero but for rounding, such as a bias of keys under softmax.
    floor = 1e-3 * max(float(one.abs().max()) for one in expected.values())
    for layout, options in LAYOUTS.items():
        got = gradients(tiny.model, [collate(samples, tiny.family, pad_token_id=PAD_ID, **options)])
        off = {
            key: float((got[key] - one).abs().max()) / max(floor, float(one.abs().max()))
            for key, one in expected.items()
        }
        assert max(off.values()) < 1e-5, (layout, max(off, key=lambda key: off[key]))
