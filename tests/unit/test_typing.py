"""The public signatures, as a type checker sees them in a user's program."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_program_over_the_public_names_is_well_typed() -> None:
    command = [sys.executable, "-m", "mypy", "--strict", str(ROOT / "tests" / "typing" / "public_names.py")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
