"""A gateway that is killed at any point loses no answered turn, and repeats none."""

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent


def played(script, *arguments):
    """The result of a script beside the tests, and none of its faults."""
    path = os.pathsep.join(map(str, [TESTS, *sys.path]))
    command, environment = [sys.executable, TESTS / script, *arguments], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    result = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {"faults": done.stderr}
    assert result["faults"] == []
    return result


def test_kills_at_points_of_a_session(tiny_model, tmp_path):
    """`make faults` tries each point."""
    result = played("gateway_kills.py", tiny_model, tmp_path, "--every", "5")
    assert result["runs"] > 12
    assert result["kills"] > 1.5 * result["runs"]


def test_kills_of_a_gateway_that_serves_and_of_agents(tiny_model, tmp_path):
    result = played(
        "gateway_http_kills.py", tiny_model, tmp_path, "--gateways", "4", "--agents", "4", "--turns", "4"
    )
    assert result["gateways_killed"] >= 4
    assert result["connections_dropped"] >= 4
    assert result["turns"] == 4 * result["sessions"]
