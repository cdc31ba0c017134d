"""Recipes as programs of this process: `examples/recipes` with `--tiny`."""

import runpy
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_recipe(name, monkeypatch, capsys, out):
    """Run a recipe in a folder of its own; return the lines that it printed."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [name, "--tiny", "--out", str(out)])
    runpy.run_module(f"recipes.{name}", run_name="__main__")
    return capsys.readouterr().out.splitlines()
