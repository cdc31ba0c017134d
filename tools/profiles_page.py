"""Write what `mmrender doctor` says of the shared model directories into docs/profiles.md.

    python tools/profiles_page.py [--check]

The text between the two marks of the page is replaced. `--check` writes nothing and exits with 1 where the
page is not what it would write; without `../shared/models` it says so and passes.
"""

import argparse
import io
import sys
from pathlib import Path

from rich.console import Console

from mmrender.renderer import Renderer
from mmrender.view.doctor import diagnose, findings_table
from speed_page import with_text

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "profiles.md"
MODELS = ROOT.parent / "shared" / "models"
BEGIN = "<!-- written by tools/profiles_page.py -->\n"
_WIDTH = 110


def doctor_text(directory: Path) -> str:
    """Output of `mmrender doctor DIRECTORY`, without colours."""
    renderer = Renderer.from_pretrained(directory, image_backend="pil", profile_cache=False)
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(findings_table(diagnose(renderer, directory)))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip()


def with_findings(page: str, models: Path = MODELS) -> str:
    """The page with the findings of every model directory between its marks."""
    sections = [
        f"## {directory.name}\n\n```text\n{doctor_text(directory)}\n```\n"
        for directory in sorted(models.iterdir())
        if directory.is_dir()
    ]
    return with_text(page, "\n".join(sections), BEGIN)


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check and not MODELS.is_dir():
        print(f"docs/profiles.md is not checked: {MODELS} is missing")
        return 0
    page = PAGE.read_text("utf-8")
    expected = with_findings(page)
    if options.check:
        if page != expected:
            print("docs/profiles.md is not what tools/profiles_page.py writes", file=sys.stderr)
        return int(page != expected)
    PAGE.write_text(expected, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
