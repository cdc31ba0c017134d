"""Engines of vLLM in this process, by a record of their classes; tests/integration runs the real ones."""

import asyncio
import sys
import threading
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from PIL import Image

from kit import user
from mmrender import RendererClient, Trajectory
from mmrender.errors import EngineMismatchError, EngineReplyError, EngineUnsupportedError, PromptTooLongError
from mmrender.integrations.synced import SyncedBackend
from mmrender.integrations.vllm import AsyncLLMBackend, LLMBackend


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class StructuredOutputsParams(msgspec.Struct):
    choice: list[str] | None = None
    json: Any = None


class SamplingParams(msgspec.Struct, kw_only=True):
    """The fields of vLLM 0.32's that are set here; others are an error, as there."""

    max_tokens: int
    temperature: float = 1.0
    logprobs: int | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    package, sampling = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    package.SamplingParams = SamplingParams
    sampling.RequestOutputKind, sampling.StructuredOutputsParams = RequestOutputKind, StructuredOutputsParams
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling)


@dataclass
class Engine:
    """Answers as `LLM` and `AsyncLLM` do, always with the same words."""

    renderer: Any
    asked: list[Any] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)
    wrong: str = ""
    model_config = SimpleNamespace(max_model_len=600)

    def output(self, prompt, params, request_id="0"):
        self.asked.append((prompt, params))
        ids = [*self.renderer.tokenizer.encode("A cow."), self.renderer.get_stop_token_ids()[0]]
        rows = [{token: SimpleNamespace(logprob=-0.5, rank=1)} for token in ids]
        seen = list(prompt["prompt_token_ids"])
        pad = self.renderer.tokenizer.token_id("<|image_pad|>")
        sizes = iter(
            image.width * image.height // 32**2
            for image in prompt.get("multi_modal_data", {}).get("image", ())
        )
        seen = [token for each in seen for token in ([pad] * next(sizes) if each == pad else [each])]
        completion = SimpleNamespace(
            token_ids=ids,
            logprobs=None if self.wrong == "logprobs" else rows,
            finish_reason="stop",
            stop_reason=None,
            weight_versions=[SimpleNamespace(version="a", start=0, end=len(ids))],
        )
        return SimpleNamespace(
            request_id=request_id,
            prompt_token_ids=seen[1:] if self.wrong == "prompt" else seen,
            outputs=[completion],
            num_cached_tokens=3,
        )


class OfflineEngine(Engine):
    def generate(self, prompts, sampling_params, *, use_tqdm, lora_request):
        assert not use_tqdm
        if self.wrong == "fails":
            raise ValueError("no memory")
        self.batches.append(len(prompts))
        self.threads.add(threading.get_ident())
        return [self.output(*each) for each in zip(prompts, sampling_params, strict=True)]


class AsyncEngine(Engine):
    async def generate(self, prompt, sampling_params, request_id, *, lora_request, priority):
        assert sampling_params.output_kind is RequestOutputKind.FINAL_ONLY
        await asyncio.sleep(0)
        yield self.output(prompt, sampling_params, request_id)


KINDS = {"LLM": (OfflineEngine, LLMBackend), "AsyncLLM": (AsyncEngine, AsyncLLMBackend)}


@pytest.fixture(params=KINDS)
def pair(request, renderer):
    engine, backend = KINDS[request.param]
    made = engine(renderer)
    return made, backend(made)


def client_of(renderer, backend):
    return RendererClient(
        renderer, backend=backend, sampling_params={"max_tokens": 8, "logit_bias": {5: 1.0}}
    )


async def test_turns_with_images_are_sampled(renderer, pair):
    engine, backend = pair
    client, picture = client_of(renderer, backend), Image.new("RGB", (96, 64))

    async def one():
        trajectory, conversation = Trajectory(), []
        for _ in range(2):
            conversation += [{"role": "user", "content": [{"type": "image", "image": picture}]}]
            turn = await client.create_completion(conversation, trajectory=trajectory)
            conversation += [turn.message]
        return trajectory

    for trajectory in await asyncio.gather(*(one() for _ in range(3))):
        first, second = trajectory.steps
        assert second.prompt_ids[: len(first)].tolist() == first.token_ids.tolist()
        assert first.weight_versions[0].version == "a"
        assert first.logprobs.tolist() == [-0.5] * len(first.completion_ids)
        assert len(second.multi_modal_data.mm_items["image"]) == 2
    assert len(engine.asked) == 6
    for prompt, params in engine.asked:
        assert len(prompt["multi_modal_data"]["image"]) == len(prompt["multi_modal_uuids"]["image"])
        assert params.logit_bias == {5: 1.0}
        assert params.logprobs == 0
        assert set(renderer.get_stop_token_ids()) <= set(params.stop_token_ids)
    if isinstance(backend, LLMBackend):
        assert sum(engine.batches) == 6
        assert threading.get_ident() not in engine.threads
        await backend.aclose()


async def test_a_prompt_that_is_too_long_reaches_no_batch(renderer, pair):
    engine, backend = pair
    with pytest.raises(PromptTooLongError):
        await client_of(renderer, backend).create_completion([user("word " * 700)])
    assert engine.asked == []


@pytest.mark.parametrize(
    ("wrong", "error"),
    [("logprobs", EngineReplyError), ("prompt", EngineMismatchError), ("fails", ValueError)],
)
async def test_a_reply_that_does_not_fit_is_an_error(renderer, wrong, error):
    backend = LLMBackend(OfflineEngine(renderer, wrong=wrong))
    with pytest.raises(error):
        await client_of(renderer, backend).create_completion([user("Moo?")])


async def test_what_such_an_engine_lacks_is_refused(renderer, pair):
    client = RendererClient(renderer, backend=pair[1], routed_experts=True, sampling_params={"max_tokens": 4})
    with pytest.raises(EngineUnsupportedError, match="router choices"):
        await client.create_completion([user("Moo?")])


async def test_choices_become_the_engines_own_class(renderer, pair):
    engine, backend = pair
    params = {"structured_outputs": {"choice": ["A cow."]}}
    await client_of(renderer, backend).create_completion([user("Moo?")], sampling_params=params)
    assert engine.asked[0][1].structured_outputs == StructuredOutputsParams(choice=["A cow."])


async def test_weights_that_change_during_a_turn_are_not_named_for_it(renderer):
    names = iter(["1", "1", "2", "3"])
    backend = SyncedBackend(AsyncLLMBackend(AsyncEngine(renderer)), lambda: next(names))
    client, versions = client_of(renderer, backend), []
    for _ in range(2):
        turn = await client.create_completion([user("Moo?")])
        versions.append({span.version for span in turn.generation.weight_versions})
    assert versions == [{"1"}, {"a"}]
