"""What every way to travel has to give: whole values, in order, each array once, bounded, and nothing left behind."""

import asyncio
import gc
import os
import pickle
import socket
import threading
import time

import numpy as np
import pytest

import mmrender.shipping.sender as sending
from kit import free_port, raised_by, until
from mmcodecs import Limits, Shared, UnsupportedTypeError
from mmcodecs.wire import encode_keyed_frames
from mmrender import TrainingSample, Trajectory
from mmrender.errors import InputError, ShippingClosedError, ShippingConnectionError, ShippingProtocolError
from mmrender.shipping import Receiver, Sender
from mmrender.shipping.protocol import Timing
from shipping_cases import PATIENT, is_message, leftovers, message, tls_contexts
from tree_cases import Call, assert_same

TRANSPORTS = ["unix", "tcp", "tls"]


class Pair:
    """Makes the two ends of one transport, with what both need."""

    def __init__(self, transport: str, folder) -> None:
        self.url = f"unix://{folder}/socket" if transport == "unix" else "tcp://127.0.0.1:0"
        self.receiver_options: dict = {"timing": PATIENT}
        self.sender_options: dict = {"timing": PATIENT}
        if transport == "tls":
            self.receiver_options["ssl"], self.sender_options["ssl"], _ = tls_contexts(folder)

    def receiver(self, **options) -> Receiver:
        return Receiver(self.url, **self.receiver_options | options)

    def sender(self, receiver: Receiver, **options) -> Sender:
        return Sender(receiver.url, **self.sender_options | options)


@pytest.fixture(params=TRANSPORTS)
def pair(request, tmp_path):
    return Pair(request.param, tmp_path)


@pytest.fixture(params=["unix", "tcp"])
def some_pair(request, tmp_path):
    return Pair(request.param, tmp_path)


@pytest.fixture
def url(tmp_path):
    return f"unix://{tmp_path}/a"


async def take(receiver: Receiver, count: int) -> list:
    return [await receiver.receive(60) for _ in range(count)]


async def test_values_arrive_whole_and_in_order(pair):
    async with pair.receiver() as receiver, pair.sender(receiver) as sender:
        for number in range(40):
            await sender.send(message(number, range(number % 4), 30_000))
        got = await take(receiver, 40)
        await sender.flush(60)
        assert [each.id.partition(":")[2] for each in got] == [str(number) for number in range(1, 41)]
        assert all(is_message(each.value, n, range(n % 4), 30_000) for n, each in enumerate(got))
        assert (sender.stats.acknowledged, sender.stats.unacked) == (40, 0)
        assert sender.stats.resent == 0
        assert (receiver.stats.messages, receiver.stats.duplicates) == (40, 0)
    assert (await leftovers()) == []


async def test_small_answers_do_not_wait_in_the_system(tmp_path):
    """Else an answer waits 40 ms for the other side to confirm the one before."""
    pair = Pair("tcp", tmp_path)
    async with pair.receiver() as receiver, pair.sender(receiver) as sender:
        (session,) = receiver._sessions
        for connection in (session.connection, sender._connection):
            sock = connection._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_large_arrays_are_read_only_views_of_aligned_memory(pair):
    async with pair.receiver() as receiver, pair.sender(receiver) as sender:
        sent = np.arange(3_000_000, dtype=np.float32)
        await sender.send({"first": np.ones(70_001, np.uint8), "second": sent})
        (got,) = await take(receiver, 1)
        array = got.value["second"]
        assert np.array_equal(array, sent)
        assert not array.flags.writeable
        assert not array.flags.owndata
        assert array.ctypes.data % 64 == 0


async def test_a_view_that_is_kept_never_sees_another_message(pair):
    async with pair.receiver() as receiver, pair.sender(receiver) as sender:
        kept = []
        for number in range(30):
            await sender.send(np.full(200_000, number, np.uint8))
            value = (await receiver.receive(60)).value
            if number % 3 == 0:
                kept.append(value[1000:1010])
            del value
        assert [int(each.mean()) for each in kept] == list(range(0, 30, 3))
    del receiver, sender
    gc.collect()
    assert [int(each.mean()) for each in kept] == list(range(0, 30, 3))


