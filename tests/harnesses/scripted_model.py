"""`ScriptedModel`: a backend that answers agents by a script, in tokens of a real model's tokenizer.

An answer is raw text in the model's own syntax, so it may contain JSON as a template would never write it. The
text of answer N mentions `step-N`, so the next answer of any prompt is the one after the highest number in it.
Prompts that offer no tools, such as titles and summaries, are side calls.
"""

import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmrender import Renderer
from mmrender.client.transport import NullTransport, Transport
from mmrender.client.types import EngineRequest, EngineResponse, OnTokens, Usage

_STEP = re.compile(r"step-(\d+)")


def call_text(name: str, arguments: str | Mapping[str, Any]) -> str:
    """Return a call of a tool in Hermes' syntax. Text arguments are written as they are."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'


@dataclass
class Exchange:
    """One request and its completion."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    items: int
    sampling_params: Mapping[str, Any]


@dataclass
class ScriptedModel:
    """Answers by a script.

    Attributes:
        renderer: Tokenizes the answers.
        script: Answers in order, as raw text without the stop token.
        side: Answer to prompts without tools. `{n}` is the number of the side call.
        tool_marker: Text by which a prompt shows that it offers tools.
        exchanges: All requests so far, with their completions.
    """

    renderer: Renderer
    script: Sequence[str]
    side: str = "Side note {n}."
    tool_marker: str = "<tools>"
    exchanges: list[Exchange] = field(default_factory=list)
    name: str = "scripted"
    limit: int = 262_144
    transport: NullTransport = field(default_factory=NullTransport)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._sides = 0

    async def generate(
        self, request: EngineRequest, transport: Transport, *, on_tokens: OnTokens | None = None
    ) -> EngineResponse:
        """Sample the next answer of the script."""
        prompt = tuple(request.prompt_ids)
        tokenizer = self.renderer.tokenizer
        ids = [*tokenizer.encode(self._answer(tokenizer.decode(prompt), request)), *self._stop()]
        budget = request.sampling_params["max_tokens"]
        cut = len(ids) > budget
        ids = ids[:budget]
        logprobs = [-0.25 - (token % 64) / 256 for token in ids]
        if on_tokens is not None:
            for start in range(0, len(ids), 8):
                on_tokens(ids[start : start + 8], logprobs[start : start + 8], None)
        items = sum(map(len, request.multi_modal_data.mm_items.values()))
        with self._lock:
            self.exchanges.append(Exchange(prompt, tuple(ids), items, dict(request.sampling_params)))
        reason = "length" if cut else "stop"
        return EngineResponse(ids, logprobs, reason, Usage(len(prompt), len(ids)))

    async def resolve_max_prompt_len(self, model: str, transport: Transport) -> int | None:
        """Return the limit of the context."""
        return self.limit

    def is_overflow_error(self, exc: BaseException) -> bool:
        """Never: prompts are measured before they are sent."""
        return False

    def _stop(self) -> list[int]:
        return [self.renderer.get_stop_token_ids()[0]]

    def _answer(self, prompt: str, request: EngineRequest) -> str:
        structured = request.sampling_params.get("structured_outputs")
        if self.tool_marker not in prompt:
            with self._lock:
                self._sides += 1
                number = self._sides
            if structured:
                return json.dumps({"title": f"Side note {number}"})
            return self.side.format(n=number)
        steps = [int(number) for number in _STEP.findall(prompt)]
        return self.script[min(max(steps, default=0), len(self.script) - 1)]
