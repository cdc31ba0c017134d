"""A handful of the faults that `tests/audit_plantings.py` plants."""

import pytest

from planting import judge
from plantings_dev import DEV

NAMED = ("double-bos", "bilinear", "temperature-0.7", "one-step-behind")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("planted")


@pytest.mark.parametrize("name", NAMED)
def test_a_planted_fault_is_named(name, folder):
    planting = next(one for one in DEV if one.name == name)
    outcome = judge(planting, "one", folder)
    assert (outcome.verdict, outcome.stage_right, outcome.beside) == ("right", True, ""), outcome.cause
