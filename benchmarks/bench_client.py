"""The client by itself: processor time of a request, how long it holds up the event loop, bytes of a rollout.

    python benchmarks/bench_client.py [MODEL_DIR] [--rounds N] [--quick] [--json FILE]

- requests: 1, 32 and 256 at once, of 4 KB (tokens) and 5 MB (tokens and an image as base64), against a stub
  server in a process of its own that answers 256 tokens with logprobs. mmrender's `generate`, the `generate`
  of PyPI `renderers` (which uses openai's client), and openai's chat call take turns. Processor time is that
  of the client's process, all threads. Lateness is how late a ticker wakes that should every millisecond.
- bytes: what is sent in each turn of a rollout with a picture of 1024² in every turn, in the three ways in
  which `VLLMBackend` sends images.

Medians of rounds; contenders take turns within each.
"""

import argparse
import asyncio
import base64
import contextlib
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs")]

import msgspec  # noqa: E402
from client_contenders import Load, OpenAI, Ours, Peer  # noqa: E402
from client_stub import generate_answer  # noqa: E402
from measure import machine, shown_ms, shown_ratio, table  # noqa: E402
from render_cases import make_image  # noqa: E402

from mmrender import Renderer, generate  # noqa: E402
from mmrender.client.http import encode_json, joined  # noqa: E402
from mmrender.client.transport import JSONText, Reply  # noqa: E402
from mmrender.client.types import Generation  # noqa: E402
from mmrender.client.vllm import VLLMBackend  # noqa: E402
from mmrender.errors import EngineStatusError  # noqa: E402
from mmrender.testing.tiny_model import build_tiny_model  # noqa: E402
from mmrender.tokens.rendered import RenderedTokens  # noqa: E402

SHARED_MODEL = ROOT.parent / "shared" / "models" / "qwen3_vl"
SHARED_IMAGES = ROOT.parent / "shared" / "images"
PACKAGES = ("aiohttp", "msgspec", "openai", "httpx", "renderers")
CONCURRENCY = (1, 32, 256)
SIZES = {"4 KB": 0, "5 MB": 5_000_000}
REQUESTS = {"4 KB": {1: 200, 32: 512, 256: 768}, "5 MB": {1: 20, 32: 64, 256: 256}}
PROMPT, COMPLETION = 800, 256
TICK_S = 0.001
MODES = ("features", "hash_only", "content_parts")


