"""An audit names the fault that was planted between sampler and trainer, and nothing where there is none."""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from audit_cases import recorded
from kit import blocks, shown
from mmrender import Trajectory
from mmrender.audit import TrainerModel, Watch, audit
from mmrender.audit.case import ChangedItem, with_items
from mmrender.audit.computed import _cached_in as cached_in
from mmrender.audit.computed import changed_weights, in_dtype
from mmrender.audit.inspect import inspect_sample, shown_by_peers
from mmrender.audit.noise import Noise, measure_noise
from mmrender.audit.recorded import View
from mmrender.audit.report import Comparison, sampled_runs
from mmrender.audit.rows import ROWS
from mmrender.audit.sampling import truncated
from mmrender.audit.trainer import parts_of
from mmrender.client.engine import Engine
from mmrender.client.local import LocalBackend
from mmrender.client.probe import probe_weights
from mmrender.client.types import EngineRequest
from mmrender.sidecar import MultiModalData
from mmrender.trajectory.engine_data import AllowedTokens, WeightVersionSpan
from mmrender.trajectory.sample import TrainingSample

TOLERANCE = 1e-3
MEASURED = Noise(1e-5, 1e-5)
"""Arithmetic that is not measured again."""


@pytest.fixture(scope="module")
def trainer(tiny_model):
    return TrainerModel.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def samples(tiny_model, renderer):
    """Two turns each, the second bridged: images before the first completion and between the two."""
    backend = LocalBackend(tiny_model)

    async def rollout(seed):
        user = {"role": "user", "content": [shown(blocks(seed)), "What is it?"]}
        more = {"role": "user", "content": [shown(blocks(seed + 50)), "And this?"]}
        first = renderer.render([user], add_generation_prompt=True)
        one = await complete(backend, first, 2 * seed)
        bridged = renderer.bridge_to_next_turn(
            first.token_ids, one.completion_ids, [more], previous_multi_modal_data=first.multi_modal_data
        )
        two = await complete(backend, bridged, 2 * seed + 1)
        return sample_of(seed, bridged, [(len(first), one), (len(bridged), two)])

    async def everything():
        return await asyncio.gather(*[rollout(seed) for seed in range(3)])

    return asyncio.run(everything())


async def complete(backend, prompt, seed):
    request = EngineRequest(
        "tiny",
        prompt.token_ids,
        {"max_tokens": 12, "temperature": 1.0, "seed": seed, "ignore_eos": True},
        f"r{seed}",
        multi_modal_data=prompt.multi_modal_data,
    )
    return await backend.generate(request, None)


def sample_of(seed, last, turns):
    ids = np.array([*last.token_ids, *turns[-1][1].completion_ids], np.int32)
    mask, logprobs = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.float32)
    for start, response in turns:
        stop = start + len(response.completion_ids)
        mask[start:stop] = True
        logprobs[start:stop] = response.logprobs
    return TrainingSample(ids, mask, logprobs, last.multi_modal_data, sample_id=f"rollout-{seed}")


def planted(samples, trainer, change, **options):
    faulty = [change(samples[0]), *samples[1:]]
    return audit(faulty, trainer, tolerance=TOLERANCE, noise=MEASURED, **options)


def test_nothing_is_found_where_nothing_is_wrong(samples, trainer):
    report = audit(samples, trainer, tolerance=TOLERANCE)
    assert report.ok
    assert report.tokens == 3 * 24
    assert report.largest < 1e-4
    assert report.kl < 1e-6
    assert report.text().endswith("trainer and sampler agree")


def test_an_audit_of_nothing_is_no_agreement(samples, trainer):
    """As after rollouts that all failed."""
    unsampled = replace(samples[0], loss_mask=np.zeros_like(samples[0].loss_mask))
    for given in ([], [unsampled]):
        report = audit(given, trainer)
        assert not report.ok
        assert "nothing was compared, since no sample has a token with" in report.text()


