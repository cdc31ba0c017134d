"""A fleet on this machine: deaths and restarts, errors, addresses, and a simulation of all of it, small."""

import asyncio
import json
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch")

import fleet_faults
from fleet_cases import ask, die_twice, fail, forever, read, serve, ship, stop
from kit import error_of, raised_by
from mmrender import Trajectory
from mmrender.errors import FleetError, InputError
from mmrender.integrations.fleet import AddressFiles, Fleet, LocalFleet, Role, receivers, record
from mmrender.shipping import Sender
from mmrender.trajectory import TrajectoryWriter

TESTS = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True, scope="module")
def clean_server():
    """A server of forks that finds the modules of these tests: without them each process would import torch."""
    multiprocessing.forkserver._forkserver._stop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))
        yield
        multiprocessing.forkserver._forkserver._stop()


def test_a_process_that_dies_is_started_again_and_servers_end_last(tmp_path):
    roles = {"server": Role(serve, 2, serves=True), "mortal": Role(die_twice, 2), "asker": Role(ask)}
    with LocalFleet(Fleet(tmp_path, roles)) as fleet:
        fleet.run()
        assert {role for role, _ in fleet.pids()} == {"server"}
    assert fleet.pids() == {}
    assert [(tmp_path / f"lives-{number}").read_text() for number in (0, 1)] == ["xxx", "xxx"]
    assert json.loads((tmp_path / "asked").read_text()) == ["address of 0", "address of 1"]
    assert all((tmp_path / f"ended-{number}").exists() for number in (0, 1))


@pytest.mark.parametrize(
    ("role", "got"),
    [
        (Role(fail), "ValueError: no luck in process 0 of 1"),
        (Role(stop, serves=True), "it returned"),
        (Role(die_twice, max_restarts=1), "exit status -9 after 1 restarts"),
    ],
)
def test_an_error_is_no_death_and_ends_the_fleet(tmp_path, role, got):
    roles = {"one": role, "other": Role(forever)}
    with LocalFleet(Fleet(tmp_path, roles)) as fleet:
        error = error_of(FleetError, fleet.run)
    log = tmp_path.resolve() / "logs" / "one-0.log"
    assert str(error) == f"one 0: a process has failed - got {got}. See {log}"
    assert fleet.pids() == {}
    if "luck" in got:
        text = log.read_text()
        assert text.startswith("about to fail\n")
        assert "Traceback" in text


def test_trajectories_reach_all_ranks_once_while_a_receiver_dies(tmp_path):
    count = 10
    roles = {
        "worker": Role(partial(ship, count), 2),
        "receiver": receivers(2, sync=False),
        "trainer": Role(partial(read, 2 * count), 2),
    }
    with LocalFleet(Fleet(tmp_path, roles)) as fleet:
        while not (tmp_path / "killed").exists():
            assert fleet.poll()
        before = AddressFiles(tmp_path).addresses("receiver")
        for number in range(2):
            os.kill(fleet.pids()["receiver", number], signal.SIGKILL)
        while set(before) & set(AddressFiles(tmp_path).addresses("receiver")):
            assert fleet.poll()
        while not (tmp_path / "all").exists():
            assert fleet.poll()
    lines = [line for path in tmp_path.glob("read-*") for line in path.read_text().splitlines()]
    assert sorted(lines) == sorted(f"{worker}-{number}/0" for worker in range(2) for number in range(count))


def test_processes_end_with_their_driver(tmp_path):
    program = tmp_path / "driver.py"
    program.write_text(
        textwrap.dedent("""
        import os, sys, time
        from pathlib import Path
        from mmrender.integrations.fleet import Fleet, LocalFleet, Role

        def forever(process):
            (process.folder / f"pid-{process.number}").write_text(str(os.getpid()))
            time.sleep(600)

        if __name__ == "__main__":
            with LocalFleet(Fleet(Path(sys.argv[1]), {"one": Role(forever, 2)})) as fleet:
                fleet.run()
        """)
    )
    with subprocess.Popen([sys.executable, str(program), str(tmp_path)]) as driver:
        files = [tmp_path / f"pid-{number}" for number in range(2)]
        until(lambda: all(file.exists() and file.read_text() for file in files))
        driver.kill()
    pids = [int(file.read_text()) for file in files]
    until(lambda: not any(is_running(pid) for pid in pids))


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


async def test_a_receiver_that_cannot_write_ends_with_the_error(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(TrajectoryWriter, "append", full)
    process = Fleet(tmp_path, {"receiver": receivers()}).process(("receiver", 0), AddressFiles(tmp_path))
    recording = asyncio.create_task(asyncio.to_thread(record, process))
    async with Sender(process.receivers) as sender:
        trajectory = Trajectory()
        trajectory.append([1], [2], logprobs=[-1.0])
        await sender.send(trajectory)
        error = await raised_by(OSError, asyncio.wait_for(recording, 60))
        await sender.aclose(0)
    assert str(error) == "no space left"


def test_roles_are_checked(tmp_path):
    error = error_of(InputError, Fleet, tmp_path, {"a/b": Role(stop)})
    assert str(error) == "roles: not a name of a role - expected letters, got 'a/b'"
    error = error_of(InputError, Fleet, tmp_path, {"worker": Role(stop, 0)})
    assert str(error) == "roles['worker'].count: is out of range - expected a whole number, 1 or more, got 0"


def test_addresses_are_in_order_of_their_processes(tmp_path):
    files = AddressFiles(tmp_path)
    for number in (10, 2, 0):
        files.publish("receiver", number, f"tcp://{number}")
    files.publish("receiver", 2, "tcp://moved")
    files.publish("receiver_b", 1, "tcp://other")
    assert files.addresses("receiver") == ["tcp://0", "tcp://moved", "tcp://10"]
    assert files.addresses("receiver_b") == ["tcp://other"]
    files.clear()
    assert files.addresses("receiver") == []


def test_a_fleet_that_is_killed_trains_on_each_answered_turn_once(capsys):
    sizes = "--workers 2 --environments 6 --engines 4 --mortal 1 --slow 1 --hung 1 --receivers 2 --ranks 2"
    deadlines = "--control-s 2 --attempt-s 2 --slow-s 0.3"
    fleet_faults.main(["--steps", "2", "--kills", "4", *sizes.split(), *deadlines.split()])
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["kills"] == {"worker": 1, "receiver": 1, "trainer": 1, "engine": 1}
    assert figures["games"] == 6 * figures["steps"]
    assert figures["turns"] == 2 * figures["games"]
