"""A model's own files, in a local directory or fetched from the hub.

Special tokens, stop tokens and the vocabulary size are read here. Weights are never fetched.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from mmrender.caching import cached_property
from mmrender.errors import ModelError, ModelNotFoundError

_PATTERNS = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py", "additional_chat_templates/*"]
_IGNORED = ["*.safetensors*", "*.bin*", "*.gguf", "onnx/*", "*.index.json"]
SPECIAL_TOKEN_KEYS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Special tokens of all tokenizers, which templates read."""

_SAMPLING = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
"""vLLM's name of each parameter in `generation_config.json`."""


class Conversion(msgspec.Struct, frozen=True):
    """A vocabulary of another format as the files of a fast tokenizer, and the proof that both are equal.

    Attributes:
        files: Texts of files by name. They come before files of the directory.
        library: The library that the vocabulary belongs to.
        proof: The converted files and their comparison, in words.
        template: A chat template, for a directory without one, or None.
        no_template: The reason why there is no template for a directory that has one in another form.
    """

    files: dict[str, str]
    library: str
    proof: str
    template: str | None = None
    no_template: str = ""

    @property
    def is_native(self) -> bool:
        """Whether Transformers reads the vocabulary without another library."""
        return self.library not in ("tiktoken", "mistral-common")


@dataclass(frozen=True)
class ModelDir:
    """A directory in hub layout. Each JSON file is read once.

    `conversion` adds the files of a tokenizer that the directory has in another format.
    """

    path: Path
    conversion: Conversion | None = field(default=None, repr=False, compare=False)
    _read: dict[str, dict[str, Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def read_text(self, name: str) -> str | None:
        """Return the text of a file, or None if it does not exist.

        Raises:
            ModelError: The file is not UTF-8.
        """
        if self.conversion is not None and name in self.conversion.files:
            return self.conversion.files[name]
        file = self.path / name
        if not file.is_file():
            return None
        try:
            return file.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise self._unreadable(name, "UTF-8 text", str(error)) from error

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the object of a JSON file, or an empty one if it does not exist.

        Raises:
            ModelError: The file is not a JSON object.
        """
        if name in self._read:
            return self._read[name]
        text = self.read_text(name)
        try:
            value = {} if text is None else json.loads(text)
        except ValueError as error:
            raise self._unreadable(name, "JSON", str(error)) from error
        if not isinstance(value, dict):
            raise self._unreadable(name, "a JSON object", type(value).__name__)
        self._read[name] = value
        return value

    def _unreadable(self, name: str, expected: str, got: str) -> ModelError:
        return ModelError(f"cannot read {name}", where=str(self.path / name), expected=expected, got=got)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """`config.json`."""
        return self.read_json("config.json")

    @cached_property
    def tokenizer_config(self) -> Mapping[str, Any]:
        """`tokenizer_config.json`."""
        return self.read_json("tokenizer_config.json")

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        """`generation_config.json`."""
        return self.read_json("generation_config.json")

    @property
    def _text_config(self) -> Mapping[str, Any]:
        config = self.config.get("text_config")
        return config if isinstance(config, Mapping) else {}

    @property
    def vocab_size(self) -> int | None:
        """Number of ids with embeddings, from `config.json`, or None."""
        sizes = (config.get("vocab_size") for config in (self._text_config, self.config))
        return next((size for size in sizes if isinstance(size, int)), None)

    @cached_property
    def token_settings(self) -> Mapping[str, Any]:
        """`tokenizer_config.json`, with the special tokens of other files that Transformers reads.

        The entries of `special_tokens_map.json` override it if it does not list the added tokens.
        """
        config = dict(self.tokenizer_config)
        if not config.get("extra_special_tokens"):
            config["extra_special_tokens"] = config.pop("additional_special_tokens", None)
        if "added_tokens_decoder" not in config:
            config.update(self.read_json("special_tokens_map.json"))
        return config

    @property
    def named_tokens(self) -> dict[str, Any]:
        """Special tokens under their names, such as `bos_token`, as the tokenizer's files describe them."""
        config = self.token_settings
        extra = config.get("extra_special_tokens")
        custom = {key: value for key, value in config.items() if key.endswith("_token")}
        custom.update(extra if isinstance(extra, Mapping) else {})
        named = {key: config.get(key) for key in SPECIAL_TOKEN_KEYS} | custom
        return {key: entry for key, entry in named.items() if isinstance(_token_text(entry), str)}

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of the special tokens that a template may name."""
        return {key: _token_text(entry) for key, entry in self.named_tokens.items()}

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """Sampling parameters of `generation_config.json` under vLLM's names. Greedy is temperature 0."""
        config = self.generation_config
        numbers = {name: value for name, value in config.items() if type(value) in (int, float)}
        values = {ours: numbers[name] for name, ours in _SAMPLING.items() if name in numbers}
        return values if config.get("do_sample") is not False else {**values, "temperature": 0.0}

    def stop_token_ids(self, token_id: Callable[[str], int | None]) -> list[int]:
        """`eos_token_id` of generation config, config and text config, and the tokenizer's `eos_token`.

        Args:
            token_id: Returns the id of a whole token.
        """
        text = _token_text(self.tokenizer_config.get("eos_token"))
        values: list[Any] = [token_id(text)] if isinstance(text, str) else []
        for config in (self.generation_config, self.config, self._text_config):
            value = config.get("eos_token_id")
            values += value if isinstance(value, list) else [value]
        return sorted({value for value in values if isinstance(value, int)})


def _token_text(entry: Any) -> Any:
    return entry.get("content") if isinstance(entry, Mapping) else entry


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
            "the model directory does not exist",
            where=name,
            expected="an existing directory, or a hub id such as org/name",
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return ModelDir(
            Path(
                snapshot_download(name, revision=revision, allow_patterns=_PATTERNS, ignore_patterns=_IGNORED)
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelNotFoundError(
            "the model directory does not exist, and the hub did not return it",
            where=name,
            expected="an existing directory, or a hub id such as org/name",
            got=(str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix("Got: "),
            remedy="Check the name, set HF_TOKEN for a private model, pass the path of a local copy, or "
            "build a tiny model that works offline: mmrender.testing.tiny_model.build_tiny_model(directory)",
        ) from error
