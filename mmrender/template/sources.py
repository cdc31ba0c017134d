"""Find a model's chat templates, in every place that models use.

The first of these sources that exists counts, as in Transformers 5 (`ProcessorMixin.get_processor_dict`,
`PreTrainedTokenizerBase._from_pretrained`):

- for a model with a processor, the key `chat_template` of `processor_config.json`, the file
  `chat_template.json`, then the files `chat_template.jinja` and `additional_chat_templates/NAME.jinja`;
- for a model without one, these files;
- then the key in `tokenizer_config.json`: one text, or a list of named texts.

Without these, the fallbacks are places that Transformers ignores: the rest of the first list, and the key in
`preprocessor_config.json`; then the template that mistral-common generates for a `tekken.json`.
"""

from collections.abc import Mapping
from typing import Any

from mmrender.content.values import describe
from mmrender.errors import TemplateError, TemplateMissingError
from mmrender.model.files import ModelDir

_WITH_PROCESSOR = ("processor_config.json", "chat_template.json", "files", "tokenizer_config.json")
_WITHOUT_PROCESSOR = ("files", "tokenizer_config.json", "processor_config.json", "chat_template.json")
_FOLDER = "additional_chat_templates"


def load_templates(model: ModelDir) -> dict[str, str]:
    """Return the templates of a model by name; a template without a name is `default`.

    Raises:
        TemplateError: Two places contradict each other.
        TemplateMissingError: A template is neither text nor a list of named texts.
        ModelError: A file cannot be read.
    """
    names = ("preprocessor_config.json", "processor_config.json")
    has_processor = any((model.path / name).is_file() for name in names)
    if has_processor:
        _refuse_conflict(model)
    for place in (*(_WITH_PROCESSOR if has_processor else _WITHOUT_PROCESSOR), "preprocessor_config.json"):
        if place == "files":
            templates = _from_files(model)
        else:
            value = model.read_json(place).get("chat_template")
            templates = _named(value, where=place) if value else {}
        if templates:
            return templates
    if model.conversion is not None and model.conversion.template:
        return {"default": model.conversion.template}
    return {}


def _refuse_conflict(model: ModelDir) -> None:
    folder = model.path / _FOLDER
    if (model.path / "chat_template.json").is_file() and any(folder.glob("*.jinja")):
        raise TemplateError(
            "the model has chat templates in two places that exclude each other",
            where=str(model.path),
            expected=f"chat_template.jinja next to {_FOLDER}/",
            got=f"chat_template.json next to {_FOLDER}/",
            remedy="Write the text of chat_template.json to chat_template.jinja and remove it",
        )


def _from_files(model: ModelDir) -> dict[str, str]:
    named = {file.stem: f"{_FOLDER}/{file.name}" for file in sorted((model.path / _FOLDER).glob("*.jinja"))}
    texts = {
        name: model.read_text(path) for name, path in {**named, "default": "chat_template.jinja"}.items()
    }
    if texts["default"] is None and "default" in named:
        texts["default"] = model.read_text(named["default"])
    return {name: text for name, text in texts.items() if text}


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
    """Return the name of the template to run: `name`, else `tool_use` with tools, else `default`.

    Raises:
        TemplateMissingError: The model lacks this template.
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
    names = ", ".join(sorted(templates)) or "none"
    if name is None and templates:
        raise TemplateMissingError(
            "the model has several chat templates without a default",
            expected="a template named 'default'",
            got=names,
            remedy="Pass chat_template=<one of these names>",
        )
    raise TemplateMissingError(
        f"the model lacks a chat template{'' if name is None else f' named {describe(name)}'}",
        expected="chat_template.jinja, chat_template.json, or one in the tokenizer or processor config",
        got=f"templates: {names}",
        remedy="Pass chat_template=<Jinja text>",
    )
