"""Write what was compared for each family into docs/families.md.

    mmrender parity MODEL... --json > RESULTS.json
    python tests/image_law.py --backend torch MODEL... > PICTURES.log
    python -m mmrender.testing.places MODEL... > PLACES.log
    python tools/families_page.py RESULTS.json... PICTURES.log... PLACES.log...

The text between the two marks of the page is replaced. Where several files name a model, the last one counts.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "families.md"
BEGIN, END = "<!-- written by tools/families_page.py -->\n", "<!-- end -->\n"
MODES = ("torch", "pil")
_PICTURES = re.compile(r"^(\w+) (torch|pil): (\d+) equal, (\d+) refused by both, (\d+) broken$", re.M)
_PLACES = re.compile(r"^(\w+): ([\d,]+) renderings, (\d+) leaks$", re.M)
_HEAD = """\
| family | torch | pil | refused by both | tokens | images | pixel values | odd pictures | texts in places |
|---|--:|--:|---|--:|--:|--:|--:|--:|
"""


@dataclass
class Family:
    """What was found for one model: parity's reports by mode, odd pictures by mode, and texts in places."""

    reports: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    pictures: dict[str, str] = field(default_factory=dict)
    places: str = "-"

    def cells(self) -> list[str]:
        """Cells of its row; tokens, images and values of all modes, and reasons of the first."""
        first = next(iter(self.reports.values()))
        # A template may print a text of the conversation, of several lines.
        reasons = {" ".join(why.split()): count for why, count in first["refusals"].items()}
        why = [f"{count}: {reason.rstrip('.')}" for reason, count in reasons.items()]
        why = [reason.replace("|", "\\|").replace("<", "&lt;") for reason in why]
        counts = [
            sum(report[name] for report in self.reports.values())
            for name in ("tokens", "images", "pixel_values")
        ]
        return [
            *(_outcome(self.reports.get(mode)) for mode in MODES),
            "; ".join(why) or "-",
            *(f"{count:,}" for count in counts),
            " + ".join(self.pictures[mode] for mode in MODES if mode in self.pictures) or "-",
            self.places,
        ]


def _outcome(report: Mapping[str, Any] | None) -> str:
    """How many conversations were equal, or that not all is."""
    if report is None:
        return "-"
    compared = report["cases"] - sum(report["refusals"].values())
    return str(compared) if report["outcome"] == "equal" else str(report["outcome"])


def read(files: Iterable[tuple[str, str]]) -> dict[str, Family]:
    """Return the families of some files, each a name and a text, in the order in which they come."""
    found: dict[str, Family] = {}
    for name, text in files:
        for report in json.loads(text) if name.endswith(".json") else ():
            found.setdefault(report["model"], Family()).reports[report["image_backend"]] = report
        for model, mode, equal, _, broken in _PICTURES.findall(text):
            found.setdefault(model, Family()).pictures[mode] = f"{broken} differ" if int(broken) else equal
        for model, count, leaks in _PLACES.findall(text):
            found.setdefault(model, Family()).places = f"{leaks} leaks" if int(leaks) else count
    return found


def with_table(page: str, families: Mapping[str, Family]) -> str:
    """Return the page with a row for each family whose conversations were compared between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = [
        f"| {' | '.join([f'`{name}`', *family.cells()])} |\n"
        for name, family in families.items()
        if family.reports
    ]
    return f"{before}{BEGIN}\n{_HEAD}{''.join(rows)}\n{END}{after}"


def main() -> int:
    """Write the page."""
    files = [(name, Path(name).read_text("utf-8")) for name in sys.argv[1:]]
    PAGE.write_text(with_table(PAGE.read_text("utf-8"), read(files)), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
