"""Findings about one model, for `mmrender doctor`, as plain data and as a table."""

from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.table import Table

from mmrender.errors import MMRenderError
from mmrender.media.processor import UnavailableProcessor
from mmrender.messages import UNKNOWN_SOURCE, ImagePart, MessageDict, TextPart
from mmrender.renderer import Renderer


def diagnose(renderer: Renderer) -> dict[str, Any]:
    """Everything that was found out about a model by probing, JSON-ready."""
    profile = asdict(renderer.profile)
    form, reasoning = profile.pop("form"), renderer.profile.reasoning
    profile["reasoning"] = "none" if reasoning is None else f"{reasoning.begin} to {reasoning.end}"
    del profile["stop_ids"], profile["openers"]
    tokenizer = renderer.tokenizer
    stop_ids = renderer.get_stop_token_ids()
    processor = renderer.media.processor if renderer.media is not None else None
    images: dict[str, Any] = {}
    if isinstance(processor, UnavailableProcessor):
        images = {"not available": str(processor.error)}
    elif processor is not None:
        images = {
            "processor": processor.name,
            "back end": processor.image_backend,
            "placeholders": dict(processor.placeholder),
            "an item depends on the number of images": processor.depends_on_image_count,
            "tokens of 1024×1024": processor.geometry(1024, 1024).num_tokens,
        }
    return {
        "template": {**profile, **{f"takes {key.replace('_', ' ')}": value for key, value in form.items()}},
        "completions": {"tool calls": str(renderer.response_parser().choice)},
        "bridge": {name: _bridge_over(renderer, extension) for name, extension in _EXTENSIONS.items()},
        "tokenizer": {
            "vocabulary": tokenizer.vocab_size,
            "added tokens": len(tokenizer.added_ids),
            "runs between added tokens are independent": tokenizer.dependent_token is None,
            "stop tokens": {tokenizer.token(token_id) or "?": token_id for token_id in stop_ids},
        },
        "images": images,
    }


_SHOWN = ImagePart(UNKNOWN_SOURCE)
_SAID = TextPart("x")
_EXTENSIONS: dict[str, MessageDict] = {
    "over a user turn": {"role": "user", "content": "x"},
    "over a user turn with an image": {"role": "user", "content": [_SHOWN, _SAID]},
    "over a tool result": {"role": "tool", "content": "x", "name": "probe", "tool_call_id": "call00000"},
    "over a tool result with an image": {"role": "tool", "content": [_SHOWN, _SAID], "name": "probe"},
    "over a system message": {"role": "system", "content": "x"},
}


def _bridge_over(renderer: Renderer, extension: MessageDict) -> str:
    """Return whether an extension may follow an answer without rendering again, or why not."""
    completion = renderer.get_stop_token_ids()[-1:]
    try:
        prompt = renderer.render_ids([{"role": "user", "content": "x"}], add_generation_prompt=True)
        if renderer.bridge_to_next_turn(prompt, completion, [extension]) is None:
            return f"no: {renderer.why_not_bridged}"
        kept = renderer.bridge_to_next_turn(prompt, completion, [extension], history="template")
    except MMRenderError as error:
        return f"no: {error.problem}"
    return "yes" if kept is not None else f"yes, as sampled; {renderer.why_not_bridged}"


def findings_table(findings: dict[str, Any]) -> Table:
    """The findings as a table, section by section."""
    table = Table(show_edge=False, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for section, entries in findings.items():
        table.add_row(f"[cyan]{section}[/]", "" if entries else "none: a text-only model")
        for key, value in entries.items():
            table.add_row(f"  {key.replace('_', ' ')}", _shown(value))
        table.add_row("", "")
    return table


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "[green]yes[/]" if value else "[yellow]no[/]"
    if isinstance(value, dict):
        return escape("\n".join(f"{key}: {item!r}" for key, item in value.items())) or "-"
    if isinstance(value, tuple | list):
        shown = [item if isinstance(item, str) and item.isprintable() else repr(item) for item in value]
        return escape(", ".join(shown)) or "-"
    return escape(str(value))
