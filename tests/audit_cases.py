"""Rollouts of tiny models, and how faults are planted in them for an audit."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from mmrender.sidecar import MultiModalData
from mmrender.training import collate
from mmrender.trajectory.sample import TrainingSample
from training_cases import PAD_ID, item_tokens
from training_models import END_ID, START_ID, TinyFamily

BOS, OPENER, ANSWER, STOP = 1, 80, 81, 2
LETTERS, PAIRS = range(3, 43), range(43, 79)


def decode(ids: Sequence[int]) -> str:
    """Letters, pairs of letters, and names for the rest."""
    texts = {token: chr(0x4E00 + token) for token in LETTERS}
    texts |= {token: texts[3 + index] + texts[4 + index] for index, token in enumerate(PAIRS)}
    return "".join(texts.get(int(token), f"<{int(token)}>") for token in ids)


class Row:
    """A sample under construction."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.mask: list[bool] = []
        self.entries: list[Any] = []

    def add(self, tokens: Sequence[int], sampled: bool = False) -> "Row":
        self.ids += map(int, tokens)
        self.mask += [sampled] * len(tokens)
        return self

    def take(self, sample: TrainingSample, start: int, stop: int) -> "Row":
        """Tokens `[start, stop)` of a sample, with the images that begin there."""
        moved = len(self.ids) - start
        self.entries += [
            (s.range.shifted(moved), s.item) for s in sample.media_spans if start <= s.start < stop
        ]
        self.ids += sample.token_ids[start:stop].tolist()
        self.mask += sample.loss_mask[start:stop].tolist()
        return self

    def image(self, item: Any) -> "Row":
        own, placeholder = item_tokens(item)
        self.add([START_ID])
        self.entries.append((placeholder.shifted(len(self.ids)), item))
        return self.add(own).add([END_ID])

    def sample(self, name: str = "", logprobs: Any = None) -> TrainingSample:
        ids = np.array(self.ids, np.int32)
        given = np.zeros(len(ids), np.float32) if logprobs is None else logprobs
        return TrainingSample(
            ids, np.array(self.mask), given, MultiModalData.of(self.entries), sample_id=name
        )


def numbers(model: Any, tiny: TinyFamily, sample: TrainingSample, change: Any = None) -> Any:
    """Logits at the sampled tokens: float32 `(m, vocabulary)`; `change` edits the model's inputs."""
    bare = TrainingSample(
        sample.token_ids, np.zeros(len(sample), bool), multi_modal_data=sample.multi_modal_data
    )
    dtype = model.dtype
    inputs = collate([bare], tiny.family, pad_token_id=PAD_ID, dtype=dtype, pin_memory=False).model_inputs()
    if change is not None:
        change(inputs)
    with torch.inference_mode():
        rows = model(**inputs).logits[0, np.flatnonzero(sample.loss_mask) - 1].float()
    return rows.clone()


def scored(model: Any, tiny: TinyFamily, sample: TrainingSample, change: Any = None, rule: Any = None) -> Any:
    """The sample with the log-probabilities that a sampler with this model and these inputs reports."""
    logits = numbers(model, tiny, sample, change)
    logits = logits if rule is None else rule(logits)
    own = logits.log_softmax(-1)[range(len(logits)), sample.token_ids[sample.loss_mask].astype(int)]
    return recorded(sample, own.numpy())


def recorded(sample: TrainingSample, values: Any) -> TrainingSample:
    logprobs = np.zeros(len(sample), np.float32)
    logprobs[sample.loss_mask] = values
    return replace(sample, logprobs=logprobs)


def as_trained(sampled: TrainingSample, trained: TrainingSample) -> TrainingSample:
    """The trainer's sample with the log-probabilities of the sampler's."""
    return recorded(trained, sampled.logprobs[sampled.loss_mask])


def picture(rng: np.random.Generator, size: tuple[int, int] | None = None) -> Image.Image:
    width, height = size or rng.integers(40, 110, 2).tolist()
    small = rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
