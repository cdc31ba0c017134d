"""Soak: rollouts without end, to see that nothing is left behind. Run by `make soak`.

Many rollouts of the example environment are always in flight, sampled from the tiny model in this process.
Each is shipped to a second process when it ends, by a Unix socket and by TCP in turn. Every few seconds the
memory of both processes, open files, tasks and threads are counted. The warm-up lasts until the caches are
full, however slow the machine is, so there is always a verdict: flat, or not. It fails if memory rises after
the warm-up, if something is left at the end, or if a rollout is lost or failed.
"""

import argparse
import asyncio
import contextlib
import ctypes
import gc
import itertools
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
sys.path += [str(Path(__file__).resolve().parent.parent / folder) for folder in ("examples", "tests")]

from find_cell import FindCell, FindCellSettings, sensible_calls
from guided import guided_params
from mmrender.client.local import LocalBackend
from mmrender.errors import ShippingClosedError
from mmrender.media.resolve import MediaCache
from mmrender.renderer import Renderer, RendererPool
from mmrender.rollout.client import RendererClient
from mmrender.rollout.environment import run_episode
from mmrender.shipping import Receiver, Sender
from mmrender.testing.tiny_model import build_tiny_model
from mmrender.trajectory.tree import Trajectory

SAMPLING = {"temperature": 1.5, "max_tokens": 64, "seed": 1}
# Caches with small bounds are full soon, and what rises after that is not a cache.
MEMO_BYTES, MEDIA_BYTES, MEMORY_BYTES = 4 << 20, 4 << 20, 4 << 20
BOARDS = 24
INTERVAL = 5.0
MIN_SAMPLES = 24
"""Samples after the warm-up, at least."""
WARM_UP = 0.25
"""The warm-up takes this part of the time at least,"""
WARM_UP_ROLLOUTS = 120
"""and so many rollouts."""
MAX_SLOPE, NOISE = 1.0, 4.0
"""Memory may seem to rise by so many megabytes a minute, and so many in all: an allocator's noise."""


@dataclass(frozen=True)
class Sample:
    """Counts at one moment."""

    seconds: float
    memory: float
    receiver_memory: float
    files: int
    tasks: int
    threads: int
    rollouts: int


@dataclass
class Counts:
    """The work done, and when the warm-up was over."""

    seconds: float
    started: float
    warm: float | None = None
    rollouts: int = 0
    turns: int = 0
    tokens: int = 0

    def count(self, trajectory: Trajectory) -> None:
        """Count one rollout."""
        self.rollouts += 1
        self.turns += len(trajectory)
        self.tokens += sum(len(step.completion_ids) for step in trajectory.steps)
        now = time.monotonic()
        enough = self.rollouts >= WARM_UP_ROLLOUTS and now - self.started >= WARM_UP * self.seconds
        if self.warm is None and enough:
            self.warm = now

    def goes_on(self) -> bool:
        """Whether it is still warming up, or has been watched for less than the rest of the time."""
        return self.warm is None or time.monotonic() < self.warm + (1 - WARM_UP) * self.seconds


