"""The renderer that anybody would write first: plain Jinja, one pass of the tokenizer, a loop over messages.

It is what `Renderer` must equal, and shows why there is more to `Renderer`: here content must spell no special
token, each turn must begin with its prompt and end with its stop token, the template runs twice for each
answer, and an image is processed at each of its places.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer


class Naive(NamedTuple):
    token_ids: list[int]
    sampled: list[bool]


class NaiveRenderer:
    """Renders for a model directory; `expand` returns the token ids of an image, for the placeholder's one."""

    def __init__(
        self, directory: Path, placeholder: str, stop: str, expand: Callable[[Any], list[int]]
    ) -> None:
        settings = json.loads((directory / "tokenizer_config.json").read_text("utf-8"))
        self.names = {key: value for key, value in settings.items() if key.endswith("_token") and value}
        self.stop = stop
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self.template = environment.from_string((directory / "chat_template.jinja").read_text("utf-8"))
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.placeholder, self.expand = self.tokenizer.token_to_id(placeholder), expand

    def text(self, messages: list[dict[str, Any]], *, asks: bool) -> str:
        return self.template.render(messages=messages, add_generation_prompt=asks, **self.names)

    def render(self, messages: list[dict[str, Any]]) -> Naive:
        text = self.text(messages, asks=False)
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        answers = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                # The model writes everything after the prompt, through the stop token.
                prompt = self.text(messages[:number], asks=True)
                answer = self.text(messages[: number + 1], asks=False)
                answers.append(range(len(prompt), answer.rindex(self.stop) + len(self.stop)))
                assert answer.startswith(prompt)
                assert text.startswith(answer)
        parts = [part for message in messages for part in message["content"]]
        images = iter([part["image"] for part in parts if part["type"] == "image"])
        token_ids: list[int] = []
        sampled: list[bool] = []
        for token, (start, _) in zip(encoding.ids, encoding.offsets, strict=True):
            tokens = self.expand(next(images)) if token == self.placeholder else [token]
            token_ids += tokens
            sampled += [any(start in answer for answer in answers)] * len(tokens)
        return Naive(token_ids, sampled)
