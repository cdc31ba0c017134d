"""A handful of the faults that `tests/audit_plantings.py` plants."""

import pytest

from planting import judge
from plantings_dev import DEV
from plantings_third import THIRD


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("planted")


def planting_of(name):
    return next(one for one in (*DEV, *THIRD) if one.name == name)


@pytest.mark.parametrize("name", ["bilinear", "gap-before-completion", "tool-as-user"])
def test_a_planted_fault_is_named(name, folder):
    outcome = judge(planting_of(name), "one", folder)
    assert (outcome.verdict, outcome.stage_right, outcome.beside) == ("right", True, ""), outcome.cause


def test_a_fault_without_a_row_is_located_whatever_is_called_an_alarm(folder):
    outcome = judge(planting_of("brighter"), "one", folder, 1e-3)
    assert (outcome.verdict, outcome.stage_right) == ("unknown", True), outcome.cause
    assert outcome.cause.startswith("pixels, unknown: unknown, in the pixels"), outcome.cause
