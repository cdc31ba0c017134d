"""What `mmrender doctor` prints: the findings about one model, as plain data and as a table."""

from dataclasses import asdict
from typing import Any

from rich.table import Table

from mmrender.renderer import Renderer


def diagnose(renderer: Renderer) -> dict[str, Any]:
    """Everything that was found out about a model by probing, JSON-ready."""
    profile = asdict(renderer.profile)
    form = profile.pop("form")
    tokenizer = renderer.tokenizer
    stop_ids = renderer.get_stop_token_ids()
    parser = renderer.response_parser()
    reasoning = parser.reasoning_format
    processor = renderer.media.processor if renderer.media is not None else None
    return {
        "template": {**profile, **{f"takes {key.replace('_', ' ')}": value for key, value in form.items()}},
        "completions": {
            "tool calls": str(parser.choice),
            "reasoning": "none" if reasoning is None else f"{reasoning.begin} to {reasoning.end}",
        },
        "tokenizer": {
            "vocabulary": tokenizer.vocab_size,
            "added tokens": len(tokenizer.added_ids),
            "runs between added tokens are independent": tokenizer.runs_are_independent,
            "stop tokens": {tokenizer.token(token_id) or "?": token_id for token_id in stop_ids},
        },
        "images": {}
        if processor is None
        else {
            "processor": processor.name,
            "back end": processor.image_backend,
            "placeholders": dict(processor.placeholder),
            "an item depends on its company": processor.depends_on_company,
            "tokens of 1024×1024": processor.geometry(1024, 1024).num_tokens,
        },
    }


def findings_table(findings: dict[str, Any]) -> Table:
    """The findings, a section for each of template, tokenizer and images."""
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
        return "\n".join(f"{key}: {_escaped(repr(item))}" for key, item in value.items()) or "-"
    if isinstance(value, tuple | list):
        return (
            ", ".join(
                _escaped(item if isinstance(item, str) and item.isprintable() else repr(item))
                for item in value
            )
            or "-"
        )
    return _escaped(str(value))


def _escaped(text: str) -> str:
    return text.replace("[", "\\[")
