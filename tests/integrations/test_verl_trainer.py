"""verl's own trainer on a CPU, for three steps: the sampler has the weights of each step until they are withheld."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--steps", "3", "--boards", "4", "--rollouts", "4", "--held-out", "8", "--learning-rate", "2e-3"]


def run(module, *options, cwd, **variables):
    """Run a program with verl's trainer; return what it printed."""
    path = os.pathsep.join(map(str, [ROOT, ROOT / "codecs", ROOT / "examples"]))
    done = subprocess.run(
        [sys.executable, "-m", module, *options],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.timeout(900)
def test_each_step_samples_with_its_weights_and_withheld_ones_are_seen(tmp_path):
    # The server does not load what step 2 has changed.
    run("grpo.with_verl", "--out", "run", *SMALL, cwd=tmp_path, GRPO_FROZEN_AFTER="1")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    differences = {line["step"]: line["difference"] for line in lines if "difference" in line}
    assert max(differences[1], differences[2]) < 1e-3
    assert differences[3] > 0.01
    assert [line["step"] for line in lines if "held_out" in line] == [0, 3]


@pytest.mark.timeout(900)
def test_the_recipe_trains(tmp_path):
    printed = run("recipes.verl", "--tiny", "--out", "run", cwd=tmp_path)
    lines = [line.split() for line in printed if line.startswith("step ") and "nats" in line]
    assert [line[1] for line in lines] == ["1", "2"]
    assert max(float(line[-1]) for line in lines) < 1e-3
