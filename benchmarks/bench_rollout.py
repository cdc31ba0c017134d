"""Ship a group of rollouts to another process, and measure each way to travel.

    python benchmarks/bench_rollout.py [--quick] [--rounds 7] [--mb 67] [--json FILE]

**The group**: 8 rollouts of 16 turns; each turn adds an image of 640 x 960 pixels (1.84 MB as uint8 planes),
600 placeholder tokens, 20 tokens of text and 100 sampled ones. The first 4 images are the same in all
rollouts. It is shipped from one process to another, where it is decoded:

- cumulative: each step is a message with its whole prompt and all images so far, as rollouts hold them;
- last only: the same, but only the last step of each rollout has images, which loses them under branching;
- ours: `Sender.send(trajectory)`, once per rollout.

The first two travel in the plain form, which is what a typical library does (msgpack, `tobytes`, `zmq.send`),
and in ours (frames over a Unix socket), so that the gain of the codec and that of the content table can be
distinguished. They ship uint8 planes as ours does; float32 patches would be eight times as much. Time
is from the first message to the last acknowledgement; peaks are those of the resident sets over what they
were before, with the rollouts in the sender's memory and nothing kept by the receiver. "again" is the third
of such groups over one connection, other images in each, where memory is used again. "memcpy" copies
as many bytes as the trajectories have, image by image between warm arrays.

**The transports**: one message of 16 arrays, 4 in a row, from encoding to the acknowledgement of what was
decoded; gigabytes a second of one such message. All take turns, so that a slow spell of the machine meets
every one. "processor" is the processor time of both processes, which depends less on who else uses the
machine. The receiver looks at no element: with views, reading is what costs it, and it does so once in any
form.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zmq

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "codecs"), str(ROOT / "benchmarks")]

from bench_codec import Resident  # noqa: E402
from bench_trajectory import grown, images, rollout  # noqa: E402
from codec_peers import Peer, peers  # noqa: E402
from measure import machine, shown_ms, shown_ratio, table  # noqa: E402

from mmrender import Trajectory  # noqa: E402
from mmrender.shipping import Receiver, Sender  # noqa: E402
from mmrender.trajectory.step import step_sample  # noqa: E402

GROUP, TURNS, SHARED_IMAGES = 8, 16, 4
IN_A_ROW = 4
MEMORY_BYTES = 128 << 20
PLAIN_IPC, PLAIN_TCP = "plain form over ZeroMQ, ipc", "plain form over ZeroMQ, tcp"
TRANSPORTS = {
    "ours over Unix socket": "unix",
    "ours over TCP": "tcp",
}
Ship = Callable[[], Awaitable[int]]


def plain() -> Peer:
    found = next(peers())
    if isinstance(found, str):
        raise SystemExit("the plain form needs msgpack")
    return found


# The receiving process


def serve_plain(context: zmq.Context[Any], endpoint: str, ready: Callable[[str], None]) -> None:
    """Decode what comes and answer each message with its number of bytes."""
    inlet, outlet = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    names = []
    for socket in (inlet, outlet):
        socket.bind(endpoint if endpoint.endswith("*") else f"{endpoint}{len(names)}")
        names.append(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    ready(" ".join(names))
    decode = plain().decode
    with contextlib.suppress(zmq.ContextTerminated):
        while True:
            decode(inlet.recv())
            outlet.send(b"")
    inlet.close(0)
    outlet.close(0)


async def serve(folder: str) -> None:
    """Take what comes at every address until standard input ends; answer `peak` with the memory it took."""
    context: zmq.Context[Any] = zmq.Context()
    found: dict[str, str] = {}
    for name, endpoint in ((PLAIN_IPC, f"ipc://{folder}/plain"), (PLAIN_TCP, "tcp://127.0.0.1:*")):
        there = threading.Event()

        def ready(urls: str, name: str = name, there: threading.Event = there) -> None:
            found[name] = urls
            there.set()

        threading.Thread(target=serve_plain, args=(context, endpoint, ready), daemon=True).start()
        there.wait()

    async def consume(receiver: Receiver) -> None:
        while True:
            await receiver.receive()

    async with contextlib.AsyncExitStack() as stack:
        tasks = []
        for name, kind in TRANSPORTS.items():
            url = f"unix://{folder}/unix" if kind == "unix" else "tcp://127.0.0.1:0"
            receiver = Receiver(url, memory_bytes=MEMORY_BYTES)
            await stack.enter_async_context(receiver)
            found[name] = receiver.url
            tasks.append(asyncio.create_task(consume(receiver)))
        print(json.dumps(found), flush=True)
        resident = Resident()
        before = 0
        while line := await asyncio.to_thread(sys.stdin.readline):
            if line.strip() == "cpu":
                print(time.process_time_ns(), flush=True)
                continue
            if line.strip() == "start" and resident.works:
                resident.trim(0)
                Path("/proc/self/clear_refs").write_text("5")
                before = resident._read("VmRSS")
            print(resident._read("VmHWM") - before if resident.works else -1, flush=True)
        for task in tasks:
            task.cancel()
    context.term()  # the threads see it and close their sockets


class Other:
    """The receiving process, as the sending one sees it."""

    def __init__(self, folder: str) -> None:
        command = [sys.executable, __file__, "--serve", folder]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.urls: dict[str, str] = json.loads(self._line())

    def ask(self, word: str) -> int:
        print(word, file=self.process.stdin, flush=True)
        return int(self._line())

    def _line(self) -> str:
        if self.process.stdout is None:
            raise SystemExit("no receiving process")
        return self.process.stdout.readline()

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(20)


class PlainSender:
    """The way of a typical library."""

    def __init__(self, context: zmq.Context[Any], urls: str) -> None:
        self.outlet, self.inlet = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for socket, url in zip((self.outlet, self.inlet), urls.split(), strict=True):
            socket.connect(url)
        self.encode = plain().encode

    async def ship(self, values: Iterator[Any]) -> int:
        total, count = 0, 0
        for value in values:
            message = self.encode(value)
            self.outlet.send(message)
            total += len(message)
            count += 1
        for _ in range(count):
            self.inlet.recv()
        return total

    def close(self) -> None:
        self.outlet.close(0)
        self.inlet.close(0)


async def ship_ours(sender: Sender, values: Iterator[Any]) -> int:
    before = sender.stats.sent_bytes
    for value in values:
        await sender.send(value)
    await sender.flush()
    return sender.stats.sent_bytes - before


# The group


def make_group(turns: int, seed: int = 0) -> list[Trajectory]:
    pictures = images(SHARED_IMAGES + GROUP * (turns - SHARED_IMAGES), seed)
    own = turns - SHARED_IMAGES
    first, rest = pictures[:SHARED_IMAGES], pictures[SHARED_IMAGES:]
    return grown([rollout([*first, *rest[n * own : (n + 1) * own]], n) for n in range(GROUP)])


def step_messages(group: list[Trajectory], *, last_only: bool) -> Iterator[dict[str, Any]]:
    """Each step with its whole sequence and sidecar, flat, as the plain form can write it."""
    for trajectory in group:
        for step in trajectory.steps:
            sample = step_sample(step)
            message: dict[str, Any] = {
                "token_ids": sample.token_ids,
                "loss_mask": sample.loss_mask,
                "logprobs": sample.logprobs,
            }
            if not last_only or step is trajectory.steps[-1]:
                for number, item in enumerate(sample.multi_modal_data.mm_items["image"]):
                    message[f"pixels {number}"] = item.frames
            yield message


def copy_seconds(group: list[Trajectory], num_bytes: int) -> tuple[float, float]:
    """Time of copying so many bytes between warm arrays, on the clock and of the processor."""
    image = group[0].steps[0].multi_modal_data.mm_items["image"][0].frames
    arrays = [np.array(image) for _ in range(2 * round(num_bytes / image.nbytes))]
    sources, targets = arrays[::2], arrays[1::2]
    taken = []
    for _ in range(3):
        start, worked = time.perf_counter(), time.process_time()
        for target, source in zip(targets, sources, strict=True):
            np.copyto(target, source)
        taken.append((time.perf_counter() - start, time.process_time() - worked))
    return min(taken)


OURS = "ours: trajectories over a Unix socket"
WAYS = (
    ("cumulative, plain form over ZeroMQ", False, "plain"),
    ("cumulative, our frames over a Unix socket", False, "frames"),
    ("last only, plain form over ZeroMQ", True, "plain"),
    ("last only, our frames over a Unix socket", True, "frames"),
    (OURS, False, "ours"),
)


async def measure_group(turns: int, rounds: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Measure each way, and the time of a copy of the trajectories' bytes."""
    groups = [make_group(turns, seed) for seed in range(3)]
    resident = Resident()
    rows: dict[str, list[dict[str, float]]] = {name: [] for name, _, _ in WAYS}
    copies = []
    for _ in range(rounds):
        for name, last_only, way in WAYS:
            rows[name].append(await ship_groups(groups, last_only, way, resident))
        copies.append(copy_seconds(groups[0], round(rows[OURS][0]["bytes"])))
    found = [
        {"name": name, **{key: statistics.median(row[key] for row in taken) for key in taken[0]}}
        for name, taken in rows.items()
    ]
    seconds, processor = (statistics.median(values) for values in zip(*copies, strict=True))
    return found, {"seconds": seconds, "processor_seconds": processor}


