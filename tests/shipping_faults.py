"""Kill senders and receivers, cut their connections, and see that nothing is lost, doubled or unreadable.

    python tests/shipping_faults.py [--kills 500] [--seed 0] [--transports unix tcp ...]

Each run ships messages from one process to another: values that share pictures, and rollouts of which many have the
same name. The receiver appends each message to a record file, then acknowledges it; the sender notes what was
acknowledged. On the way one of them, or both, die by SIGKILL several times: at a random moment, or at a chosen step
such as halfway through an append. Or a proxy between them cuts connections after a random number of bytes. Whoever
died is started again and goes on from its file. There are runs over each link until so many processes were killed.
Checked after each death of the receiver and at the end:

- every message whose acknowledgement the sender saw is in the record file;
- no message is in it twice, and each is what was sent, in the sender's order; a sender that was started again is
  another one, which sends again what its predecessor did not know to be acknowledged;
- the file can be read, and a torn append is cut off.

The link `receivers` kills recorders of a fleet: three of them, each with a file, and a sender that finds them by a list in
a file. A recorder that was killed comes again under another address, with its file or a new one, and addresses leave the
list and join it. At the end two ranks read all files, and train on each trajectory once, also on those of two files.
"""

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np

import mmcodecs
from kit import free_port
from mmrender import Trajectory
from mmrender.shipping import Receiver, Recorder, Sender
from mmrender.trajectory.files import received_ids
from shipping_cases import PATIENT, CuttingProxy, tls_contexts

TRANSPORTS = ("unix", "tcp", "tcp+tls", "receivers")
STEPS = ("before append", "half an append", "after append", "after ack")
DEADLINE_S = 60.0


def content(seed: int, number: int) -> tuple[list[tuple[bytes, np.ndarray]], np.ndarray]:
    """The pictures and the tokens of a message; some pictures recur from message to message."""
    rng = random.Random(f"{seed} {number}")
    sizes = (3_000, 40_000, 150_000, 700_000)
    names = rng.sample(range(6), rng.randint(0, 3))
    pictures = [
        (b"picture %d" % name, np.full(sizes[name % 4], seed % 97 + name, np.uint8)) for name in names
    ]
    return pictures, np.arange(number, number + rng.randint(1, 30_000))


def message(seed: int, number: int) -> Any:
    """A value with pictures or, every other time, a rollout of one of three names."""
    pictures, tokens = content(seed, number)
    if number % 2:
        rollout = Trajectory(f"task-{number % 3}")
        rollout.append([number], tokens, logprobs=np.zeros(len(tokens)))
        return rollout
    shared = [mmcodecs.Shared(picture, name) for name, picture in pictures]
    return {"number": number, "tokens": tokens, "pictures": shared}


def record_of(value: Any) -> dict[str, Any]:
    """What is written of a message."""
    if not isinstance(value, Trajectory):
        return dict(value)
    (step,) = value.steps
    number = int(step.prompt_ids[0])
    named = f"task-{number % 3}" == value.trajectory_id
    return {"number": number, "tokens": step.completion_ids if named else step.prompt_ids, "pictures": []}


def is_right(seed: int, number: int, value: Any) -> bool:
    pictures, tokens = content(seed, number)
    pictures = [] if number % 2 else pictures
    return (
        value["number"] == number
        and np.array_equal(value["tokens"], tokens)
        and len(value["pictures"]) == len(pictures)
        and all(np.array_equal(got, sent) for got, (_, sent) in zip(value["pictures"], pictures, strict=True))
    )


