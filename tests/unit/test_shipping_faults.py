"""Real processes that are killed, and connections that are cut, at random points; `make faults` kills 500 for each link."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "shipping_faults.py"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_deaths_lose_nothing_and_double_nothing():
    done = subprocess.run(
        [sys.executable, str(TOOL), "--kills", "4"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    *links, verdict = done.stdout.splitlines()
    assert len(links) == 4
    assert verdict.endswith("none lost, none twice, every file readable")
