"""Gradients of batches equal those of single forwards for eight families, also where rows are split over ranks."""

import json
import subprocess
import sys
from pathlib import Path

import sequence_parallel
from training_models import FAMILIES

WORLD_SIZE = 2


def test_gradients_equal_those_of_single_forwards(tmp_path: Path) -> None:
    """Padded, packed, and split over two processes, which exchange what attention needs by gloo."""
    ranks = [
        subprocess.Popen(
            [sys.executable, sequence_parallel.__file__, str(rank), str(WORLD_SIZE), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        outputs = [rank.communicate(timeout=280) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    errors = b"".join(error for _, error in outputs).decode()
    assert [rank.returncode for rank in ranks] == [0] * WORLD_SIZE, errors
    found = json.loads(outputs[0][0])
    whole = {"right", "left", "packed"}
    split = {"ring right", "ring packed", "ulysses right", "ulysses left", "ulysses packed"}
    for name in FAMILIES:
        refused = {"ring right", "ring packed"} if name == "gemma3" else set()
        assert found[name].keys() == (whole | split) - refused
        assert max(found[name].values()) < 1e-5, (name, found[name])
