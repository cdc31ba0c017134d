"""Cost of the engine client.

    python benchmarks/bench_engines.py [--rounds N] [--quick] [--json FILE]

Time per request of a stub engine that answers at its next turn of the event loop, asked directly and through
a client of 8 such engines, with 1, 64 and 512 requests in flight; medians of rounds in which the contenders
take turns. A request has 1,000 prompt tokens and 100 sampled ones, with or without a session or two images.
There is no network; what is measured is processor time, which others on the machine disturb least.
"""

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import time
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
from mmrender.sidecar import MultiModalData, PlaceholderRange  # noqa: E402
from mmrender.testing.scripted_engine import ScriptedEngine  # noqa: E402

IN_FLIGHT = (1, 64, 512)
ENGINES = 8
PROMPT = list(range(1000))
SAMPLED = EngineResponse(list(range(100)), [-0.5] * 100, "stop", Usage(1000, 100))


class Stub(ScriptedEngine):
    """Answers at its next turn."""

    async def complete(self, request: Any, **_: Any) -> EngineResponse:
        await asyncio.sleep(0)
        return SAMPLED


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

    def batch(**more: Any) -> Any:
        return {"prompt_token_ids": [PROMPT], "sampling_params": params, **more}

    return {
        "engine alone": lambda n: stub.generate(batch()),
        "client": lambda n: plain.generate(batch()),
        "client, sessions": lambda n: plain.generate(batch(session_ids=[n // 4])),
        "client, two images": lambda n: plain.generate(batch(multi_modal_data=[sidecar(n)])),
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


def main() -> None:
    parser = argparse.ArgumentParser(description="what the engine client costs")
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
    if args.json is not None:
        figures = {
            "machine": machine(()),
            "seconds_each": costs,
        }
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
