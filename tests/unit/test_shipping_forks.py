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
from mmrender.shipping import BlockingReceiver, BlockingSender, Receiver, Sender

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
UNUSED = {
    "Sender": """
sender = Sender(url)

def work():
    async def send():
        async with sender:
            for number in range(10):
                await sender.send([os.getpid(), number])
    asyncio.run(send())
""",
    "BlockingSender": """
sender = BlockingSender(url)

def work():
    with sender:
        for number in range(10):
            sender.send([os.getpid(), number])
""",
}
USED = """
sender, receiver = BlockingSender(url), BlockingReceiver(url + ".other")
receiver.open()
delivery = sender.send("of the parent")

def refused(work, *args):
    try:
        work(*args)
    except ShippingClosedError as error:
        assert f"in use in the process from which this one was forked - expected process {os.getppid()}" in str(error)
        return
    raise AssertionError(f"{work} was not refused")

def child():
    for work in (sender.open, sender.flush, sender.close, delivery.wait, receiver.receive, receiver.close):
        refused(work)
    refused(sender.send, 1)
    bare = sender._end
    async def awaited():
        await delivery._delivery
    for make in (bare.connect, bare.flush, bare.aclose, lambda: bare.send(1), awaited, receiver._end.receive):
        refused(lambda: asyncio.run(make()))
    with BlockingSender(url) as own:
        own.send("of the child")

assert in_child(child) == 0
sender.close()
receiver.close()
"""


async def outcome(script: str, url: str) -> str:
    """Run a script to its end, and return its errors."""
    command = [sys.executable, "-c", COMMON + script, url]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    return errors.decode() if process.returncode else ""


@pytest.mark.parametrize("kind", UNUSED)
async def test_a_sender_made_before_a_fork_is_another_one_in_each_child(kind, tmp_path):
    url = f"unix://{tmp_path}/a"
    async with Receiver(url, ack="explicit", timing=PATIENT) as receiver:
        got = []

        async def acknowledge():
            async for message in receiver:
                got.append(tuple(message.value))
                message.ack()

        task = asyncio.create_task(acknowledge())
        children = "assert [in_child(work) for _ in range(2)] == [0, 0]"
        assert await outcome(UNUSED[kind] + children, url) == ""
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
