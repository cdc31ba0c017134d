"""Recordings of one engine, and the request with which a test asks for them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from engine_replies import Recording
from mmrender.client.types import EngineRequest
from mmrender.tokens.rendered import RenderedTokens

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
