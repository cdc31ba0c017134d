"""Links of the README and the guides lead somewhere, and what commands make for them is what they make."""

import json
import re
from pathlib import Path

import pytest

from doc_pages import ROOT, load_script

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MADE = {"errors.md", "wire.md", "live.html", "tour.md", "api/index.md"}
"""Pages that `tools/docs_pages.py` makes with the site."""
FENCE = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")


def anchors(text: str) -> set[str]:
    """What headings are linked by, as MkDocs and GitHub name them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text("utf-8"))
    for target, anchor in LINK.findall(text):
        if re.match(r"[a-z]+:", target) or target in MADE:
            continue
        place = page.parent / target if target else page
        assert place.exists(), f"{page.name}: {target}"
        if anchor and place.suffix == ".md":
            assert anchor in anchors(place.read_text("utf-8")), f"{page.name}: {target}#{anchor}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "faq.md"], ids=lambda page: page.name
)
def test_pages_open_with_a_sentence_and_show_something_soon(page: Path) -> None:
    """A reader sees what a page is for, and code, a table or a picture within a screen."""
    lines = re.sub(r"\A---.*?---\n", "", page.read_text("utf-8"), flags=re.DOTALL).strip().splitlines()
    if lines[0].startswith("--8<--"):
        return
    first = next(line for line in lines[1:] if line)
    assert re.match(r"[\w`*\[\"]", first), f"{page.name} opens with {first!r}"
    assert not first.startswith("```"), f"{page.name} opens with code"
    shown = (number for number, line in enumerate(lines) if re.match(r" *(```|\||!\[|\[!\[|--8<--|<)", line))
    assert next(shown, 99) <= 22, page.name


def test_pictures_are_shown_somewhere() -> None:
    text = "".join(page.read_text("utf-8") for page in PAGES)
    assert [path.name for path in (ROOT / "docs" / "images").iterdir() if path.name not in text] == []


def test_notebooks_are_kept_without_output() -> None:
    for path in (ROOT / "examples").glob("*.ipynb"):
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            assert not cell.get("outputs"), path.name
            assert cell.get("execution_count") is None, path.name


def test_diagrams_are_what_the_script_draws() -> None:
    for path, svg in load_script("tools/diagrams.py").files().items():
        assert path.read_text("utf-8") == svg, "run: python tools/diagrams.py"


def test_figures_of_the_first_page_were_measured() -> None:
    text = (ROOT / "docs" / "index.md").read_text("utf-8")
    speed = json.loads((ROOT / "docs" / "speed.json").read_text("utf-8"))
    (row,) = [row for row in speed["figures"] if row["name"].startswith("bridge of a tool result")]
    ours, reference = row["seconds"]["mmrender"], row["seconds"]["reference"]
    assert f"**{reference / ours:.0f}x** as fast" in text
    assert f"in {1000 * ours:.2f} ms" in text
    fleet = json.loads((ROOT / "docs" / "scale-fleet.json").read_text("utf-8"))
    assert f"**{sum(fleet['kills'].values())}** processes killed in {fleet['games']:,} games" in text
    assert f"of {fleet['sizes']['environments']:,} environments" in text
    assert "at most 1.9e-6 nats" in " ".join((ROOT / "docs" / "learn.md").read_text("utf-8").split())
    assert "**1.9e-6** nats" in text
