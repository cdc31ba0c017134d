"""Tests against the libraries themselves: `make integration-NAME` runs `test_NAME*.py` where NAME is installed."""

import os
from pathlib import Path

LIBRARY = os.environ.get("MMRENDER_LIBRARY")

collect_ignore = [
    path.name for path in Path(__file__).parent.glob("test_*.py") if path.stem.split("_")[1] != LIBRARY
]
