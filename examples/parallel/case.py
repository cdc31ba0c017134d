"""The same model and samples for every recipe, and the loss and gradients of one process."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from mmrender import Renderer, TrainingSample, Trajectory
from mmrender.testing.tiny_model import build_tiny_model
from mmrender.training import ModelFamily, TrainingBatch, collate, score_tokens
from mmrender.training.losses import ppo_loss, step_counts

PAD = 0


def model_and_samples() -> tuple[Any, list[TrainingSample]]:
    """Build a tiny model, equal on every rank, and rollouts with images and without, with advantages."""
    with tempfile.TemporaryDirectory() as folder:
        directory = build_tiny_model(Path(folder) / "model", patch_size=8, weights=False)
        renderer = Renderer.from_pretrained(directory, image_backend="pil")
        config = AutoConfig.from_pretrained(directory)
        config.text_config.num_key_value_heads = 2  # tensor parallel splits them
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
        for parameter in model.parameters():
            if parameter.ndim > 1:  # with small weights, gradients would be too small to be compared
                torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
        rng = np.random.default_rng(0)
        samples = []
        for index in range(4):
            picture = Image.fromarray(rng.integers(0, 256, (64, 64 + 32 * index, 3), dtype=np.uint8), "RGB")
            content: list[Any] = [{"type": "text", "text": f"Question {index}?"}]
            if index != 2:
                content.insert(0, {"type": "image", "image": picture})
            prompt = renderer.render([{"role": "user", "content": content}], add_generation_prompt=True)
            trajectory = Trajectory(f"rollout-{index}")
            sampled = rng.integers(40, 900, 5 + 3 * index)
            trajectory.append(
                prompt.token_ids,
                sampled.tolist(),
                logprobs=(-7.0 + rng.normal(size=len(sampled)) / 10).tolist(),
                multi_modal_data=prompt.multi_modal_data,
            )
            samples += trajectory.samples()
    return model, [with_advantage(sample, rng.normal()) for sample in samples]


def with_advantage(sample: TrainingSample, advantage: float) -> TrainingSample:
    """Return a sample with one advantage for all its trained tokens."""
    return replace(sample, advantages=sample.loss_mask * np.float32(advantage))


def packed_batch(model: Any, samples: list[TrainingSample]) -> TrainingBatch:
    """All samples in two packed rows."""
    family = ModelFamily.from_config(model.config)
    return collate(samples, family, pad_token_id=PAD, rows=[[0, 1], [2, 3]])


def loss_of(model: Any, rows: Any, tokens: int) -> Any:
    """A micro-batch's or a shard's part of the loss of a step with so many tokens to train on."""
    scores = score_tokens(model, rows, entropy=True)
    return ppo_loss(scores.logprobs, rows, tokens=tokens, low=9.0, high=9.0, penalty=-0.01 * scores.entropy)


def one_process(model: Any, samples: list[TrainingSample]) -> dict[str, Any]:
    """Return the loss and the gradients of the whole step, computed here alone."""
    batch = packed_batch(model, samples)
    loss = loss_of(model, batch, step_counts([batch]).tokens)
    loss.backward()
    gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return {"loss": loss.detach(), **gradients}


def largest_difference(expected: dict[str, Any], found: dict[str, Any]) -> float:
    """Return the largest difference of loss and gradients, relative to the largest value of a tensor."""
    return max(
        float((found[name] - one).abs().max()) / max(1e-4, float(one.abs().max()))
        for name, one in expected.items()
    )