def second_image(change):
    """Change the second image's item, which only the second completion saw."""

    def changed(sample):
        _, second = sample.media_spans
        return with_items(sample, [(second, change(second.item))])

    return changed


def test_one_patch_off_is_named_and_the_text_says_where(samples, trainer, renderer):
    """Tokens that could be no others, at the beginning of the second completion, do not clear its image."""
    start, _ = sampled_runs(samples[0].loss_mask)[1]

    def forced(sample):
        logprobs = sample.logprobs.copy()
        logprobs[start : start + 6] = 0.0
        only = [AllowedTokens(at, at + 1, (int(sample.token_ids[at]),)) for at in range(start, start + 6)]
        return replace(sample, logprobs=logprobs, allowed=tuple(only))

    samples = [forced(sample) for sample in samples]
    assert audit(samples, trainer, tolerance=TOLERANCE, noise=MEASURED).ok
    moved = second_image(lambda item: ChangedItem.of(item, lambda pixels, _: np.roll(pixels, 1, 0)))
    report = planted(samples, trainer, moved, decode=renderer.decode)
    (finding,) = report.findings
    assert (finding.stage, finding.cause) == ("pixels", "patch order")
    assert (finding.image, finding.token) == (1, start + 6)
    assert finding.statement.startswith("the sampler saw every patch moved by -1 in image 1 (tokens ")
    assert finding.remedy.startswith("sampler: send tensors of this library")
    ((departing, first),) = report.departing
    assert [place.position for place in departing.suspects(first)] == [1]
    text = report.text()
    assert "1 of 3 samples depart" in text
    assert "rollout-0: first at token" in text
    assert "sampled token 19 of 24, after image 1 (tokens" in text


def test_wrong_normalisation(samples, trainer):
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

    def clip(pixels, _):
        raw = (pixels * 0.5 + 0.5).reshape(len(pixels), 3, -1)
        return (
            ((raw - np.array(mean)[:, None]) / np.array(std)[:, None])
            .reshape(pixels.shape)
            .astype(np.float32)
        )

    changed = second_image(
        lambda item: msgspec.structs.replace(item, arithmetic=replace(item.arithmetic, mean=mean, std=std))
    )
    item = samples[0].multi_modal_data.mm_items["image"][1]
    as_served = ChangedItem.of(item, clip).tensors()["pixel_values"]
    by_settings = changed(samples[0]).multi_modal_data.mm_items["image"][1].tensors()["pixel_values"]
    assert np.allclose(as_served, by_settings, atol=1e-5)
    (finding,) = planted(samples, trainer, changed).findings
    assert (finding.stage, finding.cause) == ("pixels", "normalisation")
    assert "normalised by another rule (mean and deviation 0.5) in image 1" in finding.statement


def test_stale_image_for_a_hash(samples, trainer):
    own = samples[0].multi_modal_data.mm_items["image"][1]
    other = samples[1].multi_modal_data.mm_items["image"][1]
    stale = second_image(lambda item: msgspec.structs.replace(other, identity=item.identity))
    report = planted(samples, trainer, stale, others=[msgspec.structs.replace(own, identity="f" * 64)])
    (finding,) = report.findings
    assert (finding.stage, finding.cause) == ("pixels", "stale image")
    assert "a stale image under this one's hash" in finding.statement
    assert finding.image == 1


