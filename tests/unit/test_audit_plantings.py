"""A handful of the faults that `tests/audit_plantings.py` plants."""

from functools import partial

import numpy as np
import pytest

from audit_cases import decode
from mmrender.audit import TrainerModel, audit
from mmrender.audit.case import Trial
from mmrender.audit.computed import changed_weights, losing
from mmrender.audit.stage import weigh
from mmrender.training.recurrent import recurrent_layers
from planting import HEALTHY, dialogue, grown, healthy_rollouts, judge, world_of
from plantings_fourth import FOURTH
from plantings_third import THIRD


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("planted")


def planting_of(name):
    return next(one for one in (*THIRD, *FOURTH) if one.name == name)


@pytest.mark.parametrize("name", ["header-newline", "limited-range", "bad-words"])
def test_a_planted_fault_is_named(name, folder):
    outcome = judge(planting_of(name), "one", folder)
    assert (outcome.verdict, outcome.stage_right, outcome.beside) == ("right", True, ""), outcome.cause


def test_a_fault_without_a_row_is_located_whatever_is_called_an_alarm(folder):
    outcome = judge(planting_of("drafted"), "one", folder, 1e-3, budget=150)
    assert (outcome.verdict, outcome.stage_right) == ("unknown", True), outcome.cause
    assert outcome.cause.startswith("recording, unknown: unknown, in "), outcome.cause


@pytest.mark.parametrize(("after", "stage"), [(0.0, "recording"), (0.02, "tokens")])
def test_another_token_changes_the_numbers_after_it_in_its_completion(after, stage):
    rng = np.random.default_rng(0)
    shifted = [(Trial("", row="altered token"), change) for change in rng.normal(0, 1, (4, 28))]
    difference = rng.normal(0, 1e-6, 28)
    difference[5:14] = rng.normal(0, after, 9)
    difference[[5, 9]] = 1.3, -0.8
    assert weigh(difference, shifted, 1e-6, [14])[0].stage == stage


def test_kept_masks_are_those_of_the_inputs(folder):
    """Gemma 3 makes two masks of its inputs, and images see each other in both directions."""
    world = world_of("gemma3", folder, HEALTHY)
    parts = [part for prompt, _ in dialogue(0) for part in prompt]
    row = world.build(parts[:-1]).add((3, 4, 5), True)
    sample, trainer = row.sample("masks"), TrainerModel(world.model)
    kept, other = trainer.steady(), changed_weights(world.model.lm_head, lambda data: data * 1.5)
    for change in (other, None, other):
        own = trainer.sampled_logprobs(sample, model=change)
        np.testing.assert_array_equal(kept.sampled_logprobs(sample, model=change), own)


def test_recurrent_layers_are_audited_in_padded_batches(folder):
    samples, _ = healthy_rollouts("qwen3_5", folder)
    assert len({len(sample) for sample in samples[:2]}) > 1
    report = audit(samples[:2], TrainerModel(grown("qwen3_5", folder).model), decode=decode)
    assert report.ok
    assert report.largest < 1e-4


def test_recurrent_layers_that_lose_nothing_run_in_parts(folder):
    samples, _ = healthy_rollouts("qwen3_5", folder)
    trainer = TrainerModel(grown("qwen3_5", folder).model)
    layers = recurrent_layers(trainer.model, trainer.family)
    start, whole = int(samples[0].loss_mask.argmax()), trainer.sampled_logprobs(samples[0])
    for lost, is_same in (((), True), (("conv_states",), False), (("recurrent_states",), False)):
        change = partial(losing, trainer.model, layers, lost, [start])
        own = trainer.sampled_logprobs(samples[0], model=change)
        np.testing.assert_allclose(own[0], whole[0], atol=1e-5)
        assert np.allclose(own, whole, atol=1e-5) is is_same
