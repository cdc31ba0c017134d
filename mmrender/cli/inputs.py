"""Inputs of commands: conversations, token ids, files of trajectories, and the model that renders them."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mmcodecs.files import MAGIC
from mmrender.content import normalize_messages
from mmrender.errors import InputError, importing
from mmrender.media.pixels import ImageBackend
from mmrender.media.policy import MediaPolicy
from mmrender.media.processors.registry import backend_of_tokens
from mmrender.model.files import find_model
from mmrender.processes import BoundedProcesses
from mmrender.renderer import Renderer

if TYPE_CHECKING:
    from mmrender.tokens.rendered import RenderedTokens

with importing("typer", "cli", "the mmrender command"):
    from rich.console import Console

log = Console(stderr=True)
OPTIONS = {"trust_remote_code": False}
"""Options that are given before the command."""


def read_document(file: str) -> Any:
    """Read JSON from a file, or from standard input if it is `-`."""
    try:
        return json.loads(sys.stdin.read() if file == "-" else Path(file).read_text("utf-8"))
    except OSError as error:
        raise InputError("cannot read the file", where=file, got=error.strerror) from error
    except ValueError as error:
        is_lines = "Extra data: line 2 column 1 " in str(error)
        remedy = (
            "Of a file with a conversation on each line pass one line: `sed -n 3p FILE`, and - as the file"
        )
        raise InputError(
            "the file is not JSON", where=file, got=str(error), remedy=remedy if is_lines else None
        ) from error


def conversation_in(document: Any, file: str) -> dict[str, Any]:
    """Return the arguments of `Renderer.render` that a file's JSON holds."""
    arguments = dict(document) if isinstance(document, dict) else {"messages": document}
    if "messages" not in arguments:
        expected = 'a list, or an object with "messages"'
        raise InputError("no messages in the input", where=file, expected=expected)
    return arguments


def render_conversation(
    arguments: dict[str, Any], renderer: Renderer, generation_prompt: bool | None
) -> "RenderedTokens":
    """Render a conversation. Its generation prompt is left out by default after an assistant's message."""
    messages = normalize_messages(arguments.pop("messages"))
    if generation_prompt is None:
        generation_prompt = not messages or messages[-1].role != "assistant"
    with log.status("rendering"):
        return renderer.render(messages, **{"add_generation_prompt": generation_prompt, **arguments})


def load_for_tokens(model: str, image_backend: str | None, html: Path | None) -> Renderer:
    """Load a renderer for a page, or else for tokens alone: without torch for native families."""
    if image_backend is None and html is None:
        with log.status(f"loading {model}"):
            image_backend = backend_of_tokens(find_model(model))
    return load(model, image_backend or "torch")


def load(model: str, image_backend: str, *, files: bool = True) -> Renderer:
    """Load a renderer, which reads files of the current folder unless `files` is false."""
    processes = None
    if files:
        # A file of the current folder that is named on the command line is meant to be read.
        policy = MediaPolicy(local_roots=(Path.cwd(),))
    else:
        # A remote caller names no file, and may send anything.
        processes = BoundedProcesses(4) if sys.platform == "linux" else None
        policy = MediaPolicy(schemes=frozenset({"data", "http", "https"}), processes=processes)
    with log.status(f"loading {model}"):
        return Renderer.from_pretrained(
            model,
            image_backend=cast(ImageBackend, image_backend),
            media_policy=policy,
            template_processes=processes,
            trust_remote_code=OPTIONS["trust_remote_code"],
        )


def is_trajectories(file: str) -> bool:
    """Whether a file is one of records; JSON begins otherwise."""
    try:
        with Path(file).open("rb") as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def renderable(file: str, renderer: Renderer, generation_prompt: bool | None) -> "RenderedTokens":
    """Render a conversation, or take token ids as they are."""
    from mmrender.tokens.rendered import RenderedTokens, TokenSpan

    document = read_document(file)
    ids = document.get("token_ids") if isinstance(document, dict) else None
    if ids is None:
        return render_conversation(conversation_in(document, file), renderer, generation_prompt)
    if not isinstance(ids, list) or not all(isinstance(each, int) and each >= 0 for each in ids):
        raise InputError("token_ids must be a list of ids", where=file, got=repr(ids)[:80])
    return RenderedTokens(ids, (TokenSpan(0, len(ids), -1, "prompt", False),) if ids else ())
