"""The page of profiles says what `mmrender doctor` says."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_page_is_what_the_script_writes(shared_models: Path) -> None:
    spec = importlib.util.spec_from_file_location("profiles_page", ROOT / "tools" / "profiles_page.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (ROOT / "docs" / "profiles.md").read_text("utf-8")
    assert page.count(script.BEGIN) == page.count(script.END) == 1
    assert script.with_findings(page, shared_models) == page, "run: python tools/profiles_page.py"
