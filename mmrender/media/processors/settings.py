"""The processor files of a model directory, read as the reference reads them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from mmrender.errors import ProcessorError

_SUFFIXES = ("Fast", "Pil")


@dataclass(frozen=True)
class ProcessorFiles:
    """What a model directory says about its processor.

    Attributes:
        directory: The model directory.
        image: Settings of the image processor; empty where the directory has none.
        video: Settings of the video processor; empty where the directory has none.
        processor: Settings of the processor as a whole, such as the number of tokens per tile.
        model: `config.json`.
        tokenizer: `tokenizer_config.json`.
    """

    directory: Path
    image: Mapping[str, Any] = field(default_factory=dict)
    video: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def image_processor_type(self) -> str | None:
        """Class of the image processor without its back-end suffix, or `None` where no file names one."""
        name = self.image.get("image_processor_type")
        if not isinstance(name, str):
            return None
        for suffix in _SUFFIXES:
            name = name.removesuffix(suffix)
        return name

    @property
    def processor_class(self) -> str | None:
        """Class of the whole processor, from whichever file names it."""
        for settings in (self.processor, self.image, self.tokenizer):
            if isinstance(name := settings.get("processor_class"), str):
                return name
        return None

    def named_token(self, name: str, default: str) -> str:
        """Return the token that the tokenizer's settings call `name`, such as `image_token`."""
        extra = self.tokenizer.get("extra_special_tokens")
        named = extra if isinstance(extra, dict) else {}
        token = self.tokenizer.get(name, named.get(name, default))
        return str(token["content"] if isinstance(token, dict) else token)


def read_processor_files(directory: Path) -> ProcessorFiles:
    """Read the settings files that are there; a nested `image_processor` comes before a file of its own.

    Raises:
        ProcessorError: A file is not a JSON object.
    """
    processor = _read(directory / "processor_config.json")
    image = processor.get("image_processor")
    video = processor.get("video_processor")
    return ProcessorFiles(
        directory=directory,
        image=image if isinstance(image, dict) else _read(directory / "preprocessor_config.json"),
        video=video if isinstance(video, dict) else _read(directory / "video_preprocessor_config.json"),
        processor=processor,
        model=_read(directory / "config.json"),
        tokenizer=_read(directory / "tokenizer_config.json"),
    )


def digest_settings(settings: Mapping[str, Any]) -> bytes:
    """Return a 32-byte digest of settings that JSON can hold, whatever the order of their keys."""
    return blake3(json.dumps(settings, sort_keys=True, allow_nan=True).encode()).digest()


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ProcessorError("the settings file cannot be read", where=str(path), got=str(error)) from error
    if not isinstance(content, dict):
        raise ProcessorError(
            "the settings file is not usable",
            where=str(path),
            expected="a JSON object",
            got=type(content).__name__,
        )
    return content