def test_memory_is_used_again_when_the_last_view_is_gone(some_pair):
    async def run():
        async with some_pair.receiver() as receiver, some_pair.sender(receiver) as sender:
            places = set()
            for number in range(12):
                await sender.send(np.full(2_000_000, number, np.uint8))
                value = (await receiver.receive(60)).value
                assert value[0] == number
                places.add(value.ctypes.data)
                del value
                await sender.flush(60)
                await asyncio.sleep(0.01)
            return places

    assert len(asyncio.run(run())) <= 3


async def test_trajectories_arrive_as_trajectories_and_groups_together(some_pair):
    def trajectory(name: str) -> Trajectory:
        made = Trajectory(name)
        Call([10, ("A", 3), 11], [20, 21], 1).append_to(made)
        Call([10, ("A", 3), 11, 20, 21, 12, ("B", 2)], [22], 2).append_to(made)
        return made

    async with some_pair.receiver() as receiver, some_pair.sender(receiver) as sender:
        await sender.send(trajectory("task/1"))
        await sender.send([trajectory("task/2"), trajectory("task/3")])
        first, group = await take(receiver, 2)
        assert first.id.endswith(":1")
        assert_same(first.value, trajectory("task/1"))
        assert [each.trajectory_id for each in group.value] == ["task/2", "task/3"]


async def test_tensors_where_they_are_asked_for_and_trajectories_as_ever(url):
    torch = pytest.importorskip("torch")
    async with Receiver(url, framework="torch") as receiver, Sender(receiver.url) as sender:
        made = Trajectory("t")
        Call([10, ("B", 3)], [20], 1).append_to(made)
        await sender.send({"x": torch.ones(300, dtype=torch.bfloat16)})
        await sender.send(made)
        plain, tree = await take(receiver, 2)
        assert torch.equal(plain.value["x"], torch.ones(300, dtype=torch.bfloat16))
        assert isinstance(tree.value.steps[0].token_ids, np.ndarray)


async def test_the_window_bounds_what_is_under_way(some_pair):
    window = {"window_messages": 3, "memory_bytes": 1 << 20}
    async with some_pair.receiver(**window) as receiver, some_pair.sender(receiver) as sender:
        for number in range(12):
            await sender.send(message(number))
        await until(lambda: receiver.stats.queued == 3)
        await asyncio.sleep(0.1)
        assert receiver.stats.queued == 3
        got = await take(receiver, 1)
        await until(lambda: receiver.stats.queued == 3)
        await asyncio.sleep(0.1)
        assert receiver.stats.queued == 3
        got += await take(receiver, 11)
        assert [each.value["number"] for each in got] == list(range(12))

        for _ in range(5):
            await sender.send(np.zeros(600_000, np.uint8))
        await until(lambda: receiver.stats.queued == 1)
        await asyncio.sleep(0.1)
        assert receiver.stats.queued == 1  # a second one would be beyond a megabyte
        await take(receiver, 5)
        await sender.send(np.zeros(3_000_000, np.uint8))  # larger than the window: alone
        await take(receiver, 1)


async def test_a_sender_waits_while_too_much_is_unacknowledged(some_pair):
    async with some_pair.receiver(ack="explicit") as receiver:
        async with some_pair.sender(receiver, max_unacked_messages=2) as sender:
            await sender.send(1)
            await sender.send(2)
            third = asyncio.ensure_future(sender.send(3))
            got = await take(receiver, 2)
            await asyncio.sleep(0.05)
            assert not third.done()
            got[0].ack()
            await asyncio.wait_for(third, 60)
            got[1].ack()
            (await take(receiver, 1))[0].ack()

        async with some_pair.sender(receiver, max_unacked_bytes=1_000_000) as sender:
            await sender.send(np.zeros(2_000_000, np.uint8))  # whatever its size
            second = asyncio.ensure_future(sender.send(np.zeros(10, np.uint8)))
            (got,) = await take(receiver, 1)
            await asyncio.sleep(0.05)
            assert not second.done()
            got.ack()
            await asyncio.wait_for(second, 60)
            (await take(receiver, 1))[0].ack()


