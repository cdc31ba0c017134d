"""What the engine client costs, and how it spreads sessions.

    python benchmarks/bench_engines.py [--rounds N] [--quick] [--json FILE]

- overhead: time per request of a stub engine that answers at its next turn of the event loop, asked
  directly and through a client of 8 such engines, with 1, 64 and 512 requests in flight; medians of rounds in
  which the contenders take turns. A request has 1,000 prompt tokens and 100 sampled ones, with or without a
  session, two images or a limit of 4 requests per engine, beyond which requests queue. There is no network;
  what is measured is processor time, which others on the machine disturb least.
- routing: 10,000 sessions over 8 engines: largest share over the mean, and the share of sessions that move
  when a ninth engine is added, against hashing modulo the number of engines. One ninth has to move.
"""

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from measure import machine, table  # noqa: E402

from mmrender.client.types import EngineResponse, Usage  # noqa: E402
from mmrender.engines.client import InferenceEngineClient  # noqa: E402
from mmrender.engines.policy import ClientPolicy  # noqa: E402
from mmrender.engines.ring import HashRing, session_text  # noqa: E402
from mmrender.engines.scripted import ScriptedEngine  # noqa: E402
from mmrender.engines.work import joined, split  # noqa: E402
from mmrender.spans import MultiModalData, PlaceholderRange  # noqa: E402

IN_FLIGHT = (1, 64, 512)
ENGINES = 8
SESSIONS = 10_000
PROMPT = list(range(1000))
SAMPLED = EngineResponse(list(range(100)), [-0.5] * 100, "stop", Usage(1000, 100))


class Stub(ScriptedEngine):
    """Answers at its next turn."""

    async def generate(self, input_batch: Any) -> Any:
        work = split(input_batch)
        await asyncio.sleep(0)
        return joined(work, [SAMPLED] * len(work), None)


def sidecar(seed: int) -> MultiModalData:
    """Two images, of which four requests share each."""
    names = [f"image{seed // 4}-{index}" for index in range(2)]
    items: list[Any] = [SimpleNamespace(identity=name, modality="image", nbytes=1) for name in names]
    return MultiModalData.of((PlaceholderRange(4 + 8 * i, 4), item) for i, item in enumerate(items))


Ask = Callable[[int], Awaitable[Any]]


def asks() -> dict[str, Ask]:
    """The contenders."""
    params = {"max_tokens": 200, "temperature": 1.0}
    stub = Stub("direct")
    plain = InferenceEngineClient([Stub(f"engine{i}") for i in range(ENGINES)])
    bounded = InferenceEngineClient(
        [Stub(f"engine{i}") for i in range(ENGINES)], policy=ClientPolicy(concurrency=4)
    )

    def batch(**more: Any) -> Any:
        return {"prompt_token_ids": [PROMPT], "sampling_params": params, **more}

    return {
        "engine alone": lambda n: stub.generate(batch()),
        "client": lambda n: plain.generate(batch()),
        "client, sessions": lambda n: plain.generate(batch(session_ids=[n // 4])),
        "client, two images": lambda n: plain.generate(batch(multi_modal_data=[sidecar(n)])),
        "client, 4 per engine": lambda n: bounded.generate(batch()),
    }


async def seconds_each(ask: Ask, in_flight: int, requests: int) -> float:
    """Time of one request, `in_flight` of them under way at any moment."""
    numbers = iter(range(requests))

    async def worker() -> None:
        for number in numbers:
            await ask(number)

    gc.collect()
    begun = time.process_time()
    await asyncio.gather(*[worker() for _ in range(in_flight)])
    return (time.process_time() - begun) / requests


async def overhead(rounds: int, requests: int) -> dict[str, dict[int, float]]:
    """Median seconds of one request, by contender and requests in flight."""
    contenders = asks()
    times: dict[str, dict[int, list[float]]] = {name: {n: [] for n in IN_FLIGHT} for name in contenders}
    for ask in contenders.values():
        await seconds_each(ask, 8, 64)  # warm up
    for _ in range(rounds):
        for in_flight in IN_FLIGHT:
            for name, ask in contenders.items():
                times[name][in_flight].append(await seconds_each(ask, in_flight, max(requests, in_flight)))
    return {name: {n: statistics.median(each) for n, each in row.items()} for name, row in times.items()}


def routing(virtual_nodes: int) -> dict[str, float]:
    """Balance and movement of sessions."""
    names = [f"http://10.0.0.{index}:8000" for index in range(ENGINES + 1)]
    sessions = [f"trajectory-{index}" for index in range(SESSIONS)]

    def owners(count: int) -> list[str | None]:
        ring = HashRing(names[:count], virtual_nodes)
        return [ring.owner(session, set(names[:count])) for session in sessions]

    before, after = owners(ENGINES), owners(ENGINES + 1)
    moved = sum(old != new for old, new in zip(before, after, strict=True))
    astray = sum(old != new and new != names[ENGINES] for old, new in zip(before, after, strict=True))
    largest = max(Counter(before).values())
    return {
        "largest_over_mean": largest * ENGINES / SESSIONS,
        "moved_share": moved / SESSIONS,
        "moved_between_old_engines": astray / SESSIONS,
    }


def modulo() -> dict[str, float]:
    """The same for a hash modulo the number of engines."""
    import hashlib

    hashes = [
        int(hashlib.sha256(session_text(f"trajectory-{index}").encode()).hexdigest(), 16)
        for index in range(SESSIONS)
    ]
    largest = max(Counter(value % ENGINES for value in hashes).values())
    moved = sum(value % ENGINES != value % (ENGINES + 1) for value in hashes)
    return {"largest_over_mean": largest * ENGINES / SESSIONS, "moved_share": moved / SESSIONS}


def main() -> None:
    parser = argparse.ArgumentParser(description="what the engine client costs, and how it spreads sessions")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    rounds, requests = (2, 200) if args.quick else (args.rounds, 2000)

    costs = asyncio.run(overhead(rounds, requests))
    direct = costs["engine alone"]
    rows = [
        [name, *[f"{1e6 * (row[n] - (0 if name == 'engine alone' else direct[n])):.0f}" for n in IN_FLIGHT]]
        for name, row in costs.items()
    ]
    print(f"overhead: microseconds a request over the engine alone, {requests} requests, {rounds} rounds")
    print(table(["in flight", *map(str, IN_FLIGHT)], rows))

    default = ClientPolicy().virtual_nodes
    spread = {nodes: routing(nodes) for nodes in (64, default, 2048)}
    naive = modulo()
    must = 1 / (ENGINES + 1)
    print(f"\nrouting: {SESSIONS} sessions over {ENGINES} engines, then {ENGINES + 1} ({must:.1%} must move)")
    print(
        table(
            ["", "largest / mean", "moved"],
            [
                *[
                    [f"ring, {nodes} places", f"{row['largest_over_mean']:.3f}", f"{row['moved_share']:.1%}"]
                    for nodes, row in spread.items()
                ],
                ["hash modulo engines", f"{naive['largest_over_mean']:.3f}", f"{naive['moved_share']:.1%}"],
            ],
        )
    )
    if args.json is not None:
        figures = {
            "machine": machine(("xxhash",)),
            "seconds_each": costs,
            "routing": {"ring": spread, "modulo": naive},
        }
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
