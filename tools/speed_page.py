"""Write the figures of one run of the benchmarks into docs/.

    make bench > TABLE.txt          # or: python benchmarks/run.py --json speed.json
    python tools/speed_page.py speed.json

Tables between the marks of docs/compare.md and docs/speed.md are replaced, plots of growth drawn anew, and
the figures that they show kept in docs/speed.json.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "speed.json"
BEGIN, END = "<!-- written by tools/speed_page.py -->\n", "<!-- end -->\n"
OURS, PEERS = "mmrender", ("reference", "renderers", "tml-renderers")
AXES = {
    "turns": "turns of a conversation, cold",
    "images": "images of 1024² in one message, cold, Pillow mode",
    "rounds": "rounds before the bridge of a tool result",
    "requests": "requests of 5 MB in flight, processor time of each",
}
Document = Mapping[str, Any]
Line = tuple[str, list[tuple[float, float]]]


def reduced(document: Document) -> dict[str, Any]:
    """Return what the pages show of a run."""
    parts = document["parts"]
    return {
        "machine": document["machine"],
        "figures": document["figures"],
        "memory": parts.get("render", {}).get("memory", []),
        "growth": {name: lines for name, lines in _growth(parts) if lines},
    }


def _growth(parts: Document) -> Iterable[tuple[str, list[Line]]]:
    """Milliseconds over size, for each plot and line of it."""
    texts = [row for row in parts.get("text", {}).get("text", ()) if not row["known"]]
    yield "turns", _lines(texts, "turns", (("ours", OURS), *((name, name) for name in PEERS)))
    counts = [row for row in parts.get("images", {}).get("counts", ()) if row["backend"] == "pil"]
    names = {
        "levels": "mmrender, levels",
        "levels, two threads": "mmrender, levels, two threads",
        "seen before": "mmrender, seen before",
        "reference": "reference",
        "copy of levels": "a copy of the levels",
    }
    yield "images", _lines(counts, "images", names.items())
    cases = [case for case in parts.get("bridge", {}).get("cases", ()) if case["kind"] == "tool text"]
    bridges = (("ours", OURS), ("peer", "renderers"), ("reference", "reference"))
    yield "rounds", _lines(cases, "rounds", bridges)
    requests: list[dict[str, Any]] = []
    for key, found in parts.get("client", {}).get("requests", {}).items():
        if key.startswith("5 MB"):
            seconds = {name: row["cpu"] for name, row in found.items()}
            requests.append({"requests": int(key.rpartition(" ")[2]), "seconds": seconds})
    clients = requests[0]["seconds"] if requests else ()
    yield "requests", _lines(requests, "requests", [(name, name) for name in clients])


def _lines(rows: Sequence[Document], size: str, names: Iterable[tuple[str, str]]) -> list[Line]:
    found = [
        (label, [(row[size], 1e3 * row["seconds"][name]) for row in rows if name in row["seconds"]])
        for name, label in names
    ]
    return [(label, points) for label, points in found if len(points) > 1]


def whole_table(kept: Document) -> str:
    """All figures with what bounds them, what was asked and what was reached."""
    rows = [
        [
            figure["name"],
            *[_ms(figure["seconds"].get(name)) for name in (OURS, *PEERS)],
            "-" if figure["limit"] is None else f"{_ms(figure['limit'][1])}, {figure['limit'][0]}",
            "<br>".join(map(_verdict, figure["verdicts"])) or "-",
        ]
        for figure in kept["figures"]
    ]
    headings = ["milliseconds", OURS, "Transformers", *PEERS[1:], "limit", "our aim, and what is reached"]
    plots = "".join(f"\n![Milliseconds over {AXES[name]}](growth-{name}.svg)\n" for name in kept["growth"])
    table = _table(headings, rows, texts=(0, 5, 6))
    return f"{_machine(kept['machine'])}\n\n{table}\n## Growth with size\n{plots}"


def short_tables(kept: Document) -> str:
    """The figures that others have too, and memory."""
    compared = [figure for figure in kept["figures"] if set(PEERS) & set(figure["seconds"])]
    rows = [
        [figure["name"], *[_ms(figure["seconds"].get(name)) for name in (OURS, *PEERS)]]
        for figure in compared
    ]
    table = _table(["milliseconds", OURS, "Transformers", *PEERS[1:]], rows, texts=(0,))
    memory = []
    for row in kept["memory"]:
        for key, label in (("kept_bytes", "kept"), ("peak_rss", "at the peak")):
            sizes = [_mb(row.get(who), key) for who in ("ours", "reference")]
            memory.append([f"{row['case']}, {row['backend']} mode: {label}", *sizes])
    megabytes = _table(["MB of one picture", OURS, "Transformers"], memory, texts=(0,))
    return f"{_machine(kept['machine'])}\n\n{table}\n{megabytes}"


def _machine(machine: Document) -> str:
    versions = ", ".join(
        f"{name} {machine[name]}" for name in ("transformers", *PEERS[1:]) if "." in machine.get(name, "")
    )
    load = machine["load"]
    busy = "" if load < machine["cores"] else f"; **other programs ran beside it, at a load of {load:g}**"
    return f"{machine['cores']} cores of {machine['cpu']}, Python {machine['python']}, {versions}{busy}:"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, texts: Sequence[int]) -> str:
    rule = "|".join("---" if index in texts else "--:" for index in range(len(headings)))
    lines = [" | ".join(headings), *[" | ".join(row) for row in rows]]
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *[f"| {line} |" for line in lines[1:]]]) + "\n"


def _ms(seconds: float | None) -> str:
    """Milliseconds, or a dash."""
    return "-" if seconds is None else _three(1e3 * seconds)


def _mb(found: Document | None, key: str) -> str:
    """Megabytes, or a dash."""
    return "-" if found is None else _three(found[key] / 1e6)


def _three(value: float) -> str:
    """Three digits of a number."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def _verdict(entry: Document) -> str:
    word = {True: "", False: ", **not reached**", None: ", not measured"}[entry["met"]]
    if entry["other"] == "s":
        return f"at most {_ms(entry['asked'])} ms{word}"
    reached = "-" if entry["reached"] is None else f"{_three(entry['reached'])}x"
    return f"{entry['sense']} {entry['other']}: {entry['asked']:g}x, {reached}{word}"


