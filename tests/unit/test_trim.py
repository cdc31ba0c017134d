"""Packing and stripping trajectories: cases with names, exact messages, and sizes."""

from collections import namedtuple
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from pydantic import BaseModel

import mmcodecs
from mmrender.errors import TrajectoryError
from mmrender.spans import MultiModalData, PlaceholderRange
from mmrender.trajectory import (
    pack_group,
    pack_sidecars,
    step_multi_modal_data,
    strip_intermediate_mm_data,
    unpack_group,
    unpack_sidecars,
)
from trajectory_cases import Picture, Step, Tokens, as_mapping, equal, mapping_sidecar, sidecar, step, turns

A, B, C = ("A", 1, 2), ("B", 4, 2), ("C", 7, 2)


def places(entry):
    """The sidecars of a step, in both places."""
    return entry["tokens"]["multi_modal_data"], entry["response"]["message"]["tokens"]["multi_modal_data"]


class TestStepMultiModalData:
    mm = sidecar(A)

    def test_tokens_come_first(self):
        other = sidecar(B)
        entry = step([1], [2], self.mm)
        entry["response"]["message"]["tokens"]["multi_modal_data"] = other
        assert step_multi_modal_data(entry) is self.mm

    @pytest.mark.parametrize("first", [None, {"multi_modal_data": None}, {}])
    def test_then_the_response(self, first):
        message = SimpleNamespace(tokens={"multi_modal_data": self.mm})
        assert step_multi_modal_data({"tokens": first, "response": {"message": message}}) is self.mm

    def test_mappings_and_objects_are_read_alike(self):
        assert step_multi_modal_data(Step(Tokens([], [], self.mm))) is self.mm
        assert (
            step_multi_modal_data(MappingProxyType({"tokens": SimpleNamespace(multi_modal_data=self.mm)}))
            is self.mm
        )

    @pytest.mark.parametrize(
        "entry", [{}, {"tokens": None, "response": None}, Step(None), {"response": {"message": {}}}]
    )
    def test_else_there_is_none(self, entry):
        assert step_multi_modal_data(entry) is None

    def test_an_empty_sidecar_is_one(self):
        empty = MultiModalData()
        assert step_multi_modal_data(step([1], [2], empty)) is empty


class TestStrip:
    def test_a_plain_rollout_keeps_the_last_sidecar_only(self):
        steps = turns(4)
        kept = [places(entry) for entry in strip_intermediate_mm_data(steps)]
        assert kept == [(None, None)] * 3 + [places(steps[-1])]
        assert all(None not in places(entry) for entry in steps), "the input was changed"

    def test_what_is_not_touched_is_the_same_object(self):
        steps = turns(2)
        first, last = strip_intermediate_mm_data(steps)
        assert last is steps[-1]
        assert first["tokens"]["prompt_ids"] is steps[0]["tokens"]["prompt_ids"]

    def test_a_compaction_keeps_what_it_drops(self):
        before = step([1, 9, 9, 4, 9, 9], [5], sidecar(A, B))
        after = step([1, 9, 9, 6], [5], sidecar(("B", 1, 2)))
        assert strip_intermediate_mm_data([before, after]) == [before, after]

    def test_a_compaction_that_shows_the_same_images_keeps_both(self):
        before = step([1, 9, 9, 4, 9, 9], [5], sidecar(A, B))
        after = step([2, 9, 9, 4, 9, 9], [5], sidecar(A, B))
        assert strip_intermediate_mm_data([before, after]) == [before, after]

    def test_a_branch_keeps_each_leaf(self):
        root = step([1, 9, 9], [3], sidecar(A), parent=None)
        left = step([1, 9, 9, 3, 9, 9], [4], sidecar(A, B), parent=0)
        right = step([1, 9, 9, 3, 9, 9], [5], sidecar(A, ("C", 4, 2)), parent=0)
        kept = strip_intermediate_mm_data([root, left, right])
        assert [places(entry)[0] for entry in kept] == [None, places(left)[0], places(right)[0]]

    def test_without_a_named_parent_a_sibling_is_no_extension(self):
        left = step([1, 9, 9, 3, 9, 9], [4], sidecar(A, B))
        right = step([1, 9, 9, 3, 9, 9], [5], sidecar(A, B))
        assert strip_intermediate_mm_data([left, right]) == [left, right]

    def test_reordered_images_are_kept(self):
        mm = sidecar(A, B)
        swapped = MultiModalData.of(
            [(PlaceholderRange(1, 2), Picture("B")), (PlaceholderRange(4, 2), Picture("A"))]
        )
        steps = [step([1, 9, 9, 4, 9, 9], [5], mm), step([1, 9, 9, 4, 9, 9, 5, 6], [7], swapped)]
        assert strip_intermediate_mm_data(steps) == steps

    def test_a_sidecar_that_lost_its_data_does_not_stand_for_one_that_has_it(self):
        full = sidecar(A)
        bare = MultiModalData(full.mm_hashes, full.mm_placeholders, {"image": [None]})
        steps = [step([1, 9, 9], [3], full), step([1, 9, 9, 3, 4], [5], bare)]
        assert strip_intermediate_mm_data(steps) == steps

    def test_duplicates_and_reintroduction_are_no_hindrance(self):
        first = sidecar(A, B)
        later = first.merged(sidecar(("A", 8, 2)))
        steps = [step([1, 9, 9, 4, 9, 9], [5], first), step([1, 9, 9, 4, 9, 9, 5, 6, 9, 9], [7], later)]
        assert [places(entry)[0] for entry in strip_intermediate_mm_data(steps)] == [None, later]

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

    @pytest.mark.parametrize(
        "kind", ["frozen dataclass", "struct", "model", "named tuple", "namespace", "mapping proxy"]
    )
    def test_objects_of_every_kind_are_copied(self, kind):
        first, last = (
            make(kind, prompt, mm) for prompt, mm in (([1], sidecar(A)), ([1, 2, 3], sidecar(A, B)))
        )
        stripped = strip_intermediate_mm_data([first, last])
        assert stripped[1] is last
        assert step_multi_modal_data(stripped[0]) is None
        assert step_multi_modal_data(first) == sidecar(A)
        expected = dict if kind == "mapping proxy" else type(first)
        assert type(stripped[0]) is expected