async def test_a_sender_may_be_there_before_its_receiver(pair):
    pair.url = pair.url.replace(":0", f":{free_port()}")
    receiver = pair.receiver()
    sender = pair.sender(receiver)
    with pytest.raises(ShippingConnectionError, match=r"the receiver does not answer - got for 0.05 s"):
        await sender.connect(0.05)
    await sender.send("early")
    async with receiver:
        assert [each.value for each in await take(receiver, 1)] == ["early"]
        await sender.aclose()


async def test_what_the_receiver_cannot_use_is_told_to_the_sender_and_stops_nobody_else(
    some_pair, monkeypatch
):
    from mmrender.errors import TrajectoryError
    from mmrender.shipping import receiver as receiving

    def picky(kind, value):
        if isinstance(value, str) and value.startswith("bad"):
            raise TrajectoryError("it does not hold together", where="steps[1]")
        return value

    monkeypatch.setattr(receiving, "from_wire", picky)
    async with some_pair.receiver() as receiver:
        sender = some_pair.sender(receiver)
        values = ("good 1", "bad", "good 2", "bad too", "good 3")
        deliveries = [await sender.send(value) for value in values]
        got = await take(receiver, 3)
        assert [each.value for each in got] == ["good 1", "good 2", "good 3"]
        caught = await raised_by(ShippingProtocolError, deliveries[1])
        assert str(caught) == (
            f"message {deliveries[1].id!r} to {receiver.url}: the receiver cannot use this message - "
            "got steps[1]: it does not hold together"
        )
        await asyncio.wait_for(asyncio.gather(*deliveries[::2]), 60)
        with pytest.raises(ShippingProtocolError, match=rf"{deliveries[3].id}.*cannot use this message"):
            await sender.aclose()  # the other one was raised above
        # A connection may break before its refusal was read, and then the message is refused again.
        assert 2 == sender.stats.refused <= receiver.stats.refused


async def test_a_message_longer_than_the_receiver_takes_fails_alone(some_pair):
    receiver = some_pair.receiver(limits=Limits(max_bytes=100_000))
    async with receiver, some_pair.sender(receiver) as sender:
        long = await sender.send(np.zeros(200_000, np.uint8))
        await sender.send("short")
        too = await sender.send(np.zeros(200_000, np.uint8))
        caught = await raised_by(ShippingProtocolError, long)
        assert str(caught) == (
            f"message {long.id!r} to {receiver.url}: the message is longer than the receiver takes - expected "
            f"at most 100000 bytes, got {caught.got}. "
            "Pass limits=Limits(max_bytes=...) to the receiver, or ship it in pieces"
        )
        assert [each.value for each in await take(receiver, 1)] == ["short"]
        with pytest.raises(ShippingProtocolError, match=rf"{too.id}.*longer than the receiver takes"):
            await sender.flush(60)  # the other one was raised above
        await sender.flush(60)


async def test_a_value_that_cannot_be_written_is_refused_before_it_is_taken_in(url):
    async with Receiver(url) as receiver, Sender(receiver.url) as sender:
        assert "$.x" in str(await raised_by(UnsupportedTypeError, sender.send({"x": object()})))
        sample = TrainingSample(np.arange(3, dtype=np.int32), np.array([False, True, True]))
        assert "got TrainingSample. Send the trajectory" in str(
            await raised_by(InputError, sender.send(sample))
        )
        assert sender.stats.unacked == 0
        await sender.send(pickle.dumps(sample, 5))
        received = pickle.loads((await receiver.receive(60)).value)
        assert (received.token_ids.tolist(), received.loss_mask.tolist()) == ([0, 1, 2], [False, True, True])


