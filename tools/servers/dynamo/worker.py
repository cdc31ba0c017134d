"""A Dynamo worker that samples from a Transformers model, and so makes the frontend's answers real.

Usage: `VENV/bin/python worker.py MODEL --python PYTHON --log FILE`, with an environment of
`../environments.py`. PYTHON has torch and Transformers, which Dynamo's environment need not have;
`model_process.py` runs there.

The worker does what Dynamo's own vLLM worker does with a request: it reads `stop_conditions` and
`sampling_options` of chat requests, and `extra_args.vllm_tito` of `/inference/v1/generate`; it answers a
token at a time, with logprobs where they are asked for, and with `engine_data` on the last chunk where
`nvext` asks. Every request is appended to FILE as a line of JSON, and a cancelled one as `{"cancelled": id}`.

What a worker may also do is chosen by `nvext.annotations`, or by `worker` at the top of a request to
`/inference/v1/generate`: `no_engine_data`, `empty`, `raise`, `short_logprobs`, `http_error`, `abort`, and
`routed_experts`, since the model has no experts: these are counted up, and of the right shape.
"""

import argparse
import asyncio
import base64
import itertools
import json
import math
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from dynamo.common.backend.engine import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.run import run
from dynamo.common.backend.worker import WorkerConfig
from dynamo.llm.exceptions import HttpError

CONTEXT_LENGTH = 2048
LAYERS, TOP_K = 2, 2
# What the worker does not do; a request that asks for it must not be answered as if it did.
NOT_SERVED = (
    "best_of",
    "frequency_penalty",
    "guided_decoding",
    "length_penalty",
    "logit_bias",
    "min_p",
    "presence_penalty",
    "repetition_penalty",
    "structured_outputs",
    "top_k",
    "top_p",
    "use_beam_search",
)


