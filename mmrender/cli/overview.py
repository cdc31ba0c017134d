"""The help of the command without the packages of the extra `cli`: its commands and its exit statuses."""

import ast
from importlib.resources import files
from textwrap import wrap
from typing import Final

STATUSES: Final = {
    0: "done",
    1: "found a difference, a problem or a claim that fails",
    2: "not done, or not compared with everything",
    3: "a defect of mmrender, with its traceback",
    130: "interrupted, as by Ctrl-C",
}
"""Meaning of each exit status. `docs/commands.md` says which command means what."""


def commands() -> dict[str, str]:
    """Return each command with the first line of its docstring, read from the source without importing it."""
    tree = ast.parse(files("mmrender.cli").joinpath("commands.py").read_text("utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {
        function.name: (ast.get_docstring(function) or "").partition("\n")[0]
        for function in functions
        if any(ast.unparse(each) == "app.command()" for each in function.decorator_list)
    }


def overview(reason: str) -> str:
    """Return the help as plain text of at most 80 columns.

    Args:
        reason: Why the commands cannot run.
    """
    rows = [*commands().items()]
    width = max(len(name) for name, _ in rows) + 4
    lines = [
        "Usage: mmrender [OPTIONS] COMMAND [ARGS]...",
        "",
        *wrap(reason[:1].upper() + reason[1:], 79),
        "",
        "Commands:",
    ]
    for name, summary in rows:
        lines += wrap(
            f"  {name:<{width - 2}}{summary}", 79, subsequent_indent=" " * width, break_on_hyphens=False
        )
    options = {
        "--version": "Print the version.",
        "--trust-remote-code": "Run code of the model directory. Read it first.",
        "--help": "Print this text.",
    }
    lines += ["", "Options:", *(f"  {name:<19}  {text}" for name, text in options.items()), ""]
    lines.append("Exit status:")
    lines += [f"  {status:>3}  {meaning}" for status, meaning in STATUSES.items()]
    return "\n".join(lines)
