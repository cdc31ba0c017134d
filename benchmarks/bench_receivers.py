"""Memory of a receiver over its number of senders, and throughput of two receivers over one.

    python benchmarks/bench_receivers.py [--senders 1 8 64] [--messages 320] [--rounds 3] [--json FILE]

A receiver is a process with a `Recorder` at its defaults, except that it does not wait for the disk. Senders
are in two processes. Each message is a trajectory of 8 turns with an image of 640 x 960 pixels each (1.84 MB
as uint8); two of the images are those of the sender's message before.

**Memory**: one receiver takes so many messages of 1, 8 and 64 senders, each time in a new process. The peak
is that of the resident set over its value before the first message.

**Throughput**: 8 senders ship to one receiver, or 4 to each of two. Receivers and senders share the machine's
cores. "capacity" is the bytes that receivers take per second of their own processor time, summed over
receivers: the throughput when senders have cores of their own. Files are in `/dev/shm` if it is there, so
that no disk is measured.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from blake3 import blake3
from msgspec.structs import replace

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs"), str(ROOT / "benchmarks")]

from bench_codec import Resident  # noqa: E402
from bench_trajectory import grown, images, rollout  # noqa: E402
from measure import machine, table  # noqa: E402

from mmrender.media.processors.patches import PatchItem  # noqa: E402
from mmrender.shipping import Recorder, Sender  # noqa: E402

TURNS, AGAIN = 8, 2
PROCESSES = 2
SENDERS = 8
"""Senders that measure throughput."""


def record(url: str, path: str) -> None:
    """Record until standard input ends; answer each line with the memory and the processor time so far."""
    with Recorder(url, path, sync=False) as recorder:
        resident = Resident()
        if resident.works:
            resident.trim(0)
            Path("/proc/self/clear_refs").write_text("5")
        print(recorder.url, flush=True)
        for _ in sys.stdin:
            figures = {
                "now": resident._read("VmRSS"),
                "peak": resident._read("VmHWM"),
                "processor_seconds": time.process_time(),
            }
            print(json.dumps(figures), flush=True)


async def send(urls: list[str], senders: int, messages: int) -> None:
    """Make the images, say so, and ship when a line comes. Answer with the bytes and the processor time."""
    pictures = images(TURNS)

    async def ship(url: str, name: str, gate: asyncio.Event) -> int:
        items: list[PatchItem] = []
        async with Sender(url) as sender:
            await gate.wait()
            for number in range(messages):
                fresh = range(len(items[-AGAIN:]), TURNS)
                items = items[-AGAIN:] + [
                    replace(pictures[place], identity=blake3(f"{name} {number} {place}".encode()).hexdigest())
                    for place in fresh
                ]
                await sender.send(grown([rollout(items, number)])[0])
            await sender.flush()
        return sender.stats.sent_bytes

    gate = asyncio.Event()
    places = range(senders)
    tasks = [
        asyncio.create_task(ship(urls[place % len(urls)], f"{os.getpid()} {place}", gate)) for place in places
    ]
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    before = time.process_time()
    gate.set()
    num_bytes = sum(await asyncio.gather(*tasks))
    print(json.dumps({"bytes": num_bytes, "processor_seconds": time.process_time() - before}), flush=True)


class Other:
    """A process of this script."""

    def __init__(self, *arguments: Any) -> None:
        command = [sys.executable, __file__, *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.begun = self._line()

    def ask(self) -> dict[str, float]:
        print(file=self.process.stdin, flush=True)
        return dict(json.loads(self._line()))

    def _line(self) -> str:
        if self.process.stdout is None or not (line := self.process.stdout.readline()):
            raise SystemExit("a process of the benchmark has ended")
        return line.strip()

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(60)


@contextmanager
def receivers(count: int) -> Iterator[list[Other]]:
    """Processes that record, each to a file of its own."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder, ExitStack() as stack:
        made = []
        for number in range(count):
            other = Other("--record", f"unix://{folder}/{number}", f"{folder}/{number}.mmc")
            stack.callback(other.close)
            made.append(other)
        yield made


def ship(others: list[Other], senders: int, messages: int) -> dict[str, float]:
    """Ship so many messages in all, and return the seconds, the bytes and the senders' processor time."""
    urls = [other.begun for other in others]
    processes = min(PROCESSES, senders)
    with ExitStack() as stack:
        made = []
        for _ in range(processes):
            other = Other("--send", senders // processes, messages // senders, *urls)
            stack.callback(other.close)
            made.append(other)
        started = time.perf_counter()
        for other in made:
            print(file=other.process.stdin, flush=True)
        found = [dict(json.loads(other._line())) for other in made]
        seconds = time.perf_counter() - started
    sums = {name: sum(each[name] for each in found) for name in found[0]}
    return {"seconds": seconds, **sums}


def memory(senders: int, messages: int) -> dict[str, float]:
    with receivers(1) as (receiver,):
        before = receiver.ask()["now"]
        shipped = ship([receiver], senders, messages)
        after = receiver.ask()
    return {
        "senders": senders,
        "bytes": shipped["bytes"],
        "peak": after["peak"] - before,
        "after": after["now"] - before,
    }


def throughput(count: int, messages: int) -> dict[str, float]:
    with receivers(count) as made:
        ship(made, SENDERS, 8 * SENDERS)  # the buffers of the first messages are fresh memory
        before = [each.ask()["processor_seconds"] for each in made]
        shipped = ship(made, SENDERS, messages)
        used = [each.ask()["processor_seconds"] - start for each, start in zip(made, before, strict=True)]
    return {
        "gb_a_second": shipped["bytes"] / 1e9 / shipped["seconds"],
        "capacity": shipped["bytes"] / 1e9 / max(used),
        "senders_processor_seconds_a_gb": shipped["processor_seconds"] / shipped["bytes"] * 1e9,
        "receivers_processor_seconds_a_gb": sum(used) / shipped["bytes"] * 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--senders", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument(
        "--messages", type=int, default=320, help="in all, a multiple of each number of senders"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--record", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--send", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        record(*options.record)
        return
    if options.send:
        senders, messages, *urls = options.send
        asyncio.run(send(urls, int(senders), int(messages)))
        return
    memories = [memory(senders, options.messages) for senders in options.senders]
    rounds = [[throughput(count, options.messages) for count in (1, 2)] for _ in range(options.rounds)]
    one, two = (
        {name: statistics.median(each[name] for each in column) for name in column[0]}
        for column in zip(*rounds, strict=True)
    )
    document = {
        "machine": machine(()),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "memory": memories,
        "one": one,
        "two": two,
    }
    shown = [
        [str(each["senders"]), *(f"{each[name] / 1e6:,.0f}" for name in ("bytes", "peak", "after"))]
        for each in memories
    ]
    print(table(["senders", "MB shipped", "peak, MB", "after, MB"], shown))
    print(
        table(
            ["", "one receiver", "two", "ratio"],
            [[name, f"{one[name]:.2f}", f"{two[name]:.2f}", f"{two[name] / one[name]:.2f}"] for name in one],
        )
    )
    if options.json:
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
