"""Rollouts of tiny models, and how faults are planted in them for an audit."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image

from mmrender.audit import TrainerModel, audit
from mmrender.audit.rows import ROWS
from mmrender.sidecar import MultiModalData
from mmrender.training import collate
from mmrender.trajectory.sample import TrainingSample
from training_cases import PAD_ID, item_tokens
from training_models import END_ID, START_ID, TinyFamily, tiny_family

BOS, OPENER, ANSWER, STOP, OTHER_STOP = 1, 80, 81, 2, 82
LETTERS, PAIRS = range(3, 43), range(43, 79)
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "glm4v")


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


@dataclass
class Scene:
    """Healthy rollouts of one family."""

    tiny: TinyFamily
    trainer: TrainerModel
    samples: list[TrainingSample]
    sources: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> Any:
        return self.tiny.model


def picture(rng: np.random.Generator, size: tuple[int, int] | None = None) -> Image.Image:
    width, height = size or rng.integers(40, 110, 2).tolist()
    small = rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def rollout(
    tiny: TinyFamily, model: Any, seed: int, sources: dict[str, Any], tokens: int = 12
) -> TrainingSample:
    """Two turns, an image before each, a system prompt, every token drawn from the model."""
    rng = np.random.default_rng(seed)
    row = Row().add([BOS, OPENER, 21, 22, 23, 24, 25, OPENER])
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.full((tiny.model.config.get_text_config().vocab_size,), -torch.inf)
    allowed[[*LETTERS, *PAIRS]] = 0
    for turn in range(2):
        for _ in range(1 + (seed + turn) % 2):
            image = picture(rng)
            item = tiny.process(image)
            sources[item.identity] = image
            row.add(rng.choice(LETTERS, 3)).image(item)
        row.add(rng.choice(LETTERS, 4)).add([ANSWER, 5, 6])
        for _ in range(tokens):
            probe = replace(row.sample(), loss_mask=np.arange(len(row.ids)) == len(row.ids) - 1)
            logits = _next(model, tiny, probe) + allowed
            row.add([int(torch.multinomial(logits.softmax(-1), 1, generator=generator))], True)
        row.add([STOP], True)
        if turn == 0:
            row.add([OPENER])
    return scored(model, tiny, row.sample(f"rollout-{seed}"))


def _next(model: Any, tiny: TinyFamily, sample: TrainingSample) -> Any:
    bare = TrainingSample(
        sample.token_ids, np.zeros(len(sample), bool), multi_modal_data=sample.multi_modal_data
    )
    inputs = collate(
        [bare], tiny.family, pad_token_id=PAD_ID, dtype=model.dtype, pin_memory=False
    ).model_inputs()
    with torch.inference_mode():
        return model(**inputs).logits[0, -1].float()


@cache
def scene(name: str, folder: Path, count: int = 5) -> Scene:
    tiny = tiny_family(name, folder)
    sources: dict[str, Any] = {}
    samples = [rollout(tiny, tiny.model, seed, sources) for seed in range(count)]
    return Scene(tiny, TrainerModel(tiny.model), samples, sources)


@dataclass
class Planted:
    """What an audit is given, and what it must say.

    Attributes:
        sample: The faulty one.
        image: Index of the image that must be named; None where none need be.
        token: Index of the token that must be named; None where none need be.
        options: Further arguments of the audit.
    """

    sample: TrainingSample
    image: int | None = None
    token: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


Plant = Callable[[Scene, int], Planted]
FAULTS: dict[str, tuple[tuple[str, ...], Plant]] = {}
"""By name: variations that name the fault, and how it is planted in one of a scene's rollouts."""


class Seen:
    """An item whose tensors another has changed."""

    def __init__(self, item: Any, pixels: Any, grid: Any = None) -> None:
        self.item, self.pixels = item, pixels
        self.identity = f"seen-{id(self)}"
        self.modality, self.size, self.grid = item.modality, item.size, grid or item.grid
        self.expansion, self.nbytes = item.expansion, item.nbytes

    def tensors(self, dtype: Any = "float32", *, framework: Any = "numpy") -> dict[str, Any]:
        pixels = torch.from_numpy(np.ascontiguousarray(self.pixels, np.float32))
        out = {"pixel_values": pixels, "image_grid_thw": torch.tensor([self.grid])}
        if framework == "numpy":
            out = {name: value.numpy() for name, value in out.items()}
        return out


def images(sample: TrainingSample) -> list[Any]:
    return list(sample.multi_modal_data.mm_items["image"])


