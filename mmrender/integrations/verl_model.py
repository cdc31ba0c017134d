"""The renderer of the model that verl trains: from the files and the chat template that verl has read."""

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from mmrender.errors import InputError
from mmrender.renderer import Renderer

_WITHOUT_EFFECT: Final = frozenset({"sampling_rate"})
"""Processor settings that verl adds for audio."""


def renderer_of(tokenizer: Any, processor: Any = None) -> Renderer:
    """Return the renderer of a tokenizer's files, with the template that verl set. Loaded once a process."""
    templates = (getattr(each, "chat_template", None) for each in (processor, tokenizer))
    return _renderer(
        str(tokenizer.name_or_path), next((text for text in templates if isinstance(text, str)), None)
    )


@cache
def _renderer(path: str, chat_template: str | None) -> Renderer:
    return Renderer.from_pretrained(path, chat_template=chat_template)


def check_processor_settings(settings: Mapping[str, Any] | None) -> None:
    """Refuse `data.mm_processor_kwargs`, which verl's processor would follow and mmrender's would not."""
    if names := sorted({*(settings or {})} - _WITHOUT_EFFECT):
        raise InputError(
            "images are processed by the settings of the model's files",
            where=f"data.mm_processor_kwargs[{names[0]!r}]",
            remedy="Set it in preprocessor_config.json",
        )
