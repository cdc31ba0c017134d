"""Which messages mean the same, and which may be left out."""

import numpy as np
import pytest
from PIL import Image

from mmrender.content import normalize_messages
from mmrender.rollout.client import droppable_units, same_message


def one(**fields):
    return normalize_messages([fields])[0]


def call(arguments, **fields):
    return {"type": "function", "function": {"name": "zoom", "arguments": arguments}, **fields}


RED = Image.new("RGB", (4, 4), "red")
SAME = [
    ({"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}),
    ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
    (
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": "x", "reasoning_content": "why"},
    ),
    (
        {"role": "assistant", "content": "", "tool_calls": [call('{"a": 1, "b": [2]}')]},
        {"role": "assistant", "content": None, "tool_calls": [call({"b": [2], "a": 1}, id="call-1")]},
    ),
    (
        {"role": "assistant", "tool_calls": [call('{"a": 1.0, "b": [true, null, {"c": 2}]}')]},
        {"role": "assistant", "tool_calls": [call({"a": 1, "b": [True, None, {"c": 2.0}]})]},
    ),
    (
        {"role": "assistant", "content": "x", "reasoning_content": "why"},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "why"}, {"type": "text", "text": "x"}],
        },
    ),
    (
        {"role": "user", "content": [{"type": "image", "image": RED}]},
        {"role": "user", "content": [{"type": "image", "image": RED.copy()}, {"type": "text", "text": ""}]},
    ),
    (
        {"role": "user", "content": [{"type": "image", "image": np.zeros((2, 2, 3), np.uint8)}]},
        {"role": "user", "content": [{"type": "image", "image": np.zeros((2, 2, 3), np.uint8)}]},
    ),
    ({"role": "tool", "content": "1", "name": ""}, {"role": "tool", "content": "1", "extra_key": None}),
]
OTHER = [
    ({"role": "user", "content": "a"}, {"role": "user", "content": "b"}),
    ({"role": "user", "content": "a"}, {"role": "system", "content": "a"}),
    ({"role": "tool", "content": "1", "name": "zoom"}, {"role": "tool", "content": "1", "name": "answer"}),
    ({"role": "tool", "content": "1", "tool_call_id": "a"}, {"role": "tool", "content": "1", "tool_call_id": "b"}),
    (
        {"role": "assistant", "content": "x", "reasoning_content": "because"},
        {"role": "assistant", "content": "x", "reasoning_content": "why"},
    ),
    ({"role": "assistant", "content": "x", "reasoning_content": "why"}, {"role": "assistant", "content": "x"}),
    *(
        (
            {"role": "assistant", "tool_calls": [call({"a": later})]},
            {"role": "assistant", "tool_calls": [call({"a": earlier})]},
        )
        for later, earlier in [
            (1, 2),
            (True, 1),
            (0.0, False),
            ([1, {"b": True}], [1, {"b": 1}]),
            ([1], [1, 1]),
            ({"b": 1}, {"c": 1}),
            (None, False),
            ("1", 1),
        ]
    ),
    ({"role": "assistant", "tool_calls": [call({})]}, {"role": "assistant", "tool_calls": [call({}), call({})]}),
    (
        {"role": "assistant", "tool_calls": [call({}, id="a")]},
        {"role": "assistant", "tool_calls": [call({}, id="b")]},
    ),
    (
        {"role": "user", "content": [{"type": "image", "image": RED}]},
        {"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (4, 4), "blue")}]},
    ),
    (
        {"role": "user", "content": [{"type": "image", "image": RED}]},
        {"role": "user", "content": [{"type": "image", "image": "https://x.org/red.png"}]},
    ),
    (
        {"role": "user", "content": [{"type": "image", "image": RED}]},
        {"role": "user", "content": [{"type": "text", "text": "red"}]},
    ),
    ({"role": "user", "content": "a", "mood": "good"}, {"role": "user", "content": "a"}),
]  # fmt: skip


@pytest.mark.parametrize("pair", SAME, ids=range(len(SAME)))
def test_messages_that_say_the_same(pair):
    later, earlier = (one(**fields) for fields in pair)
    assert same_message(later, earlier)


@pytest.mark.parametrize("pair", OTHER, ids=range(len(OTHER)))
def test_messages_that_do_not(pair):
    later, earlier = (one(**fields) for fields in pair)
    assert not same_message(later, earlier)


def left_out(roles):
    """Roles by first letter; what remains after each unit is left out, oldest first."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = normalize_messages([{"role": names[role], "content": str(i)} for i, role in enumerate(roles)])
    shorter, dropped = [], set()
    for unit in droppable_units(messages):
        dropped.update(unit)
        shorter.append("".join(m.role[0] for index, m in enumerate(messages) if index not in dropped))
    return shorter


@pytest.mark.parametrize(
    ("roles", "shorter"),
    [
        ("su", []),
        ("u", []),
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
    assert left_out(roles) == shorter
