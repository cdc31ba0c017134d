"""The clients that `bench_client.py` compares. Each sends the same prompt and the same image text.

Prompts are given as tokens, and images as base64 that is made beforehand, in the type in which each client's
own encoding gives it (a JSON text for mmrender, text for the others). So what is timed is the client: its
JSON, its HTTP, and reading the answer into tokens, logprobs and a message.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from mmrender import Renderer, generate
from mmrender.client.exchange import check_request
from mmrender.client.http import HTTPTransport
from mmrender.client.transport import JSONText, Transport
from mmrender.client.types import EngineRequest, EngineResponse, OnTokens
from mmrender.client.vllm import VLLMBackend, sample_tokens
from mmrender.sidecar import MultiModalData

Call = Callable[["Load"], Awaitable[Any]]

_PATIENCE = 600.0
"""Seconds. Its default for a connection is 5, and 256 requests of 5 MB hold openai's loop up for longer."""


@dataclass(frozen=True)
class Load:
    """A prompt, the base64 text of its image or none, and the expected answer."""

    prompt_ids: list[int]
    image: str | None
    completion: int
    image_json: JSONText | None = None

    @property
    def features(self) -> dict[str, Any] | None:
        if self.image is None:
            return None
        return {
            "mm_hashes": {"image": ["0" * 64]},
            "mm_placeholders": {"image": [{"offset": 0, "length": 1}]},
            "kwargs_data": {"image": [self.image]},
        }


@dataclass(frozen=True)
class GivenFeatures:
    """vLLM's backend, but for the encoding of images, which the benchmark has done."""

    load: Load
    name: str = "vllm"

    async def generate(
        self, request: EngineRequest, transport: Transport, *, on_tokens: OnTokens | None = None
    ) -> EngineResponse:
        ids, _ = check_request(request)
        prompt: dict[str, Any] = {"token_ids": ids.tolist()}
        features = self.load.features
        if features is not None:
            # As the backend's own encoding gives it: a JSON text.
            prompt["features"] = {**features, "kwargs_data": {"image": [self.load.image_json]}}
        return await sample_tokens(request, transport, prompt, aborts=True)

    async def resolve_max_prompt_len(self, model: str, transport: Transport) -> int | None:
        return await VLLMBackend().resolve_max_prompt_len(model, transport)

    def is_overflow_error(self, exc: BaseException) -> bool:
        return VLLMBackend().is_overflow_error(exc)


class Ours:
    """`mmrender.generate` over its HTTP transport."""

    name = "mmrender"

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def open(self, url: str) -> tuple[Call, Callable[[], Awaitable[None]]]:
        transport = HTTPTransport(url)

        async def call(load: Load) -> Any:
            result = await generate(
                client=transport,
                renderer=self._renderer,
                model="stub",
                backend=GivenFeatures(load),
                prompt_ids=load.prompt_ids,
                multi_modal_data=MultiModalData(),
                sampling_params={"max_tokens": load.completion},
            )
            return result.logprobs

        return call, transport.aclose


class Peer:
    """`renderers.client.generate` over `openai.AsyncOpenAI`."""

    name = "renderers"

    def __init__(self, directory: Any) -> None:
        from renderers import client
        from renderers.qwen3_vl import Qwen3VLRenderer
        from transformers import AutoTokenizer

        self._client = client
        self._renderer = Qwen3VLRenderer(
            AutoTokenizer.from_pretrained(directory), processor=SimpleNamespace()
        )

    def open(self, url: str) -> tuple[Call, Callable[[], Awaitable[None]]]:
        from openai import AsyncOpenAI

        # Its own encoding needs vLLM; here it gets the same text as everyone, as its sidecar.
        self._client._build_mm_features = lambda _, sidecar: sidecar.features
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=_PATIENCE)

        async def call(load: Load) -> Any:
            given: Any = SimpleNamespace(is_empty=lambda: False, features=load.features)
            if load.image is None:
                given = None
            result = await self._client.generate(
                client=client,
                renderer=self._renderer,
                messages=[],
                model="stub",
                prompt_ids=load.prompt_ids,
                multi_modal_data=given,
                sampling_params={"max_tokens": load.completion},
            )
            return result["completion_logprobs"]

        return call, client.close


class OpenAI:
    """`openai.AsyncOpenAI.chat.completions.create`: text in place of tokens, the image as a data URL."""

    name = "openai"

    def open(self, url: str) -> tuple[Call, Callable[[], Awaitable[None]]]:
        from openai import AsyncOpenAI

        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=_PATIENCE)

        async def call(load: Load) -> Any:
            # As many bytes as the others' token ids take as JSON.
            content: list[Any] = [{"type": "text", "text": "x" * len(str(load.prompt_ids))}]
            if load.image is not None:
                content.append(
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{load.image}"}}
                )
            result = await client.chat.completions.create(
                model="stub",
                messages=[{"role": "user", "content": content}],
                max_tokens=load.completion,
                logprobs=True,
            )
            logprobs = result.choices[0].logprobs
            return [token.logprob for token in (logprobs.content if logprobs else None) or ()]

        return call, client.close
