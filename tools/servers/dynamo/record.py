"""Record what Dynamo answers to each form of request, for tests that run without it.

Usage: `python tools/servers/dynamo/record.py BASE_URL MODEL OUT [CLOSED_URL]`, with the project's own
environment, a server of `serve.py` at BASE_URL, its model directory MODEL, and at CLOSED_URL one of
`serve.py ... --no-generate-route`.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from PIL import Image

from mmrender import Renderer
from mmrender.client.vllm_fields import WireForm, layout_for
from mmrender.client.vllm_images import features_of
from mmrender.media.item import tensor_specs
from servers.recording import Recorder

CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
FIELDS = ["completion_token_ids", "prompt_token_ids", "engine_data"]
PROMPT = [10, 11, 12]


def chat(*modes: str, nvext: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A request as the backend sends it; `modes` are what the worker is to leave out or do."""
    annotations = {"annotations": list(modes)} if modes else {}
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": ""}],
        "stream": False,
        "logprobs": True,
        "temperature": 0.0,
        "max_completion_tokens": 4,
        **fields,
        "nvext": {**annotations, "token_data": PROMPT, "extra_fields": FIELDS, **(nvext or {})},
    }


def generate(*modes: str, **fields: Any) -> dict[str, Any]:
    """A request of vLLM's route as the backend sends it."""
    worker = {"worker": list(modes)} if modes else {}
    sampling = {"temperature": 0.0, "max_tokens": 4, "logprobs": 0}
    return {
        "model": "tiny",
        "request_id": "recorded",
        "sampling_params": sampling,
        "token_ids": PROMPT,
        **worker,
        **fields,
    }


def record_chat(recorder: Recorder) -> None:
    """Every form of an answer of the chat route."""
    whole = recorder.record("text", CHAT, chat())
    recorder.record("no_engine_data", CHAT, chat("no_engine_data"))
    only_content = chat("no_engine_data")
    del only_content["nvext"]["extra_fields"]
    recorder.record("only_content", CHAT, only_content)
    recorder.record("empty", CHAT, chat("empty"))
    recorder.record("short_logprobs", CHAT, chat("short_logprobs"))
    recorder.record("abort", CHAT, chat("abort"))
    extra = {"extra_fields": [*FIELDS, "routed_experts"]}
    recorder.record("routed_experts", CHAT, chat("routed_experts", nvext=extra))
    only_worker = chat("routed_experts")
    recorder.record("routed_experts_of_worker", CHAT, only_worker)
    hints = {"cache_salt": "salt", "agent_hints": {"priority": -3}}
    recorder.record("alternatives", CHAT, chat(nvext=hints, top_logprobs=2))
    stop = whole["nvext"]["completion_token_ids"][1]
    recorder.record("stop_token", CHAT, chat(stop_token_ids=[stop]))
    recorder.record("stop_string", CHAT, chat(stop=["low"]))
    recorder.record("models", "/v1/models")


def record_generate(recorder: Recorder, model: Path) -> None:
    """Every form of an answer of vLLM's route."""
    recorder.record("generate_text", GENERATE, generate())
    recorder.record("generate_abort", GENERATE, generate("abort"))
    recorder.record("generate_empty", GENERATE, generate("empty"))
    renderer = Renderer.from_pretrained(model, image_backend="pil")  # which needs no torch
    pixels = np.random.default_rng(0).integers(0, 256, (128, 128, 3), np.uint8)
    content = [{"type": "image", "image": Image.fromarray(pixels)}, {"type": "text", "text": "What?"}]
    rendered = renderer.render([{"role": "user", "content": content}], add_generation_prompt=True)
    placed = rendered.multi_modal_data.spans(len(rendered.token_ids))
    forms = {entry.item.identity: WireForm(layout_for(tensor_specs(entry.item)), "uint8") for entry in placed}
    image = {"token_ids": rendered.token_ids, **features_of(placed, forms)}
    recorder.record("image", GENERATE, generate(**image))
    recorder.record("image_routed_experts", GENERATE, generate("routed_experts", **image))


def record_errors(recorder: Recorder) -> None:
    """Every form of an error reply."""
    recorder.record("error_worker", CHAT, chat("raise"))
    recorder.record("error_http", CHAT, chat("http_error"))
    recorder.record("error_nvext", CHAT, chat(nvext={"unknown": 1}))
    recorder.record("error_parameter", CHAT, chat(unknown=1))
    recorder.record("error_model", CHAT, {**chat(), "model": "other"})
    recorder.record("error_too_long", CHAT, chat(nvext={"token_data": [5] * 2048}))
    recorder.record("error_generate", GENERATE, generate("raise"))


def main() -> None:
    """Record everything."""
    base_url, model, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(base_url, out)
    record_chat(recorder)
    record_generate(recorder, model)
    record_errors(recorder)
    if len(sys.argv) > 4:
        Recorder(sys.argv[4], out).record("error_closed", GENERATE, generate())


if __name__ == "__main__":
    main()
