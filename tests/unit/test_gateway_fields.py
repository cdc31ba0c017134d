"""The page of fields lists what each protocol uses, ignores and refuses."""

import re
from pathlib import Path

import pytest

from mmrender.gateway import chat, messages, responses

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "gateway-fields.md").read_text()
ROWS = {
    title.strip(): [line.split("|")[1:3] for line in body.splitlines() if line.startswith("| `")]
    for title, _, body in (part.partition("\n") for part in PAGE.split("\n## "))
}


def fields(title, *, effect=None):
    """Fields in a protocol's table, or in its rows with this effect."""
    rows = [names for names, what in ROWS[title] if effect is None or what.strip() == effect]
    return {name for row in rows for name in re.findall("`([a-z_]+)`", row)}


@pytest.mark.parametrize(
    ("title", "module"), [("Chat completions", chat), ("Responses", responses), ("Messages", messages)]
)
def test_the_page_lists_every_field(title, module):
    assert fields(title, effect="no effect") == module.IGNORED
    assert fields(title, effect="refused") == module.REFUSED.keys()
    assert set(module._Request.__struct_fields__) <= fields(title)