def test_ranges_and_masks_that_do_not_fit(samples):
    sample = samples[0]
    sidecar = sample.multi_modal_data
    moved = [sidecar.mm_placeholders["image"][0].shifted(1), sidecar.mm_placeholders["image"][1]]
    shifted = replace(
        sample, multi_modal_data=MultiModalData(sidecar.mm_hashes, {"image": moved}, sidecar.mm_items)
    )
    (finding,) = inspect_sample(shifted)
    assert finding.statement == (
        "the placeholder range of image 0 covers other tokens, and the run that fits begins -1 place(s) from it"
    )
    outside = replace(sample, multi_modal_data=sidecar.shifted(10_000))
    (finding,) = inspect_sample(outside)
    assert finding.statement == "the placeholder ranges do not fit the tokens"
    late = replace(sample, loss_mask=np.roll(sample.loss_mask, 1))
    assert {found.cause for found in inspect_sample(late)} == {"loss mask"}
    sentinel = sample.logprobs.copy()
    sentinel[np.flatnonzero(sample.loss_mask)[2]] = np.nan
    (finding,) = inspect_sample(replace(sample, logprobs=sentinel))
    assert finding.statement == "sampled tokens carry values that are not log-probabilities"


def test_precision(samples, trainer):
    """Named where a tolerance asks for it; no alarm where the tolerance is measured."""
    low = trainer.sampled_logprobs(samples[0], model=partial(in_dtype, trainer.model, torch.bfloat16))
    rounded = [recorded(samples[0], low)]
    noise = measure_noise(rounded, trainer)
    report = audit(rounded, trainer, tolerance=1e-4, noise=noise)
    assert [(finding.stage, finding.cause) for finding in report.findings] == [("model", "dtype")]
    measured = audit(rounded, trainer, noise=noise, explain=0)
    assert measured.ok, measured.text()
    assert measured.largest > 1e-3


def test_other_weights_are_not_blamed_on_an_image(samples, trainer):
    rng = np.random.default_rng(0)
    wrong = [
        replace(sample, logprobs=(sample.logprobs * rng.uniform(0.5, 1.5, len(sample))).astype(np.float32))
        for sample in samples
    ]
    report = audit(wrong, trainer, tolerance=TOLERANCE, noise=MEASURED, explain=1, budget=100)
    (finding,) = report.findings
    assert (finding.stage, finding.cause) == ("recording", "unknown")
    assert finding.token == np.flatnonzero(wrong[0].loss_mask)[0]
    assert finding.statement.endswith(": no row explains the numbers")
    assert "changes tried, of this stage by missing, form, " in finding.evidence
    assert finding.remedy == "record log-probabilities as the server reports them"


def test_a_sampler_restricted_by_a_grammar(samples, trainer):
    def held(sample):
        start, stop = sampled_runs(sample.loss_mask)[1]
        logprobs = sample.logprobs.copy()
        logprobs[start:stop] = 0.0
        logprobs[start + 3] = sample.logprobs[start + 3] / 2
        return replace(sample, logprobs=logprobs)

    report = audit([held(samples[0])], trainer, tolerance=TOLERANCE, noise=MEASURED)
    assert [(finding.stage, finding.cause) for finding in report.findings] == [("sampling", "restricted")]


@pytest.mark.parametrize("tolerance", [None, 1e-5, 1e-1])
def test_a_fault_of_all_rollouts_is_shared_and_named_whatever_is_called_an_alarm(samples, trainer, tolerance):
    faulty = [replace(one, logprobs=one.logprobs / np.float32(np.log(2))) for one in samples]
    report = audit(faulty, trainer, tolerance=tolerance)
    assert [(one.cause, one.shared) for one in report.findings] == [("form", True)] * 3
    for one in report.findings:
        assert f"all samples, here {one.sample_id}: recording, form" in report.text()


def test_weights_are_named_by_the_samples_that_they_sampled(samples):
    def compared(version, shift):
        sample = replace(samples[0], weight_versions=(WeightVersionSpan(version, 0, len(samples[0])),))
        return Comparison.of(sample, sample.logprobs[sample.loss_mask] + np.float32(shift))

    fresh, stale = compared("step-0", 0), [compared(f"step-{step}", 0.5) for step in (1, 2)]
    found = shown_by_peers(stale[0], [fresh, stale[1], fresh], TOLERANCE)
    statement = "all samples of the weights 'step-1', 'step-2' differ, and those of 'step-0' agree"
    assert (found.stage, found.cause, found.statement) == ("model", "weights", statement)
    assert shown_by_peers(stale[0], [fresh, stale[1]], TOLERANCE) is None  # one sample may agree by chance
    assert shown_by_peers(stale[0], [fresh, stale[1], compared("step-2", 0)], TOLERANCE) is None