@dataclass(frozen=True, slots=True)
class FrozenNode:
    tokens: Any = None
    prompt_ids: Any = None
    completion_ids: Any = None
    multi_modal_data: Any = None


class StructNode(msgspec.Struct, frozen=True):
    tokens: Any = None
    prompt_ids: Any = None
    completion_ids: Any = None
    multi_modal_data: Any = None


class ModelNode(BaseModel):
    tokens: Any = None
    prompt_ids: Any = None
    completion_ids: Any = None
    multi_modal_data: Any = None


TupleNode = namedtuple("TupleNode", "tokens prompt_ids completion_ids multi_modal_data", defaults=[None] * 4)
KINDS = {
    "frozen dataclass": FrozenNode,
    "struct": StructNode,
    "model": ModelNode,
    "named tuple": TupleNode,
    "namespace": SimpleNamespace,
    "mapping proxy": lambda **fields: MappingProxyType(fields),
}


def make(kind: str, prompt: list[int], mm: Any) -> Any:
    node = KINDS[kind]
    return node(tokens=node(prompt_ids=prompt, completion_ids=[2], multi_modal_data=mm))


class TestPack:
    def test_each_item_and_token_stands_once(self):
        steps = turns(32)
        packed = pack_sidecars(steps)
        assert [row["hash"] for row in packed["items"]] == [f"picture-{turn}" for turn in range(32)]
        last = steps[-1]["tokens"]
        assert len(packed["tokens"]) == len(last["prompt_ids"]) + len(last["completion_ids"])
        assert packed["tokens"].dtype == np.int32
        assert len(packed["placeholders"]) == 32
        assert equal(unpack_sidecars(packed), steps)

    def test_rollouts_of_a_group_share_items_and_prompt(self):
        shared = list(range(100, 400))
        rollouts = [[step([*shared, 9, 9], [turn], sidecar(("A", 300, 2)))] for turn in range(8)]
        packed = pack_group(rollouts)
        assert len(packed["items"]) == 1
        # The base is found by blocks of 64 tokens, and then used to the last token that is shared.
        assert len(packed["tokens"]) == 302 + 8
        assert equal(unpack_group(packed), rollouts)

    def test_an_interleaved_agent_finds_its_own_past(self):
        first = [step([*range(200)], [1], None), step([*range(1000, 1200)], [2], None)]
        second = [step([*range(200), 1, 5], [3], None), step([*range(1000, 1200), 2, 6], [4], None)]
        packed = pack_sidecars(first + second)
        assert [entry["base"] for entry in packed["steps"]] == [-1, 0, 0, 1]
        assert len(packed["tokens"]) == 2 * 200 + 4 + 2

    def test_items_of_the_table_are_those_of_the_sidecars(self):
        steps = turns(3)
        found = unpack_sidecars(pack_sidecars(steps))
        pictures = [entry["tokens"]["multi_modal_data"].mm_items["image"][0] for entry in found]
        assert all(
            picture is steps[0]["tokens"]["multi_modal_data"].mm_items["image"][0] for picture in pictures
        )

    def test_the_form_is_plain(self):
        def kinds(node):
            if isinstance(node, dict):
                return set().union({dict}, *map(kinds, node.values()))
            if isinstance(node, list | tuple):
                return set().union({type(node)}, *map(kinds, node))
            return {type(node)}

        assert kinds(pack_sidecars(turns(3))) <= {dict, list, str, int, type(None), np.ndarray, Picture}

    def test_objects_come_back_as_mappings_of_their_fields(self):
        steps = [Step(Tokens([1, 9, 9], [2], sidecar(A), completion_logprobs=[-0.5]))]
        assert equal(unpack_sidecars(pack_sidecars(steps)), as_mapping(steps))

    def test_hash_with_and_without_data_are_two_rows(self):
        full = sidecar(A)
        bare = MultiModalData(full.mm_hashes, full.mm_placeholders, {"image": [None]})
        steps = [step([1, 9, 9], [3], full), step([1, 9, 9, 3, 4], [5], bare)]
        packed = pack_sidecars(steps)
        assert len(packed["items"]) == 2
        assert equal(unpack_sidecars(packed), steps)

    def test_sidecars_without_items_or_ranges(self):
        steps = [step([1, 9, 9], [3], {"mm_hashes": {"image": ("A",)}, "mm_items": None})]
        assert equal(unpack_sidecars(pack_sidecars(steps)), steps)

    @pytest.mark.parametrize("spans", [None, [[0, 1]], ((0, 1),)])
    def test_ranges_as_mappings_keep_their_spans(self, spans):
        ranges = {"image": [{"offset": 1, "length": 2, "embed_spans": spans}]}
        steps = [step([1, 9, 9], [3], {"mm_hashes": {"image": ["A"]}, "mm_placeholders": ranges})]
        assert equal(unpack_sidecars(pack_sidecars(steps)), steps)

    def test_the_packed_form_goes_through_the_codec(self):
        steps = turns(5)
        for entry in steps:
            entry["tokens"]["multi_modal_data"] = mapping_sidecar(entry["tokens"]["multi_modal_data"])
            entry["response"]["message"]["tokens"]["multi_modal_data"] = None
        frames = mmcodecs.encode_frames(pack_sidecars(steps))
        # One frame each for head, tokens, placeholders and five items at most: no more with more steps.
        assert len(frames) <= 8
        assert equal(unpack_sidecars(mmcodecs.decode(frames)), steps)

    def test_nothing_is_something(self):
        assert unpack_sidecars(pack_sidecars([])) == []
        assert unpack_group(pack_group([])) == []
        assert unpack_group(pack_group([[], []])) == [[], []]