def showing(sample: TrainingSample, items: Sequence[Any]) -> TrainingSample:
    ranges = sample.multi_modal_data.mm_placeholders["image"]
    return replace(sample, multi_modal_data=MultiModalData.of(zip(ranges, items, strict=True)))


def pixels_of(item: Any) -> Any:
    return item.tensors()["pixel_values"]


def reframed(item: Any, frames: Any) -> Any:
    """The item of other planes, of the same area."""
    patch = item.layout.patch
    grid = (1, frames.shape[-2] // patch, frames.shape[-1] // patch)
    frames = np.ascontiguousarray(frames)
    return msgspec.structs.replace(item, frames=frames, grid=grid, identity=f"{id(frames):064x}")


@dataclass
class Outcome:
    """What an audit said of one fault: the verdict about its stage, and about its cause."""

    fault: str
    family: str
    index: int
    stage: str
    cause: str
    finding: str
    seconds: float


def judge(
    name: str, family: str, at: Scene, index: int, *, tolerance: float | None = None, everywhere: bool = False
) -> Outcome | None:
    """Plant a fault in one rollout, or in all, and audit it; `tolerance` as the audit takes it."""
    expected, plant = FAULTS[name]
    planted = plant(at, index)
    if planted is None:
        return None
    options = dict(planted.options)
    rollouts = options.pop("rollouts", at.samples)
    peers = [*options.pop("peers", ()), *[one for place, one in enumerate(rollouts) if place != index]]
    if everywhere:
        others = [plant(at, place) for place in range(3) if place != index]
        peers = [one.sample for one in others if one is not None]
        for one in filter(None, others):
            options |= {key: value for key, value in one.options.items() if key in ("sources", "weights")}
    if "alternatives" in options:
        options["alternatives"] = {key: [built[0], *peers] for key, built in options["alternatives"].items()}
    head, merged, disable = options.pop("adapter", (None, None, None))
    started = time.perf_counter()
    if head is not None:
        kept, head.weight.data, at.model.disable_adapter = head.weight.data, merged, disable
    try:
        # With an adapter all rollouts depart.
        count = 1 + len(peers) if head is not None or everywhere else 1
        report = audit(
            [planted.sample, *peers], at.trainer, tolerance=tolerance, decode=decode, explain=count, **options
        )
    finally:
        if head is not None:
            head.weight.data = kept
            del at.model.disable_adapter
    seconds = time.perf_counter() - started
    own = [one for one in report.findings if one.sample_id == planted.sample.sample_id]
    said = " | ".join(f"{one.stage}, {one.cause}: {one.statement}" for one in own)
    said = said or f"nothing ({report.largest:.3g}, alarm {report.tolerance:.3g})"
    stages = {row.stage for row in ROWS if row.name in expected} or {STAGES.get(name, "")}
    names = {part for one in own for part in one.cause.split(" or ")} - {"unknown", "values"}
    placed = planted.image is None or any(one.image == planted.image for one in own)
    placed = placed and (planted.token is None or any(one.token == planted.token for one in own))
    cause = "not named" if own else "missed"
    if names:
        cause = "named" if names <= set(expected) else "wrong" if not names & set(expected) else "ambiguous"
        if cause == "named" and not placed:
            cause = "misplaced"
    stage = "missed" if not own else "right" if any(one.stage in stages for one in own) else "other"
    return Outcome(name, family, index, stage, cause, said, seconds)


STAGES = {
    "JPEG without the source": "pixels", "the last row of patches black": "pixels", "blurred": "pixels",
    "half of its pixels, enlarged": "pixels", "another image of the same size": "pixels",
    "two squares of patches exchanged": "pixels", "gamma applied": "pixels", "brighter by ten levels": "pixels",
    "16 colours": "pixels", "two images exchanged and one resized": "pixels",
    "another picture, resized to the same size, in every image": "pixels",
    "positions half as far apart in images": "positions",
    "a sampled token that no later one attended to": "model",
    "a system prompt that was attended to in both directions": "model",
    "the date in the system prompt": "template", "the question cut short": "template",
    "the question asked again after the image": "template",
    "temperature that falls with each token": "sampling", "a vocabulary padded with random rows": "sampling",
    "noise on every number": "recording", "differences of neighbours": "recording", "squares": "recording",
    "means of three neighbours": "recording", "square roots": "recording",
    "every other number 0.02 higher": "recording", "the last completion's mean for the least": "recording",
    "vision features of the wrong layer norm": "model", "weights rounded to 3 bits by groups of 16": "model",
    "one head of attention lost": "model", "stale weights that are not given": "model",
    "biases left out": "model", "dropout left on": "model", "dropout of little effect": "model",
}  # fmt: skip
"""Stages of faults without a row."""
