"""Tokens as one self-contained HTML page, which loads nothing and runs nothing of a conversation."""

import base64
import hashlib
import html
import json
import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, TypeAlias

from mmrender.audit.report import AuditReport
from mmrender.errors import InputError
from mmrender.renderer import Renderer
from mmrender.tokens.rendered import RenderedTokens
from mmrender.trajectory.sample import TrainingSample
from mmrender.trajectory.tree import Trajectory
from mmrender.view.data import Data, Document, of_audit, of_difference, of_rendered, of_sample, of_trajectory
from mmrender.view.text import Decode, visible

Shown: TypeAlias = RenderedTokens | TrainingSample | Trajectory | AuditReport
_SCRIPTS: Final = ("model.js", "strip.js", "app.js")
_NOTEBOOK_HEIGHT: Final = 560


class Page:
    """A page that shows tokens: a file for a browser, or the output of a notebook's cell.

    Args:
        *shown: Renderings, training samples, trajectories (each branch is a strip) or reports of audits.
        renderer: Decodes tokens and renders trajectories. A rendering does without.
        tools: Tools that the model was offered in a trajectory, as `renderer.render` takes them.
        title: Heading of the page.
        names: Name of each of `shown`. Default: trajectory ids, or a number.
        notes: Remarks to show with the first sequence.

    Raises:
        InputError: A value is of another class.
        PlaceholderError: The placeholders of a value do not fit its tokens.
    """

    def __init__(
        self,
        *shown: Shown,
        renderer: Renderer | None = None,
        tools: Sequence[Any] | None = None,
        title: str = "",
        names: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> None:
        decode = renderer.decode if renderer is not None else None
        self._document = Document(title)
        for index, one in enumerate(shown):
            name = f"sequence {index}"
            if index < len(names):
                name = names[index]
            elif isinstance(one, Trajectory):
                name = one.trajectory_id if len(shown) > 1 else ""
            self._add(one, name, decode, renderer, tools)
        for strip in self._document.strips[:1]:
            strip["notes"] += map(visible, notes)
        if not title:
            self._document.title = (
                self._document.strips[0]["name"] if len(self._document.strips) == 1 else "tokens"
            )

    @classmethod
    def of_difference(
        cls,
        first: RenderedTokens | TrainingSample,
        second: RenderedTokens | TrainingSample,
        *,
        renderer: Renderer | None = None,
        names: tuple[str, str] = ("first", "second"),
    ) -> "Page":
        """Return a page with two sequences side by side, at their first difference."""
        page = cls(first, second, renderer=renderer, names=names, title="First difference")
        of_difference(page._document)
        return page

    def _add(
        self, shown: Shown, name: str, decode: Decode | None, renderer: Renderer | None, tools: Any
    ) -> None:
        document = self._document
        if isinstance(shown, RenderedTokens):
            of_rendered(document, shown, name, decode)
        elif isinstance(shown, TrainingSample):
            of_sample(document, shown, name, decode)
        elif isinstance(shown, Trajectory):
            of_trajectory(document, shown, name, renderer, tools)
        elif isinstance(shown, AuditReport):
            of_audit(document, shown)
        else:
            raise InputError(
                "cannot show this value",
                expected="RenderedTokens, a TrainingSample, a Trajectory or an AuditReport",
                got=type(shown).__name__,
                remedy="Pass several one by one: Page(*samples)" if isinstance(shown, list | tuple) else None,
            )

    @property
    def html(self) -> str:
        """The page: one file that loads nothing."""
        return as_html(self._document.as_json())

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to a file, and return its path."""
        Path(path).write_text(self.html, "utf-8")
        return Path(path)

    def __repr__(self) -> str:
        return f"Page({self._document.title!r}, sequences={len(self._document.strips)})"

    def _repr_html_(self) -> str:
        source = html.escape(self.html, quote=True)
        return (
            f'<iframe sandbox="allow-scripts" srcdoc="{source}" title="tokens" '
            f'style="width: 100%; height: {_NOTEBOOK_HEIGHT}px; border: 1px solid #8884"></iframe>'
        )


def as_html(document: Data) -> str:
    """Return the page of a document's data: a file that loads nothing."""
    folder = files("mmrender.view")
    style = folder.joinpath("page.css").read_text("utf-8")
    script = '"use strict";\n' + "".join(folder.joinpath(name).read_text("utf-8") for name in _SCRIPTS)
    rules = (
        "default-src 'none'",
        f"script-src {_digest(script)}",
        f"style-src {_digest(style)}",
        "img-src data:",
        "media-src data:",
    )
    policy = "; ".join((*rules, "base-uri 'none'", "form-action 'none'"))
    parts = {
        "policy": policy,
        "title": html.escape(document["title"]),
        "style": style,
        "data": _as_inert(document),
        "script": script,
    }
    skeleton = folder.joinpath("page.html").read_text("utf-8")
    pieces = skeleton.split("{{")
    filled = [f"{parts[name]}{rest}" for name, _, rest in (piece.partition("}}") for piece in pieces[1:])]
    return "".join([pieces[0], *filled])


def _digest(text: str) -> str:
    """Return the expression by which a content security policy allows this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _as_inert(document: Any) -> str:
    """Return JSON without characters that begin or end markup."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
