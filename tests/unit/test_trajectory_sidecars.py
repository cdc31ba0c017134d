"""Steps without repeated sidecars: cases with names, and exact messages."""

from collections import namedtuple
from dataclasses import make_dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from pydantic import create_model

from kit import error_of
from mmrender.errors import TrajectoryError
from mmrender.sidecar import MultiModalData
from mmrender.trajectory import strip_intermediate_mm_data
from mmrender.trajectory.sidecars import sidecar_of
from trajectory_cases import Tokens, sidecar, step, turns

A, B, C = ("A", 1, 2), ("B", 4, 2), ("C", 7, 2)


FIELDS = ("tokens", "prompt_ids", "completion_ids", "multi_modal_data")
OPTIONAL = [(name, Any, None) for name in FIELDS]
KINDS = {
    "frozen dataclass": make_dataclass("Node", OPTIONAL, frozen=True, slots=True),
    "struct": msgspec.defstruct("Node", OPTIONAL, frozen=True),
    "model": create_model("Node", **dict.fromkeys(FIELDS, (Any, None))),
    "named tuple": namedtuple("Node", FIELDS, defaults=[None] * 4),
    "namespace": SimpleNamespace,
    "mapping proxy": lambda **fields: MappingProxyType(fields),
}


def places(entry):
    """The sidecars of a step, in both places."""
    return entry["tokens"]["multi_modal_data"], entry["response"]["message"]["tokens"]["multi_modal_data"]


class TestStrip:
    def test_a_plain_rollout_keeps_the_last_sidecar_only(self):
        steps = turns(4)
        kept = [places(entry) for entry in strip_intermediate_mm_data(steps)]
        assert kept == [(None, None)] * 3 + [places(steps[-1])]
        assert all(None not in places(entry) for entry in steps), "the input was changed"

    def test_a_sidecar_that_lost_its_data_does_not_stand_for_one_that_has_it(self):
        full = sidecar(A)
        bare = MultiModalData(full.mm_hashes, full.mm_placeholders, {"image": [None]})
        steps = [step([1, 9, 9], [3], full), step([1, 9, 9, 3, 4], [5], bare)]
        assert strip_intermediate_mm_data(steps) == steps

    def test_without_token_ids_the_sidecars_decide(self):
        steps = [{"tokens": {"multi_modal_data": mm}} for mm in (sidecar(A), sidecar(A, B), sidecar(C))]
        kept = [entry["tokens"]["multi_modal_data"] for entry in strip_intermediate_mm_data(steps)]
        assert kept == [None, sidecar(A, B), sidecar(C)]

    def test_token_ids_on_one_side_prove_nothing(self):
        steps = [{"tokens": {"multi_modal_data": sidecar(A)}}, step([1, 9, 9], [3], sidecar(A))]
        assert strip_intermediate_mm_data(steps) == steps

    def test_an_unknown_kind_of_sidecar_goes_where_the_prompt_goes_on(self):
        steps = [step([1, 2], [3], "one"), step([1, 2, 3, 4], [5], "two"), step([7], [8], "three")]
        kept = [places(entry) for entry in strip_intermediate_mm_data(steps)]
        assert kept == [(None, None), ("two", "two"), ("three", "three")]

    @pytest.mark.parametrize("kind", KINDS)
    def test_objects_of_every_kind_are_copied(self, kind):
        first, last = (
            make(kind, prompt, mm) for prompt, mm in (([1], sidecar(A)), ([1, 2, 3], sidecar(A, B)))
        )
        stripped = strip_intermediate_mm_data([first, last])
        assert stripped[1] is last
        assert sidecar_of(stripped[0]) is None
        assert sidecar_of(first) == sidecar(A)
        expected = dict if kind == "mapping proxy" else type(first)
        assert type(stripped[0]) is expected


class Slotted:
    """An object that refuses to be copied."""

    def __init__(self, tokens: Any) -> None:
        self.tokens = tokens

    def __copy__(self) -> Any:
        raise TypeError("read only")


def make(kind: str, prompt: list[int], mm: Any) -> Any:
    node = KINDS[kind]
    return node(tokens=node(prompt_ids=prompt, completion_ids=[2], multi_modal_data=mm))


MALFORMED = {
    "parent": [{"parent": 0}],
    "token id": [step([1], [2], sidecar()), step([1.5], [2], sidecar())],
    "slots": [Slotted(Tokens([1], [2], sidecar(A))), Slotted(Tokens([1, 2, 9, 9], [3], sidecar(A)))],
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_steps_are_named(case, sentence):
    assert error_of(TrajectoryError, strip_intermediate_mm_data, MALFORMED[case]) == sentence
