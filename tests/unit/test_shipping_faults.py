"""Real processes that are killed, and connections that are cut, at random points; `make faults` runs 500 of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "shipping_faults.py"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_16_runs_of_deaths_lose_nothing_and_double_nothing():
    done = subprocess.run(
        [sys.executable, str(TOOL), "--runs", "16"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("16 runs, ")
    assert done.stdout.endswith("none lost, none twice, every file readable\n")
