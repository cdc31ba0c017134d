"""The audit over rollouts of a real vLLM: no alarm where nothing is wrong, and planted faults named."""

import asyncio
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from end_to_end import no_placeholders, roll_out_many
from integration.engine_checks import MODEL
from integration.engine_server import needs_tier
from mmrender.audit import TrainerModel, audit
from mmrender.audit.case import ChangedItem, edited, with_items
from mmrender.audit.report import sampled_runs
from mmrender.client.vllm import VLLMBackend
from mmrender.rollout.client import RendererClient
from mmrender.trajectory.sample import RESTRICTED

pytestmark = needs_tier("vllm")
ROLLOUTS = 50


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def sampled(request, vllm_servers, renderer):
    """Samples of rollouts that vLLM computed in this dtype."""
    flags = [] if request.param == "float32" else ["--dtype", request.param]
    server = vllm_servers.with_flags(*flags)
    client = RendererClient(
        renderer,
        server.base_url,
        model=MODEL,
        backend=VLLMBackend(),
        sampling_params=no_placeholders(renderer),
    )
    trajectories = asyncio.run(roll_out_many(client, ROLLOUTS, concurrency=8))
    return request.param, [sample for trajectory in trajectories for sample in trajectory.samples()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_healthy_rollouts_raise_no_alarm(sampled, tiny_model, renderer, dtype):
    theirs, samples = sampled
    report = audit(samples, TrainerModel.from_pretrained(tiny_model, dtype=dtype), decode=renderer.decode)
    print(
        f"vLLM {theirs}, trainer {dtype}, {ROLLOUTS} rollouts, {len(samples)} samples: {report.text()[:160]}"
    )
    assert report.ok, report.text()
    assert report.left_out  # completions that were held to a choice


def _with_image(sample, change):
    span = sample.media_spans[-1]
    return with_items(sample, [(span, change(span.item))])


def _values(sample, change):
    logprobs = sample.logprobs.copy()
    logprobs[sample.loss_mask] = change(sample.logprobs[sample.loss_mask])
    return replace(sample, logprobs=logprobs.astype(np.float32))


def _rolled(sample, array, start, stop):
    out = array.copy()
    out[start:stop] = np.roll(array[start:stop], 1)
    return out


def _bgr(item):
    return ChangedItem.of(
        item, lambda pixels, _: pixels.reshape(len(pixels), 3, -1)[:, ::-1].reshape(pixels.shape)
    )


def _mirrored(item):
    return msgspec.structs.replace(
        item, frames=np.ascontiguousarray(item.frames[..., ::-1]), identity="a" * 64
    )


def _longest(sample):
    return max(sampled_runs(sample.loss_mask), key=lambda run: run[1] - run[0])


PLANTED = {
    "one patch off": ("patch order", lambda one: _with_image(one, lambda item: ChangedItem.of(item, lambda p, _: np.roll(p, 1, 0)))),
    "BGR": ("channels", lambda one: _with_image(one, _bgr)),
    "mirrored": ("orientation", lambda one: _with_image(one, _mirrored)),
    "one token more at the beginning": ("opening", lambda one: edited(one, [(0, 0, [int(one.token_ids[0])])])),
    "numbers shifted": ("shifted numbers", lambda one: replace(one, logprobs=_rolled(one, one.logprobs, *_longest(one)))),
    "tokens shifted": ("altered token", lambda one: replace(one, token_ids=_rolled(one, one.token_ids, *_longest(one)))),
    "base 2": ("form", lambda one: _values(one, lambda own: own / np.log(2))),
    "a factor": ("scaled", lambda one: _values(one, lambda own: own * 1.25)),
}  # fmt: skip


@pytest.mark.timeout(1500)
def test_faults_planted_in_rollouts_are_noticed_and_mostly_named(sampled, tiny_model, renderer):
    """vLLM's samples differ from run to run, so names are counted. Unit tests hold each name."""
    theirs, samples = sampled
    trainer = TrainerModel.from_pretrained(tiny_model, dtype=theirs)
    # Of those that no completion was held to a choice in, whose place would move with the tokens.
    free = [sample for sample in samples if sample.media_spans and RESTRICTED not in sample.extra]
    right = 0
    planted = (
        PLANTED if theirs == "float32" else {name: PLANTED[name] for name in ("one patch off", "base 2")}
    )
    for name, (kind, change) in planted.items():
        faulty = [replace(change(one), sample_id=f"faulty {index}") for index, one in enumerate(free[:3])]
        report = audit([*faulty, *samples[10:]], trainer, decode=renderer.decode)
        named = {finding.cause for finding in report.findings} - {"unknown"}
        print(f"vLLM {theirs}, {name}: {', '.join(sorted(named)) or 'no name'}")
        assert not report.ok, report.text()
        assert {finding.sample_id for finding in report.findings} <= {one.sample_id for one in faulty}
        right += named == {kind}
    # A completion of few tokens, or the noise of bfloat16, may hide the cause.
    assert right >= (5 if theirs == "float32" else 1)
