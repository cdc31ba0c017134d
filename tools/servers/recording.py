"""Answers of running servers, written down for tests that run without them."""

import hashlib
import json
import re
import urllib.error
import urllib.request
from collections.abc import Collection
from pathlib import Path
from typing import Any

LARGE = 4096
"""A longer text within a request is written down as its digest."""
_NUMBERS = re.compile(r"\[\s+([-+.eE\d,\s]+?)\s+\]")
_PATH = re.compile(r"/[^\s\"\\]*/site-packages/")


def written(value: Any) -> Any:
    """A request's value as it is written down: long texts as their digest."""
    if isinstance(value, str) and len(value) > LARGE:
        return {"sha256": hashlib.sha256(value.encode()).hexdigest(), "length": len(value)}
    if isinstance(value, dict):
        return {key: written(member) for key, member in value.items()}
    return [written(member) for member in value] if isinstance(value, list) else value


class Recorder:
    """Asks a server, and writes each request with its answer into a file of its own.

    A file holds `request` (`method`, `path`, `body`), `status`, and the answer as `json`, or as `text` where
    it is not JSON.

    Args:
        base_url: Root of the server.
        folder: Where files go.
    """

    def __init__(self, base_url: str, folder: Path) -> None:
        self._base_url = base_url.rstrip("/")
        self._folder = folder

    def ask(self, path: str, body: Any = None) -> tuple[int, str]:
        """Status and text of the answer; a GET where there is no body."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._base_url + path, data, {"content-type": "application/json"} if data else {}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def record(self, name: str, path: str, body: Any = None, *, keep: Collection[str] = ()) -> Any:
        """Ask, write the answer down under `name`, and return it.

        Args:
            name: Of the file.
            path: What is asked.
            body: The JSON sent with it.
            keep: Members of the answer that are written down; by default all.
        """
        status, text = self.ask(path, body)
        entry: dict[str, Any] = {
            "request": {"method": "GET" if body is None else "POST", "path": path, "body": written(body)},
            "status": status,
        }
        text = _PATH.sub("site-packages/", text)
        try:
            answer = json.loads(text)
        except ValueError:
            answer = entry["text"] = text
        else:
            entry["json"] = {key: answer[key] for key in keep} if keep else answer
        text = json.dumps(entry, indent=1, ensure_ascii=False)
        # A list of numbers reads best on one line.
        text = _NUMBERS.sub(lambda found: "[" + " ".join(found[1].split()) + "]", text)
        (self._folder / f"{name}.json").write_text(text + "\n")
        return answer
