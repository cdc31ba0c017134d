r"""An inference server for `bench_gateway.py`, in a process of its own: answers by a script, in real tokens.

    python benchmarks/gateway_stub.py MODEL_DIR

Its routes are those of `mmrender.testing.agents.upstream`: vLLM's for tokens, and for messages, which are
rendered by the model's own chat template. Answer N of the script follows a prompt with N answers, so all
clients get the same tokens. Two of thirty answers have JSON as no template writes it: `\u00e9` and double
spaces.

It prints its port and serves until its standard input closes. `GET /calls` returns what it saw since the last
time: for each call the tokens, whether the prompt begins with the tokens of the call before, and seconds.
"""

import asyncio
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from aiohttp import web

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs"), str(ROOT / "benchmarks")]

from gateway_contenders import TURNS  # noqa: E402

from mmrender import Renderer  # noqa: E402
from mmrender.testing.agents.upstream import Upstream  # noqa: E402

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


class Model:
    """Answers prompts by the script."""

    def __init__(self, renderer: Renderer) -> None:
        tokenizer = renderer.tokenizer
        stop = renderer.get_stop_token_ids()[0]
        self._answers = [[*tokenizer.encode(text), stop] for text in script()]
        self._opening = tuple(tokenizer.encode(renderer.profile.generation_prompt)[:2])

    def answer(self, prompt_ids: list[int]) -> list[int]:
        """Return the tokens after a prompt."""
        openings = sum(pair == self._opening for pair in pairwise(prompt_ids))
        return self._answers[(openings - 1) % TURNS]


def take_calls(upstream: Upstream) -> list[dict[str, Any]]:
    """Return the calls since the last time."""
    calls: list[dict[str, Any]] = []
    before = [-1]
    for exchange, seconds in zip(upstream.exchanges, upstream.seconds, strict=True):
        prompt = exchange.prompt_ids
        counts = {"prompt": len(prompt), "completion": len(exchange.completion_ids), "seconds": seconds}
        calls.append({**counts, "extends": prompt[: len(before)] == before})
        before = exchange.ids
    upstream.exchanges.clear()
    upstream.seconds.clear()
    return calls


async def main(folder: str) -> None:
    renderer = Renderer.from_pretrained(folder, image_backend="pil")
    upstream = Upstream(renderer, Model(renderer).answer)

    async def calls(_: web.Request) -> web.Response:
        return web.json_response(take_calls(upstream))

    app = upstream.app()
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