def with_text(page: str, text: str, mark: str = BEGIN) -> str:
    """Return the page with this text between its marks, of which `mark` is the first."""
    before, begin, rest = page.partition(mark)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit("a page has lost its marks")
    return f"{before}{mark}\n{text}\n{END}{after}"


PAGES = {ROOT / "docs" / "compare.md": short_tables, ROOT / "docs" / "speed.md": whole_table}


def draw(name: str, lines: Sequence[Line], file: Path) -> None:
    """Draw one plot of milliseconds over size, both logarithmic; the same lines give the same file."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9}):
        figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
        for label, points in lines:
            sizes, milliseconds = zip(*points, strict=True)
            axes.loglog(sizes, milliseconds, marker="o", markersize=3, linewidth=1.2, label=label)
        axes.set_xlabel(AXES[name])
        axes.set_ylabel("milliseconds")
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.grid(visible=True, linewidth=0.3)
        axes.legend(frameon=False, fontsize=8)
        figure.savefig(file, metadata={"Date": None})
        pyplot.close(figure)


def main() -> int:
    """Write the pages, the plots and the figures."""
    kept = reduced(json.loads(Path(sys.argv[1]).read_text("utf-8")))
    FIGURES.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", "utf-8")
    for page, text in PAGES.items():
        page.write_text(with_text(page.read_text("utf-8"), text(kept)), "utf-8")
    for name, lines in kept["growth"].items():
        draw(name, lines, ROOT / "docs" / f"growth-{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
