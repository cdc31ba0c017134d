"""A pool of renderers under load: throughput, one large conversation, the event loop's lateness, peak memory.

    python benchmarks/bench_pool.py [MODEL_DIR] [--backend pil|torch] [--rounds N] [--json FILE]

Every conversation holds pictures of its own as JPEG data URLs, and media cache and memo are empty before each
run, so every picture is fetched from base64, decoded, identified, resized and stored. Contenders take turns;
the tables give medians of rounds.

- throughput: all conversations at once, through `arender`, by number of workers. The peer, PyPI `renderers`,
  has no pool in 0.1.12: its renderer runs on as many threads of a plain executor.
- one conversation: the latency of a single one with many pictures, by number of media threads.
- lateness: a ticker that should wake every millisecond notes how late it is while conversations are rendered
  inline, each in `asyncio.to_thread`, or through the pool.
- memory: peak resident memory above that before the run, in a process of its own; what is rendered stays in
  the media cache, so the least possible is not 0.

torch uses one thread, so that what is compared is the threads given here.
"""

import argparse
import asyncio
import base64
import gc
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs")]

from measure import machine, shown_ms, shown_ratio, table  # noqa: E402
from render_cases import make_image  # noqa: E402
from render_contenders import Peer, Reference  # noqa: E402

from mmrender import Renderer  # noqa: E402
from mmrender.media.pixels import ImageBackend  # noqa: E402
from mmrender.renderer import RendererPool  # noqa: E402
from mmrender.testing.tiny_model import build_tiny_model  # noqa: E402

SHARED_MODEL = ROOT.parent / "shared" / "models" / "qwen3_vl"
PACKAGES = ("numpy", "pillow", "tokenizers", "torch", "transformers", "renderers")
WORKERS = (1, 2, 4)
MEDIA_THREADS = (0, 1, 3)
TICK_S = 0.001
WAYS = ("idle", "inline", "to_thread", "pool")


def data_url(width: int, height: int, seed: int) -> str:
    """A JPEG of its own for every seed."""
    buffer = io.BytesIO()
    make_image(width, height, seed).save(buffer, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def conversation(images: int, size: int, seed: int) -> list[dict[str, Any]]:
    """User turns with a picture each, answered but for the last."""
    messages: list[dict[str, Any]] = []
    for turn in range(images):
        url = data_url(size, size, 1000 * seed + turn)
        parts = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": f"Picture {turn} of {seed}?"},
        ]
        messages += [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": f"It shows pattern {seed * turn}."},
        ]
    return messages[:-1]


class Load:
    """A renderer that remembers nothing between runs, and conversations for it."""

    def __init__(self, directory: Path, backend: ImageBackend, count: int, images: int, size: int) -> None:
        self.directory = directory
        self.renderer = Renderer.from_pretrained(directory, image_backend=backend, memo_bytes=0)
        self.conversations = [conversation(images, size, seed) for seed in range(count)]
        self.renderer.render(conversation(1, 64, 999_999), add_generation_prompt=True)  # compiled and probed

    def forget(self) -> None:
        """Drop all pictures."""
        assert self.renderer.media is not None
        self.renderer.media.cache.clear()

    async def through(self, pool: Renderer) -> list[Any]:
        return await asyncio.gather(
            *[pool.arender(messages, add_generation_prompt=True) for messages in self.conversations]
        )

    async def to_thread(self) -> list[Any]:
        render = self.renderer.render
        return await asyncio.gather(
            *[
                asyncio.to_thread(render, messages, add_generation_prompt=True)
                for messages in self.conversations
            ]
        )

    async def inline(self) -> None:
        for messages in self.conversations:
            self.renderer.render(messages, add_generation_prompt=True)
            await asyncio.sleep(0)


