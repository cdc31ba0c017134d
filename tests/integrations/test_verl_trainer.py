"""verl's own trainer on a CPU, for three steps: the sampler has the weights of each step until they are withheld."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--steps", "3", "--boards", "4", "--rollouts", "4", "--held-out", "8", "--learning-rate", "2e-3"]


@pytest.mark.timeout(900)
def test_each_step_samples_with_its_weights_and_withheld_ones_are_seen(tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "codecs", ROOT / "examples"])),
        "GRPO_FROZEN_AFTER": "1",  # the server does not load what step 2 has changed
    }
    command = [sys.executable, "-m", "grpo.with_verl", "--out", tmp_path / "run", *SMALL]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=850, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    differences = {line["step"]: line["difference"] for line in lines if "difference" in line}
    assert max(differences[1], differences[2]) < 1e-3
    assert differences[3] > 0.01
    assert [line["step"] for line in lines if "held_out" in line] == [0, 3]