async def ship_groups(
    groups: list[list[Trajectory]], last_only: bool, way: str, resident: Resident
) -> dict[str, float]:
    """Ship groups to a process and over a connection of their own; what is plain goes once."""
    context: zmq.Context[Any] = zmq.Context()
    with tempfile.TemporaryDirectory() as folder:
        other = Other(folder)
        try:
            async with contextlib.AsyncExitStack() as stack:
                if way == "plain":
                    sender = PlainSender(context, other.urls[PLAIN_IPC])
                    stack.callback(sender.close)
                else:
                    ours = await stack.enter_async_context(Sender(other.urls["ours over Unix socket"]))

                def ship(group: list[Trajectory]) -> Awaitable[int]:
                    if way == "plain":
                        return sender.ship(step_messages(group, last_only=last_only))
                    values = step_messages(group, last_only=last_only) if way == "frames" else iter(group)
                    return ship_ours(ours, values)

                other.ask("start")
                worked = time.process_time_ns() + other.ask("cpu")
                peak, taken = await resident_peak(resident, lambda: ship(groups[0]))
                worked = time.process_time_ns() + other.ask("cpu") - worked
                found = {"bytes": taken[1], "seconds": taken[0], "processor_seconds": worked / 1e9}
                found |= {"peak_sender": peak, "peak_receiver": other.ask("peak")}
                again = taken[0], worked
                for group in [] if way == "plain" else groups[1:]:
                    worked, start = time.process_time_ns() + other.ask("cpu"), time.perf_counter()
                    await ship(group)
                    again = (
                        time.perf_counter() - start,
                        time.process_time_ns() + other.ask("cpu") - worked,
                    )
                return found | {"seconds_again": again[0], "processor_seconds_again": again[1] / 1e9}
        finally:
            other.close()
            context.destroy(0)


