"""Build hook: in the description on PyPI, links of the README into the repository are addresses.

`MMRENDER_REPOSITORY` is the address of the repository. The workflows set it. Without it the README stays as
it is, and the metadata name no repository.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<text>!\[[^\]]*\]|\])\((?P<target>(?![a-z]+:|#)[^)\s]+)\)")
"""A picture or the end of a link, which leads to a file of the repository."""


def with_addresses(text: str, repository: str) -> str:
    """Return a page with addresses in place of links to files of the repository."""

    def address(link: re.Match[str]) -> str:
        kind = "raw" if link["text"].startswith("!") else "blob"
        return f"{link['text']}({repository}/{kind}/main/{link['target']})"

    return _LINK.sub(address, text)


class CustomMetadataHook(MetadataHookInterface):
    """Sets the description, and the address of the repository."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add both to the project's metadata."""
        text = (Path(self.root) / "README.md").read_text("utf-8")
        if repository := os.environ.get("MMRENDER_REPOSITORY", "").rstrip("/"):
            text = with_addresses(text, repository)
            metadata["urls"] = {"Repository": repository, "Changelog": f"{repository}/blob/main/CHANGELOG.md"}
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