async def test_the_window_is_one_for_all_senders_dead_ones_included(url):
    """Senders that come and go cannot pile up more than the window, and those who wait go on in turn."""
    async with Receiver(url, window_messages=8, memory_bytes=410_000, timing=PATIENT) as receiver:
        for number in range(4):
            sender = Sender(url, timing=PATIENT)
            await sender.send(np.full(100_000, number, np.uint8))
            await until(lambda number=number: receiver.stats.queued == number + 1)
            await sender.aclose(0)
            await until(lambda: receiver.stats.connections == 0)
        waiting = [Sender(url, timing=PATIENT) for _ in range(4)]
        for number, sender in enumerate(waiting, 4):
            await sender.connect(60)
            await sender.send(np.full(100_000, number, np.uint8))
        await asyncio.sleep(0.1)
        assert receiver.stats.queued == 4
        assert receiver._bytes <= 410_000
        got = await take(receiver, 8)
        assert [each.value[0] for each in got[:4]] == [0, 1, 2, 3]
        assert sorted(each.value[0] for each in got[4:]) == [4, 5, 6, 7]
        assert (receiver._messages, receiver._bytes) == (0, 0)
        await asyncio.gather(*(sender.aclose() for sender in waiting))


async def test_closed_ends_say_so(url):
    receiver = Receiver(url)
    await receiver.open()
    sender = Sender(receiver.url)
    await sender.connect()
    delivery = await sender.send("x")
    waiting = asyncio.ensure_future(receiver.receive())
    await waiting
    waiting = asyncio.ensure_future(receiver.receive())
    await asyncio.sleep(0)
    await receiver.aclose()
    assert "the receiver is closed" in str(await raised_by(ShippingClosedError, waiting))
    await delivery
    late = await sender.send("y")
    assert "got 1 messages after 0.02 s" in str(await raised_by(ShippingConnectionError, sender.aclose(0.02)))
    with pytest.raises(ShippingClosedError, match="the sender was closed before this was acknowledged"):
        await late
    assert "the sender is closed" in str(await raised_by(ShippingClosedError, sender.send("z")))
    await sender.aclose()
    await receiver.aclose()
    assert "the receiver is closed" in str(await raised_by(ShippingClosedError, receiver.open()))
    async for _ in receiver:
        raise AssertionError("a closed receiver gives nothing")


async def test_a_peer_that_goes_silent_is_given_up(tmp_path):
    patient = Timing(heartbeat=0.1, silence=0.2, first_retry=0.01)
    mute = Timing(heartbeat=1000, silence=1000)
    receiver = Receiver(f"unix://{tmp_path}/mute", timing=mute)
    async with receiver, Sender(receiver.url, timing=patient) as sender:
        await until(lambda: sender.stats.connections > 1)
        assert str(sender._last_error) == (
            f"unix://{tmp_path}/mute: the peer is silent - got nothing for 0.2 s"
        )
        await sender.send("after")
        assert (await receiver.receive(60)).value == "after"


async def test_an_event_loop_that_was_busy_does_not_take_its_peer_for_dead(tmp_path):
    timing = Timing(heartbeat=0.1, silence=0.2)
    receiver = Receiver(f"unix://{tmp_path}/a", timing=timing)
    async with receiver, Sender(receiver.url, timing=timing) as sender:
        for number in range(3):
            time.sleep(0.4)  # a training step, say
            await sender.send(number)
            assert (await receiver.receive(60)).value == number
        assert sender.stats.connections == 1


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_nothing_is_left_behind(pair):
    """Files, threads and tasks are as before, however often ends are made and closed."""

    async def once():
        async with pair.receiver() as receiver, pair.sender(receiver) as sender:
            await sender.send({"a": Shared(np.zeros(500_000, np.uint8), b"a"), "b": np.ones(400_000)})
            await take(receiver, 1)
        assert await leftovers() == []

    def census() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    asyncio.run(once())
    before = census()
    for _ in range(4):
        asyncio.run(once())
    assert census() == before


async def test_each_message_is_encoded_once_however_many_connections_it_takes(url, monkeypatch):
    count = 0

    def counted(value, *, limits):
        nonlocal count
        count += 1
        return encode_keyed_frames(value, limits=limits)

    monkeypatch.setattr(sending, "encode_keyed_frames", counted)
    async with Receiver(url, timing=PATIENT, ack="explicit") as receiver:
        sender = Sender(receiver.url, timing=PATIENT)
        await sender.connect()
        for number in range(5):
            await sender.send(message(number, [1]))
        await take(receiver, 5)
    async with Receiver(url, timing=PATIENT) as receiver:
        got = await take(receiver, 5)
        assert all(is_message(each.value, number, [1]) for number, each in enumerate(got))
        await sender.aclose()
    assert count == 5