class Model:
    """The model process and the requests that wait for it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._answers: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._ids = itertools.count(1)
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, python: str, model_dir: str) -> "Model":
        """Start the process and wait until the model is loaded."""
        script = Path(__file__).with_name("model_process.py")
        process = await asyncio.create_subprocess_exec(
            python,
            str(script),
            model_dir,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
        )
        assert process.stdout is not None
        if not await process.stdout.readline():
            raise RuntimeError("the model process ended before it was ready")
        return cls(process)

    async def sample(self, request: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield what the model process says of a request; cancels it where the caller leaves early."""
        number = next(self._ids)
        answers = self._answers[number] = asyncio.Queue()
        await self._send({"id": number, **request})
        ended = False
        try:
            while not ended:
                answer = await answers.get()
                ended = "finish" in answer or "error" in answer
                yield answer
        finally:
            if not ended:
                await self._send({"cancel": number})
            del self._answers[number]

    async def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        await self._process.stdin.drain()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            answer = json.loads(line)
            if (waiting := self._answers.get(answer["id"])) is not None:
                waiting.put_nowait(answer)
        for waiting in self._answers.values():
            waiting.put_nowait({"error": "the model process ended"})

    async def stop(self) -> None:
        """End the process, which ends with its input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        await self._reader


class Asked:
    """One request, from either route, as the model process is asked."""

    def __init__(self, request: Mapping[str, Any], eos_token_ids: list[int]) -> None:
        self.token_ids: list[int] = list(request["token_ids"])
        extra = request.get("extra_args") or {}
        tito = extra.get("vllm_tito")
        if tito is not None:
            self._read_tito(tito)
        else:
            self._read_chat(request, extra.get("nvext") or {})
        if not self._ignore_eos:
            self._stop_token_ids.update(eos_token_ids)

    def _read_chat(self, request: Mapping[str, Any], nvext: Mapping[str, Any]) -> None:
        stops, options = request["stop_conditions"], request["sampling_options"]
        self._refuse(options)
        self.max_tokens = stops["max_tokens"]
        self._temperature, self._seed = options["temperature"], options["seed"]
        self._ignore_eos = bool(stops["ignore_eos"])
        self._stop_token_ids = {*(stops["stop_token_ids"] or ()), *(stops["stop_token_ids_hidden"] or ())}
        self.logprobs: int | None = request["output_options"]["logprobs"]
        self.wants_engine_data = "engine_data" in (nvext.get("extra_fields") or ())
        self.modes = set(request.get("annotations") or ())
        self._features = None

    def _read_tito(self, tito: Mapping[str, Any]) -> None:
        options = tito["sampling_params"]
        self._refuse(options)
        if tito.get("content_parts"):
            raise ValueError("content_parts are not served")
        self.max_tokens = options.get("max_tokens")
        self._temperature, self._seed = options.get("temperature"), options.get("seed")
        self._ignore_eos = bool(options.get("ignore_eos"))
        self._stop_token_ids = set(options.get("stop_token_ids") or ())
        self.logprobs = options.get("logprobs")
        self.wants_engine_data = True  # the frontend takes router choices from there
        self.modes = set(tito.get("worker") or ())
        self._features = tito.get("features")

    def _refuse(self, options: Mapping[str, Any]) -> None:
        asked = [name for name in NOT_SERVED if options.get(name) is not None]
        if asked:
            raise ValueError(f"not served: {', '.join(asked)}")

    def for_model(self) -> dict[str, Any]:
        """The request as the model process takes it.

        Raises:
            ValueError: The prompt leaves no room for a token.
        """
        room = CONTEXT_LENGTH - len(self.token_ids)
        if room < 1:
            raise ValueError(
                f"the prompt of {len(self.token_ids)} tokens does not fit into {CONTEXT_LENGTH} tokens"
            )
        sampling = {
            "max_tokens": min(self.max_tokens or room, room),
            "temperature": 1.0 if self._temperature is None else self._temperature,
            "seed": self._seed,
            "stop_token_ids": sorted(self._stop_token_ids),
            "top_logprobs": self.logprobs or 0,
        }
        return {"token_ids": self.token_ids, "sampling": sampling, "features": self._features}


def counted_experts(tokens: int) -> dict[str, Any]:
    """Router choices of `tokens` tokens, uint8 of shape `(tokens, LAYERS, TOP_K)`."""
    shape = (tokens, LAYERS, TOP_K)
    # Modulo a prime, so that rows that were moved, cut or transposed differ.
    data = (np.arange(math.prod(shape)) % 251).astype(np.uint8).tobytes()
    return {"data": base64.b64encode(data).decode(), "shape": list(shape), "start": 0, "dtype": "uint8"}


class TinyEngine(LLMEngine):  # type: ignore[misc]
    """Answers the frontend's requests from the model."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._model: Model | None = None
        self._eos_token_ids: list[int] = []

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple["TinyEngine", WorkerConfig]:
        """Read the command line."""
        parser = argparse.ArgumentParser()
        parser.add_argument("model")
        parser.add_argument("--python", default=sys.executable)
        parser.add_argument("--log", required=True)
        parser.add_argument("--no-generate-route", action="store_true")
        args = parser.parse_args(argv)
        config = WorkerConfig(
            namespace="dynamo",
            component="backend",
            endpoint="generate",
            model_name=args.model,
            served_model_name="tiny",
            endpoint_types="chat,completions",
            discovery_backend="file",
            request_plane="tcp",
            response_plane="tcp",
            event_plane="zmq",
            enable_kv_routing=False,
        )
        return cls(args), config

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the model and say what is served."""
        generation = json.loads((Path(self._args.model) / "generation_config.json").read_text())
        self._eos_token_ids = list(generation["eos_token_id"])
        self._model = await Model.start(self._args.python, self._args.model)
        return EngineConfig(
            model=self._args.model,
            served_model_name="tiny",
            runtime_data={} if self._args.no_generate_route else {"vllm_inference_v1_generate": True},
            llm=LlmRegistration(
                context_length=CONTEXT_LENGTH,
                kv_cache_block_size=16,
                total_kv_blocks=1024,
                max_num_seqs=8,
                max_num_batched_tokens=CONTEXT_LENGTH,
            ),
        )

    async def generate(self, request: Any, context: Any) -> AsyncIterator[dict[str, Any]]:
        """Yield a chunk for each sampled token, the last with the reason of its end."""
        self._write(request)
        ended = False
        try:
            async for chunk in self._chunks(request):
                # The frontend says that its caller is gone, or closes this generator.
                if context.is_stopped():
                    return
                ended = "finish_reason" in chunk
                yield chunk
        except Exception:
            ended = True
            raise
        finally:
            if not ended:
                self._write({"cancelled": context.id()})

    async def _chunks(self, request: Any) -> AsyncIterator[dict[str, Any]]:
        asked = Asked(request, self._eos_token_ids)
        if "raise" in asked.modes:
            raise ValueError("this worker was asked to fail")
        if "http_error" in asked.modes:
            raise HttpError(400, f"The decoder prompt (length {len(asked.token_ids)}) is longer than allowed")
        if "empty" in asked.modes:
            yield {"token_ids": [], "index": 0, **self._end(asked, [], [], "stop")}
            return
        ids: list[int] = []
        logprobs: list[float] = []
        held: dict[str, Any] | None = None  # the last chunk also says why sampling ended, so one is held back
        assert self._model is not None
        async for answer in self._model.sample(asked.for_model()):
            if "error" in answer:
                raise ValueError(answer["error"])
            if "finish" in answer:
                # Dynamo's workers say so of what their engine aborted.
                reason = "cancelled" if "abort" in asked.modes else answer["finish"]
                yield {**(held or {}), **self._end(asked, ids, logprobs, reason)}
                return
            if held is not None:
                yield held
            ids.append(answer["token"])
            logprobs.append(answer["logprob"])
            held = self._chunk(asked, answer)

    def _chunk(self, asked: Asked, answer: Mapping[str, Any]) -> dict[str, Any]:
        chunk: dict[str, Any] = {"token_ids": [answer["token"]], "index": 0}
        if asked.logprobs is not None:
            chunk["log_probs"] = [answer["logprob"]]
            sampled = [answer["token"], answer["logprob"]]
            # vLLM puts the sampled token first, and then the best ones.
            best = [sampled, *(pair for pair in answer["top"] if pair[0] != answer["token"])]
            chunk["top_logprobs"] = [
                [
                    {"rank": rank, "token_id": token, "token": f"token_id:{token}", "logprob": logprob}
                    for rank, (token, logprob) in enumerate(best, 1)
                ]
            ]
        return chunk

    def _end(self, asked: Asked, ids: list[int], logprobs: list[float], reason: str) -> dict[str, Any]:
        prompt = len(asked.token_ids)
        end: dict[str, Any] = {
            "finish_reason": reason,
            "completion_usage": {
                "prompt_tokens": prompt,
                "completion_tokens": len(ids),
                "total_tokens": prompt + len(ids),
            },
        }
        data: dict[str, Any] = {}
        if asked.wants_engine_data and "no_engine_data" not in asked.modes:
            data = {"completion_token_ids": ids, "prompt_token_ids": asked.token_ids, "finished": True}
            if asked.logprobs is not None:
                data["completion_logprobs"] = logprobs[: -1 if "short_logprobs" in asked.modes else None]
        if "routed_experts" in asked.modes:
            data["routed_experts"] = counted_experts(prompt + len(ids) - 1)
        return {**end, "engine_data": data} if data else end

    def _write(self, entry: Any) -> None:
        with open(self._args.log, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry, default=str) + "\n")

    async def cleanup(self) -> None:
        """End the model process."""
        if self._model is not None:
            await self._model.stop()
            self._model = None


if __name__ == "__main__":
    run(TinyEngine)
