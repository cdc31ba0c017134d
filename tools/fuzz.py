"""Run the property tests over and over, each round with its own seed, until the time is up or one fails.

`make test` runs the same tests with fixed examples; this is the search for examples that nobody thought of. A
failure prints the seed, and Hypothesis keeps the example in `.hypothesis/` for the next run.
"""

import argparse
import secrets
import subprocess
import sys
import time

LAWS = ["tests/property", "tests/parity/test_naive_renderer.py", "tests/unit/test_fast_tokenizer.py"]
"""Tests that draw examples, of which `make test` tries a few."""


def main() -> int:
    """Run rounds of pytest; return the first failing exit status, or 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--jobs", default="2")
    parser.add_argument("tests", nargs="*", default=LAWS)
    options = parser.parse_args()

    start = time.monotonic()
    rounds = 0
    while rounds == 0 or time.monotonic() - start < options.seconds:
        seed = secrets.randbits(32)
        rounds += 1
        print(f"round {rounds}, seed {seed}, {time.monotonic() - start:.0f} s so far", flush=True)
        command = [
            "-m",
            "pytest",
            "-q",
            "-n",
            options.jobs,
            "--hypothesis-profile=fuzz",
            f"--hypothesis-seed={seed}",
        ]
        status = subprocess.run([sys.executable, *command, *options.tests], check=False).returncode
        if status:
            print(f"round {rounds} failed; repeat it with --hypothesis-seed={seed}", file=sys.stderr)
            return status
    print(f"{rounds} rounds, {time.monotonic() - start:.0f} s, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
