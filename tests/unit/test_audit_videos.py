"""An audit names what a sampler saw of a video in place of what the trainer has."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from audit_cases import ANSWER, BOS, LETTERS, OPENER, Row, as_trained, scored
from mmrender.audit import TrainerModel, audit
from mmrender.audit.case import with_items
from mmrender.audit.noise import Noise
from mmrender.media.policy import MediaPolicy
from mmrender.media.video import open_video
from mmrender.messages import VideoPart
from training_models import tiny_family
from video_cases import frames_of, video_processor

KINDS = {
    "qwen2_5_vl": ("Qwen2VLVideoProcessor", "Qwen2_5_VLProcessor"),
    "qwen3_vl": ("Qwen3VLVideoProcessor", "Qwen3VLProcessor"),
}
FAULTS: tuple[tuple[str, str, Any], ...] = (
    ("qwen2_5_vl", "frames without frame 2", lambda item: {"frames": item.frames[[0, 1, 3, 4, 4]]}),
    ("qwen2_5_vl", "time steps of 1 s, not ", lambda item: {"second_per_grid": 1.0}),
    ("qwen3_vl", "frames 1 and 2 in exchanged places", lambda item: {"frames": item.frames[[0, 2, 1, 3, 4]]}),
)


@pytest.mark.parametrize(("name", "fault", "change"), FAULTS)
def test_what_the_sampler_saw_of_a_video_is_named(tmp_path: Path, name: str, fault: str, change: Any) -> None:
    tiny = tiny_family(name, tmp_path)
    patch = tiny.model.config.vision_config.patch_size
    size = {"shortest_edge": 8 * (2 * patch) ** 2, "longest_edge": 60 * (2 * patch) ** 2}
    processor = video_processor(tmp_path, *KINDS[name], {"patch_size": patch, "size": size})
    times = (0.0, 0.8, 1.7, 2.5, 3.3)
    with open_video(VideoPart(frames_of(5, 50, 70), times=times), MediaPolicy(), "video") as video:
        item = processor.prepare(video).finish()
    row = Row().add([BOS, OPENER, 21, 22]).image(item).add([23, 24, ANSWER])
    rng = np.random.default_rng(0)
    sample = row.add(rng.choice(LETTERS, 16), sampled=True).sample("rollout")
    with torch.inference_mode():
        healthy = scored(tiny.model, tiny, sample)
        (span,) = sample.media_spans
        other = msgspec.structs.replace(item, identity="f" * 64, **change(item))
        faulty = as_trained(scored(tiny.model, tiny, with_items(sample, [(span, other)])), sample)
    trainer = TrainerModel(tiny.model)
    # One noise of all audits: it is measured elsewhere.
    noise = Noise(1e-5, 1e-5)
    assert audit([healthy], trainer, tolerance=1e-4, noise=noise).ok
    findings = audit([faulty], trainer, tolerance=1e-4, noise=noise).findings
    statements = [finding.statement for finding in findings]
    assert any(fault in statement for statement in statements), statements
