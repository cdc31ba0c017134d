"""The guides' figures are those of a run, as the script writes them."""

import json

from doc_pages import ROOT, load_script


def test_tables_are_what_the_script_writes() -> None:
    script = load_script("tools/speed_page.py")
    kept = json.loads(script.FIGURES.read_text("utf-8"))
    for page, text in script.PAGES.items():
        written = page.read_text("utf-8")
        assert written.count(script.BEGIN) == written.count(script.END) == 1
        assert script.with_text(written, text(kept)) == written, "run: make speed-page BENCH_JSON=..."
    for name in kept["growth"]:
        assert (ROOT / "docs" / f"growth-{name}.svg").exists()


def test_a_figure_says_what_was_reached() -> None:
    figure = load_script("benchmarks/figures.py").Figure(
        "text",
        {"mmrender": 2.0, "reference": 13.0},
        ("a copy", 1.0),
        faster={"reference": 6.0, "renderers": 2.0},
        at_most={"limit": 1.5, "s": 3.0},
    )
    assert [(row["other"], row["reached"], row["met"]) for row in figure.verdicts()] == [
        ("reference", 6.5, True),
        ("renderers", None, None),
        ("limit", 2.0, False),
        ("s", 2.0, True),
    ]
