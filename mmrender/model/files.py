"""A model's own files: found in a local directory or fetched from the hub, and read as JSON.

No weights are ever fetched. Nothing here knows what the files mean.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mmrender.errors import ModelError, ModelNotFoundError

_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt", "*.py", "tekken.json", "additional_chat_templates/*"]
_IGNORED = ["*.safetensors*", "*.bin*", "*.gguf", "onnx/*", "*.index.json"]


@dataclass(frozen=True)
class ModelDir:
    """A directory in hub layout."""

    path: Path

    def read_text(self, name: str) -> str | None:
        """Text of a file, or None where there is none.

        Raises:
            ModelError: The file is not UTF-8.
        """
        file = self.path / name
        if not file.is_file():
            return None
        try:
            return file.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(
                f"cannot read {name}", where=str(file), expected="UTF-8 text", got=str(error)
            ) from error

    def read_json(self, name: str) -> dict[str, Any]:
        """Object held by a JSON file; an empty one where there is no such file.

        Raises:
            ModelError: The file is not a JSON object.
        """
        text = self.read_text(name)
        if text is None:
            return {}
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ModelError(
                f"cannot read {name}", where=str(self.path / name), expected="JSON", got=str(error)
            ) from error
        if not isinstance(value, dict):
            raise ModelError(
                f"cannot read {name}",
                where=str(self.path / name),
                expected="a JSON object",
                got=type(value).__name__,
            )
        return value

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """`config.json`."""
        return self.read_json("config.json")

    @property
    def vocab_size(self) -> int | None:
        """Number of ids that the model has embeddings for, as `config.json` says; None where it does not."""
        text = self.config.get("text_config")
        for config in (text if isinstance(text, Mapping) else {}, self.config):
            size = config.get("vocab_size")
            if isinstance(size, int):
                return size
        return None

    @cached_property
    def tokenizer_config(self) -> Mapping[str, Any]:
        """`tokenizer_config.json`."""
        return self.read_json("tokenizer_config.json")

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        """`generation_config.json`."""
        return self.read_json("generation_config.json")


def find_model(name_or_path: str | os.PathLike[str], *, revision: str | None = None) -> ModelDir:
    """Find a local directory, or fetch the small files of a hub repository.

    Args:
        name_or_path: A directory, or a hub id such as `Qwen/Qwen3-VL-8B-Instruct`.
        revision: Branch, tag or commit on the hub.

    Raises:
        ModelNotFoundError: Neither exists, or the hub cannot be reached and nothing is cached.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return ModelDir(path)
    name = os.fspath(name_or_path)
    if path.exists():
        raise ModelNotFoundError(
            "not a model directory", where=name, expected="a directory in hub layout", got="a file"
        )
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise ModelNotFoundError(
            "no such model directory",
            where=name,
            expected="an existing directory, or a hub id such as org/name",
        )
    return ModelDir(_fetched(name, revision))


def _fetched(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=_PATTERNS, ignore_patterns=_IGNORED)
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelNotFoundError(
            "no such model directory, and the hub did not give it",
            where=name,
            expected="an existing directory, or a hub id such as org/name",
            got=str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
            remedy="Check the name; offline, pass the path of a local copy",
        ) from error