def tear_next_write(writer: Any) -> None:
    """Die in the middle of the next write to a record file."""
    file = writer._file
    write = file.write

    def half(data: Any) -> NoReturn:
        write(bytes(data)[: len(data) // 2])
        file.flush()
        die()

    file.write = half


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(1)


async def note(delivery: Any, number: int, notes: TextIO) -> None:
    """Write down the number of a message that is acknowledged."""
    await delivery
    notes.write(f"{number}\n")
    notes.flush()


class Run:
    """One run.

    Args:
        seed: All else follows from it.
        transport: One of `TRANSPORTS`.
        folder: For its files.
    """

    def __init__(self, seed: int, transport: str, folder: Path) -> None:
        self.seed = seed
        self.transport = transport
        self.random = random.Random(seed)
        self.count = self.random.randint(5, 40)
        self.records = folder / "received.mmc"
        self.notes = folder / "acknowledged.txt"
        self.folder = folder
        self.tls = tls_contexts(folder) if transport == "tcp+tls" else (None, None, None)
        self.url = f"unix://{folder}/socket" if transport == "unix" else f"tcp://127.0.0.1:{free_port()}"
        self.sender_url = self.url
        self.kills = 0
        self.window_messages = self.random.choice([1, 3, 64])
        self.memory_bytes = self.random.choice([100_000, 2_000_000, 64 << 20])

    # The two processes

    async def receive(self, step: tuple[int, str] | None) -> None:
        """Append and acknowledge until told to stop, or die at a step."""
        seen = [id for id, _ in read_records(self.records, self.seed)]
        writer = mmcodecs.RecordWriter(self.records)
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        async with Receiver(
            self.url,
            ssl=self.tls[0],
            ack="explicit",
            seen=seen,
            window_messages=self.window_messages,
            memory_bytes=self.memory_bytes,
            timing=PATIENT,
        ) as receiver:
            work = asyncio.ensure_future(self.keep(receiver, writer, step))
            await asyncio.wait(
                [work, asyncio.ensure_future(stop.wait())], return_when=asyncio.FIRST_COMPLETED
            )
            if work.done():
                work.result()
            work.cancel()
        writer.close()

    async def keep(self, receiver: Receiver, writer: Any, step: tuple[int, str] | None) -> None:
        taken = 0
        async for message in receiver:
            record = record_of(message.value)
            if not is_right(self.seed, record["number"], record):
                raise SystemExit(f"message {message.id} is not what was sent")
            at = step[1] if step is not None and step[0] == taken else None
            if at == "before append":
                die()
            if at == "half an append":
                tear_next_write(writer)
            writer.append({"id": message.id, **record})
            if at == "after append":
                die()
            message.ack()
            if at == "after ack":
                die()
            taken += 1
            if self.random.random() < 0.3:
                await asyncio.sleep(self.random.random() * 0.004)

    async def send(self) -> None:
        """Send what was not acknowledged, and note what is."""
        known = set(self.notes.read_text().split()) if self.notes.exists() else set()
        with self.notes.open("a") as notes:
            async with Sender(self.sender_url, ssl=self.tls[1], timing=PATIENT) as sender:
                waiting = []
                for number in range(self.count):
                    if str(number) in known:
                        continue
                    value = message(self.seed, number)
                    delivery = await sender.send(value)
                    waiting.append(asyncio.ensure_future(note(delivery, number, notes)))
                    if self.random.random() < 0.3:
                        await asyncio.sleep(self.random.random() * 0.004)
                await asyncio.gather(*waiting)

    # Their death

    def play(self) -> str:
        """Carry out the run, and say which kind it was."""
        kind = self.random.choice(["sender", "receiver", "receiver", "both", "cut"])
        self.sender_dies = kind in ("sender", "both")
        proxy = self.interpose() if kind == "cut" else None
        deaths = 0 if kind == "cut" else self.random.randint(1, 4)
        receiver = self.start_receiver(deaths if kind != "sender" else 0)
        sender = start(lambda: asyncio.run(self.send()))
        try:
            while deaths:
                victim = self.random.choice(["sender", "receiver"]) if kind == "both" else kind
                deaths -= 1
                self.kills += 1
                time.sleep(self.random.random() * 0.12)
                if victim == "sender":
                    kill(sender)
                    sender = start(lambda: asyncio.run(self.send()))
                else:
                    kill(receiver)
                    self.check()
                    receiver = self.start_receiver(deaths)
            if self.doomed:
                self.kills += 1
                kill(receiver)
                self.check()
                receiver = self.start_receiver(0)
            wait(sender, "the sender", lambda: gone(receiver))
            sender = 0
            self.check(whole=True)
            os.kill(receiver, signal.SIGTERM)
            wait(receiver, "the receiver", lambda: None, -signal.SIGTERM)
            receiver = 0
        finally:
            for process in (sender, receiver, proxy):
                if process:
                    kill(process)
        self.check(whole=True)
        return kind

    def start_receiver(self, deaths: int) -> int:
        """Start a receiver that, if it is to die anyway, may do so at a chosen step."""
        self.doomed = deaths > 0 and self.random.random() < 0.5
        step = (self.random.randint(0, self.count // 3), self.random.choice(STEPS)) if self.doomed else None
        return start(lambda: asyncio.run(self.receive(step)))

    def interpose(self) -> int:
        """Put a proxy between the two that cuts some connections."""
        budgets = [int(self.random.random() ** 3 * 2_000_000) for _ in range(self.random.randint(1, 6))]
        unix = self.transport == "unix"
        self.sender_url = f"unix://{self.folder}/front" if unix else f"tcp://127.0.0.1:{free_port()}"

        async def relay() -> None:
            async with CuttingProxy(self.sender_url, self.url, budgets):
                await asyncio.Event().wait()

        return start(lambda: asyncio.run(relay()))

    def check(self, *, whole: bool = False) -> None:
        """Check the laws on what is in the files now."""
        noted = self.notes.read_text().split() if self.notes.exists() else []
        records = read_records(self.records, self.seed)
        numbers = [number for _, number in records]
        twice = [id for id, times in Counter(id for id, _ in records).items() if times > 1]
        if twice:
            raise SystemExit(f"seed {self.seed}: {twice} arrived twice: {records}")
        if not set(map(int, noted)) <= set(numbers):
            raise SystemExit(f"seed {self.seed}: acknowledged and lost: {noted}, {records}")
        senders = dict.fromkeys(id.partition(":")[0] for id, _ in records)
        for sender in senders:
            ordered = [number for id, number in records if id.startswith(sender)]
            if ordered != sorted(set(ordered)):
                raise SystemExit(f"seed {self.seed}: out of order, or twice: {records}")
        if len(senders) > 1 and not self.sender_dies:
            raise SystemExit(f"seed {self.seed}: one sender became {len(senders)}: {records}")
        if whole and set(numbers) != set(range(self.count)):
            raise SystemExit(f"seed {self.seed}: {len(set(numbers))} of {self.count} messages")


class FleetRun:
    """One run of several recorders and a sender.

    Args:
        seed: All else follows from it.
        folder: For its files.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.count = self.random.randint(20, 60)
        self.kills = self.born = self.moved = 0
        self.folder, self.files = folder, folder / "files"
        self.files.mkdir()
        self.notes, self.list = folder / "acknowledged.txt", folder / "receivers.txt"
        # By process: address and file.
        self.recorders: dict[int, tuple[str, Path]] = {}

    def play(self) -> str:
        """Carry out the run, and say which kind it was."""
        for _ in range(3):
            self.bear()
        self.publish()
        sender = start(lambda: asyncio.run(self.send()))
        try:
            for _ in range(self.random.randint(2, 5)):
                time.sleep(self.random.random() * 0.15)
                if self.random.random() < 0.3:
                    self.publish(leave_out=1)
                    continue
                victim = self.random.choice([*self.recorders])
                _, path = self.recorders.pop(victim)
                kill(victim)
                self.kills += 1
                self.bear(path if self.random.random() < 0.5 else None)
                self.publish()
            self.publish()
            wait(sender, "the sender", lambda: next(filter(None, map(gone, self.recorders)), None))
            sender = 0
            for process in [*self.recorders] if self.random.random() < 0.5 else []:
                os.kill(process, signal.SIGTERM)
                wait(process, "a recorder", lambda: None)
                del self.recorders[process]
        finally:
            for process in (sender, *self.recorders):
                if process:
                    kill(process)
        self.check()
        return "moved" if self.moved else "unmoved"

    def bear(self, path: Path | None = None) -> None:
        """Start a recorder under a new address."""
        self.born += 1
        url = f"unix://{self.folder}/{self.born}"
        path = path or self.files / f"{self.random.randrange(1000)}-{self.born}.mmc"
        ready = self.folder / f"ready-{self.born}"
        process = start(lambda: self.record(url, path, ready))
        self.recorders[process] = url, path
        wait_for(ready.exists, "a recorder")

    def publish(self, *, leave_out: int = 0) -> None:
        """Write the list, as a whole."""
        urls = [url for url, _ in self.recorders.values()]
        new = self.list.with_suffix(".new")
        new.write_text("\n".join(self.random.sample(urls, len(urls) - leave_out)))
        new.replace(self.list)

    def record(self, url: str, path: Path, ready: Path) -> None:
        """Record until told to stop."""
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        sync = self.random.random() < 0.2
        with Recorder(url, path, sync=sync, memory_bytes=2_000_000, timing=PATIENT):
            ready.touch()
            while not stop.wait(0.01):
                pass

    async def send(self) -> None:
        """Send all, and note what is acknowledged."""
        leave = self.random.choice([0.0, 0.05, 60.0])
        timing = replace(PATIENT, look=0.01, leave=leave, failover=self.random.choice([0.02, 60.0]))
        with self.notes.open("a") as notes:
            async with Sender(self.list, timing=timing) as sender:
                waiting = []
                for number in range(self.count):
                    delivery = await sender.send(self.rollout(number))
                    waiting.append(asyncio.ensure_future(note(delivery, number, notes)))
                    if self.random.random() < 0.5:
                        await asyncio.sleep(self.random.random() * 0.01)
                await asyncio.gather(*waiting)

    def rollout(self, number: int) -> Any:
        """A rollout, or a group of two."""
        tokens = np.arange(number, number + 1 + number % 7 * 5000)
        group = [Trajectory(f"task-{number}.{part}") for part in range(1 + number % 2)]
        for each in group:
            each.append([number], tokens, logprobs=np.zeros(len(tokens)))
        return group if number % 2 else group[0]

    def check(self) -> None:
        """Let two ranks read a part, and three the rest: each trajectory once, and whole."""
        from mmrender.training import TrajectoryDataset

        noted = set(map(int, self.notes.read_text().split()))
        if noted != set(range(self.count)):
            raise SystemExit(f"{len(noted)} of {self.count} messages were acknowledged")
        written = [id for path in self.files.iterdir() if path.suffix == ".mmc" for id in received_ids(path)]
        self.moved = len(written) - len(set(written))
        samples, states = [], []
        for rank in range(2):
            dataset = TrajectoryDataset(self.files, rank=rank, world=2, shuffle=self.seed)
            samples += list(itertools.islice(dataset, self.random.randint(0, self.count // 2)))
            states.append(dataset.state_dict())
        for rank in range(3):
            dataset = TrajectoryDataset(self.files, rank=rank, world=3, shuffle=self.seed)
            dataset.load_state_dict(states)
            samples += list(dataset)
        trained = Counter(sample.sample_id for sample in samples)
        expected = Counter(
            f"task-{number}.{part}/0" for number in range(self.count) for part in range(1 + number % 2)
        )
        if trained != expected:
            raise SystemExit(f"lost {expected - trained}, twice {trained - expected}")
        for sample in samples:
            number = int(sample.sample_id.split("-")[1].split(".")[0])
            if sample.token_ids.tolist() != [number, *range(number, number + 1 + number % 7 * 5000)]:
                raise SystemExit(f"{sample.sample_id} is not what was sent")


def read_records(path: Path, seed: int) -> list[tuple[str, int]]:
    """Read the whole file, as a user would after a crash: id and number of each message."""
    found = []
    for record in mmcodecs.RecordReader(path) if path.exists() else ():
        if not is_right(seed, record["number"], record):
            raise SystemExit(f"seed {seed}: record {record['id']} is not what was sent")
        found.append((record["id"], record["number"]))
    return found


def start(work: Callable[[], Any]) -> int:
    """Run something in a child process; it ends with status 0 if that does."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def gone(process: int) -> str | None:
    """Whether a child that should live has ended."""
    return "the receiver ended" if os.waitpid(process, os.WNOHANG)[0] else None


def wait_for(condition: Callable[[], bool], name: str) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"{name} does not start")
        time.sleep(0.002)


def wait(process: int, name: str, trouble: Callable[[], str | None], *ways: int) -> None:
    """Wait for a child to end with status 0 or in one of these ways."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            if code and code not in ways:
                raise SystemExit(f"{name} failed with status {code}")
            return
        found = trouble()
        if found:
            raise SystemExit(found)
        time.sleep(0.005)
    raise SystemExit(f"{name} does not end")


def survey(kills: int, seed: int, transport: str) -> tuple[int, int, Counter[str]]:
    """Run over one link until so many processes were killed: how many were, messages, and runs of each kind."""
    kinds: Counter[str] = Counter()
    killed = messages = 0
    while killed < kills:
        folder = Path(tempfile.mkdtemp(prefix="mmrender-faults-"))
        try:
            run = FleetRun(seed, folder) if transport == "receivers" else Run(seed, transport, folder)
            try:
                kinds[run.play()] += 1
            except SystemExit as error:
                raise SystemExit(f"seed {seed} over {transport}: {error}") from error
            killed, messages, seed = killed + run.kills, messages + run.count, seed + 1
        finally:
            shutil.rmtree(folder)
    return killed, messages, kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=500, help="over each link, at least")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    options = parser.parse_args()
    started = time.monotonic()
    work = partial(survey, options.kills, options.seed)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(options.transports), context) as pool:
        for transport, found in zip(options.transports, pool.map(work, options.transports), strict=True):
            killed, messages, kinds = found
            runs = ", ".join(f"{times} {kind}" for kind, times in sorted(kinds.items()))
            print(f"{transport}: {killed} kills, {messages} messages in {kinds.total()} runs ({runs})")
    print(f"{time.monotonic() - started:.0f} s: none lost, none twice, every file readable")


if __name__ == "__main__":
    main()
