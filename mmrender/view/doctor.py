"""Findings about one model, for `mmrender doctor`, as plain data and as a table."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from mmrender.errors import MMRenderError, PlaceholderError, ProcessorError, TemplateRefusedError
from mmrender.media.processors.adapted_audio import AudioOnlyProcessor
from mmrender.media.processors.patch_videos import PatchVideoProcessor
from mmrender.messages import UNKNOWN_PARTS, MessageDict, TextPart
from mmrender.renderer import Renderer
from mmrender.view.text import visible

UNKNOWN = "unknown"
"""Begins a finding whose probe failed."""
_CONTENT = {
    "parts": "text, or a list of parts",
    "text": "text only (a list of texts is passed as one text)",
    "list": "a list of parts only (a text is passed as one part)",
}
_TEXTS = (
    "Hello world",
    " two  blanks ",
    "59 and 42.5",
    "na\u00efve \u212b e\u0301 \uff21",
    "\n\n \n\t",
    "\u6f22\u5b57 \U0001f642",
)


def diagnose(renderer: Renderer, directory: Path | None = None) -> dict[str, Any]:
    """Return everything that probing finds out about a model, ready for JSON.

    Args:
        renderer: The model's renderer.
        directory: The model's directory, to compare its tokenizer with the Transformers tokenizer.

    Returns:
        Findings by section. A finding whose probe failed begins with `unknown`. The section `problems` has
        the reasons why the model cannot be rendered completely and exactly. It is empty if exactness is
        proved.
    """
    findings = {
        "template": _template(renderer),
        "completions": {"tool calls": _found(lambda: str(renderer.response_parser().choice))},
        "bridge": {name: _bridge_over(renderer, extension) for name, extension in _EXTENSIONS.items()},
        "tokenizer": _tokenizer(renderer, directory),
        "images": _images(renderer),
    }
    return {**findings, "problems": _problems(renderer, findings)}


def _template(renderer: Renderer) -> dict[str, Any]:
    profile = renderer.profile
    found = asdict(profile)
    form = found.pop("form")
    for ids in ("stop_ids", "end_ids", "closer_ids", "openers"):
        del found[ids]
    reasons = dict.fromkeys(("prints_tools", "prints_tool_calls"), "the template refuses the probe")
    reasons["prefix_stable"] = "no probe showed an answer"
    found |= {key: f"{UNKNOWN}: {why}" for key, why in reasons.items() if found[key] is None}
    found["reasoning"] = (
        "none" if profile.reasoning is None else f"{profile.reasoning.begin} to {profile.reasoning.end}"
    )
    found["reads_documents"] = renderer.templates.find({}, has_tools=False).template.reads_documents
    form["content"] = _CONTENT[form["content"]]
    if form["tool_images"] == "tool":
        del form["tool_images"]  # image_roles says whether there are any
    return {**found, **{f"takes {key.replace('_', ' ')}": value for key, value in form.items()}}


def _tokenizer(renderer: Renderer, directory: Path | None) -> dict[str, Any]:
    tokenizer = renderer.tokenizer
    dependent = tokenizer.dependent_token
    found = {
        "vocabulary": tokenizer.vocab_size,
        "added tokens": len(tokenizer.added_ids),
        "encoded by": tokenizer.choice.settle(),
        "runs between added tokens are independent": True
        if dependent is None
        else f"no: not next to {dependent!r}",
        "beginning of a prompt": _found(lambda: _beginning(renderer)),
        "stop tokens": {
            tokenizer.token(token_id) or "?": token_id for token_id in renderer.get_stop_token_ids()
        },
    }
    conversion = tokenizer.conversion
    if conversion is not None:
        found["converted from"] = conversion.proof
    if directory is not None and (conversion is None or conversion.is_native):
        found["equals the Transformers tokenizer"] = _equals_transformers(renderer, directory)
    return found


def _beginning(renderer: Renderer) -> str:
    """Return the first token of a prompt and its author."""
    rendered = renderer.render([{"role": "user", "content": "x"}])
    bos = renderer.templates.special_tokens.get("bos_token")
    if bos and rendered.text.startswith(bos):
        return f"{bos}, written by the template"
    length = len(rendered.token_ids) - len(renderer.tokenizer.encode(rendered.text))
    first = renderer.tokenizer.token(rendered.token_ids[0])
    if length > 0 and not rendered.text.startswith(first or "?"):
        is_its_own = rendered.token_ids[:1] == renderer.tokenizer.affixes[0][:1]
        writer = "tokenizer's post-processor" if is_its_own else "model's processor"
        return f"{first}, written by the {writer}"
    return "only the template's own text"


def _equals_transformers(renderer: Renderer, directory: Path) -> bool | str:
    """Compare with the Transformers tokenizer, which for some classes differs from `tokenizer.json`."""
    try:
        from transformers import AutoTokenizer

        reference = AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # noqa: BLE001 - Transformers raises anything
        return f"{UNKNOWN}: {type(error).__name__}: {error}"
    for text in (*_TEXTS, *(f"a {token} b" for token in renderer.tokenizer.added_ids)):
        ours, theirs = renderer.tokenizer.encode(text), reference(text, add_special_tokens=False).input_ids
        if ours != theirs:
            return (
                f"no: {type(reference).__name__} encodes {text!r} as {theirs}, tokenizer.json as {ours}. "
                "For the ids of Transformers, save the tokenizer from there"
            )
    return True


_OTHER_CLIPS = {
    "none": "each clip by itself",
    "longer": "clips padded to a longer one of the prompt",
    "any": "clips padded to the longest of the prompt",
    "refused": "one clip in a prompt",
}
"""What `AudioProcessor.effect_of_others` means."""


def _images(renderer: Renderer) -> dict[str, Any]:
    if renderer.media is None:
        return {}
    try:
        renderer.media.require_processor()
    except MMRenderError as error:
        return {"not available": str(error)}
    processor, videos = renderer.media.processor, "none"
    if processor.videos is not None:
        is_native = isinstance(processor.videos, PatchVideoProcessor)
        videos = f"{processor.videos.name}, {'native' if is_native else 'by Transformers with torchvision'}"
    audio = "none"
    if processor.audio is not None:
        clips = _found(lambda: None if processor.audio is None else processor.audio.effect_of_others)
        rate = _found(lambda: None if processor.audio is None else processor.audio.sampling_rate)
        audio = f"{processor.audio.name}, {rate} samples a second, {_OTHER_CLIPS.get(clips, clips)}"
    if isinstance(processor, AudioOnlyProcessor):
        return {"placeholders": dict(processor.placeholder), "audio": audio}
    return {
        "processor": processor.name,
        "back end": processor.image_backend,
        "placeholders": dict(processor.placeholder),
        "an item depends on the number of images": processor.depends_on_image_count,
        "tokens of 1024\u00d71024": _found(lambda: processor.geometry(1024, 1024).num_tokens),
        "videos": videos,
        "audio": audio,
    }


def _problems(renderer: Renderer, findings: dict[str, Any]) -> dict[str, str]:
    """Return the reasons why the model cannot be rendered completely and exactly, by subject."""
    profile, images = renderer.profile, findings["images"]
    problems = {
        name: entry
        for section in ("template", "completions", "bridge", "tokenizer", "images")
        for name, entry in findings[section].items()
        if isinstance(entry, str) and entry.startswith(UNKNOWN)
    }
    for name in ("runs between added tokens are independent", "equals the Transformers tokenizer"):
        entry = findings["tokenizer"].get(name, True)
        if entry is not True:
            problems[name] = entry
    if "not available" in images:
        problems["images"] = images["not available"]
    elif "processor" in images and not profile.image_roles:
        problems["images"] = "the template writes no placeholder for an image in any role"
    if not {"user", "assistant"} <= {*profile.roles}:
        problems["roles"] = "the template omits messages of users or the assistant"
    if profile.unattributed:
        problems["unattributed"] = (
            f"the template prints {', '.join(profile.unattributed)} without their origin"
        )
    if not profile.stop_ids:
        problems["stop tokens"] = "neither the model's files nor its template name one"
    return problems


def _found(probe: Callable[[], Any]) -> Any:
    try:
        return probe()
    except MMRenderError as error:
        return f"{UNKNOWN}: {error}"


_SHOWN, _SAID = UNKNOWN_PARTS["image"], TextPart("x")
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
    except (PlaceholderError, ProcessorError, TemplateRefusedError) as error:
        return f"no: {error.problem}"
    except MMRenderError as error:
        return f"{UNKNOWN}: {error}"
    return "yes" if kept is not None else f"yes, as sampled: {renderer.why_not_bridged}"


_NO_ENTRIES = {"images": "none: a text-only model", "problems": "none"}


_REMEDIES = {
    "images": "Install the extra that it names, or put images into a role whose messages the template prints",
    "roles": "Pass chat_template= with a template that prints users and the assistant",
    "unattributed": "Leave these arguments out, or pass chat_template= with one that prints them plainly",
    "stop tokens": "Name the stop token as eos_token_id in generation_config.json",
}


def next_steps(findings: dict[str, Any], model: str) -> list[str]:
    """Return a remedy for each problem, or the next steps if there are no problems."""
    compare = f"Compare with Transformers to the last bit: mmrender parity {model} --cases 50"
    if not findings["problems"]:
        return [
            compare,
            f"Look at a conversation: mmrender view chat.json --model {model} --html tokens.html",
        ]
    named = [f"{name}: {_REMEDIES[name]}" for name in findings["problems"] if name in _REMEDIES]
    return [*named, *([compare] if len(named) < len(findings["problems"]) else [])]


def findings_table(findings: dict[str, Any]) -> Table:
    """Return the findings as a table, section by section."""
    table = Table(show_edge=False, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for section, entries in findings.items():
        table.add_row(f"[cyan]{section}[/]", "" if entries else _NO_ENTRIES[section])
        for key, value in entries.items():
            table.add_row(f"  {key.replace('_', ' ')}", _shown(value))
        table.add_row("", "")
    return table


def _shown(value: Any) -> str:
    if isinstance(value, str) and value.startswith((UNKNOWN, "no: ")):
        return f"[{'red' if value.startswith(UNKNOWN) else 'yellow'}]{_safe(value)}[/]"
    if isinstance(value, bool):
        return "[green]yes[/]" if value else "[yellow]no[/]"
    if isinstance(value, dict):
        return escape("\n".join(f"{key}: {item!r}" for key, item in value.items())) or "-"
    if isinstance(value, tuple | list):
        shown = [item if isinstance(item, str) and item.isprintable() else repr(item) for item in value]
        return escape(", ".join(shown)) or "-"
    return _safe(str(value))


def _safe(text: str) -> str:
    """Return text of a model's files without markup and control characters."""
    return escape("\n".join(map(visible, text.splitlines())))
