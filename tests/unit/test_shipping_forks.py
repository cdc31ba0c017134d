"""Ends that were made before a fork: each process is a sender of its own, or the use is refused by name."""

import asyncio
import os
import sys

import pytest

from mmrender.shipping import Receiver
from shipping_cases import PATIENT

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

COMMON = """
import asyncio, os, signal, sys
from mmrender.errors import ShippingClosedError
from mmrender.shipping import Receiver, Sender

def in_child(work):
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    signal.alarm(20)  # a child that hangs dies
    try:
        work()
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)

url = sys.argv[1]
"""
UNUSED = """
sender = Sender(url)

def work():
    async def send():
        async with sender:
            for number in range(10):
                await sender.send([os.getpid(), number])
    asyncio.run(send())

assert [in_child(work) for _ in range(2)] == [0, 0]
"""
USED = """
sender, receiver = Sender(url), Receiver(url + ".other")

async def refused(work):
    try:
        await work()
    except ShippingClosedError as error:
        assert f"in use in the process from which this one was forked - expected process {os.getppid()}" in str(error)
        return
    raise AssertionError(f"{work} was not refused")

async def parent():
    await receiver.open()
    delivery = await sender.send("of the parent")

    async def child():
        async def awaited():
            await delivery

        bound = (sender.connect, sender.flush, sender.aclose, receiver.receive, receiver.aclose)
        for work in (*bound, awaited, lambda: sender.send(1)):
            await refused(work)
        async with Sender(url) as own:
            await own.send("of the child")

    assert await asyncio.to_thread(in_child, lambda: asyncio.run(child())) == 0
    await sender.aclose()
    await receiver.aclose()

asyncio.run(parent())
"""


async def outcome(script: str, url: str) -> str:
    """Run a script to its end, and return its errors."""
    command = [sys.executable, "-c", COMMON + script, url]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    return errors.decode() if process.returncode else ""


async def test_a_sender_made_before_a_fork_is_another_one_in_each_child(tmp_path):
    url = f"unix://{tmp_path}/a"
    async with Receiver(url, ack="explicit", timing=PATIENT) as receiver:
        got = []

        async def acknowledge():
            async for message in receiver:
                got.append(tuple(message.value))
                message.ack()

        task = asyncio.create_task(acknowledge())
        assert await outcome(UNUSED, url) == ""
        task.cancel()
        assert len(set(got)) == len(got) == 20
        assert len({process for process, _ in got}) == 2
        assert receiver.stats.duplicates == 0


async def test_an_end_in_use_before_a_fork_is_refused_by_name_and_never_hangs(tmp_path):
    url = f"unix://{tmp_path}/a"
    async with Receiver(url, ack="explicit", timing=PATIENT) as receiver:
        work = asyncio.create_task(outcome(USED, url))
        # Acknowledged at the end: a delivery that is done already may be asked anywhere.
        messages = [await receiver.receive(30) for _ in range(2)]
        for message in messages:
            message.ack()
        assert await work == ""
        assert sorted(message.value for message in messages) == ["of the child", "of the parent"]
