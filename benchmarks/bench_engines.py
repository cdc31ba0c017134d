"""Cost of the engine client, and of a server that hangs.

    python benchmarks/bench_engines.py [--part cost|hung] [--rounds N] [--quick] [--json FILE]

`cost`: time per request of a stub engine that answers at its next turn of the event loop, asked directly and
through a client of 8 such engines, with 1, 64 and 512 requests in flight; medians of rounds in which the
contenders take turns. A request has 1,000 prompt tokens and 100 sampled ones, with or without a session or
two images. There is no network; what is measured is processor time, which others disturb least.

`hung`: 64 stub servers over HTTP, in a process of their own, that answer after 100 ms, with one request in
flight at each. Latencies of requests to 63 of them, with all well and with the 64th hung, in rounds that take
turns. Then, with the 64th hung and not yet known to hang, the time of a pause, an update of the weights and
a resumption, and of the same once it is known; the time from the cancellation of a pause to its end; and the
time until the 63 have answered after that.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs"), str(ROOT / "tests")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np  # noqa: E402
from measure import machine, table  # noqa: E402

from mmrender.client.types import EngineResponse, Usage  # noqa: E402
from mmrender.engines.client import InferenceEngineClient  # noqa: E402
from mmrender.engines.http_engine import HTTPEngine  # noqa: E402
from mmrender.engines.interface import new_request  # noqa: E402
from mmrender.sidecar import MultiModalData, PlaceholderRange  # noqa: E402
from scripted_engine import ScriptedEngine  # noqa: E402

IN_FLIGHT = (1, 64, 512)
ENGINES = 8
SERVERS, SERVICE_S, PAUSE_S = 64, 0.1, 2.0
STEPS = ("pause", "update", "resume")
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


# --- a server that hangs ---


class Stubs:
    """Stub servers in a process of their own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.urls = [f"http://127.0.0.1:{port}" for port in json.loads(self._read())]

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def tell(self, command: str, number: int) -> None:
        """Let a server `hang`, or `wake` it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command} {number}\n")
        self._process.stdin.flush()
        self._read()


@contextlib.contextmanager
def stubs(count: int) -> Iterator[Stubs]:
    """Serve while the block runs."""
    script = ROOT / "benchmarks" / "engines_stub.py"
    command = [sys.executable, str(script), str(count), str(SERVICE_S), str(len(PROMPT)), "100"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Stubs(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


def sessions_of(client: InferenceEngineClient) -> list[str]:
    """A session for each server, in their order, that hashes to it."""
    homes: dict[str, str] = {}
    names = (f"session{number}" for number in range(1_000_000))
    while len(homes) < len(client.engines):
        name = next(names)
        homes.setdefault(client._pool.begin(name, "").order[0].name, name)
    return [homes[engine.name] for engine in client.engines]


async def latencies(client: InferenceEngineClient, sessions: list[str], requests: int) -> list[float]:
    """Seconds of requests to all servers but the last, one in flight at each of all."""
    taken: list[float] = []
    request = new_request(PROMPT, {"max_tokens": 200})

    async def worker(session: str) -> None:
        for _ in range(requests):
            begun = time.perf_counter()
            await client.complete(request, session_id=session)
            taken.append(time.perf_counter() - begun)

    stuck = asyncio.create_task(client.complete(request, session_id=sessions[-1]))
    await asyncio.gather(*map(worker, sessions[:-1]))
    stuck.cancel()
    await asyncio.gather(stuck, return_exceptions=True)
    return taken


async def seconds_of(call: Awaitable[Any]) -> float:
    begun = time.perf_counter()
    await call
    return time.perf_counter() - begun


async def hung(servers: Stubs, rounds: int, requests: int) -> dict[str, Any]:
    """Figures of one hung server among many."""

    def make() -> InferenceEngineClient:
        engines = [HTTPEngine("vllm", url, model="stub") for url in servers.urls]
        return InferenceEngineClient(engines, pause_timeout=PAUSE_S, update_timeout=PAUSE_S)

    last = len(servers.urls) - 1
    client = make()
    sessions = sessions_of(client)
    await latencies(client, sessions, 3)  # warm up
    taken: dict[str, list[float]] = {"all well": [], "one hung": []}
    for _ in range(rounds):
        for name, command in (("all well", "wake"), ("one hung", "hang")):
            servers.tell(command, last)
            taken[name] += await latencies(client, sessions, requests)
    figures: dict[str, Any] = {
        "servers": SERVERS,
        "service_s": SERVICE_S,
        "deadline_s": PAUSE_S,
        "latency_s": {
            name: {
                "p50": float(np.quantile(each, 0.5)),
                "p99": float(np.quantile(each, 0.99)),
                "count": len(each),
            }
            for name, each in taken.items()
        },
    }
    for name in ("first", "later"):
        steps = {
            "pause": seconds_of(client.pause_generation("abort")),
            "update": seconds_of(client.load_weights("/step", weight_version=name)),
            "resume": seconds_of(client.resume_generation()),
        }
        figures[f"{name}_step_s"] = {step: await call for step, call in steps.items()}
    await client.teardown()
    client = make()  # which does not know that it hangs
    pausing = asyncio.create_task(client.pause_generation("abort"))
    await asyncio.sleep(PAUSE_S / 2)
    pausing.cancel()
    figures["cancel_s"] = await seconds_of(asyncio.wait({pausing}))
    assert pausing.cancelled()
    request = new_request(PROMPT, {"max_tokens": 200})
    answers = [client.complete(request, session_id=each) for each in sessions[:-1]]
    figures["answers_after_cancel_s"] = await seconds_of(asyncio.gather(*answers))
    await client.teardown()
    return figures


def print_hung(figures: dict[str, Any]) -> None:
    rows = [
        [name, f"{1000 * each['p50']:.1f}", f"{1000 * each['p99']:.1f}", str(each["count"])]
        for name, each in figures["latency_s"].items()
    ]
    print(f"\n{SERVERS} servers that answer after {1000 * SERVICE_S:.0f} ms, requests to all but one: ms")
    print(table(["", "p50", "p99", "requests"], rows))
    rows = [
        [name, *[f"{figures[f'{name}_step_s'][each]:.3f}" for each in STEPS]] for name in ("first", "later")
    ]
    print(f"\none of them hung, deadline {PAUSE_S:g} s: seconds of a step")
    print(table(["step", *STEPS], rows))
    print(
        f"\ncancelling a pause: {1000 * figures['cancel_s']:.1f} ms; answers of the others after that: "
        f"{1000 * figures['answers_after_cancel_s']:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="what the engine client costs")
    parser.add_argument("--part", choices=("cost", "hung"), help="one of the two alone")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args()
    rounds, requests = (2, 200) if args.quick else (args.rounds, 2000)

    figures: dict[str, Any] = {"machine": machine(("aiohttp",)), "load": os.getloadavg()[0]}
    if args.part != "hung":
        costs = figures["seconds_each"] = asyncio.run(overhead(rounds, requests))
        direct = costs["engine alone"]
        rows = [
            [
                name,
                *[f"{1e6 * (row[n] - (0 if name == 'engine alone' else direct[n])):.0f}" for n in IN_FLIGHT],
            ]
            for name, row in costs.items()
        ]
        print(f"overhead: microseconds a request over the engine alone, {requests} requests, {rounds} rounds")
        print(table(["in flight", *map(str, IN_FLIGHT)], rows))
    if args.part != "cost":
        with stubs(SERVERS) as servers:
            figures["hung"] = asyncio.run(hung(servers, 2 if args.quick else 5, 5 if args.quick else 20))
        print_hung(figures["hung"])
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