def mm_of(**fields):
    return [step([1, 9, 9], [3], fields)]


RANGE = {"offset": 1, "length": 2}


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (
            [step([1], [2], None, parent=0)],
            "steps[0].parent: a step must come after the step that it continues - expected None, got 0. "
            "Order the steps so that parents come first",
        ),
        (
            [step([1, "2"], [2], None)],
            "steps[0].tokens.prompt_ids: token ids must be a flat list, tuple or numpy array of integers "
            "of 32 bits"
            " - got a list with '2'",
        ),
        (
            [step([1], [2**31], None)],
            "steps[0].tokens.completion_ids: token ids must be a flat list, tuple or numpy array of "
            "integers of "
            "32 bits - got a list with 2147483648",
        ),
        (
            [step(np.zeros((1, 2), np.int64), [], None)],
            "steps[0].tokens.prompt_ids: token ids must be a flat list, tuple or numpy array of integers "
            "of 32 bits"
            " - got int64 [1, 2]",
        ),
        (
            mm_of(pixel_values=1),
            "steps[0].tokens.multi_modal_data: this is no sidecar - "
            "expected some of mm_hashes, mm_placeholders, mm_items, got pixel_values",
        ),
        (
            mm_of(mm_hashes={"image": ["A", "B"]}, mm_placeholders={"image": [RANGE]}),
            "steps[0].tokens.multi_modal_data.image: hashes, placeholders and items of a sidecar must be "
            "equally "
            "many - got 2 hashes, 1 placeholders",
        ),
        (
            mm_of(mm_items={"image": [{"pixel_values": 1}]}),
            "steps[0].tokens.multi_modal_data.image[0]: an item has no hash - expected text, got None",
        ),
        (
            mm_of(mm_hashes={"image": ["A", "A"]}, mm_items={"image": [np.zeros(2), np.ones(2)]}),
            "steps[0].tokens.multi_modal_data.image[1]: the hash 'A' stands for two different items. "
            "Derive hashes from the pixels and the processor's settings",
        ),
        (
            mm_of(mm_hashes={"image": ["A"]}, mm_placeholders={"image": [{"offset": 1}]}),
            "steps[0].tokens.multi_modal_data.image[0]: a placeholder range is malformed - expected "
            "offset and "
            "length, non-negative integers, and perhaps embed_spans, got {'offset': 1}",
        ),
        (
            mm_of(
                mm_hashes={"image": ["A"]}, mm_placeholders={"image": [RANGE | {"is_embed": [True, False]}]}
            ),
            "steps[0].tokens.multi_modal_data.image[0]: a placeholder range is malformed - expected "
            "offset and "
            "length, non-negative integers, and perhaps embed_spans, "
            "got {'offset': 1, 'length': 2, 'is_embed': [True, False]}",
        ),
    ],
)
def test_what_cannot_be_packed_is_named(steps, message):
    with pytest.raises(TrajectoryError) as caught:
        pack_sidecars(steps)
    assert str(caught.value) == message


