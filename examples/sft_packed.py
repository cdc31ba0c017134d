"""Fine-tune on recorded conversations with pictures, several packed into one row.

    python examples/sft_packed.py MODEL_DIR recorded.json

Each entry of the file has `messages`, and may have `tools`. Samples are packed so that no token attends to
another sample, and the loss is on what the model would have sampled.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from mmrender import MediaPolicy, Renderer, build_training_sample
from mmrender.training import ModelFamily, collate, first_fit_decreasing, token_logprobs


def train(model_dir: str, recorded: list[dict[str, Any]], steps: int = 2, width: int = 2048) -> list[float]:
    """Make some steps over all conversations, and return their losses."""
    policy = MediaPolicy(local_roots=(Path.cwd(),))
    renderer = Renderer.from_pretrained(model_dir, image_backend="pil", media_policy=policy)
    samples = [
        build_training_sample(renderer, entry["messages"], tools=entry.get("tools")) for entry in recorded
    ]
    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32)
    family = ModelFamily.from_config(model.config)
    rows = first_fit_decreasing([len(sample) for sample in samples], capacity=width)
    batch = collate(samples, family, pad_token_id=0, rows=rows, dtype=model.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        logprobs = token_logprobs(model(**batch.model_inputs()).logits, batch)
        loss = -logprobs[batch.loss_mask].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    print(f"{len(samples)} conversations in {len(rows)} rows; losses {losses}")
    return losses


if __name__ == "__main__":
    train(sys.argv[1], json.loads(Path(sys.argv[2]).read_text("utf-8")))
