"""Requests whose exchange with a real vLLM was recorded, and how a recording is kept short.

`tests/integration/record_vllm_replies.py` sends them, `tests/unit/test_client_vllm_contract.py` replays what came.
"""

import base64
import hashlib
import io
import json
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from kit import blocks
from mmrender.client.http import encode_json, joined
from mmrender.client.types import EngineRequest
from mmrender.client.vllm_fields import PixelDtype, WireForm, collate_items, item_tensors, layout_of
from mmrender.media.vllm_items import encode_mm_kwargs_item
from mmrender.renderer import Renderer
from mmrender.testing.memory_transport import Answer, Asked
from mmrender.tokens.rendered import RenderedTokens
from stub_server import vllm_reply

DATA = Path(__file__).resolve().parent / "data" / "engines" / "vllm"
GREEDY = {"temperature": 0.0, "max_tokens": 4}
ALTERNATIVES = {**GREEDY, "logprobs": 2}
LONGEST_TEXT = 1000
LAYOUT = layout_of("Qwen3VLForConditionalGeneration")


def text_prompt(renderer: Renderer) -> RenderedTokens:
    return renderer.render([{"role": "user", "content": "hi"}], add_generation_prompt=True)


def one_image(renderer: Renderer, seed: int = 1) -> RenderedTokens:
    return _of_images(renderer, blocks(seed))


def three_images(renderer: Renderer) -> RenderedTokens:
    """The first and the last are the same."""
    return _of_images(renderer, blocks(2), blocks(3, 160, 128), blocks(2))


def _of_images(renderer: Renderer, *images: Image.Image) -> RenderedTokens:
    parts = [{"type": "image", "image": image} for image in images]
    content = [*parts, {"type": "text", "text": "What?"}]
    return renderer.render([{"role": "user", "content": content}], add_generation_prompt=True)


def contract_request(rendered: RenderedTokens, sampling: Any = None) -> EngineRequest:
    return EngineRequest(
        model="tiny",
        prompt_ids=rendered.token_ids,
        sampling_params=sampling or GREEDY,
        request_id="contract",
        multi_modal_data=rendered.multi_modal_data,
        vocab_size=1024,
    )


def info(**changes: Any) -> dict[str, Any]:
    """What a server says of its settings: safe ones, but for the changes."""
    cache: dict[str, Any] = {"mm_processor_cache_gb": 4.0, "mm_processor_cache_type": "lru"}
    runs: dict[str, Any] = {"_api_process_count": 1, "data_parallel_size": 1}
    for name, value in changes.items():
        (cache if name in cache else runs)[name] = value
    return {"vllm_config": {"model_config": {"multimodal_config": cache}, "parallel_config": runs}}


def completion(asked: Asked) -> dict[str, Any]:
    """An answer to any request: one token."""
    ids = asked.json["token_ids"]
    return vllm_reply([7], [-1.5]) | {"usage": {"prompt_tokens": len(ids)}}


class Recalling:
    """A server that processes encoded images, widens as the renderer does, and keeps the last of them.

    Attributes:
        room: Images that it keeps.
        usage: What it counts of a prompt whose images it knows. None for the right number.
        kept: Uuids of the kept ones.
    """

    def __init__(self, *prompts, room=100, usage=None):
        self.prompts, self.room, self.kept, self.usage = prompts, room, [], usage

    def __call__(self, asked):
        if "content_parts" not in asked.json:
            return completion(asked)
        parts = asked.json["content_parts"]
        missing = [number for number, part in enumerate(parts) if "url" not in part]
        missing = [number for number in missing if parts[number]["uuid"] not in self.kept]
        if missing:
            message = f"Cache miss for image at index {missing[0]} but data is not provided."
            return Answer({"error": {"message": message, "code": 400}}, status=400)
        self.kept = [*self.kept, *(part["uuid"] for part in parts)][
            max(0, len(self.kept) + len(parts) - self.room) :
        ]
        (rendered,) = (each for each in self.prompts if len(each.multi_modal_data.spans()) == len(parts))
        places = rendered.multi_modal_data.mm_placeholders["image"]
        if not asked.json.get("return_token_ids"):
            return vllm_reply([7], [-1.5]) | {
                "usage": self.usage or {"prompt_tokens": len(rendered.token_ids)}
            }
        return vllm_reply([7], [-1.5]) | {
            "usage": {"prompt_tokens": len(rendered.token_ids)},
            "prompt_token_ids": rendered.token_ids,
            "mm_placeholders": {"image": [{"offset": p.offset, "length": p.length} for p in places]},
        }