@pytest.mark.parametrize("temperature", [0.97, 1.6])
def test_a_temperature_close_to_the_trainer_s_is_named_too(samples, trainer, temperature):
    places = np.flatnonzero(samples[0].loss_mask)
    logits = trainer.logits_at(samples[0], places) / temperature
    chosen = torch.from_numpy(samples[0].token_ids[places].astype(np.int64))[:, None]
    faulty = recorded(samples[0], logits.log_softmax(-1).gather(1, chosen)[:, 0].numpy())
    report = audit([faulty, *samples[1:]], trainer)
    (finding,) = report.findings
    assert (finding.stage, finding.cause) == ("sampling", "temperature")
    assert f"at temperature {temperature:g} in all completions" in finding.statement


def test_typical_tokens_are_told_from_the_likeliest():
    logits = torch.randn(12, 40, generator=torch.Generator().manual_seed(0)) * 2
    logs = logits.log_softmax(-1)
    order = (-logs + (logs.exp() * logs).sum(-1, keepdim=True)).abs().argsort(-1)
    count = (logs.gather(1, order).exp().cumsum(-1) < 0.7).sum(-1, keepdim=True) + 1
    kept = torch.zeros_like(logs, dtype=torch.bool).scatter(1, order, torch.arange(40) < count)
    tokens = order[:, :1]
    sampler = logs.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(1, tokens)[:, 0].numpy()
    trainer = logs.gather(1, tokens)[:, 0].numpy()
    case, every = SimpleNamespace(tolerance=1e-4), np.arange(12, dtype=np.int32)
    sample = SimpleNamespace(token_ids=tokens[:, 0].numpy())
    view = View(sample, every, sampler, trainer, case, 0, every, logits)
    (found,) = truncated(view)
    assert found.statement.startswith("the log-probabilities are those after typical_p between 0.")
    np.testing.assert_allclose(found.expected, sampler, atol=1e-4)


def test_a_tolerance_below_the_arithmetic_is_an_alarm_without_a_cause(samples, trainer):
    assert audit(samples, trainer).largest < 1e-4
    noise = np.random.default_rng(0).choice([-1e-4, 1e-4], len(samples[0])).astype(np.float32)
    faulty = replace(samples[0], logprobs=samples[0].logprobs + noise * samples[0].loss_mask)
    report = audit([faulty, *samples[1:]], trainer, tolerance=5e-5)
    assert not report.ok
    (finding,) = report.findings
    assert (finding.stage, finding.cause) == ("model", "unknown")
    assert audit([faulty, *samples[1:]], trainer).ok


def test_the_page_lists_the_rows():
    page = " ".join((Path(__file__).parents[2] / "docs" / "audit.md").read_text().split())
    rows = [f"| `{one.name}` | {one.stage} | {one.about} | {one.reference} |" for one in ROWS.values()]
    assert [row for row in rows if row not in page] == []


def test_kept_features_are_those_of_the_model_as_it_is(samples, trainer):
    kept, (vision, language) = (
        trainer.steady(),
        map(parts_of(trainer.model).get, ("vision (visual)", "language model")),
    )
    noisy = lambda data: data * 1.01  # noqa: E731
    changes = [
        None,
        changed_weights(language, noisy),
        changed_weights(vision, noisy),
        partial(in_dtype, trainer.model, torch.bfloat16),
        None,
    ]
    for change in changes:
        own = trainer.sampled_logprobs(samples[0], model=change)
        np.testing.assert_array_equal(kept.sampled_logprobs(samples[0], model=change), own)
        np.testing.assert_array_equal(kept.sampled_logprobs(samples[0], model=change), own)


