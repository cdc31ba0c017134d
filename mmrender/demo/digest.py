"""What a trajectory amounts to for a trainer, as one digest that two processes can compare."""

import json

from blake3 import blake3

from mmrender.trajectory.tree import Trajectory


def trajectory_digest(trajectory: Trajectory) -> str:
    """Hex digest of tokens, masks, logprobs and rewards of all samples, of pixel values, and of messages."""
    digest = blake3(trajectory.trajectory_id.encode())
    for sample in trajectory.samples(once=False):
        digest.update(sample.token_ids.tobytes())
        digest.update(sample.loss_mask.tobytes())
        digest.update(sample.logprobs.tobytes() if sample.logprobs is not None else b"")
        digest.update(sample.rewards.tobytes() if sample.rewards is not None else b"")
        for modality, ranges in sorted(sample.multi_modal_data.mm_placeholders.items()):
            digest.update(repr((modality, list(ranges))).encode())
    for item in trajectory.items:
        for name, values in sorted(item.tensors("float32").items()):
            digest.update(name.encode())
            digest.update(values.tobytes())
    for step in trajectory.steps:
        digest.update(json.dumps(step.messages, sort_keys=True, default=str).encode())
    return digest.hexdigest()
