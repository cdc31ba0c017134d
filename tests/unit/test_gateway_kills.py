"""A gateway that is killed at any point loses no answered turn, and repeats none."""

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent


def test_kills_at_each_point_of_a_session(tiny_model, tmp_path):
    command = [sys.executable, TESTS / "gateway_kills.py", tiny_model, tmp_path]
    path = os.pathsep.join(map(str, [TESTS, *sys.path]))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    result = json.loads(done.stdout.splitlines()[-1]) if done.stdout else done.stderr
    assert result["faults"] == []
    assert result["runs"] > 60
    assert result["kills"] > 1.5 * result["runs"]