async def resident_peak(resident: Resident, ship: Ship) -> tuple[int, tuple[float, int]]:
    before = 0
    if resident.works:
        resident.trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = resident._read("VmRSS")
    start = time.perf_counter()
    num_bytes = await ship()
    seconds = time.perf_counter() - start
    return (resident._read("VmHWM") - before if resident.works else -1), (seconds, num_bytes)


# The transports


def make_message(megabytes: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    each = megabytes * 1_000_000 // 16
    kinds = ["float32"] * 8 + ["uint8"] * 8
    return {
        f"array {index}": random.integers(0, 120, each // np.dtype(kind).itemsize, np.uint8).astype(kind)
        for index, kind in enumerate(kinds)
    }


async def measure_transports(megabytes: int, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of one message by transport, on the clock and of both processors; "memcpy" is one warm copy."""
    message = make_message(megabytes)
    num_bytes = sum(array.nbytes for array in message.values())
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    seconds: dict[str, list[float]] = {}
    busy: dict[str, list[float]] = {}
    context: zmq.Context[Any] = zmq.Context()
    with tempfile.TemporaryDirectory() as folder:
        other = Other(folder)
        try:
            async with contextlib.AsyncExitStack() as stack:
                ships: dict[str, Ship] = {}

                async def copy() -> int:
                    np.copyto(target, source)
                    return num_bytes

                ships["memcpy"] = copy
                for name in (PLAIN_IPC, PLAIN_TCP):
                    old = PlainSender(context, other.urls[name])
                    stack.callback(old.close)
                    ships[name] = lambda old=old: old.ship(iter([message] * IN_A_ROW))
                for name in TRANSPORTS:
                    ours = await stack.enter_async_context(Sender(other.urls[name]))
                    ships[name] = lambda ours=ours: ship_ours(ours, iter([message] * IN_A_ROW))
                for number in range(rounds + 1):
                    for name, ship in ships.items():
                        worked = time.process_time_ns() + other.ask("cpu")
                        start = time.perf_counter()
                        await ship()
                        took = time.perf_counter() - start
                        worked = time.process_time_ns() + other.ask("cpu") - worked
                        if number:  # the first round fills the pools
                            count = 1 if name == "memcpy" else IN_A_ROW
                            seconds.setdefault(name, []).append(took / count)
                            busy.setdefault(name, []).append(worked / 1e9 / count)
        finally:
            other.close()
            context.destroy(0)
    clock, processor = (
        {name: statistics.median(values) for name, values in each.items()} for each in (seconds, busy)
    )
    return clock, processor


def bars(
    group: list[dict[str, Any]], copied: dict[str, float], transports: dict[str, float]
) -> list[dict[str, Any]]:
    """What is required of the group and of each transport, and what was measured."""
    base = transports[PLAIN_IPC]
    wanted = {"ours over Unix socket": 10, "ours over TCP": 5}
    ways = {row["name"]: row for row in group}
    cumulative, last_only = (ways[WAYS[index][0]] for index in (0, 3))
    ours = ways[OURS]
    both = copied["processor_seconds"] * 2  # a socket takes a copy on either side
    figures = [
        ("times the plain form, cumulative", 25, cumulative["seconds"] / ours["seconds"]),
        ("the same in processor time", 25, cumulative["processor_seconds"] / ours["processor_seconds"]),
        ("times last-only frames, again", 1, last_only["seconds_again"] / ours["seconds_again"]),
        ("of memcpy, first group", 0.6, copied["seconds"] / ours["seconds"]),
        ("of memcpy, again", 0.6, copied["seconds"] / ours["seconds_again"]),
        ("of memcpy on both sides, processor time, again", 0.6, both / ours["processor_seconds_again"]),
    ]
    return [
        *({"figure": f"{OURS}: {name}", "bar": bar, "reached": reached} for name, bar, reached in figures),
        *(
            {"figure": f"{name}: times the plain form", "bar": bar, "reached": base / transports[name]}
            for name, bar in wanted.items()
        ),
    ]


def show_group(rows: list[dict[str, Any]]) -> None:
    base = rows[0]
    print(
        table(
            [
                "group of rollouts",
                "MB shipped",
                "less by",
                "ms",
                "faster",
                "again, ms",
                "processor time, ms",
                "processor time again, ms",
                "peak sender",
                "peak receiver",
            ],
            [
                [
                    row["name"],
                    f"{row['bytes'] / 1e6:.1f}",
                    shown_ratio(base["bytes"], row["bytes"]),
                    shown_ms(row["seconds"]),
                    shown_ratio(base["seconds"], row["seconds"]),
                    shown_ms(row["seconds_again"]),
                    shown_ms(row["processor_seconds"]),
                    shown_ms(row["processor_seconds_again"]),
                    f"{row['peak_sender'] / 1e6:.0f} MB",
                    f"{row['peak_receiver'] / 1e6:.0f} MB",
                ]
                for row in rows
            ],
        )
    )


def show_transports(transports: dict[str, float], busy: dict[str, float], megabytes: int) -> None:
    print(
        table(
            [
                f"transport, {megabytes} MB a message",
                "ms",
                "GB/s",
                "of memcpy",
                "plain form ÷ it",
                "processor ms",
                "plain form ÷ it",
            ],
            [
                [
                    name,
                    shown_ms(seconds),
                    f"{megabytes / 1e3 / seconds:.2f}",
                    f"{transports['memcpy'] / seconds:.2f}",
                    shown_ratio(transports[PLAIN_IPC], seconds),
                    shown_ms(busy[name]),
                    shown_ratio(busy[PLAIN_IPC], busy[name]),
                ]
                for name, seconds in transports.items()
            ],
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mb", type=int, default=67, help="megabytes of the transports' message")
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds, smaller messages, shorter rollouts"
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve))
        return
    rounds, megabytes, turns = (2, 16, 6) if options.quick else (options.rounds, options.mb, TURNS)
    group, copied = asyncio.run(measure_group(turns, min(3, rounds)))
    show_group(group)
    print(
        f"memcpy of the trajectories' bytes: {shown_ms(copied['seconds'])} ms, "
        f"{shown_ms(copied['processor_seconds'])} ms of the processor"
    )
    print()
    transports, busy = asyncio.run(measure_transports(megabytes, rounds))
    show_transports(transports, busy, megabytes)
    print()
    reached = bars(group, copied, transports)
    for row in reached:
        verdict = "pass" if row["reached"] >= row["bar"] else "FALLS SHORT"
        print(f"{row['figure']}: at least {row['bar']}, reached {row['reached']:.2f}: {verdict}")
    if options.json:
        versions = {"pyzmq": zmq.__version__, "msgpack": msgpack.version}
        record = {
            "machine": machine(["numpy", "msgspec"]) | versions,
            "group": {
                "rollouts": GROUP,
                "turns": turns,
                "shared_images": SHARED_IMAGES,
                "ways": group,
                "memcpy": copied,
            },
            "transports": {
                "megabytes": megabytes,
                "rounds": rounds,
                "seconds": transports,
                "processor": busy,
            },
            "bars": reached,
        }
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
