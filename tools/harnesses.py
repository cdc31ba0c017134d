"""Install the harnesses that docs/gateway.md names, each in a folder of its own.

Usage: `python tools/harnesses.py FOLDER`. Then `python tests/harnesses/record.py FOLDER OUT` runs each
against a gateway with scripted answers, and writes their requests. It needs node, npm and Chromium.
"""

import subprocess
import sys
import venv
from pathlib import Path

NPM = (
    "@anthropic-ai/claude-code@2.1.197",
    "@openai/codex@0.169.0",
    "opencode-ai@1.18.33",
    "@qwen-code/qwen-code@0.15.10",
)
PYTHON = {
    "py": (
        "openai==3.54.0",
        "openai-agents==0.24.0",
        "langchain-openai==1.7.3",
        "langchain==1.4.7",
        "langgraph==1.2.22",
        "pydantic-ai-slim[openai,anthropic]==2.68.0",
        "smolagents[openai]==1.26.0",
    ),
    "mini": ("mini-swe-agent==2.4.6", "litellm==1.83.0"),
    "browser": ("browser-use==0.13.14",),
}
"""Packages by virtual environment, since their requirements exclude one another."""


def install(folder: Path) -> None:
    """Install all harnesses.

    Raises:
        CalledProcessError: One could not be installed.
    """
    packages = folder / "npm"
    packages.mkdir(parents=True, exist_ok=True)
    (packages / "package.json").write_text("{}")
    for name in NPM:
        subprocess.run(
            ["npm", "install", "--silent", "--no-audit", "--no-fund", name], cwd=packages, check=True
        )
    for name, wanted in PYTHON.items():
        venv.create(folder / name, with_pip=True)
        pip = [str(folder / name / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install"]
        subprocess.run([*pip, "--quiet", *wanted], check=True)


if __name__ == "__main__":
    install(Path(sys.argv[1]).resolve())
