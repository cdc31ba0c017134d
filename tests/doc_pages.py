"""Code blocks of the README, the guides and docstrings, and what they find when they run: files and servers."""

import ast
import asyncio
import inspect
import io
import re
import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pybase64
import pytest
from PIL import Image

from client_engines import dynamo_reply, sglang_reply, vllm_reply
from mmrender.client.http import HTTPTransport
from mmrender.renderer import Renderer
from mmrender.testing.memory_transport import Answer, Asked, MemoryTransport

ROOT = Path(__file__).resolve().parents[1]
_PATIENCE = 60
_CONTROLS = ("pause", "resume", "collective_rpc", "reset_prefix_cache", "update_weight_version")
FENCE = re.compile(r"^( *)```python[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


def documents() -> Iterator[Path]:
    """Every file that may show code: the README, the guides, and modules."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").glob("**/*.md"))
    for package in ("mmrender", "codecs/mmcodecs"):
        yield from sorted((ROOT / package).glob("**/*.py"))


def code_blocks(path: Path) -> list[tuple[int, str]]:
    """Line and code of each Python block of a file, in order."""
    text = path.read_text("utf-8")
    return [
        (text[: found.start()].count("\n") + 2, textwrap.dedent(found[2])) for found in FENCE.finditer(text)
    ]


PAGES = {str(path.relative_to(ROOT)): blocks for path in documents() if (blocks := code_blocks(path))}


class Page:
    """Runs code blocks one after another in one namespace and one event loop, as a notebook does."""

    def __init__(self, name: str, given: dict[str, Any]) -> None:
        self.name, self.names = name, {"__name__": name, **given}

    def run(self, *, leave_out: str = "") -> dict[str, Any]:
        """Run every block of the page without those that name `leave_out`; return the names that they leave."""
        with tempfile.TemporaryDirectory() as scratch, asyncio.Runner() as runner:
            for line, code in PAGES[self.name]:
                if leave_out and leave_out in code:
                    continue
                tree = ast.parse(code.replace("/tmp/", f"{scratch}/"), self.name)
                ast.increment_lineno(tree, line - 1)
                made = compile(tree, self.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                if made.co_flags & inspect.CO_COROUTINE:
                    runner.run(asyncio.wait_for(eval(made, self.names), _PATIENCE))
                else:
                    exec(made, self.names)
        return self.names


NAMES = ("MODEL", "Qwen/Qwen3-VL-8B-Instruct")
"""Names that pages have for a model."""


def lay_out(folder: Path, directory: Path) -> None:
    """Put the pictures and the models that pages name into a folder."""
    for name in NAMES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(directory)
    for name in ("photo.jpg", "chart.png"):
        shutil.copy(str(files("mmrender.testing").joinpath("data", name)), folder / name)


def stand_in(patch: pytest.MonkeyPatch, renderer: Renderer) -> MemoryTransport:
    """Give the tiny model's renderer for every name of a model, and a server in memory for every URL."""
    load = Renderer.from_pretrained.__func__  # type: ignore[attr-defined]

    def from_pretrained(cls: type[Renderer], name: Any, **options: Any) -> Renderer:
        if name in NAMES and not options:
            return renderer  # loaded once
        return load(cls, name, **{"image_backend": "pil", **options})

    patch.setattr(Renderer, "from_pretrained", classmethod(from_pretrained))
    server = serving(renderer)
    patch.setattr(HTTPTransport, "request", lambda self, *args, **options: server.request(*args, **options))
    return server


def serving(renderer: Renderer) -> MemoryTransport:
    """A server that speaks as vLLM, SGLang and Dynamo do, and always samples the same answer."""
    ids = [*renderer.tokenizer.encode("A cow."), renderer.tokenizer.token_id("<|im_end|>")]
    logprobs = [-0.5] * len(ids)
    models = [{"id": name, "max_model_len": 4096} for name in ("my-model", *NAMES)]

    def counted(reply: Any, prompt: list[int]) -> Any:
        return reply | {"usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}}

    def vllm(asked: Asked) -> Any:
        return counted(vllm_reply(ids, logprobs), asked.json["token_ids"])

    def sglang(asked: Asked) -> Any:
        return sglang_reply(ids, logprobs) | {"prompt_token_ids": asked.json["input_ids"]}

    def dynamo(asked: Asked) -> Any:
        reply = dynamo_reply(ids, logprobs)
        reply["nvext"]["engine_data"]["prompt_token_ids"] = asked.json["nvext"]["token_data"]
        return counted(reply, asked.json["nvext"]["token_data"])

    def processed(asked: Asked) -> Any:
        (part,) = asked.json["messages"][0]["content"]
        data = pybase64.b64decode(part["image_url"]["url"].partition(",")[2])
        count = Image.open(io.BytesIO(data)).width * 2 // 5
        features = {
            "mm_hashes": {"image": ["0" * 64]},
            "mm_placeholders": {"image": [{"offset": 1, "length": count}]},
            "kwargs_data": {"image": [pybase64.b64encode(data).decode()]},
        }
        return Answer({"token_ids": [7, *[8] * count, 9], "features": features})

    routes = {
        "GET /v1/models": {"data": models},
        "POST /inference/v1/generate": vllm,
        "POST /generate": sglang,
        "POST /v1/chat/completions": dynamo,
        "POST /v1/chat/completions/render": processed,
        **{f"POST /{control}": {} for control in _CONTROLS},
    }
    return MemoryTransport(routes)
