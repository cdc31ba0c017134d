"""What a maintainer relies on: one version, a release that is refused by name, and hooks that run `make check`."""

import re

import pytest

from doc_pages import ROOT, load_script

CHANGELOG = """# Changelog

## {}

- Something.

## 0.0.9 (2026-01-31)

- Older.
"""


@pytest.fixture(scope="module")
def release():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        yield load_script("tools/release_check.py")


def test_the_version_is_one(release, capsys):
    assert release.check_version(None) == release.stated("mmrender/_version.py", r'^__version__ = "(.*)"$')


def test_a_tag_of_another_version_is_refused(release):
    with pytest.raises(release.CheckError, match=r"the tag is v9\.9\.9: expected v\d"):
        release.check_version("v9.9.9")


@pytest.mark.parametrize(
    ("heading", "is_release", "refusal"),
    [
        ("0.1.0 (2026-02-28)", True, None),
        ("0.1.0 (2026-02-28)", False, None),
        ("Unreleased", False, None),
        ("Unreleased", True, "CHANGELOG.md begins with '## Unreleased': expected ## 0.1.0"),
        ("0.1.0", True, "CHANGELOG.md begins with '## 0.1.0': expected ## 0.1.0"),
        ("0.2.0 (2026-02-28)", False, "CHANGELOG.md begins with '## 0.2.0"),
    ],
)
def test_the_changelog_begins_with_the_release(release, heading, is_release, refusal):
    text = CHANGELOG.format(heading)
    if refusal is None:
        release.check_changelog(text, "0.1.0", is_release=is_release)
        return
    with pytest.raises(release.CheckError) as caught:
        release.check_changelog(text, "0.1.0", is_release=is_release)
    assert str(caught.value).startswith(refusal)


def test_a_release_says_something(release):
    text = CHANGELOG.format("0.1.0 (2026-02-28)").replace("- Something.", "")
    with pytest.raises(release.CheckError, match=r"the section 0\.1\.0 is empty"):
        release.check_changelog(text, "0.1.0", is_release=True)


def test_hooks_are_the_parts_of_the_check():
    (parts,) = re.findall(r"^check: (.*?) ##", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    hooks = re.findall(r"entry: make (\w+)", (ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    assert sorted(hooks) == sorted(parts.split())
