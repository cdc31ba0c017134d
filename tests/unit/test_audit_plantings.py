"""A handful of the faults that `tests/audit_plantings.py` plants."""

import pytest

from audit_cases import decode
from mmrender.audit import TrainerModel, audit
from planting import grown, healthy_rollouts, judge
from plantings_dev import DEV
from plantings_third import THIRD


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("planted")


def planting_of(name):
    return next(one for one in (*DEV, *THIRD) if one.name == name)


@pytest.mark.parametrize("name", ["brighter", "gap-before-completion", "tool-as-user"])
def test_a_planted_fault_is_named(name, folder):
    outcome = judge(planting_of(name), "one", folder)
    assert (outcome.verdict, outcome.stage_right, outcome.beside) == ("right", True, ""), outcome.cause


def test_a_fault_without_a_row_is_located_whatever_is_called_an_alarm(folder):
    outcome = judge(planting_of("drafted"), "one", folder, 1e-3, budget=150)
    assert (outcome.verdict, outcome.stage_right) == ("unknown", True), outcome.cause
    assert outcome.cause.startswith("recording, unknown: unknown, in "), outcome.cause


def test_recurrent_layers_are_audited_in_padded_batches(folder):
    samples, _ = healthy_rollouts("qwen3_5", folder)
    assert len({len(sample) for sample in samples[:2]}) > 1
    report = audit(samples[:2], TrainerModel(grown("qwen3_5", folder).model), decode=decode)
    assert report.ok
    assert report.largest < 1e-4