def served(rendered: RenderedTokens, pixels: PixelDtype = "uint8", **changes: Any) -> dict[str, Any]:
    """A render route's answer: what a server that takes these pixels makes of the first image."""
    (item, *_), (place, *_) = (
        rendered.multi_modal_data.mm_items["image"],
        rendered.multi_modal_data.mm_placeholders["image"],
    )
    (elems,) = collate_items(LAYOUT, [item_tensors(item, WireForm(LAYOUT, pixels))])
    for key, change in changes.items():
        elems[key] = change(elems[key]) if key in elems else change
    elems = {key: elem for key, elem in elems.items() if elem is not None}
    ids = rendered.token_ids[: place.offset + place.length]
    return {
        "token_ids": ids,
        "features": {
            "mm_hashes": {"image": ["theirs"]},
            "mm_placeholders": {"image": [{"offset": place.offset, "length": place.length}]},
            "kwargs_data": {"image": [encode_mm_kwargs_item(elems)]},
        },
    }


def to_json(value: Any) -> Any:
    """A value as it is after a way through JSON."""
    return None if value is None else msgspec.json.decode(joined(encode_json(value)))


def digested(value: Any) -> Any:
    """A value with every long text cut to length and digest, and every image to size and digest of its pixels."""
    if isinstance(value, str) and value.startswith("data:image/png;base64,") and len(value) > 100:
        # Releases of zlib pack the same pixels into other bytes.
        image = Image.open(io.BytesIO(base64.b64decode(value.partition(",")[2])))
        pixels = hashlib.sha256(np.asarray(image).tobytes()).hexdigest()
        return f"{image.mode} {image.width}x{image.height} sha256:{pixels}"
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        return f"sha256:{hashlib.sha256(value.encode()).hexdigest()}:{len(value)}"
    if isinstance(value, dict):
        return {key: digested(member) for key, member in value.items()}
    if isinstance(value, list):
        return (
            f"{len(value)} times {value[0]}" if len(value) > 1000 else [digested(member) for member in value]
        )
    return value


_INFO = {
    "model_config": {
        "multimodal_config": ("mm_processor_cache_gb", "mm_processor_cache_type", "mm_device_do_normalize")
    },
    "parallel_config": ("_api_process_count", "data_parallel_size"),
}


def _picked(value: Any, keys: Any) -> Any:
    if isinstance(keys, tuple):
        return {key: value[key] for key in keys}
    return {key: _picked(value[key], inner) for key, inner in keys.items()}


def shortened(exchange: dict[str, Any]) -> dict[str, Any]:
    """An exchange without what makes it long: texts of a request, and settings that nobody reads."""
    reply = exchange["reply"]
    if exchange["path"].startswith("/server_info") and exchange["status"] == 200:
        reply = {"vllm_config": _picked(reply["vllm_config"], _INFO)}
    if exchange["path"].endswith("/render") and exchange["status"] == 200:
        reply = {**reply, "features": _squeezed(reply["features"])}
    return {**exchange, "request": digested(exchange["request"]), "reply": reply}


def _squeezed(features: dict[str, Any]) -> dict[str, Any]:
    """Features whose item texts are packed, since pictures of few colours repeat themselves."""
    pack = lambda text: "zlib:" + base64.b64encode(zlib.compress(text.encode(), 9)).decode()  # noqa: E731
    data = {modality: [pack(text) for text in texts] for modality, texts in features["kwargs_data"].items()}
    return {**features, "kwargs_data": data}


def recorded(name: str) -> list[dict[str, Any]]:
    """The exchanges of a recording, replies as they came."""
    exchanges = json.loads((DATA / f"{name}.json").read_text())
    for exchange in exchanges:
        features = exchange["reply"].get("features") if isinstance(exchange["reply"], dict) else None
        for texts in (features or {}).get("kwargs_data", {}).values():
            texts[:] = [_unpacked(text) for text in texts]
    return exchanges


def _unpacked(text: str) -> str:
    return zlib.decompress(base64.b64decode(text.removeprefix("zlib:"))).decode()
