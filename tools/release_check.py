"""Rehearse a release: its version is one everywhere, and what would be published installs and renders alone.

    python tools/release_check.py                 # a rehearsal, between two releases
    python tools/release_check.py --tag v0.1.0    # the release itself, as its workflow runs it

1. The version is that of `CITATION.cff`, of the changelog and of the tag. A rehearsal accepts "Unreleased".
2. Build the sdist and the wheel into `dist/`, and prove them as `tools/check_package.py` does.
3. Their names and metadata have the version. With `MMRENDER_REPOSITORY`, links are addresses.
"""

import argparse
import email
import os
import re
import shutil
import sys
import zipfile
from pathlib import Path

import check_package
from check_package import ROOT, CheckError, step

RELATIVE = re.compile(r"\]\(((?![a-z]+:|#)[^)]*)")
VERSION = re.compile(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?")
HEADING = re.compile(r"^## (?P<name>\S+)(?: \((?P<date>\d{4}-\d\d-\d\d)\))?$", re.MULTILINE)


def stated(path: str, pattern: str) -> str:
    """Return the group of a pattern that a file must have once, on a line of its own."""
    found = re.findall(pattern, (ROOT / path).read_text("utf-8"), re.MULTILINE)
    if len(found) != 1:
        raise CheckError(f"{path}: expected one line like {pattern}, found {len(found)}")
    return str(found[0])


def check_version(tag: str | None) -> str:
    """Return the version, if all files and the tag agree on it."""
    version = stated("mmrender/_version.py", r'^__version__ = "(.*)"$')
    if not VERSION.fullmatch(version):
        raise CheckError(f"{version} is not a version: expected X.Y.Z, or with a, b or rc and a number")
    cited = stated("CITATION.cff", r"^version: (.*)$")
    if cited != version:
        raise CheckError(f"CITATION.cff has version {cited}, mmrender/_version.py {version}")
    if tag is not None and tag != f"v{version}":
        raise CheckError(f"the tag is {tag}: expected v{version}")
    check_changelog((ROOT / "CHANGELOG.md").read_text("utf-8"), version, is_release=tag is not None)
    return version


def check_changelog(text: str, version: str, *, is_release: bool) -> None:
    """Check that the changelog begins with this version and its date, or "Unreleased" in a rehearsal."""
    headings = list(HEADING.finditer(text))
    if not headings:
        raise CheckError("CHANGELOG.md has no section")
    first = headings[0]
    if not text[first.end() : headings[1].start() if len(headings) > 1 else None].strip():
        raise CheckError(f"CHANGELOG.md: the section {first['name']} is empty")
    if first["name"] == "Unreleased" and not is_release:
        print(f"   a rehearsal: CHANGELOG.md needs the heading `## {version} (YYYY-MM-DD)` before the tag")
    elif first["name"] != version or first["date"] is None:
        raise CheckError(f"CHANGELOG.md begins with {first[0]!r}: expected ## {version} (YYYY-MM-DD)")


def check_metadata(wheel: Path, version: str) -> None:
    """Check the version in a wheel's name and metadata."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    if metadata["Version"] != version or f"-{version}-" not in wheel.name:
        raise CheckError(f"{wheel.name} has version {metadata['Version']}: expected {version}")
    if os.environ.get("MMRENDER_REPOSITORY") and (found := RELATIVE.findall(str(metadata.get_payload()))):
        raise CheckError(f"the description on PyPI would have links to files: {', '.join(found[:3])}")
    print(f"   {metadata['Name']} {metadata['Version']}, {metadata['License-Expression']}")


def main() -> int:
    """Run every step; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tag", help="tag of the release; without it, this is a rehearsal")
    tag = parser.parse_args().tag or None
    try:
        with step("version"):
            version = check_version(tag)
        dist = ROOT / "dist"
        shutil.rmtree(dist, ignore_errors=True)
        if status := check_package.main(dist):
            return status
        with step("metadata"):
            check_metadata(next(dist.glob("*.whl")), version)
    except CheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"mmrender {version}: {'ready to publish' if tag else 'rehearsed'}, in {dist.name}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