def test_a_watch_spends_its_share_of_the_time(samples, monkeypatch):
    now, seen = [0.0], set()

    def measured(chosen, _):
        now[0] += 5.0
        return Noise(1e-6, 1e-6)

    def audited(chosen, _, **options):
        now[0] += 0.002 * sum(map(len, chosen))
        seen.update(sample.sample_id for sample in chosen)
        return SimpleNamespace(ok=True)

    monkeypatch.setattr("mmrender.audit.run.measure_noise", measured)
    monkeypatch.setattr("mmrender.audit.run.audit", audited)
    watch, spent, reports = Watch(None, share=0.02, clock=lambda: now[0]), 0.0, []
    for step in range(600):
        now[0] += 1.0
        began = now[0]
        reports.append(watch(samples))
        spent += now[0] - began
        # The first call measures the arithmetic, and is paid back.
        assert step < 300 or spent <= 0.02 * (step + 1)
    assert reports[0] is not None
    assert spent > 0.015 * 600
    assert seen == {sample.sample_id for sample in samples}


def test_a_watch_explains_a_sample_that_differs(samples, trainer):
    scaled = [replace(sample, logprobs=sample.logprobs * np.float32(1 / np.log(2))) for sample in samples]
    (finding,) = Watch(trainer)(scaled).findings
    assert (finding.stage, finding.cause) == ("recording", "form")


def test_a_probe_names_servers_with_other_weights(tiny_model, renderer, trainer):
    other = TrainerModel.from_pretrained(tiny_model)
    with torch.no_grad():
        other.model.get_output_embeddings().weight[::2] *= 1.5
    models = {"first": trainer.model, "second": other.model}
    engines = [Engine(LocalBackend(model), model=name, renderer=renderer) for name, model in models.items()]
    ids = renderer.render([{"role": "user", "content": "Which animal says moo?"}]).token_ids
    same = asyncio.run(probe_weights(engines[:1], ids, tries=2))
    assert (same.ok, same.groups) == (True, ({"local:": 2},))
    apart = asyncio.run(probe_weights(engines, ids, tries=2))
    assert (apart.ok, apart.groups) == (False, ({"local:": 2}, {"local:": 2}))
    assert apart.text() == "weights 0: local: (2 answers)\nweights 1: local: (2 answers)"


def test_the_sampler_s_dtype_travels_with_the_samples(tiny_model, renderer, trainer):
    """With it the alarm is the real arithmetic's."""
    low = LocalBackend(str(tiny_model), dtype="bfloat16")

    async def sampled():
        engine = Engine(low, model="tiny", renderer=renderer)
        ids = renderer.render([{"role": "user", "content": "Which?"}], add_generation_prompt=True).token_ids
        return await engine.turn(engine.prompt(ids), {"max_tokens": 16, "seed": 0, "ignore_eos": True})

    rollout = Trajectory()
    rollout.append_turn(asyncio.run(sampled()))
    (sample,) = rollout.samples()
    assert sample.extra["sampler"]["dtype"] == "bfloat16"
    report = audit([sample], trainer, explain=0)
    assert report.ok, report.text()
    assert not report.notes
    # As from a sampler in float32, the same differences are an alarm.
    extra = {**sample.extra, "sampler": {"dtype": "float32"}}
    assert not audit([replace(sample, extra=extra)], trainer, explain=0).ok


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_two_caches_of_another_dtype_leave_the_kernels_as_they_were(trainer, samples, attention):
    language = trainer.model.config.get_text_config()
    before, language._attn_implementation = language._attn_implementation, attention
    try:
        own = trainer.sampled_logprobs(samples[0])
        with cached_in(trainer.model, torch.float16), cached_in(trainer.model, torch.bfloat16):
            changed = trainer.sampled_logprobs(samples[0])
        assert np.abs(changed - own).max() > 0
        np.testing.assert_array_equal(trainer.sampled_logprobs(samples[0]), own)
    finally:
        language._attn_implementation = before
