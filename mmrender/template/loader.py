"""Finding a model's chat templates, in every place where models keep them.

Sources, first found wins, as in Transformers 5 (`tokenization_utils_base.py`, `processing_utils.py`): file
`chat_template.jinja`, the file `chat_template.json`, the key `chat_template` of `processor_config.json`,
`preprocessor_config.json` and `tokenizer_config.json` (one text, or a list of named ones), and beside any of
them the named files of `additional_chat_templates/`.
"""

from collections.abc import Mapping
from typing import Any

from mmrender.errors import TemplateMissingError
from mmrender.model_dir import ModelDir

_CONFIGS = (
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "tokenizer_config.json",
)
_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_templates(model: ModelDir) -> dict[str, str]:
    """All templates of a model by name; the unnamed one is `default`. Empty where the model has none."""
    templates: dict[str, str] = {}
    for config in reversed(_CONFIGS):
        value = model.read_json(config).get("chat_template")
        if value:
            templates = _named(value, where=config)
    text = model.read_text("chat_template.jinja")
    if text is not None:
        templates["default"] = text
    folder = model.path / "additional_chat_templates"
    if folder.is_dir():
        for file in sorted(folder.glob("*.jinja")):
            templates[file.stem] = file.read_text("utf-8")
    return templates


def _named(value: Any, *, where: str) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, Mapping):
        return {str(name): str(text) for name, text in value.items()}
    if isinstance(value, list) and all(isinstance(entry, Mapping) and "template" in entry for entry in value):
        return {str(entry.get("name", "default")): str(entry["template"]) for entry in value}
    raise TemplateMissingError(
        "the chat template cannot be read",
        where=where,
        expected="a text, or a list of {name, template}",
        got=type(value).__name__,
    )


def choose_template(templates: Mapping[str, str], *, name: str | None, has_tools: bool) -> str:
    """Name of the template to run: the one asked for, else `tool_use` where tools are given, else `default`.

    Raises:
        TemplateMissingError: There is no such template.
    """
    if name is not None and name in templates:
        return name
    if name is None:
        if has_tools and "tool_use" in templates:
            return "tool_use"
        if "default" in templates:
            return "default"
        if len(templates) == 1:
            return next(iter(templates))
    have = ", ".join(sorted(templates)) or "none"
    raise TemplateMissingError(
        "the model has no chat template"
        if name is None
        else f"the model has no chat template named {name!r}",
        expected="chat_template.jinja, chat_template.json, or one in the tokenizer or processor config",
        got=f"templates: {have}",
        remedy="Pass chat_template=<Jinja text>",
    )


def special_tokens(model: ModelDir) -> dict[str, str]:
    """Special tokens that a template may name, such as `bos_token`: those that the tokenizer config sets."""
    config = model.tokenizer_config
    extra = config.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, Mapping) else {}), **{key: config.get(key) for key in _TOKEN_KEYS}}
    for key, value in config.items():
        if key.endswith("_token") and isinstance(value, str | Mapping):
            named.setdefault(key, value)
    texts = {
        key: value.get("content") if isinstance(value, Mapping) else value for key, value in named.items()
    }
    return {key: text for key, text in texts.items() if isinstance(text, str)}
