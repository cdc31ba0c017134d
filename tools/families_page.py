"""Write what parity compared into docs/families.md.

    mmrender parity MODEL... --json > RESULTS.json
    python tools/families_page.py RESULTS.json...

The text between the two marks of the page is replaced. Where several files name a model, the last one counts.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "families.md"
BEGIN, END = "<!-- written by tools/families_page.py -->\n", "<!-- end -->\n"
MODES = ("torch", "pil")
_HEAD = """\
| family | torch | pil | refused by both | tokens | images | pixel values |
|---|--:|--:|---|--:|--:|--:|
"""


def _outcome(report: Mapping[str, Any] | None) -> str:
    """How many conversations were equal, or that not all is."""
    if report is None:
        return "-"
    return f"{report['cases'] - _refused(report)}" if report["outcome"] == "equal" else str(report["outcome"])


def _refused(report: Mapping[str, Any]) -> int:
    return sum(report["refusals"].values())


def _row(model: str, modes: Mapping[str, Mapping[str, Any]]) -> str:
    """One family; tokens, images and pixel values are those of all modes, reasons those of the first."""
    first = next(iter(modes.values()))
    why = [f"{count}: {reason.rstrip('.')}" for reason, count in first["refusals"].items()]
    sums = [sum(report[name] for report in modes.values()) for name in ("tokens", "images", "pixel_values")]
    outcomes = [_outcome(modes.get(mode)) for mode in MODES]
    cells = [f"`{model}`", *outcomes, "; ".join(why) or "-", *(f"{count:,}" for count in sums)]
    return f"| {' | '.join(cells)} |\n"


def table(reports: Iterable[Mapping[str, Any]]) -> str:
    """Return a Markdown table with a row for each model, in the order of the reports."""
    by_model: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for report in reports:
        by_model[report["model"]][report["image_backend"]] = report
    return _HEAD + "".join(_row(model, modes) for model, modes in by_model.items())


def with_table(page: str, reports: Iterable[Mapping[str, Any]]) -> str:
    """Return the page with a table of these reports between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(reports)}\n{END}{after}"


def main() -> int:
    """Write the page."""
    reports = [report for path in sys.argv[1:] for report in json.loads(Path(path).read_text("utf-8"))]
    PAGE.write_text(with_table(PAGE.read_text("utf-8"), reports), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
