"""Stop tokens that a model's files name."""

from collections.abc import Mapping
from typing import Any

from mmrender.model.files import ModelDir
from mmrender.model.tokenizer import Tokenizer


def stop_token_ids(model: ModelDir, tokenizer: Tokenizer) -> list[int]:
    """`eos_token_id` of generation config, config and text config, and the tokenizer's `eos_token`."""
    text_config = model.config.get("text_config")
    configs: list[Mapping[str, Any]] = [model.generation_config, model.config]
    if isinstance(text_config, Mapping):
        configs.append(text_config)
    found: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        found.update(
            item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)
        )
    token = model.tokenizer_config.get("eos_token")
    text = token.get("content") if isinstance(token, Mapping) else token
    token_id = tokenizer.token_id(text) if isinstance(text, str) else None
    return sorted(found if token_id is None else {*found, token_id})
