"""Functions of processes for `unit/test_fleet.py`, which a fork of a clean server has imported."""

import json
import os
import signal
import time

import fleet_roles  # noqa: F401 - imported once, with torch, and not in each process
from mmrender import Trajectory
from mmrender.shipping import Sender


def die_twice(process):
    """Die by a signal in the first two lives, and end in the third one."""
    lives = process.folder / f"lives-{process.number}"
    lives.write_text(lives.read_text() + "x" if lives.exists() else "x")
    if len(lives.read_text()) < 3:
        os.kill(os.getpid(), signal.SIGKILL)


def fail(process):
    print("about to fail")
    raise ValueError(f"no luck in process {process.number} of {process.count}")


def serve(process):
    process.publish(f"address of {process.number}")
    process.wait()
    (process.folder / f"ended-{process.number}").touch()


def stop(process):
    """Serve, and end before the others."""


async def ask(process):
    """Wait until all servers have published their addresses."""
    while len(process.addresses("server")) < 2:
        process.wait(0.01)
    (process.folder / "asked").write_text(json.dumps(process.addresses("server")))


async def ship(count, process):
    async with Sender(process.receivers) as sender:
        for number in range(count):
            trajectory = Trajectory(f"{process.number}-{number}")
            trajectory.append([number], [1, 2], logprobs=[-1.0, -1.0])
            await (await sender.send(trajectory))
            if number == count // 2 and not (process.folder / "killed").exists():
                (process.folder / "killed").touch()


def read(count, process):
    """Read this rank's samples until all ranks together have them all."""
    with (process.folder / f"read-{process.number}").open("a") as file:
        for sample in process.dataset(wait=60):
            file.write(sample.sample_id + "\n")
            file.flush()
            texts = [path.read_text() for path in process.folder.glob("read-*")]
            if sum(text.count("\n") for text in texts) >= count:
                (process.folder / "all").touch()
            if (process.folder / "all").exists():
                return


def forever(process):
    (process.folder / f"pid-{process.number}").write_text(str(os.getpid()))
    time.sleep(600)
