"""README's and the guide's figures are those of a run, as the script writes them."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_tables_are_what_the_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("speed_page", ROOT / "tools" / "speed_page.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    kept = json.loads(script.FIGURES.read_text("utf-8"))
    for page, text in script.PAGES.items():
        written = page.read_text("utf-8")
        assert written.count(script.BEGIN) == written.count(script.END) == 1
        assert script.with_text(written, text(kept)) == written, "run: make speed-page BENCH_JSON=..."
    for name in kept["growth"]:
        assert (ROOT / "docs" / f"growth-{name}.svg").exists()