def main() -> int:
    """Run; the exit status says whether nothing is left behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--rollouts", type=int, default=64, help="under way at once")
    parser.add_argument("--receive", nargs="*", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        asyncio.run(receive(options.receive))
        return 0
    with tempfile.TemporaryDirectory(prefix="mmrender-soak-") as folder:
        return asyncio.run(soak(Path(folder), options.seconds, options.rollouts))


# --- the second process ---


async def receive(urls: list[str]) -> None:
    """Take trajectories at every address until the word `stop` comes there; look at each as a trainer."""

    async def serve(url: str) -> None:
        async with Receiver(url, ack="explicit", memory_bytes=MEMORY_BYTES) as receiver:
            while True:
                received = await receiver.receive()
                if received.value == "stop":
                    received.ack()
                    return
                for sample in received.value.samples():
                    if len(sample.token_ids) != len(sample.logprobs) or not sample.loss_mask.any():
                        raise RuntimeError(f"{received.id} arrived broken")
                received.ack()

    await asyncio.gather(*map(serve, urls))


# --- the first ---


async def soak(folder: Path, seconds: float, concurrency: int) -> int:
    """Roll out for so many seconds, then stop and look at what is left."""
    import torch

    torch.set_num_threads(1)
    directory = build_tiny_model(folder / "model")
    renderer = Renderer.from_pretrained(
        directory, image_backend="pil", memo_bytes=MEMO_BYTES, media_cache=MediaCache(MEDIA_BYTES)
    )
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    urls = [f"unix://{folder}/games.sock", f"tcp://127.0.0.1:{port}"]
    command = [sys.executable, __file__, "--receive", *urls]
    samples: list[Sample] = []
    counts = Counts(seconds, time.monotonic())
    problems: list[str] = []
    backend = LocalBackend(directory)
    await backend.resolve_max_prompt_len("tiny")
    receiver = await asyncio.create_subprocess_exec(*command)
    before = left_over()
    try:
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(RendererPool(renderer, workers=2))
            senders = [await stack.enter_async_context(Sender(url)) for url in urls]
            client = RendererClient(pool, backend=backend)
            watcher = asyncio.create_task(watch(samples, counts, receiver.pid))
            numbers = itertools.count()
            await asyncio.gather(*[work(client, senders, numbers, counts) for _ in range(concurrency)])
            await watcher
            for sender in senders:
                await (await sender.send("stop"))
            shipped = sum(sender.stats.acknowledged for sender in senders) - len(senders)
            if shipped != counts.rollouts:
                problems.append(f"{counts.rollouts} rollouts ended, and {shipped} were acknowledged")
        status = await asyncio.wait_for(receiver.wait(), 30)
        if status:
            problems.append(f"the second process ended with status {status}")
    finally:
        if receiver.returncode is None:
            receiver.kill()
            await receiver.wait()
    del backend, client, pool  # whose threads end with them
    problems += await what_is_left(before)
    steady = [each for each in samples if counts.warm is not None and each.seconds > counts.warm]
    problems += rising(steady)
    show(steady, counts, problems)
    return 1 if problems else 0


async def work(
    client: RendererClient,
    senders: list[Sender],
    numbers: "itertools.count[int]",
    counts: Counts,
) -> None:
    """Roll out one episode after the other until it is time, and ship each."""
    sampling = SAMPLING | guided_params(client.renderer, sensible_calls(3))
    while counts.goes_on():
        number = next(numbers)
        trajectory = Trajectory(f"game-{number}")
        # Boards come again, as prompts do in training.
        extras = {"seed": number // 4 % BOARDS}
        await run_episode(
            client,
            FindCell(FindCellSettings(grid=3, distractors=2, max_turns=5)),
            [],
            extras,
            trajectory=trajectory,
            sampling_params=sampling,
        )
        delivery = await senders[number % len(senders)].send(trajectory)
        await delivery
        counts.count(trajectory)


async def watch(samples: list[Sample], counts: Counts, receiver: int) -> None:
    """Count every few seconds."""
    while counts.goes_on():
        await asyncio.sleep(min(INTERVAL, (1 - WARM_UP) * counts.seconds / MIN_SAMPLES))
        gc.collect()
        with contextlib.suppress(AttributeError, OSError):  # the allocator of glibc
            # Pages that are free do not count, so a rise is not merely the highest use so far.
            ctypes.CDLL(None).malloc_trim(0)
        samples.append(
            Sample(
                time.monotonic(),
                memory_of("self"),
                memory_of(str(receiver)),
                open_files(),
                len(asyncio.all_tasks()),
                threading.active_count(),
                counts.rollouts,
            )
        )
        latest = samples[-1]
        if len(samples) % 6 == 0:
            print(
                f"{latest.seconds - counts.started:5.0f} s  "
                f"{latest.rollouts:6,} rollouts  {latest.memory:7.1f} MB  "
                f"receiver {latest.receiver_memory:6.1f} MB  {latest.files} files  {latest.tasks} tasks  "
                f"{latest.threads} threads",
                flush=True,
            )


def memory_of(process: str) -> float:
    """Resident memory in megabytes; 0 for a process that has ended."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def open_files() -> int:
    """Open file descriptors: sockets, pipes and files."""
    return len(os.listdir("/proc/self/fd")) - 1


def left_over() -> dict[str, int]:
    """State that must be the same before and after."""
    return {"open files": open_files()}


async def what_is_left(before: dict[str, int]) -> list[str]:
    """Name what is there after everything was closed and was not there before."""
    for _ in range(50):
        gc.collect()
        await asyncio.sleep(0.1)
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("mmrender")]
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        after = left_over()
        # The second process's own pipe and watcher are gone by then, so there may be fewer.
        more = [name for name, count in after.items() if count > before[name]]
        if not names and not tasks and not more:
            return []
    problems = [f"{after[name] - before[name]} more {name} than before" for name in more]
    problems += [f"a thread {name} is left" for name in names]
    return problems + [f"a task is left: {task!r}" for task in tasks]


def rising(steady: list[Sample]) -> list[str]:
    """Name what rose after the warm-up."""
    first, last = steady[0], steady[-1]
    minutes = (last.seconds - first.seconds) / 60
    problems = []
    for name, read in MEMORIES.items():
        slope = slope_of(steady, read)
        if slope * minutes > MAX_SLOPE * minutes + NOISE:
            problems.append(f"{name} rose by {slope:.2f} MB a minute")
    counted = [(name, getattr(first, name), getattr(last, name)) for name in ("files", "tasks", "threads")]
    rose = [f"{name} rose from {was} to {now}" for name, was, now in counted if now > 1.5 * was + 8]
    return problems + rose


MEMORIES: dict[str, Callable[[Sample], float]] = {
    "memory of the rollouts": lambda sample: sample.memory,
    "memory of the receiver": lambda sample: sample.receiver_memory,
}


def slope_of(samples: list[Sample], read: Callable[[Sample], float]) -> float:
    """Least-squares slope in megabytes a minute."""
    times = [sample.seconds / 60 for sample in samples]
    values = [read(sample) for sample in samples]
    middle, mean = sum(times) / len(times), sum(values) / len(values)
    spread = sum((at - middle) ** 2 for at in times)
    return sum((at - middle) * (value - mean) for at, value in zip(times, values, strict=True)) / spread


def show(steady: list[Sample], counts: Counts, problems: list[str]) -> None:
    """Print the figures and the verdict."""
    print(f"\n{counts.rollouts:,} rollouts, {counts.turns:,} turns, {counts.tokens:,} tokens sampled")
    for name, read in MEMORIES.items():
        values = [read(sample) for sample in steady]
        print(
            f"{name} after the warm-up: {min(values):.1f} to {max(values):.1f} MB, "
            f"{slope_of(steady, read):+.2f} MB a minute"
        )
    print(
        "\n".join([*problems, "not flat"]) if problems else "flat: nothing rises and nothing is left behind"
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ShippingClosedError as error:
        sys.exit(f"the second process went away: {error}")
