r"""An inference server for `bench_gateway.py`, in a process of its own: answers by a script, in real tokens.

    python benchmarks/gateway_stub.py MODEL_DIR

It has vLLM's routes for tokens (`/inference/v1/generate`) and for messages (`/v1/chat/completions`, with
`return_token_ids`). Messages are rendered by the model's own chat template. Answer N of the script follows a
prompt with N answers, so all clients get the same tokens. Two of thirty answers have JSON as no template
writes it: `\u00e9` and double spaces.

It prints its port and serves until its standard input closes. `GET /calls` returns what it saw since the last
time: for each call the tokens, whether the prompt begins with the tokens of the call before, and seconds.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from aiohttp import web

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs"), str(ROOT / "benchmarks")]

import msgspec  # noqa: E402
from gateway_contenders import TURNS  # noqa: E402

from mmrender import Renderer  # noqa: E402

PICTURE_EVERY = 3
ODD_TURNS = (4, 19)
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": f"The tool {name}.", "parameters": schema}}
    for name, schema in {
        "note": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        "look": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    }.items()
]


def script() -> list[str]:
    """Return the raw texts of the answers. Each calls a tool, every third one asks for a picture."""
    answers = []
    for turn in range(TURNS):
        name, argument = ("look", "at") if turn % PICTURE_EVERY == 2 else ("note", "text")
        arguments = json.dumps({argument: f"step {turn}: the cow has four legs"})
        if turn in ODD_TURNS:
            arguments = f'{{"{argument}":  "step {turn}: the caf\\u00e9 is open"}}'
        call = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        answers.append(f"I go on with step {turn}, and then look at the next one.\n{call}")
    return answers


class Generate(msgspec.Struct):
    """The members of a request for tokens that are used."""

    token_ids: list[int]
    content_parts: list[dict[str, str]] = []


class Model:
    """Answers prompts, and remembers them."""

    def __init__(self, folder: str) -> None:
        self.renderer = Renderer.from_pretrained(folder, image_backend="pil")
        tokenizer = self.renderer.tokenizer
        stop = self.renderer.get_stop_token_ids()[0]
        self._answers = [[*tokenizer.encode(text), stop] for text in script()]
        self._opening = np.array(tokenizer.encode(self.renderer.profile.generation_prompt)[:2])
        self._calls: list[dict[str, Any]] = []
        self._before: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._lengths: dict[str, int] = {}
        self._placeholder = -1

    def answer(self, prompt_ids: list[int]) -> list[int]:
        """Return the tokens after a prompt."""
        ids = np.array(prompt_ids)
        openings = (ids[:-1] == self._opening[0]) & (ids[1:] == self._opening[1])
        completion = self._answers[(int(openings.sum()) - 1) % TURNS]
        extends = len(ids) > len(self._before) and bool((ids[: len(self._before)] == self._before).all())
        self._before = np.concatenate([ids, completion])
        self._calls.append({"prompt": len(ids), "completion": len(completion), "extends": extends})
        return completion

    def widened(self, request: Generate) -> tuple[list[int], list[dict[str, int]]]:
        """Return a prompt whose pictures come as URLs, with all placeholders of each, and their places."""
        ids: list[int] = []
        places: list[dict[str, int]] = []
        counts = iter([self._placeholders(part["url"]) for part in request.content_parts])
        for token in request.token_ids:
            count = 1
            if token == self._placeholder:
                count = next(counts)
                places.append({"offset": len(ids), "length": count})
            ids += [token] * count
        return ids, places

    def _placeholders(self, url: str) -> int:
        """Return the number of placeholder tokens of a picture."""
        if url not in self._lengths:
            part = {"type": "image_url", "image_url": {"url": url}}
            rendered = self.renderer.render([{"role": "user", "content": [part]}])
            [place] = rendered.multi_modal_data.mm_placeholders["image"]
            self._lengths[url], self._placeholder = place.length, rendered.token_ids[place.offset]
        return self._lengths[url]

    def note_seconds(self, seconds: float) -> None:
        """Note how long the last call took here."""
        self._calls[-1]["seconds"] = seconds

    def take_calls(self) -> list[dict[str, Any]]:
        """Return the calls since the last time."""
        calls, self._calls, self._before = self._calls, [], np.zeros(0, np.int64)
        return calls


def logprobs_of(ids: list[int]) -> list[dict[str, Any]]:
    return [
        {"token": f"token_id:{token}", "token_id": token, "logprob": -0.25, "bytes": None, "top_logprobs": []}
        for token in ids
    ]


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def generate(model: Model, body: bytes) -> dict[str, Any]:
    """Answer tokens with tokens, as vLLM 0.32."""
    request = msgspec.json.decode(body, type=Generate)
    prompt, places = request.token_ids, None
    if request.content_parts:
        prompt, places = model.widened(request)
    ids = model.answer(prompt)
    choice = {
        "index": 0,
        "logprobs": {"content": logprobs_of(ids)},
        "finish_reason": "stop",
        "token_ids": ids,
    }
    answer = {"request_id": "stub", "choices": [choice], "usage": usage(len(prompt), len(ids))}
    if places is not None:
        answer |= {"prompt_token_ids": prompt, "mm_placeholders": {"image": places}}
    return answer


def chat(model: Model, body: bytes) -> dict[str, Any]:
    """Answer messages with a message, as vLLM with a parser for Hermes' calls and `return_token_ids`."""
    request = msgspec.json.decode(body)
    tools = request.get("tools") or None
    prompt = model.renderer.render_ids(request["messages"], tools=tools, add_generation_prompt=True)
    ids = model.answer(prompt)
    parsed = model.renderer.parse_response(ids, tools=tools, prompt_ids=prompt)
    calls = [
        {
            "id": f"chatcmpl-tool-{time.time_ns()}{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for number, call in enumerate(parsed.tool_calls)
    ]
    message = {"role": "assistant", "content": parsed.content or None, "tool_calls": calls}
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "logprobs": {"content": logprobs_of(ids)} if request.get("logprobs") else None,
        "finish_reason": "tool_calls",
        "stop_reason": None,
    }
    answer = {
        "id": f"chatcmpl-{time.time_ns()}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request["model"],
        "choices": [choice],
        "usage": usage(len(prompt), len(ids)),
    }
    if request.get("return_token_ids"):
        choice["token_ids"], answer["prompt_token_ids"] = ids, prompt
    return answer


async def main(folder: str) -> None:
    model = Model(folder)
    models = {"object": "list", "data": [{"id": "stub", "object": "model", "max_model_len": 1 << 18}]}

    def answered(answer: Callable[[Model, bytes], Any]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            body = await request.read()
            begun = time.perf_counter()
            reply = web.Response(
                body=msgspec.json.encode(answer(model, body)), content_type="application/json"
            )
            model.note_seconds(time.perf_counter() - begun)
            return reply

        return handle

    async def plain(_: web.Request) -> web.Response:
        return web.json_response(models)

    async def calls(_: web.Request) -> web.Response:
        return web.json_response(model.take_calls())

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/inference/v1/generate", answered(generate))
    app.router.add_post("/v1/chat/completions", answered(chat))
    app.router.add_get("/v1/models", plain)
    app.router.add_get("/health", plain)
    app.router.add_get("/calls", calls)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
