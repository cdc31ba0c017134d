"""Train in one process: a model of this process samples, and the same weights are trained.

Usage: `PYTHONPATH=examples python -m grpo --out runs/seed-0 --seed 0`; `--help` lists the settings.
"""

import asyncio
import sys
from importlib.util import find_spec

from grpo.config import Config, parse


def missing_packages(config: Config) -> list[str]:
    """Return the packages that a run needs and this environment lacks."""
    needed = ["torch", "transformers", "aiohttp", "matplotlib"]
    needed += [] if config.quiet else ["rich"]
    needed += ["openai", "starlette", "uvicorn"] if config.agent else []
    return [name for name in needed if find_spec(name) is None]


def main() -> None:
    """Run, and say where the results are. Ctrl-C ends a run that can go on."""
    config = parse()
    if missing := missing_packages(config):
        sys.exit(
            f"the example needs {', '.join(missing)}: pip install 'mmrender[all]' openai matplotlib, "
            "or let make learn install everything"
        )
    from grpo.one_process import run  # needs torch
    from grpo.report import summary

    try:
        asyncio.run(run(config))
    except KeyboardInterrupt:
        print(f"\n{config.out}: stopped. The same command goes on from the last checkpoint.", file=sys.stderr)
        sys.exit(130)
    print(summary(config))


if __name__ == "__main__":
    main()
