"""Digests of what a rollout was asked with."""

import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from functools import partial

import numpy as np
from PIL import Image

from mmrender.messages import Message
from mmrender.rollout.checkpoint import digest_of


@dataclass
class Settings:
    size: int


NOTHING = lambda: None  # noqa: E731
RED = Image.new("RGB", (4, 4), "red")
SAME = [
    ({"a": 1, "b": [2]}, {"b": (2,), "a": 1}),
    (RED, RED.copy()),
    (np.arange(6).reshape(2, 3), np.arange(6).reshape(2, 3)),
    (partial(sorted, Settings(size=2)), partial(sorted, Settings(size=2))),
    (Message(role="user", content="a"), Message(role="user", content="a")),
    (date(2020, 1, 2), date(2020, 1, 2)),
]
OTHER = [
    (1, True),
    (1, "1"),
    (None, "None"),
    ("ab", ["a", "b"]),
    (["a", ["b"]], ["a", "b"]),
    ([["a"], "b"], [["a", "b"]]),
    ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
    (RED, Image.new("RGB", (4, 4), "blue")),
    (Image.new("RGB", (4, 2)), Image.new("RGB", (2, 4))),
    (np.zeros((2, 3)), np.zeros((3, 2))),
    (np.zeros(2, np.int32), np.zeros(2, np.float32)),
    (partial(sorted, Settings(size=2)), partial(sorted, Settings(size=3))),
    (Settings(1), Settings(2)),
    (Settings(1), {"size": 1}),
    (date, Settings),
    (Message(role="user", content="a"), Message(role="user", content="b")),
    (date(2020, 1, 2), date(2020, 1, 3)),
    (NOTHING, NOTHING),
]


def test_what_is_the_same():
    """What has no lasting form is not."""
    assert [pair for pair in SAME if digest_of(pair[0]) != digest_of(pair[1])] == []
    assert [pair for pair in OTHER if digest_of(pair[0]) == digest_of(pair[1])] == []


def test_every_process_finds_the_same():
    code = (
        "from datetime import date; from functools import partial\n"
        "from mmrender.rollout.checkpoint import digest_of\n"
        "print(digest_of({'b': 'x', 'a': [1.5]}, partial(sorted, date(2020, 1, 2))))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == digest_of({"a": [1.5], "b": "x"}, partial(sorted, date(2020, 1, 2)))
