"""Engines of `tokenizers` made from the model's: with all declared tokens, or without added tokens."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Engine

from mmrender.model.files import ModelDir

_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")

Before: TypeAlias = Literal["nothing", "token", "text"]
"""Kind of text before a run: nothing, an added token, or text that it continues.

Some tokenizers prefix a space to the first run alone, and some to every run, but not within a text.
"""


def finder_of(added: Sequence[AddedToken], normalizer: Any) -> Engine:
    """Return an engine that encodes text between these added tokens as 0."""
    finder = Engine(models.WordLevel({"": 0}, unk_token=""))
    if normalizer is not None:
        finder.normalizer = normalizer
    finder.add_tokens(list(added))
    return finder


def without_added(engine: Engine, model: models.Model) -> dict[Before, Engine]:
    """Return an engine without added tokens for each kind of text before a run."""
    parts = {
        name: None if part is None else json.loads(part.__getstate__())
        for name, part in (("normalizer", engine.normalizer), ("pre_tokenizer", engine.pre_tokenizer))
    }

    def build(parts: Mapping[str, Any]) -> Engine:
        built = Engine.from_str(json.dumps(json.loads(Engine(models.BPE()).to_str()) | parts))
        # Sharing the model costs nothing, and reading the vocabulary again would take a second.
        built.model = model
        return built

    whole = build(parts)
    engines: dict[Before, Engine] = {"nothing": whole, "token": whole, "text": whole}
    for before in ("token", "text"):
        within = {name: _within(part, before) for name, part in parts.items()}
        if within != parts:
            engines[before] = build(within)
    return engines


_AT_START = {"prepend_scheme": "never", "add_prefix_space": False, "strip_left": False}
"""Settings of normalizers and pre-tokenizers that change how a text begins, turned off."""


def _within(part: Any, before: Before, *, leads: bool = True) -> Any:
    """Return the definition of a normalizer or pre-tokenizer for a run within a prompt.

    A part that does not lead works on pieces of a run, each with its own beginning.
    """
    if part is None or (before == "text" and part["type"] == "Prepend"):
        return None
    changed = dict(part)
    for key in ("normalizers", "pretokenizers"):
        if key in part:
            ahead = [leads and (key == "normalizers" or not index) for index in range(len(part[key]))]
            inner = [_within(item, before, leads=at) for item, at in zip(part[key], ahead, strict=True)]
            changed[key] = [item for item in inner if item is not None]
    if (before == "text" and leads) or part.get("prepend_scheme") == "first":
        changed |= {key: off for key, off in _AT_START.items() if key in part}
    return changed


def literal_engines(engine: Engine, lacking: Collection[int]) -> tuple[dict[Before, Engine], int | None]:
    """Return engines whose vocabulary lacks the words of added tokens, and their id of unknown characters."""
    definition = {**msgspec.json.decode(engine.to_str()), "added_tokens": [], "post_processor": None}
    model = definition["model"]
    unknown_id = model.get("unk_id")
    if isinstance(model["vocab"], list):
        model["vocab"] = [
            [_unspelled(token_id) if token_id in lacking else word, score]
            for token_id, (word, score) in enumerate(model["vocab"])
        ]
    else:
        names = {
            word: _unspelled(token_id) for word, token_id in model["vocab"].items() if token_id in lacking
        }
        unknown_id = model["vocab"].get(model.get("unk_token"))
        model["unk_token"] = names.get(model.get("unk_token"), model.get("unk_token"))
        model["vocab"] = {names.get(word, word): token_id for word, token_id in model["vocab"].items()}
        if "merges" in model:
            prefix = len(model.get("continuing_subword_prefix") or "")
            model["merges"] = [
                (left, right)
                for left, right in model["merges"]
                if names.keys().isdisjoint((left, right, left + right[prefix:]))
            ]
    return without_added(engine, Engine.from_buffer(msgspec.json.encode(definition)).model), unknown_id


def _unspelled(token_id: int) -> str:
    """Return a word of the vocabulary that occurs in no text."""
    return f"\U0010ffff{token_id}"


def declare_added(engine: Engine, model: ModelDir) -> None:
    """Add the tokens of files other than `tokenizer.json`, in the order of Transformers."""
    known = engine.get_added_tokens_decoder().values()
    spelled = {repr(token) for token in known}
    texts = {token.content for token in known}
    named = {*model.special_tokens.values()}
    listed = model.token_settings.get("added_tokens_decoder")
    declared: list[AddedToken] = []
    if isinstance(listed, Mapping):
        # A token that is listed with other flags than it has gets these.
        entries = [_added_token(entry) for _, entry in sorted(listed.items(), key=lambda item: int(item[0]))]
        declared = [token for token in entries if repr(token) not in spelled]
    else:
        numbered = sorted(model.read_json("added_tokens.json").items(), key=lambda item: int(item[1]))
        declared = [
            AddedToken(text, normalized=text not in named, special=text in named)
            for text, _ in numbered
            if text not in texts
        ]
    texts.update(token.content for token in declared)
    extra = model.token_settings.get("extra_special_tokens")
    for entry in [*model.named_tokens.values(), *(extra if isinstance(extra, list) else ())]:
        token = _added_token(entry)
        if token.content and token.content not in texts:
            declared.append(token)
    for token in declared:
        token.special = token.special or token.content in named
        (engine.add_special_tokens if token.special else engine.add_tokens)([token])


def _added_token(entry: str | Mapping[str, Any]) -> AddedToken:
    if isinstance(entry, str):
        return AddedToken(entry, special=True)
    flags = {key: bool(value) for key, value in entry.items() if key in _FLAGS}
    return AddedToken(str(entry.get("content", "")), **flags)
