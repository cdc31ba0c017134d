"""The workers of `bench_turn.py`: each rolls out all conversations at once, in a process of its own.

    python benchmarks/turn_contenders.py NAME MODEL_DIR URL ROLLOUTS

It prints a JSON object a round, after a line `go` on its standard input: processor seconds of the whole
process, seconds, turns and the bytes that a trainer would get. The first round has everything that is made at
first use.

- `mmrender`: `RendererClient` and a `Trajectory`, encoded as it is shipped.
- `verifiers`: the classes of verifiers' training path, in one process: its dialect's messages, its graph's
  turns, `TrainClient` with `renderers`, and the trace as msgpack. The hop over its server for agents is left
  out. The server processes the images, and no tensors reach the record.
- `plain`: each turn is rendered whole by Transformers' processor, and sampled by the chat of
  `openai.AsyncOpenAI`.
"""

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT), str(ROOT / "codecs")]

from turn_cases import SYSTEM, TOOLS, TURNS, asked, conversations  # noqa: E402

Messages = list[dict[str, Any]]
Rollout = Callable[[Messages, Messages], Awaitable[int]]
"""Rolls out one conversation: its first messages, and those that follow. Returns the bytes of its record."""
SAMPLING: dict[str, Any] = {"temperature": 1.0, "max_tokens": 512}


def linked(message: dict[str, Any], calls: list[str]) -> dict[str, Any]:
    """Return the environment's message with the id of the model's call."""
    return {**message, "tool_call_id": calls[0]} if calls else message


class Ours:
    """mmrender."""

    def __init__(self, directory: str, url: str) -> None:
        from mmrender import Renderer, RendererClient

        self.client = RendererClient(
            Renderer.from_pretrained(directory, image_backend="pil"),
            url,
            model="stub",
            sampling_params=SAMPLING,
        )

    async def roll_out(self, messages: Messages, following: Messages) -> int:
        from mmrender import Trajectory

        trajectory = Trajectory()
        for turn in range(TURNS):
            sampled = await self.client.create_completion(messages, trajectory=trajectory, tools=TOOLS)
            calls = [call.id or "" for call in sampled.message.tool_calls]
            if turn < TURNS - 1:
                messages = [*messages, sampled.message, linked(following[turn], calls)]
        self.client.forget(trajectory)
        return sum(memoryview(frame).nbytes for frame in trajectory.to_frames())


class Verifiers:
    """verifiers with renderers."""

    def __init__(self, directory: str, url: str) -> None:
        from renderers.configs import Qwen3VLRendererConfig
        from verifiers.v1.clients import resolve_client
        from verifiers.v1.configs.client import TrainClientConfig
        from verifiers.v1.dialects.chat import ChatDialect

        self.client = resolve_client(
            TrainClientConfig(
                base_url=f"{url}/v1",
                api_key_var="NO_KEY",
                renderer=Qwen3VLRendererConfig(),
                renderer_model_name=directory,
            )
        )
        self.dialect = ChatDialect()

    async def roll_out(self, messages: Messages, following: Messages) -> int:
        import msgpack
        from verifiers.v1 import graph
        from verifiers.v1.configs.agent import AgentConfig
        from verifiers.v1.task import TaskData
        from verifiers.v1.trace import AgentInfo, Trace, TraceTask
        from verifiers.v1.types import SamplingConfig

        trace: Any = Trace(
            task=TraceTask(type="Bench", data=TaskData()), agent=AgentInfo(config=AgentConfig())
        )
        sampling = SamplingConfig(**SAMPLING)
        for turn in range(TURNS):
            body = {"model": "stub", "messages": messages, "tools": TOOLS}
            request = self.dialect.parse_request(body)
            pending = graph.prepare_turn(trace, request.messages, request.tools)
            response = await self.client.get_response(
                self.dialect, body, sampling, session_id=trace.id, turn=pending
            )
            pending.commit(response)
            message = response.raw["choices"][0]["message"]
            calls = [call["id"] for call in message.get("tool_calls") or ()]
            if turn < TURNS - 1:
                messages = [*messages, message, linked(following[turn], calls)]
        return len(msgpack.packb(trace.model_dump(mode="python"), default=str))