@contextlib.contextmanager
def stub_server() -> Iterator[str]:
    """The server's URL while it runs."""
    command = [sys.executable, str(ROOT / "benchmarks" / "client_stub.py"), str(PROMPT), str(COMPLETION)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.stdin.close()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()


def make_load(size: str, renderer: Renderer) -> Load:
    """Make a prompt of random tokens that ends as prompts do, and an image as base64."""
    begin = renderer.tokenizer.encode(renderer.profile.generation_prompt)
    ids = [random.Random(index).randrange(100, 900) for index in range(PROMPT - len(begin))] + begin
    image = base64.b64encode(os.urandom(SIZES[size] * 3 // 4)).decode() if SIZES[size] else None
    return Load(ids, image, COMPLETION, JSONText(f'"{image}"'.encode()))


async def run_load(contender: Any, url: str, load: Load, concurrency: int, total: int) -> dict[str, float]:
    """Send `total` requests, `concurrency` at a time, over connections that are open."""
    call, close = contender.open(url)
    await asyncio.gather(*[call(replace(load, image=None)) for _ in range(concurrency)])
    await call(load)
    late: list[float] = []
    left = total

    async def work() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            logprobs = await call(load)
            if len(logprobs) != COMPLETION:
                raise SystemExit(f"{contender.name} lost logprobs: what is timed would not be the same work")

    async def tick() -> None:
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            late.append(time.perf_counter() - due)

    ticker = asyncio.create_task(tick())
    await asyncio.sleep(5 * TICK_S)
    late.clear()
    gc.collect()
    gc.freeze()  # what was loaded beforehand is not garbage
    begun, spent = time.perf_counter(), time.process_time()
    await asyncio.gather(*[work() for _ in range(concurrency)])
    spent, elapsed = time.process_time() - spent, time.perf_counter() - begun
    ticker.cancel()
    await asyncio.gather(ticker, return_exceptions=True)
    await close()
    late.sort()
    return {
        "cpu": spent / total,
        "wall": elapsed / total,
        "late_p50": late[len(late) // 2],
        "late_p99": late[int(0.99 * (len(late) - 1))],
        "late_max": late[-1],
    }


def measure_requests(
    contenders: list[Any], url: str, loads: Mapping[str, Load], rounds: int, quick: bool
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for size, load in loads.items():
        for concurrency in CONCURRENCY[:2] if quick else CONCURRENCY:
            total = REQUESTS[size][concurrency] // (4 if quick else 1)
            rows: dict[str, list[dict[str, float]]] = {contender.name: [] for contender in contenders}
            for turn in range(rounds):
                for contender in contenders[turn % len(contenders) :] + contenders[: turn % len(contenders)]:
                    done = asyncio.run(run_load(contender, url, load, concurrency, max(total, concurrency)))
                    rows[contender.name].append(done)
            found[f"{size} x {concurrency}"] = {
                name: {key: statistics.median(row[key] for row in values) for key in values[0]}
                for name, values in rows.items()
            }
    return found


class Scale:
    """A transport that weighs requests and answers as a server would; nothing leaves the process."""

    base_url = "http://scale"

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.expected: tuple[list[int], dict[str, Any]] = ([], {})

    async def request(
        self, method: str, path: str, *, json: Any = None, headers: Mapping[str, str] | None = None, **_: Any
    ) -> Reply:
        if path == "/v1/models":
            return Reply(200, {}, b'{"data": [{"id": "stub", "max_model_len": 1048576}]}')
        if method != "POST":
            raise EngineStatusError("no such route", status=404)
        self.bytes.append(len(joined(encode_json(json))))
        ids, placeholders = self.expected
        answer = generate_answer(len(ids), 32)
        if "content_parts" in json:
            answer["prompt_token_ids"], answer["mm_placeholders"] = ids, placeholders
        return Reply(200, {}, msgspec.json.encode(answer))

    async def stream(self, method: str, path: str, **_: Any) -> AsyncIterator[bytes]:
        raise NotImplementedError
        yield b""

    async def aclose(self) -> None:
        pass


def pictures(turns: int) -> tuple[list[Any], str]:
    """Photographs of 1024² where there are any, each turn's its own; else noise over a gradient."""
    from PIL import Image, ImageEnhance

    files = sorted(SHARED_IMAGES.glob("*.jpg")) if SHARED_IMAGES.is_dir() else []
    if not files:
        return [make_image(1024, 1024, turn) for turn in range(turns)], "noise over a gradient"
    photos = [
        Image.open(file).convert("RGB").resize((1024, 1024), Image.Resampling.LANCZOS) for file in files
    ]
    changed = [
        ImageEnhance.Brightness(photos[turn % len(photos)]).enhance(1 - turn / 100) for turn in range(turns)
    ]
    return changed, "photographs"


async def roll_out(renderer: Renderer, mode: Any, images: list[Any]) -> list[int]:
    """Bytes of each turn's request."""
    scale = Scale()
    backend = VLLMBackend(images=mode, pixels="uint8", trust_cache=True)
    turn: Generation | None = None
    for image in images:
        parts = [{"type": "image", "image": image}, {"type": "text", "text": "And this?"}]
        messages = [{"role": "user", "content": parts}]
        if turn is None:
            prompt: RenderedTokens | None = renderer.render(messages, add_generation_prompt=True)
        else:
            prompt = renderer.bridge_to_next_turn(
                turn.prompt_ids,
                turn.completion_ids,
                messages,
                previous_multi_modal_data=turn.multi_modal_data,
            )
        if prompt is None:
            raise SystemExit(f"the model's template was not bridged: {renderer.why_not_bridged}")
        ranges = prompt.multi_modal_data.mm_placeholders["image"]
        placeholders = {"image": [{"offset": found.offset, "length": found.length} for found in ranges]}
        scale.expected = prompt.token_ids, placeholders
        turn = await generate(
            client=scale,
            renderer=renderer,
            model="stub",
            backend=backend,
            prompt_attribution=prompt,
            sampling_params={"max_tokens": 32},
        )
    return scale.bytes


def measure_bytes(renderer: Renderer, turns: int) -> dict[str, Any]:
    images, kind = pictures(turns)
    sent = {mode: asyncio.run(roll_out(renderer, mode, images)) for mode in MODES}
    return {"pictures": kind, "turns": turns, "bytes": sent}


def report(result: dict[str, Any]) -> str:
    names = list(next(iter(result["requests"].values())))
    parts = []
    for key, heading in (
        ("cpu", "processor time of a request, ms"),
        ("late_max", "event loop late by at most, ms"),
        ("late_p99", "event loop late by, 99th percentile, ms"),
        ("wall", "elapsed per request, ms"),
    ):
        rows = [
            [
                case,
                *[shown_ms(found[name][key]) for name in names],
                *[shown_ratio(found[name][key], found["mmrender"][key]) for name in names[1:]],
            ]
            for case, found in result["requests"].items()
        ]
        parts.append(table([heading, *names, *[f"{name}/ours" for name in names[1:]]], rows))
    sent = result["rollout"]["bytes"]
    rows = [
        [
            mode,
            *[f"{sent[mode][turn] / 1e6:.2f}" for turn in (0, len(sent[mode]) // 2, -1)],
            f"{sum(sent[mode]) / 1e6:.1f}",
        ]
        for mode in MODES
    ]
    turns = result["rollout"]["turns"]
    heading = f"MB sent, {result['rollout']['pictures']}"
    parts.append(table([heading, "turn 1", f"turn {turns // 2 + 1}", f"turn {turns}", "all"], rows))
    return "\n\n".join(parts)


def make_contenders(directory: Path, renderer: Renderer) -> list[Any]:
    contenders: list[Any] = [Ours(renderer)]
    for build in (lambda: Peer(directory), OpenAI):
        try:
            contenders.append(build())
        except ImportError as error:
            print(f"left out: {error}")
    return contenders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, help="a Qwen3-VL directory (default: shared or tiny)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=20, help="of the rollout")
    parser.add_argument("--quick", action="store_true", help="fewer requests, at most 32 at once, one round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, stub_server() as url:
        directory = options.model or (
            SHARED_MODEL if SHARED_MODEL.is_dir() else build_tiny_model(Path(folder) / "tiny", weights=False)
        )
        renderer = Renderer.from_pretrained(directory, image_backend="pil")
        contenders = make_contenders(directory, renderer)
        loads = {size: make_load(size, renderer) for size in SIZES}
        rounds = 1 if options.quick else options.rounds
        result = {
            "machine": machine(PACKAGES),
            "rounds": rounds,
            "requests": measure_requests(contenders, url, loads, rounds, options.quick),
            "rollout": measure_bytes(renderer, 4 if options.quick else options.turns),
        }
    print(f"{result['machine']['cpu']}, {result['machine']['cores']} cores\n")
    print(report(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
