"""Code blocks of the README, the guides and docstrings, and what they find when they run: files and servers.

`python tests/doc_pages.py` lists them: how many a page has, how many run, and where; the rest with the reason.
"""

import ast
import asyncio
import importlib.util
import inspect
import io
import json
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import pybase64
import pytest
from PIL import Image

from mmrender.client.http import HTTPTransport
from mmrender.renderer import Renderer
from mmrender.testing.memory_transport import Answer, Asked, MemoryTransport
from stub_server import dynamo_reply, sglang_reply, vllm_reply

ROOT = Path(__file__).resolve().parents[1]
_PATIENCE = 60
_CONTROLS = (
    "pause",
    "resume",
    "collective_rpc",
    "reset_prefix_cache",
    "reset_encoder_cache",
    "update_weight_version",
)
FENCE = re.compile(r"^( *)```python[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


def load_script(path: str) -> ModuleType:
    """Import a file of the repository that lies in no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def documents() -> Iterator[Path]:
    """Every file that may show code: the README, the guides, notebooks, and modules."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").glob("**/*.md"))
    yield from sorted((ROOT / "examples").glob("*.ipynb"))
    for package in ("mmrender", "codecs/mmcodecs"):
        yield from sorted((ROOT / package).glob("**/*.py"))


def code_blocks(path: Path) -> list[tuple[int, str]]:
    """Line and code of each Python block of a file, or of each code cell of a notebook, in order."""
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        return [(1, "".join(cell["source"])) for cell in cells]
    return [
        (text[: found.start()].count("\n") + 2, textwrap.dedent(found[2])) for found in FENCE.finditer(text)
    ]


PAGES = {str(path.relative_to(ROOT)): blocks for path in documents() if (blocks := code_blocks(path))}


ELSEWHERE = {
    "README.md": "test_readme.py",
    "docs/index.md": "test_readme.py",
    "docs/quickstart.md": "test_readme.py",
    "docs/client.md": "test_client_page.py",
    "docs/training.md": "test_training_page.py",
    "docs/audit.md": "test_pages.py, with what it finds",
    "docs/rollout.md": "test_pages.py, with what it ends in",
    "examples/tour.ipynb": "test_pages.py, as a script",
}
"""Pages whose code has more to show than that it runs, and what runs it."""
LEFT_OUT = {
    "docs/vllm.md": ("llm.generate", "a vLLM in this process; tests/integration runs the like"),
    "mmrender/training/collator.py": ("Trainer(", "accelerate; test_training_page.py runs the like"),
    "mmrender/training/dataset.py": ("describe(", "64 records; test_trajectory_dataset.py runs the like"),
    "docs/use-datasets.md": (
        "multiprocessing_context",
        "workers that are spawned from a file; test_datasets.py runs the like",
    ),
    "docs/use-ray.md": ("/shared/", "a cluster; test_ray.py runs the like"),
    "mmrender/integrations/ray.py": ("ray.data", "a cluster; test_ray.py runs the like"),
}
"""What names the blocks of a page that are not run, and what they need."""
LIBRARIES = {
    name: found[1]
    for name in PAGES
    if (found := re.fullmatch(r"(?:docs/use-|mmrender/integrations/)(\w+)\.(?:md|py)", name))
    and found[1] != "transformers"
}
"""Pages of libraries that need not be installed beside the tests; `make integration-NAME` has each."""


def left_out(name: str) -> list[str]:
    """The blocks of a page that are not run."""
    word, _ = LEFT_OUT.get(name, ("", ""))
    return [code for _, code in PAGES[name] if word and word in code]


def missing_for(name: str) -> str:
    """Why nothing of a page can run here; empty where something can."""
    library = LIBRARIES.get(name, "")
    packages = ("trl", "accelerate", "datasets", "torchvision") if library == "trl" else (library,)
    absent = [each for each in packages if each and importlib.util.find_spec(each) is None]
    if absent:
        return f"needs {', '.join(absent)}; `make integration-{library}` has it"
    return f"needs {LEFT_OUT[name][1]}" if len(left_out(name)) == len(PAGES[name]) else ""


class Page:
    """Runs code blocks one after another in one namespace and one event loop, as a notebook does."""

    def __init__(self, name: str, given: dict[str, Any]) -> None:
        self.name, self.names = name, {"__name__": name, **given}

    def run(self) -> dict[str, Any]:
        """Run every block of the page but those that are left out; return the names that they leave."""
        skipped = left_out(self.name)
        with tempfile.TemporaryDirectory() as scratch, asyncio.Runner() as runner:
            for line, code in PAGES[self.name]:
                if code in skipped:
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


def listing() -> str:
    """The blocks of each page, how many of them run here, and where; then why the others do not."""
    lines, blocks, run = [f"{'blocks':>6} {'run':>4}  page"], 0, 0
    for name, found in PAGES.items():
        skipped, missing = left_out(name), missing_for(name)
        why = missing or (f"{len(skipped)} left out: needs {LEFT_OUT[name][1]}" if skipped else "")
        count = 0 if missing else len(found) - len(skipped)
        where = ELSEWHERE.get(name, "test_pages.py")
        lines.append(f"{len(found):>6} {count:>4}  {name}: {why or where}")
        blocks, run = blocks + len(found), run + count
    return "\n".join([*lines, f"{blocks:>6} {run:>4}  in all"])


if __name__ == "__main__":
    sys.stdout.write(listing() + "\n")
