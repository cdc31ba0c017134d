"""The table of families that `make families` builds, and how its vocabularies are made."""

import importlib.util
import json
from pathlib import Path

import pytest

from small_models import train_byte_pairs

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "families.py"


@pytest.fixture(scope="module")
def families():
    spec = importlib.util.spec_from_file_location("families", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_name_tokens_of_their_own(families):
    for name, row in families.read_table().items():
        tokens = [*row["special"], *row.get("plain", []), *row.get("swallowing", [])]
        config = [value for key, value in row["config"].items() if key != "model_type"]
        named = {*row["tokens"].values(), *row["stop"], *config, *([row["bos"]] if "bos" in row else [])}
        assert named <= set(families.expand(tokens)), name


def test_the_merges_of_a_vocabulary_follow_from_its_order(families):
    trained = json.loads(train_byte_pairs(800, SCRIPT.read_text("utf-8")).to_str())["model"]
    byte_of = {letter: byte for byte, letter in families.byte_letters().items()}
    vocabulary = sorted(trained["vocab"], key=trained["vocab"].get)
    tokens = [bytes(map(byte_of.get, token)) for token in vocabulary if set(token) <= byte_of.keys()]
    expected = [tuple(bytes(map(byte_of.get, part)) for part in merge) for merge in trained["merges"]]
    assert len(expected) > 300
    assert families.merges_of(tokens) == expected
