"""The page of fields lists what each protocol uses, ignores and refuses."""

import re
from pathlib import Path

import pytest

from kit import error_of
from mmrender.errors import InputError
from mmrender.gateway import chat, messages, responses
from mmrender.gateway.protocols import PROTOCOLS

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
    assert fields(title, effect="no effect") == module._Request.ignored
    assert fields(title, effect="refused") == module.REFUSED.keys()
    assert set(module._Request.__struct_fields__) <= fields(title)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_refused_field_is_named(name):
    modules = {"chat": chat, "messages": messages, "responses": responses}
    for field, remedy in modules[name].REFUSED.items():
        error = error_of(InputError, PROTOCOLS[name].read, {field: "x"}, {})
        assert error == f"{field}: this field is not supported. {remedy}"