def interleaved(contenders: dict[str, Callable[[], object]], load: Load, rounds: int) -> dict[str, float]:
    """Median wall seconds of each contender."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, call in contenders.items():
            load.forget()
            start = time.perf_counter()
            call()
            if turn:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def throughput(load: Load, peer: Peer | None, rounds: int) -> dict[str, float]:
    """Conversations per second."""
    contenders: dict[str, Callable[[], object]] = {}
    pools = {count: RendererPool(load.renderer, workers=count, media_threads=0) for count in WORKERS}
    for count, pool in pools.items():
        contenders[f"pool {count}"] = lambda pool=pool: asyncio.run(load.through(pool))
    if peer is not None:
        for count in WORKERS:
            contenders[f"peer {count}"] = lambda count=count: _peer_run(peer, load, count)
    seconds = interleaved(contenders, load, rounds)
    for pool in pools.values():
        pool.close()
    return {name: len(load.conversations) / value for name, value in seconds.items()}


def _peer_run(peer: Peer, load: Load, threads: int) -> None:
    peer.forget()
    with ThreadPoolExecutor(threads) as executor:
        list(executor.map(peer.render, load.conversations))


def check_peer(peer: Peer, load: Load) -> None:
    """Refuse to compare with one that does not compute the same tokens."""
    for messages in load.conversations[:2]:
        ours = load.renderer.render(messages, add_generation_prompt=True).token_ids
        if list(peer.render(messages).token_ids) != ours:
            raise SystemExit("the peer's token ids differ: what is timed would not be the same work")


def latency(load: Load, messages: list[dict[str, Any]], rounds: int) -> dict[str, float]:
    """Seconds of one conversation with many pictures, by media threads."""
    pools = {count: RendererPool(load.renderer, workers=1, media_threads=count) for count in MEDIA_THREADS}
    contenders = {
        str(count): lambda pool=pool: asyncio.run(pool.arender(messages)) for count, pool in pools.items()
    }
    seconds = interleaved(contenders, load, rounds)
    for pool in pools.values():
        pool.close()
    return seconds


async def lateness(work: Callable[[], Awaitable[object]]) -> list[float]:
    """Seconds by which each tick came late while the work was done."""
    late: list[float] = []

    async def tick() -> None:
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            late.append(time.perf_counter() - due)

    ticker = asyncio.create_task(tick())
    await asyncio.sleep(10 * TICK_S)
    late.clear()
    await work()
    ticker.cancel()
    # A tick that the work held up to its very end is late too.
    await asyncio.gather(ticker, return_exceptions=True)
    return late


def stalls(load: Load, workers: int, rounds: int) -> dict[str, dict[str, float]]:
    """Median over rounds of the middle, 99th percentile and worst lateness, and of the time of the whole."""
    pool = RendererPool(load.renderer, workers=workers, media_threads=0)
    works: dict[str, Callable[[], Awaitable[object]]] = {
        "idle": lambda: asyncio.sleep(1.0),
        "inline": load.inline,
        "to_thread": load.to_thread,
        "pool": lambda: load.through(pool),
    }
    found: dict[str, list[tuple[float, ...]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            load.forget()
            start = time.perf_counter()
            late = sorted(asyncio.run(lateness(works[way])))
            elapsed = time.perf_counter() - start
            found[way].append((late[len(late) // 2], late[int(0.99 * (len(late) - 1))], late[-1], elapsed))
    pool.close()
    names = ("median", "p99", "worst", "elapsed")
    return {
        way: dict(zip(names, map(statistics.median, zip(*rows, strict=True)), strict=True))
        for way, rows in found.items()
    }


def peak_bytes(load: Load, way: str, workers: int) -> int:
    """Resident bytes at the peak above those before; for a process of its own, on Linux."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text(
        "5"
    )  # the peak so far, which building the load has set, is forgotten
    before = _resident("VmRSS")
    if way == "pool":
        with RendererPool(load.renderer, workers=workers, media_threads=0) as pool:
            asyncio.run(load.through(pool))
    else:
        asyncio.run(load.to_thread() if way == "to_thread" else load.inline())
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def memory(options: argparse.Namespace, directory: Path) -> dict[str, int]:
    """Peak of each way."""
    found = {}
    for way in WAYS[1:]:
        command = [sys.executable, __file__, str(directory), "--backend", options.backend, "--peak", way]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found[way] = int(done.stdout)
    return found


def report(result: dict[str, Any]) -> str:
    """The tables."""
    rates = result["throughput"]
    rows = [
        [
            f"{count} workers" if count > 1 else "1 worker",
            f"{rates[f'pool {count}']:.1f}",
            shown_ratio(rates[f"pool {count}"], rates["pool 1"]),
            f"{rates[f'peer {count}']:.1f}" if f"peer {count}" in rates else "-",
            shown_ratio(rates[f"pool {count}"], rates.get(f"peer {count}")),
        ]
        for count in WORKERS
    ]
    parts = [table(["conversations/s", "pool", "of 1 worker", "peer", "pool/peer"], rows)]
    times = result["latency"]
    rows = [
        [f"{count} media threads", shown_ms(times[count]), shown_ratio(times["0"], times[count])]
        for count in times
    ]
    parts.append(table(["one conversation, ms", "time", "faster"], rows))
    rows = [[way, *[shown_ms(value) for value in result["lateness"][way].values()]] for way in WAYS]
    parts.append(table(["event loop late by, ms", "median", "p99", "worst", "whole run"], rows))
    rows = [[way, f"{peak / 1e6:.0f}"] for way, peak in result["memory"].items()]
    parts.append(table(["peak memory, MB", ""], rows))
    return "\n\n".join(parts)


def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Everything."""
    load = Load(directory, options.backend, options.count, images=3, size=768)
    reference = Reference(directory, options.backend)
    peer = Peer(directory, reference) if reference.missing is None else None
    missing = reference.missing if peer is None else peer.missing
    if peer is not None and missing is None:
        check_peer(peer, load)
    else:
        peer = None
        print(f"no peer: {missing}")
    return {
        "machine": machine(PACKAGES),
        "backend": options.backend,
        "conversations": options.count,
        "throughput": throughput(load, peer, options.rounds),
        "latency": latency(load, conversation(8, 1024, 7), options.rounds),
        "lateness": stalls(load, options.workers, max(3, options.rounds // 2)),
        "memory": memory(options, directory),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, help="a Qwen3-VL directory (default: shared or tiny)")
    parser.add_argument("--backend", choices=("pil", "torch"), default="pil")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--count", type=int, default=24, help="conversations at once")
    parser.add_argument("--workers", type=int, default=2, help="workers for lateness and memory")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peak", choices=WAYS[1:], help=argparse.SUPPRESS)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        directory = options.model or (
            SHARED_MODEL if SHARED_MODEL.is_dir() else build_tiny_model(Path(folder) / "tiny", weights=False)
        )
        if options.peak:
            load = Load(directory, options.backend, count=32, images=2, size=1536)
            print(peak_bytes(load, options.peak, options.workers))
            return
        result = measure(options, directory)
    print(f"{result['machine']['cpu']}, {result['machine']['cores']} cores, {options.backend} back end\n")
    print(report(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
