"""Which messages mean the same, and which may be left out."""

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from kit import user
from mmrender.content import normalize_messages
from mmrender.content.values import copy_containers
from mmrender.rollout.client import droppable_units
from mmrender.trajectory.conversation import is_unchanged, same_message
from rollout_cases import text


def said(content=None, **fields):
    return {"role": "assistant", "content": content, **fields}


def shown(source, *more):
    return {"role": "user", "content": [{"type": "image", "image": source}, *more]}


def result(**fields):
    return {"role": "tool", "content": "1", **fields}


def calls(*made, **fields):
    return said(tool_calls=[{"function": {"name": "zoom", "arguments": each}, **fields} for each in made])


RED = Image.new("RGB", (4, 4), "red")
BLACK = np.zeros((2, 2, 3), np.uint8)
ASKED = user("a")
SAME = [
    (ASKED, {"role": "user", "content": [text("a")]}),
    (said(None), said("")),
    (said("x"), said("x", reasoning_content="why")),
    (calls('{"a": 1, "b": [2]}'), calls({"b": [2], "a": 1}, id="call-1")),
    (calls('{"a": 1.0, "b": [true, null, {"c": 2}]}'), calls({"a": 1, "b": [True, None, {"c": 2.0}]})),
    (said("x", reasoning_content="why"), said([{"type": "thinking", "thinking": "why"}, text("x")])),
    (shown(RED), shown(RED.copy(), text(""))),
    (shown(BLACK), shown(BLACK.copy())),
    (result(name=""), result(extra_key=None)),
]
OTHER = [
    (ASKED, user("b")),
    (ASKED, {"role": "system", "content": "a"}),
    (ASKED | {"mood": "good"}, ASKED),
    (result(name="zoom"), result(name="answer")),
    (result(tool_call_id="a"), result(tool_call_id="b")),
    (said("x", reasoning_content="because"), said("x", reasoning_content="why")),
    (said("x", reasoning_content="why"), said("x")),
    (calls({"a": 1}), calls({"a": 2})),
    (calls({"a": True}), calls({"a": 1})),
    (calls({"a": 0.0}), calls({"a": False})),
    (calls({"a": [1, {"b": True}]}), calls({"a": [1, {"b": 1}]})),
    (calls({"a": [1]}), calls({"a": [1, 1]})),
    (calls({"a": {"b": 1}}), calls({"a": {"c": 1}})),
    (calls({"a": None}), calls({"a": False})),
    (calls({"a": "1"}), calls({"a": 1})),
    (calls({}), calls({}, {})),
    (calls({}, id="a"), calls({}, id="b")),
    (shown(RED), shown(Image.new("RGB", (4, 4), "blue"))),
    (shown(BLACK), shown(BLACK.astype(np.float32))),
    (shown(RED), shown("https://x.org/red.png")),
    (shown(RED), {"role": "user", "content": [text("red")]}),
]


@pytest.mark.parametrize(
    ("pair", "same"), [*((pair, True) for pair in SAME), *((pair, False) for pair in OTHER)]
)
def test_messages_that_mean_the_same(pair, same):
    later, earlier = (normalize_messages([fields])[0] for fields in pair)
    assert same_message(later, earlier) is same


@pytest.mark.parametrize(
    ("roles", "shorter"),
    [
        ("su", []),
        ("s", []),
        ("suau", ["su"]),
        ("suauau", ["suau", "su"]),
        ("suatat", ["suat"]),
        ("suatatatu", ["suatatu", "suatu"]),
        ("suauatat", ["suatat", "suat"]),
        ("suattuattuattu", ["suattuattu", "suattu"]),
        ("uuauu", ["uu"]),
        ("uatua", ["ua"]),
    ],
)
def test_what_is_left_out_first(roles, shorter):
    """Roles by first letter; what remains after each unit is left out, oldest first."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = normalize_messages([{"role": names[role], "content": str(i)} for i, role in enumerate(roles)])
    dropped, found = set(), []
    for unit in droppable_units(messages):
        dropped.update(unit)
        found.append("".join(role for index, role in enumerate(roles) if index not in dropped))
    assert found == shorter


def test_a_message_that_was_changed_in_its_place_is_seen():
    message = said("x", tool_calls=[{"function": {"name": "zoom", "arguments": {"a": [1, "b"]}}}])
    arguments = message["tool_calls"][0]["function"]["arguments"]
    copy = copy_containers(message, "message")
    assert is_unchanged(message, copy)
    assert is_unchanged(copy_containers(message, "message"), copy)
    arguments["a"][1] = "c"
    assert not is_unchanged(message, copy)
    arguments["a"][1] = "b"
    assert is_unchanged(message, copy)
    arguments["a"][0] = True
    assert not is_unchanged(message, copy)
    arguments["a"] = [1]
    assert not is_unchanged(message, copy)


@pytest.mark.parametrize("value", [(1, 2), bytearray(b"png"), SimpleNamespace(url="a.png")])
def test_values_that_may_change_unseen_are_read_again(value):
    message = {"role": "user", "content": [{"type": "image", "image": value}]}
    assert not is_unchanged(message, copy_containers(message, "message"))


@pytest.mark.parametrize("value", [BLACK, RED])
def test_an_image_that_a_message_holds_itself_is_not_read_again(value):
    message = {"role": "user", "content": [{"type": "image", "image": value}]}
    (read,) = normalize_messages([message])
    assert read.content[0].source is value
    copy = copy_containers(message, "message")
    assert is_unchanged(message, copy)
    message["content"][0]["image"] = value.copy()
    assert not is_unchanged(message, copy)


def test_the_order_of_keys_counts():
    assert not is_unchanged({"b": 1, "a": 2}, {"a": 2, "b": 1})