def damaged(change):
    packed = pack_sidecars(turns(2))
    change(packed)
    return packed


def block(packed):
    return packed["steps"][1]["blocks"]["tokens"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: p.update(version=2),
            "packed: this is not a packed form that can be read - expected format "
            "'mmrender.trajectories', version 1, "
            "got format 'mmrender.trajectories', version 2. Pack and unpack with the same release of "
            "mmrender",
        ),
        (
            lambda p: p["steps"][1].update(base=1),
            "packed.steps[1].base: a base is no earlier step - expected -1..0, got 1",
        ),
        (
            lambda p: block(p)["prompt"].update(keep=99),
            "packed.steps[1].tokens.prompt_ids.keep: more is kept than the reference holds - expected "
            "0..36, got 99",
        ),
        (
            lambda p: block(p)["prompt"].update(add=10**9),
            "packed.steps[1].tokens.prompt_ids.add: more is taken from the pool of tokens than it holds - "
            "expected 0..33, got 1000000000",
        ),
        (
            lambda p: p.update(tokens=np.append(p["tokens"], np.int32(0))),
            "packed.tokens: a pool holds rows that no step uses - expected 69, got 70",
        ),
        (
            lambda p: p.update(tokens=p["tokens"].astype(np.int64)),
            "packed.tokens: a pool has the wrong shape - expected int32 [n], got int64 [69]",
        ),
        (
            lambda p: p["placeholders"].__setitem__((1, 0), 7),
            "packed.steps[1].tokens.multi_modal_data.image: a placeholder refers to no image of the item "
            "table - "
            "expected a row below 2, got 7",
        ),
        (
            lambda p: p.update(lengths=[3]),
            "packed.lengths: the lengths of the trajectories do not add up - "
            "expected non-negative numbers with the sum 2, got [3]",
        ),
        (
            lambda p: p.update(lengths=[1, 1]),
            "packed.lengths: the packed form holds a group - expected one trajectory, got 2. Use "
            "unpack_group",
        ),
        (
            lambda p: p["steps"][0].update(base="x"),
            "packed: the packed form is damaged - got Expected `int`, got `str` - at `$.steps[0].base`",
        ),
    ],
)
def test_what_cannot_be_unpacked_is_named(change, message):
    with pytest.raises(TrajectoryError) as caught:
        unpack_sidecars(damaged(change))
    assert str(caught.value) == message
