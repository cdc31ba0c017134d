"""What servers answered when they were recorded, replayed by a transport in memory.

`tools/servers/*/record.py` writes the files. A test asks through a backend, and both must hold: the request is the
recorded one, member for member, and the answer is read as it should be.
"""

import asyncio
import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kit import noise, user
from mmrender import Renderer
from mmrender.client.types import EngineRequest, EngineResponse
from mmrender.testing.memory_transport import Answer, MemoryTransport
from mmrender.testing.tiny_model import build_tiny_model
from mmrender.tokens.rendered import RenderedTokens

DATA = Path(__file__).parent / "data" / "engines"
LARGE = 4096


@dataclass
class Recording:
    """One request and its answer; `answer` may be changed before it is replayed."""

    method: str
    path: str
    body: Any
    status: int
    answer: Any
    sent: Any = field(default=None)

    @classmethod
    def of(cls, engine: str, name: str) -> "Recording":
        entry = json.loads((DATA / engine / f"{name}.json").read_text())
        request = entry["request"]
        answer = entry["json"] if "json" in entry else entry["text"]
        return cls(request["method"], request["path"], request["body"], entry["status"], answer)

    def changed(self, change: Callable[[Any], Any]) -> "Recording":
        """The same with its answer changed in place."""
        self.answer = copy.deepcopy(self.answer)
        change(self.answer)
        return self

    def transport(self) -> MemoryTransport:
        return MemoryTransport({f"{self.method} {self.path}": Answer(self.answer, status=self.status)})

    def replay(self, backend: Any, request: EngineRequest) -> EngineResponse:
        """Ask through a backend; `sent` then holds the body that it sent."""
        transport = self.transport()
        try:
            return asyncio.run(backend.generate(request, transport))
        finally:
            self.sent = transport.asked[-1].json if transport.asked else None

    def limit(self, backend: Any, model: str = "tiny") -> int | None:
        return asyncio.run(backend.resolve_max_prompt_len(model, self.transport()))


def digested(value: Any) -> Any:
    """Long texts as their digest, as recordings hold them."""
    if isinstance(value, str) and len(value) > LARGE:
        return {"sha256": hashlib.sha256(value.encode()).hexdigest(), "length": len(value)}
    if isinstance(value, dict):
        return {key: digested(member) for key, member in value.items()}
    return [digested(member) for member in value] if isinstance(value, list) else value


def an_image(directory: Path) -> RenderedTokens:
    """The prompt with an image that was recorded; the model directory is built without weights."""
    renderer = Renderer.from_pretrained(build_tiny_model(directory, weights=False), image_backend="pil")
    return renderer.render([user("What?", noise(0, 128, 128))], add_generation_prompt=True)


PROMPT = [10, 11, 12]
GREEDY = {"temperature": 0.0, "max_tokens": 4}
ROWS = 3 + 4 - 1
"""Rows of router choices for the recorded prompt and completion."""


@dataclass(frozen=True)
class Replays:
    """The recordings of an engine, its backend, and what its requests have besides prompt and sampling."""

    backend: Any
    fields: dict[str, Any]

    def recorded(self, name: str) -> Recording:
        return Recording.of(self.backend.name, name)

    def request(self, **fields: Any) -> EngineRequest:
        values = {"model": "tiny", "prompt_ids": PROMPT, "sampling_params": GREEDY, "vocab_size": 1024}
        return EngineRequest(**{**values, **self.fields, **fields})

    def replay(self, recording: str | Recording, backend: Any = None, **fields: Any) -> Any:
        """The response to a request, from what was recorded."""
        found = self.recorded(recording) if isinstance(recording, str) else recording
        return found.replay(backend or self.backend, self.request(**fields))

    def refused(self, kind: type[Exception], recording: str | Recording, *given: Any, **fields: Any) -> str:
        """The message of the error with which a request, or what was answered to it, is refused."""
        with pytest.raises(kind) as caught:
            self.replay(recording, *given, **fields)
        return str(caught.value)


def with_image(rendered: RenderedTokens, **fields: Any) -> dict[str, Any]:
    """The members of a request that a rendered prompt gives."""
    return {"prompt_ids": rendered.token_ids, "multi_modal_data": rendered.multi_modal_data, **fields}


def counted(layers: int, top_k: int, dtype: str) -> np.ndarray:
    """Router choices that count, so that every row is known."""
    return np.arange(ROWS * layers * top_k, dtype=dtype).reshape(ROWS, layers, top_k)
