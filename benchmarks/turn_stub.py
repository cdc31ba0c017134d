"""A vLLM server as its documentation starts it, for `bench_turn.py`: without metrics and developer routes.

    python benchmarks/turn_stub.py MODEL_DIR

It serves `/inference/v1/generate`, `/v1/chat/completions/render`, `/v1/chat/completions` and `/v1/models`.
Like vLLM it keeps images by uuid, answers 400 to a uuid that it does not know, widens placeholders and shows
the prompt that it made. Answer N of a conversation follows N answers: every other one calls a tool. All
images are taken to have the size of `turn_cases.SIDE`.

It prints its port and serves until its standard input closes. `GET /taken` returns the requests and bytes of
each route since the last time.
"""

import asyncio
import base64
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs")]

import msgspec  # noqa: E402
import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402
from turn_cases import SIDE, answers  # noqa: E402

from mmrender import Renderer  # noqa: E402
from mmrender.client.vllm_fields import WireForm, collate_items, item_tensors, layout_of  # noqa: E402
from mmrender.media.vllm_items import encode_mm_kwargs_item  # noqa: E402

_LENGTH = re.compile(rb"content-length: *(\d+)", re.I)
ARCHITECTURE = "Qwen3VLForConditionalGeneration"


class Model:
    """Answers requests. `seen` holds the uuids of the images that it was sent."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        tokenizer = renderer.tokenizer
        stop = renderer.get_stop_token_ids()[0]
        self._texts = answers()
        self._ids = [[*tokenizer.encode(text), stop] for text in self._texts]
        self._opening = tokenizer.encode(renderer.profile.generation_prompt)[:2]
        self._placeholder = tokenizer.token_id("<|image_pad|>")
        blank = Image.new("RGB", (SIDE, SIDE), (127, 127, 127))
        rendered = renderer.render([{"role": "user", "content": [{"type": "image", "image": blank}]}])
        self._width = rendered.multi_modal_data.mm_placeholders["image"][0].length
        self._seen: set[str] = set()

    def generate(self, body: Any) -> tuple[int, Any]:
        """Answer `/inference/v1/generate`."""
        ids = body["token_ids"]
        array = np.asarray(ids)
        opened = (array[:-1] == self._opening[0]) & (array[1:] == self._opening[1])
        completion = self._ids[(int(opened.sum()) - 1) % len(self._ids)]
        places = None
        if parts := body.get("content_parts"):
            for number, part in enumerate(parts):
                if part.get("url") is None and part.get("uuid") not in self._seen:
                    message = f"Cache miss for image at index {number} but data is not provided."
                    return 400, {"error": {"message": message, "type": "BadRequestError", "code": 400}}
            self._seen.update(part["uuid"] for part in parts if "uuid" in part)
            marks = np.flatnonzero(array == self._placeholder)
            starts = marks + np.arange(len(marks)) * (self._width - 1)
            places = {"image": [{"offset": int(start), "length": self._width} for start in starts]}
            ids = np.repeat(array, np.where(array == self._placeholder, self._width, 1)).tolist()
        content = [
            {
                "token": f"token_id:{token}",
                "token_id": token,
                "logprob": -0.25 - index / 1024,
                "rank": 1,
                "top_logprobs": [],
            }
            for index, token in enumerate(completion)
        ]
        choice = {
            "index": 0,
            "logprobs": {"content": content},
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": completion,
            "routed_experts": None,
            "weight_versions": [{"version": "default", "start": 0, "end": len(completion)}],
        }
        return 200, {
            "request_id": f"generate-tokens-{body.get('request_id')}",
            "choices": [choice],
            "usage": _usage(len(ids), len(completion)),
            "prompt_token_ids": ids if body.get("return_token_ids") else None,
            "mm_placeholders": places if body.get("return_token_ids") else None,
        }

    def chat(self, body: Any) -> tuple[int, Any]:
        """Answer `/v1/chat/completions`."""
        number = sum(message["role"] == "assistant" for message in body["messages"]) % len(self._ids)
        text, _, call = self._texts[number].partition("<tool_call>\n")
        message: dict[str, Any] = {"role": "assistant", "content": text.strip()}
        if call:
            spelled = json.loads(call.removesuffix("\n</tool_call>"))
            function = {"name": spelled["name"], "arguments": json.dumps(spelled["arguments"])}
            message["tool_calls"] = [{"id": f"call_{number}", "type": "function", "function": function}]
        content: list[dict[str, Any]] = [
            {"token": f"token_id:{token}", "logprob": -0.25 - index / 1024, "bytes": None, "top_logprobs": []}
            for index, token in enumerate(self._ids[number])
        ]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": {"content": content},
            "finish_reason": "tool_calls" if call else "stop",
        }
        usage = _usage(1000, len(content))
        return 200, {
            "id": "stub",
            "object": "chat.completion",
            "created": 1,
            "model": "stub",
            "choices": [choice],
            "usage": usage,
        }

    def render(self, body: Any) -> tuple[int, Any]:
        """Answer `/v1/chat/completions/render` as a server that takes uint8 levels."""
        url = body["messages"][0]["content"][0]["image_url"]["url"]
        image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
        rendered = self._renderer.render([{"role": "user", "content": [{"type": "image", "image": image}]}])
        data = rendered.multi_modal_data
        (item,), (place,) = data.mm_items["image"], data.mm_placeholders["image"]
        layout = layout_of(ARCHITECTURE)
        (elems,) = collate_items(layout, [item_tensors(item, WireForm(layout, "uint8"))])
        features = {
            "mm_hashes": {"image": [item.identity]},
            "mm_placeholders": {"image": [{"offset": place.offset, "length": place.length}]},
            "kwargs_data": {"image": [encode_mm_kwargs_item(elems)]},
        }
        return 200, {"token_ids": rendered.token_ids, "features": features}


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class Exchange(asyncio.Protocol):
    """One connection: a request at a time."""

    model: Model
    taken: dict[str, tuple[int, int]]

    def __init__(self) -> None:
        self._data = bytearray()
        self._start, self._size = 0, -1
        self._path = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        if self._size < 0:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._data[:end])
            length = _LENGTH.search(head)
            self._path = head.split(b" ", 2)[1].partition(b"?")[0].decode()
            self._start, self._size = end + 4, int(length[1]) if length else 0
        if len(self._data) < self._start + self._size:
            return
        body = memoryview(self._data)[self._start : self._start + self._size]
        status, answer = self.answer(self._path, body)
        size = self._size
        del body
        self._data, self._size = bytearray(), -1
        if self._path != "/taken":
            count, total = self.taken.get(self._path, (0, 0))
            self.taken[self._path] = count + 1, total + size
        text = msgspec.json.encode(answer)
        head = b"HTTP/1.1 %d Is\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self._transport.write(head % (status, len(text)) + text)

    def answer(self, path: str, body: memoryview) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {
                "object": "list",
                "data": [{"id": "stub", "object": "model", "max_model_len": 1 << 20}],
            }
        if path == "/taken":
            taken = dict(self.taken)
            self.taken.clear()
            return 200, taken
        routes = {
            "/inference/v1/generate": self.model.generate,
            "/v1/chat/completions": self.model.chat,
            "/v1/chat/completions/render": self.model.render,
        }
        if path not in routes:
            return 404, {"detail": "Not Found"}
        return routes[path](msgspec.json.decode(body))


async def main(directory: str) -> None:
    Exchange.model = Model(Renderer.from_pretrained(directory, image_backend="pil"))
    Exchange.taken = {}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Exchange, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