class Plain:
    """Transformers' processor, and a chat client."""

    def __init__(self, directory: str, url: str) -> None:
        import torch
        from openai import AsyncOpenAI

        from mmrender.testing.reference import has_reference_backend, import_torchvision

        if has_reference_backend("torch"):
            import_torchvision()
        from transformers import AutoProcessor

        torch.set_num_threads(1)
        self.processor = AutoProcessor.from_pretrained(directory)
        self.client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)

    async def roll_out(self, messages: Messages, following: Messages) -> int:
        pictures: dict[str, Any] = {}
        size = 0
        for turn in range(TURNS):
            tokens = await asyncio.to_thread(self._render, messages, pictures)
            answer = await self.client.chat.completions.create(
                model="stub", messages=messages, tools=TOOLS, logprobs=True, **SAMPLING
            )
            choice = answer.choices[0]
            logprobs = [entry.logprob for entry in choice.logprobs.content]
            size += tokens["pixel_values"].nbytes + 8 * tokens["input_ids"].shape[1] + 8 * len(logprobs)
            message = choice.message.model_dump(exclude_none=True)
            calls = [call["id"] for call in message.get("tool_calls") or ()]
            if turn < TURNS - 1:
                messages = [*messages, message, linked(following[turn], calls)]
        return size

    def _render(self, messages: Messages, pictures: dict[str, Any]) -> Any:
        import base64
        import io

        from PIL import Image

        def shown(part: dict[str, Any]) -> dict[str, Any]:
            if part["type"] != "image_url":
                return part
            url = part["image_url"]["url"]
            if url not in pictures:
                data = base64.b64decode(url.partition(",")[2])
                pictures[url] = Image.open(io.BytesIO(data)).convert("RGB")
            return {"type": "image", "image": pictures[url]}

        whole = []
        for message in messages:
            content, calls = message.get("content") or "", message.get("tool_calls")
            changed = {**message, "content": [{"type": "text", "text": content}]}
            if isinstance(content, list):
                changed["content"] = [shown(part) for part in content]
            if calls:
                changed["tool_calls"] = [
                    {
                        **call,
                        "function": {
                            **call["function"],
                            "arguments": json.loads(call["function"]["arguments"]),
                        },
                    }
                    for call in calls
                ]
            whole.append(changed)
        return self.processor.apply_chat_template(
            whole,
            tools=TOOLS,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )


class OursByPart(Ours):
    """mmrender, timed by part, which takes time itself."""

    def __init__(self, directory: str, url: str) -> None:
        from turn_parts import Parts

        super().__init__(directory, url)
        self.parts = Parts()
        self.parts.install()


CONTENDERS: dict[str, Any] = {"mmrender": Ours, "parts": OursByPart, "verifiers": Verifiers, "plain": Plain}


async def measure(name: str, directory: str, url: str, rollouts: int) -> None:
    contender = CONTENDERS[name](directory, url)
    number = 0
    while (await asyncio.to_thread(sys.stdin.readline)).strip() == "go":
        rows = range(number * rollouts, (number + 1) * rollouts)
        openings = [[{"role": "system", "content": SYSTEM}, asked(row, 0)] for row in rows]
        follows = conversations(rows)
        gc.collect()
        gc.freeze()  # what was loaded beforehand is not garbage
        begun, spent = time.perf_counter(), time.process_time()
        sizes = await asyncio.gather(*map(contender.roll_out, openings, follows))
        spent, elapsed = time.process_time() - spent, time.perf_counter() - begun
        record = {"processor_s": spent, "seconds": elapsed, "turns": TURNS * rollouts, "bytes": sum(sizes)}
        if isinstance(contender, OursByPart):
            record["parts"] = contender.parts.take()
        print(json.dumps(record), flush=True)
        number += 1


if __name__ == "__main__":
    asyncio.run(measure(*sys.argv[1:4], int(sys.argv[4])))
