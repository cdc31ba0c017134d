"""A Transformers model behind a pipe: what the Dynamo worker asks to be sampled.

Usage: `python model_process.py MODEL`, with an interpreter that has torch, transformers and mmrender.

Each line of standard input is a JSON object, `{"id", "token_ids", "sampling", "features"}` or
`{"cancel": id}`; `features` has the form of vLLM's `/inference/v1/generate`. Each line of standard output is
one of

- `{"ready": true}`, once;
- `{"id", "token", "logprob", "top": [[token, logprob], ...]}` for each sampled token;
- `{"id", "finish": "stop" | "length" | "cancelled"}` or `{"id", "error": text}`, last.

Requests are served one after the other, each with a forward pass of its own. Logprobs are those of the raw
logits, as in vLLM: before temperature.
"""

import json
import queue
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from mmrender.media.vllm_items import decode_mm_kwargs_item

GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters; `stop_token_ids` end the completion and belong to it."""

    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    top_logprobs: int = 0


def write(message: Mapping[str, Any]) -> None:
    """Send one message."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


class Sampler(LogitsProcessor):  # type: ignore[misc]
    """Chooses every token itself, tells of it, and leaves `generate` no other choice."""

    def __init__(self, request_id: Any, sampling: Sampling) -> None:
        self.request_id = request_id
        self.sampling = sampling
        self.token = -1
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        logprobs = torch.log_softmax(scores[0].float(), dim=-1)
        self.token = self._choose(logprobs)
        best = torch.topk(logprobs, self.sampling.top_logprobs)
        write(
            {
                "id": self.request_id,
                "token": self.token,
                "logprob": logprobs[self.token].item(),
                "top": list(zip(best.indices.tolist(), best.values.tolist(), strict=True)),
            }
        )
        only = torch.full_like(scores, float("-inf"))
        only[0, self.token] = 0.0
        return only

    def _choose(self, logprobs: Any) -> int:
        if self.sampling.temperature < GREEDY_BELOW:
            return int(logprobs.argmax())
        weights = torch.softmax(logprobs / self.sampling.temperature, dim=-1)
        return int(torch.multinomial(weights, 1, generator=self._generator))


class Stop(StoppingCriteria):  # type: ignore[misc]
    """Ends a completion at a stop token, or when its request was cancelled."""

    def __init__(self, sampler: Sampler, cancelled: set[Any]) -> None:
        self._sampler = sampler
        self._cancelled = cancelled

    @property
    def reason(self) -> str:
        """Why sampling ended."""
        if self._sampler.request_id in self._cancelled:
            return "cancelled"
        return "stop" if self._sampler.token in self._sampler.sampling.stop_token_ids else "length"

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return torch.full((len(input_ids),), self.reason != "length")


class Pixels:
    """Reads the `features` of a request as the model's keyword arguments."""

    def __init__(self, model_dir: Path) -> None:
        settings = json.loads((model_dir / "preprocessor_config.json").read_text())
        self._scale = settings["rescale_factor"]
        # A patch lies channel by channel: time, height and width of each vary fastest.
        per_channel = settings["temporal_patch_size"] * settings["patch_size"] ** 2
        self._mean = torch.tensor(settings["image_mean"]).repeat_interleave(per_channel)
        self._std = torch.tensor(settings["image_std"]).repeat_interleave(per_channel)

    def inputs(self, token_ids: Sequence[int], features: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments of the model.

        Raises:
            ValueError: An item lies elsewhere than in the prompt, or has no data.
        """
        patches, grids = [], []
        types = torch.zeros(1, len(token_ids), dtype=torch.int64)
        ranges = features["mm_placeholders"]["image"]
        for where, text in zip(ranges, features["kwargs_data"]["image"], strict=True):
            if text is None:
                raise ValueError("this worker keeps no item, and one came without data")
            item = decode_mm_kwargs_item(text)
            patches.append(self._normalized(torch.tensor(item["pixel_values"].data)))
            grids.append(torch.tensor(item["image_grid_thw"].data))
            stop = where["offset"] + where["length"]
            if stop > len(token_ids):
                raise ValueError("a placeholder range goes beyond the prompt")
            types[0, where["offset"] : stop] = 1
        return {
            "pixel_values": torch.cat(patches),
            "image_grid_thw": torch.stack(grids),
            "mm_token_type_ids": types,
        }

    def _normalized(self, patches: Any) -> Any:
        """Float patches as they are; raw bytes as the model's processor would have normalised them."""
        if patches.dtype != torch.uint8:
            return patches.float()
        return (patches.float() * self._scale - self._mean) / self._std


class ModelProcess:
    """Serves requests in the order in which they come."""

    def __init__(self, model_dir: Path) -> None:
        config = AutoConfig.from_pretrained(model_dir)
        self._model = AutoModelForImageTextToText.from_pretrained(
            model_dir, config=config, dtype=torch.float32
        )
        self._model.eval()
        self._pixels = Pixels(model_dir)
        self._cancelled: set[Any] = set()
        self._requests: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def read(self) -> None:
        """Take messages until the pipe ends."""
        for line in sys.stdin:
            message = json.loads(line)
            if "cancel" in message:
                self._cancelled.add(message["cancel"])
            else:
                self._requests.put(message)
        self._requests.put(None)

    def serve(self) -> None:
        """Answer every request."""
        threading.Thread(target=self.read, daemon=True).start()
        write({"ready": True})
        while (request := self._requests.get()) is not None:
            try:
                self._answer(request)
            except Exception as error:  # noqa: BLE001 - a bad request must not end the server
                write({"id": request["id"], "error": f"{type(error).__name__}: {error}"})
            self._cancelled.discard(request["id"])

    def _answer(self, request: Mapping[str, Any]) -> None:
        given = request["sampling"]
        sampling = Sampling(**{**given, "stop_token_ids": frozenset(given["stop_token_ids"])})
        sampler = Sampler(request["id"], sampling)
        stop = Stop(sampler, self._cancelled)
        ids = torch.tensor([request["token_ids"]])
        media = self._pixels.inputs(request["token_ids"], request["features"]) if request["features"] else {}
        with torch.inference_mode():
            self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                **media,
                max_new_tokens=sampling.max_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=StoppingCriteriaList([stop]),
            )
        write({"id": request["id"], "finish": stop.reason})


if __name__ == "__main__":
    torch.set_num_threads(1)
    ModelProcess(Path(sys.argv[1])).serve()
