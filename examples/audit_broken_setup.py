"""An audit of a set-up that is broken: the trainer decodes what was sampled, and encodes it again.

    python examples/audit_broken_setup.py MODEL_DIR audit.html

The loss falls and nothing fails, yet the gradient is of tokens that were never sampled. The audit says so,
and the page shows where.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from mmrender import Renderer, TrainingSample, Trajectory
from mmrender.audit import AuditReport, TrainerModel, audit
from mmrender.view import Page


def sampled(renderer: Renderer, trainer: TrainerModel) -> TrainingSample:
    """Return a rollout as an engine gives it: a sampler is free to write a word in other pieces."""
    prompt = renderer.render(
        [{"role": "user", "content": "Which animal says moo?"}], add_generation_prompt=True
    )
    pieces = ["A", " w", "h", "it", "e", " c", "o", "w", ".", "<|im_end|>"]
    completion = [token for piece in pieces for token in renderer.tokenizer.encode(piece)]
    rollout = Trajectory("rollout")
    rollout.append(prompt.token_ids, completion, logprobs=np.zeros(len(completion)))
    (sample,) = rollout.samples()
    return scored(sample, trainer)


def scored(sample: TrainingSample, trainer: TrainerModel) -> TrainingSample:
    """Return the sample with the log-probabilities of the weights that sampled it."""
    logprobs = np.zeros(len(sample), np.float32)
    logprobs[sample.loss_mask] = trainer.sampled_logprobs(sample)
    return replace(sample, logprobs=logprobs)


def encoded_again(renderer: Renderer, sample: TrainingSample) -> TrainingSample:
    """Return what a trainer that keeps text makes of it: log-probabilities of other tokens."""
    start = int(np.argmax(sample.loss_mask))
    again = renderer.tokenizer.encode(renderer.decode(sample.token_ids[start:].tolist()))
    ids = np.array([*sample.token_ids[:start], *again], np.int32)
    mask = np.arange(len(ids)) >= start
    logprobs = np.zeros(len(ids), np.float32)
    kept = min(len(again), len(sample) - start)
    logprobs[start : start + kept] = sample.logprobs[start : start + kept]
    return TrainingSample(ids, mask, logprobs, sample_id="rollout, encoded again")


def main(model: str, page: str) -> tuple[AuditReport, AuditReport]:
    """Audit both set-ups, and write what the broken one trains on to a page."""
    renderer = Renderer.from_pretrained(model, image_backend="pil")
    trainer = TrainerModel.from_pretrained(model)
    whole = sampled(renderer, trainer)
    broken = encoded_again(renderer, whole)
    sound, unsound = (
        audit([sample], trainer, decode=renderer.decode, tolerance=1e-2, explain=0)
        for sample in (whole, broken)
    )
    print(unsound.text())
    names = ("sampled", "encoded again")
    Page.of_difference(whole, broken, renderer=renderer, names=names).save(Path(page))
    return sound, unsound


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
