"""The tour's notebook as a script: `python tools/tour_script.py > tour.py`. The site has both."""

import ast
import json
import sys
import textwrap
from pathlib import Path

TOUR = Path(__file__).resolve().parent.parent / "examples" / "tour.ipynb"
_HEAD = '''"""The tour, from a picture to a gradient, and to the cause of a mismatch."""

import asyncio


async def main() -> None:
'''
_TAIL = '\n\nif __name__ == "__main__":\n    asyncio.run(main())\n'


def cells() -> list[tuple[str, str]]:
    """Kind and text of each cell of the notebook."""
    return [
        (cell["cell_type"], "".join(cell["source"])) for cell in json.loads(TOUR.read_text("utf-8"))["cells"]
    ]


def tour_script() -> str:
    """Return the code cells in one coroutine, each with its heading. What a notebook shows is printed."""
    blocks = []
    for kind, text in cells():
        if kind == "code":
            blocks.append(shown(text))
        elif text.startswith("## "):
            title = text.partition("\n")[0].removeprefix("## ")
            blocks.append(f"\nprint({chr(10) + title!r}, flush=True)")
    return _HEAD + textwrap.indent("\n".join(blocks).lstrip("\n"), "    ") + _TAIL


def shown(code: str) -> str:
    """Print the value of a last expression, as a notebook shows it."""
    last = ast.parse(code).body[-1]
    value = ast.get_source_segment(code, last)
    if not isinstance(last, ast.Expr) or value is None or value.startswith("print("):
        return code
    return "\n".join([*code.splitlines()[: last.lineno - 1], f"print({value})"])


if __name__ == "__main__":
    sys.stdout.write(tour_script())
