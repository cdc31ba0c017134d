"""Several receivers and a list that changes: who ships where, and what a receiver keeps for its senders."""

import asyncio
import os
import random
import subprocess
import sys
from collections import Counter
from contextlib import AsyncExitStack

import numpy as np
import pytest

from kit import error_of, raised_by, until
from mmcodecs import BufferPool, Shared
from mmrender import Trajectory
from mmrender.errors import ShippingConnectionError, ShippingError, ShippingSecurityError
from mmrender.shipping import Receiver, Recorder, Sender
from mmrender.shipping.address import Address, ReceiverList, order_for
from mmrender.shipping.protocol import LONG_BYTES, Timing
from mmrender.shipping.store import FrameStore
from mmrender.training import TrajectoryDataset
from mmrender.trajectory.files import received_ids
from shipping_cases import tls_contexts

SOON = Timing(first_retry=0.001, last_retry=0.02, look=0.005, leave=60, failover=60)
"""A sender looks often, and waits as long as it takes."""


def url(folder, name):
    return f"unix://{folder}/{name}"


async def opened(stack, folder, names, **options):
    """Receivers under these names, by URL."""
    made = [Receiver(url(folder, name), timing=SOON, **options) for name in names]
    return {each.url: await stack.enter_async_context(each) for each in made}


async def take(receiver, count):
    return [(await receiver.receive(60)).value for _ in range(count)]


def connected(receivers):
    return [name for name, each in receivers.items() if each.stats.connections]


async def settled(receivers, count=1):
    """The only receiver that has connections, once all senders are there."""
    await until(lambda: sum(each.stats.connections for each in receivers.values()) == count, 60)
    (name,) = connected(receivers)
    return name


def rollout(token):
    trajectory = Trajectory(f"task-{token}")
    trajectory.append([1, 2], [token], logprobs=[-0.5])
    return trajectory


# Who ships where


def test_a_change_of_the_list_moves_its_own_share_of_senders():
    draw = random.Random(3)
    addresses = [Address.parse(f"tcp://10.0.0.{number}:5555") for number in range(1, 9)]
    senders = [draw.randbytes(16) for _ in range(2000)]
    firsts = [order_for(sender, addresses)[0] for sender in senders]
    shares = Counter(firsts)
    assert set(shares) == set(addresses)
    assert 180 < min(shares.values()) <= max(shares.values()) < 330
    fewer = [order_for(sender, addresses[:3] + addresses[4:])[0] for sender in senders]
    for before, after in zip(firsts, fewer, strict=True):
        assert (after == before) == (before != addresses[3])
    assert order_for(senders[0], addresses[::-1]) == order_for(senders[0], addresses)


@pytest.mark.parametrize("kind", ["sequence", "file", "function"])
async def test_a_sender_follows_its_list_and_messages_come_once(kind, tmp_path):
    """Receivers leave the list and join it, each time with messages on their way."""
    listed, lines = [], tmp_path / "receivers"

    def publish(urls):
        listed[:] = urls
        new = tmp_path / "receivers.new"
        new.write_text("# receivers\n\n" + "".join(f"{each}  # on a host\n" for each in urls))
        new.replace(lines)

    publish([url(tmp_path, "a"), url(tmp_path, "b")])
    forms = {"sequence": listed, "file": lines, "function": lambda: tuple(listed)}
    taken = []
    async with AsyncExitStack() as stack:
        receivers = await opened(stack, tmp_path, "abc")

        async def consume(receiver):
            async for message in receiver:
                taken.append(message.value)  # noqa: PERF401 - as they come

        for each in receivers.values():
            task = asyncio.create_task(consume(each))
            stack.callback(task.cancel)
        sender = await stack.enter_async_context(Sender(forms[kind], timing=SOON))
        number = 0
        for moves in range(3):
            await until(lambda moves=moves: sender.stats.connections > moves, 60)
            here = await settled(receivers)
            there = [each for each in receivers if each != here]
            for _ in range(20):
                await sender.send(number)
                number += 1
            publish(there)
        await until(lambda: sender.stats.connections == 4, 60)
        await sender.flush(60)
    assert sorted(taken) == list(range(60))
    assert sum(each.stats.messages for each in receivers.values()) == 60
    assert sum(each.stats.duplicates for each in receivers.values()) == 0
    assert sender.stats.connections == 4


async def test_a_sender_goes_to_a_receiver_that_joins_if_it_prefers_it(tmp_path):
    async with AsyncExitStack() as stack:
        receivers = await opened(stack, tmp_path, "ab")
        first, second = receivers
        listed = [first]
        senders = [await stack.enter_async_context(Sender(listed, timing=SOON)) for _ in range(16)]
        addresses = [Address.parse(each) for each in receivers]
        listed.append(second)
        wanted = sum(str(order_for(sender._id, addresses)[0]) == second for sender in senders)
        await until(lambda: receivers[second].stats.connections == wanted, 60)
        await until(lambda: receivers[first].stats.connections == 16 - wanted, 60)
        assert all(sender.stats.connections <= 2 for sender in senders)


async def test_what_the_old_receiver_does_not_acknowledge_in_time_is_shipped_to_the_new_one_as_well(tmp_path):
    timing = Timing(first_retry=0.001, last_retry=0.02, look=0.005, leave=0.02)
    async with AsyncExitStack() as stack:
        receivers = await opened(stack, tmp_path, "ab", ack="explicit")
        listed = [*receivers]
        sender = await stack.enter_async_context(Sender(listed, timing=timing))
        here = await settled(receivers)
        deliveries = [await sender.send(number) for number in range(3)]
        old = [await receivers[here].receive(60) for _ in range(3)]
        old[0].ack()
        await deliveries[0]
        listed.remove(here)
        (there,) = listed
        new = [await receivers[there].receive(60) for _ in range(2)]
        assert [each.id for each in new] == [each.id for each in old[1:]]
        old[1].ack()  # which the sender does not hear
        for each in new:
            each.ack()
        await asyncio.wait_for(asyncio.gather(*deliveries), 60)
        listed[:] = [here]  # and back, where its last number is known
        await until(lambda: connected(receivers) == [here], 60)
        delivery = await sender.send("later")
        old[2].ack()
        later = await receivers[here].receive(60)
        later.ack()
        await asyncio.wait_for(delivery, 60)
        assert later.value == "later"
        assert (sender.stats.acknowledged, sender.stats.resent) == (4, 2)


async def test_a_dead_receiver_is_replaced_under_another_address(tmp_path):
    listed = [url(tmp_path, "a")]
    dead, born = Receiver(listed[0], ack="explicit", timing=SOON), Receiver(url(tmp_path, "b"), timing=SOON)
    await dead.open()
    sender = Sender(lambda: listed, timing=SOON)
    delivery = await sender.send("x")
    assert (await dead.receive(60)).value == "x"
    await dead.aclose()
    await until(lambda: not sender.connected, 60)
    async with born:
        listed[:] = [born.url]
        assert await take(born, 1) == ["x"]
        await asyncio.wait_for(delivery, 60)
        await sender.aclose()


async def test_a_receiver_that_cannot_be_reached_is_passed_over_after_a_while(tmp_path):
    async with AsyncExitStack() as stack:
        receivers = await opened(stack, tmp_path, "ab")
        timing = Timing(first_retry=0.001, last_retry=0.01, look=0.005, failover=0.05)
        sender = await stack.enter_async_context(Sender([*receivers], timing=timing))
        here = await settled(receivers)
        await receivers[here].aclose()
        (there,) = set(receivers) - {here}
        await sender.send("x")
        assert await take(receivers[there], 1) == ["x"]
        again = await stack.enter_async_context(Receiver(here, timing=SOON))
        for number in range(5):  # the list is as it was, so the sender stays
            await sender.send(number)
            assert await take(receivers[there], 1) == [number]
            await asyncio.sleep(0.01)
        assert again.stats.messages == 0


async def test_a_list_that_cannot_be_used_is_named_and_read_again(tmp_path, sentence):
    lines = tmp_path / "receivers"
    sender = Sender(lines, timing=SOON)
    await sender.connect(0)
    problems = []
    for content, part in ((None, "No such file"), ("", "is empty"), ("tcp://nowhere", "malformed")):
        if content is not None:
            lines.write_text(content)
        await until(lambda part=part: part in str(sender._last_error), 60)
        problem = await raised_by(ShippingConnectionError, sender.connect(0.01))
        problems.append(str(problem).replace(str(tmp_path), "FOLDER"))
    async with Receiver(url(tmp_path, "a"), timing=SOON) as receiver:
        lines.write_text(receiver.url)
        await sender.send("x")
        assert await take(receiver, 1) == ["x"]
        lines.write_text("")  # a connection outlives a list that is gone for a moment
        await until(lambda: "is empty" in str(sender._last_error), 60)
        await sender.send("y")
        assert await take(receiver, 1) == ["y"]
        await sender.aclose()
        assert sender.stats.connections == 1
    assert problems == sentence


def test_a_fixed_list_is_checked_at_once(tmp_path):
    assert "malformed address" in error_of(ShippingError, Sender, ["unix:///tmp/a", "nothing"])
    assert "malformed address" in error_of(ShippingError, Sender, "nothing")
    assert "TLS is for tcp:// only" in error_of(
        ShippingError, Sender, [url(tmp_path, "a")], ssl=tls_contexts(tmp_path)[1]
    )
    assert str(ReceiverList(["unix:///a", "unix:///b"], None)) == "unix:///a, unix:///b"
    assert str(ReceiverList(tmp_path, None)) == str(tmp_path)


async def test_a_url_in_place_of_a_list_is_named():
    problem = await raised_by(ShippingConnectionError, ReceiverList(lambda: "tcp://a:1", None).read())
    assert "a list of URLs is needed" in str(problem)


async def test_an_address_of_a_list_that_needs_tls_ends_the_sender():
    sender = Sender(lambda: ["tcp://192.0.2.1:9"], timing=SOON)
    with pytest.raises(ShippingSecurityError, match="other machines can reach this address"):
        await sender.connect(60)
    await sender.aclose()


async def test_recorders_and_a_dataset_train_on_each_message_once(tmp_path):
    """Two senders move between two recorders with messages unacknowledged, and two ranks read both files."""
    files = [tmp_path / "files" / name for name in "ab"]
    files[0].parent.mkdir()
    listed = [url(tmp_path, "a")]
    timing = Timing(first_retry=0.001, last_retry=0.02, look=0.005, leave=0.0)
    with Recorder(url(tmp_path, "a"), files[0]) as first, Recorder(url(tmp_path, "b"), files[1]) as second:
        senders = [Sender(listed, timing=timing) for _ in range(2)]
        for token in range(60):
            listed[:] = [(first, second)[token // 6 % 2].url]
            group = [rollout(token), rollout(token)]
            await senders[token % 2].send(group if token % 5 == 0 else group[0])
            await asyncio.sleep(0.001)  # so that senders look at the list meanwhile
        for sender in senders:
            await sender.aclose(60)
    written = [id for path in files for id in received_ids(path)]
    assert len(set(written)) == 60
    ranks = [[one.sample_id for one in TrajectoryDataset(files[0].parent, rank=n, world=2)] for n in range(2)]
    expected = [f"task-{token}/0" for token in range(60) for _ in range(1 + (token % 5 == 0))]
    assert sorted(ranks[0] + ranks[1]) == sorted(expected)
    assert sorted(one.sample_id for one in samples_of_plan(files[0].parent)) == sorted(expected)


def samples_of_plan(folder):
    dataset = TrajectoryDataset(folder)
    step = dataset.describe()
    return dataset.load(step, range(len(step))).values()


# What a receiver keeps


def frame(value, length=100):
    return memoryview(bytes([value]) * length)


def test_a_store_keeps_equal_frames_once_and_never_mixes_senders():
    store = FrameStore(10_000)
    store.put("a", b"k", frame(1))
    assert store.find("b", b"k", 100) is None
    store.put("b", b"k", frame(1))
    assert store.find("a", b"k", 100) is store.find("b", b"k", 100)
    assert store.find("a", b"k", 99) is store.find("a", b"other", 100) is store.find("a", None, 100) is None
    before = store.num_bytes
    assert before == 100 + 2 * 256
    store.put("b", b"k", frame(2))  # the key says that it is the same, and it is not
    assert store.find("a", b"k", 100) is None
    assert store.find("b", b"k", 100) == frame(2)
    assert store.num_bytes < before


def test_a_store_compares_a_frame_with_an_earlier_one_only(monkeypatch):
    """Comparing takes as long as a copy."""
    compared = []
    monkeypatch.setattr(np, "array_equal", lambda one, other: compared.append((one[0], other[0])) or True)
    store = FrameStore(10_000)
    store.put("a", b"k", frame(1))
    store.put("a", b"other", frame(2))
    assert compared == []
    store.put("b", b"k", frame(3))
    assert compared == [(1, 3)]


def test_a_store_drops_what_was_used_longest_ago_and_is_bounded():
    store = FrameStore(4000)
    for number in range(4):
        store.put("a", b"%d" % number, frame(number, 700))
    assert store.find("a", b"0", 700) == frame(0, 700)
    store.put("a", b"4", frame(4, 700))
    assert [store.find("a", b"%d" % number, 700) is not None for number in range(5)] == [1, 0, 1, 1, 1]
    assert store.num_bytes <= 4000
    store.put("a", b"large", frame(9, 5000))  # drops nothing, and is not kept
    assert store.find("a", b"large", 5000) is None
    assert store.find("a", b"4", 700) is not None
    for number in range(1000):  # senders take memory, too
        store.put(f"{number}", b"4", frame(4, 700))
        assert store.num_bytes <= 4000
    store.limit(0)
    assert store.num_bytes == 0
    assert store.find("a", b"4", 700) is None


def image(key, value, length=LONG_BYTES):
    return Shared(np.full(length, value, np.uint8), b"%d" % key)


async def shipped(sender, receiver, *values):
    """Bytes of frames on the wire for a message, which arrives as it was sent."""
    before = receiver.stats.received_bytes
    await sender.send(list(values))
    (got,) = await take(receiver, 1)
    assert all(np.array_equal(one, each.value) for one, each in zip(got, values, strict=True))
    return receiver.stats.received_bytes - before


async def test_an_image_travels_once_while_the_receiver_has_it(tmp_path):
    async with (
        Receiver(url(tmp_path, "a"), memory_bytes=8 * LONG_BYTES) as receiver,
        Sender(receiver.url) as sender,
        Sender(receiver.url) as other,
    ):
        assert await shipped(sender, receiver, image(1, 1), image(2, 2)) > 2 * LONG_BYTES
        assert await shipped(sender, receiver, image(1, 1), image(2, 2)) < LONG_BYTES
        assert await shipped(sender, receiver, image(3, 3), image(2, 2), image(3, 3)) < 2 * LONG_BYTES
        # Another sender's images are its own, until its bytes are seen to be equal.
        assert await shipped(other, receiver, image(1, 7)) > LONG_BYTES
        assert await shipped(other, receiver, image(2, 2)) > LONG_BYTES
        assert await shipped(other, receiver, image(2, 2), image(1, 7)) < LONG_BYTES
        assert await shipped(sender, receiver, image(2, 2)) < LONG_BYTES
        for number in range(4, 12):
            assert await shipped(other, receiver, image(number, number)) > LONG_BYTES
        assert await shipped(sender, receiver, image(2, 2)) > LONG_BYTES  # dropped meanwhile
        assert receiver._store.num_bytes <= 8 * LONG_BYTES


async def test_images_outlive_a_connection_and_do_not_travel_with_duplicates(tmp_path):
    async with Receiver(url(tmp_path, "a"), ack="explicit", timing=SOON) as receiver:
        sender = Sender(receiver.url, timing=SOON)
        delivery = await sender.send([image(1, 1), np.zeros(3 * LONG_BYTES, np.uint8)])
        message = await receiver.receive(60)
        for connections in (2, 3):
            sender._connection.close()
            await until(lambda connections=connections: receiver.stats.duplicates == connections - 1, 60)
        assert receiver.stats.received_bytes < 5 * LONG_BYTES
        message.ack()
        await asyncio.wait_for(delivery, 60)
        await sender.send([image(1, 1)])
        assert (await receiver.receive(60)).value[0][0] == 1
        assert receiver.stats.received_bytes < 5 * LONG_BYTES
        await sender.aclose(0)


async def test_torch_tensors_of_kept_images_are_copies(tmp_path):
    torch = pytest.importorskip("torch")
    async with Receiver(url(tmp_path, "a"), framework="torch") as receiver, Sender(receiver.url) as sender:
        for _ in range(2):
            await sender.send([image(1, 1)])
            (got,) = (await receiver.receive(60)).value
            assert torch.equal(got, torch.ones(LONG_BYTES, dtype=torch.uint8))
            got += 1  # of the consumer's own


async def test_memory_is_bounded_over_all_senders(tmp_path, monkeypatch):
    """While 24 senders ship images faster than they are taken: messages on their way and kept images together."""
    size, bound = 2 * LONG_BYTES, 40 * LONG_BYTES
    totals = []
    async with Receiver(url(tmp_path, "a"), memory_bytes=bound) as receiver, AsyncExitStack() as stack:
        acquire = BufferPool.acquire

        def counted(pool, num_bytes):
            totals.append(receiver._bytes + receiver._store.num_bytes)
            return acquire(pool, num_bytes)

        monkeypatch.setattr(BufferPool, "acquire", counted)
        senders = [await stack.enter_async_context(Sender(receiver.url)) for _ in range(24)]
        for part in range(4):
            for number, sender in enumerate(senders):
                await sender.send([image(100 * number + part, part, size), image(100 * number, 0, size)])
        for _ in range(24 * 4):
            await receiver.receive(60)
        assert receiver._pool.idle_bytes <= bound // 4
        for sender in senders:
            await sender.flush(60)
    assert bound // 2 < max(totals) <= bound


RESIDENT = """
import asyncio, ctypes, gc, sys
from contextlib import AsyncExitStack
from pathlib import Path
import numpy as np
from mmcodecs import Shared
from mmrender.shipping import Receiver, Sender

def read(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

async def peak(url, count):
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = read("VmRSS")
    async with Receiver(url, memory_bytes=32 << 20) as receiver, AsyncExitStack() as stack:
        senders = [await stack.enter_async_context(Sender(url)) for _ in range(count)]
        for number in range(384):
            array = np.full(1 << 18, number % 251, np.uint8)
            delivery = await senders[number % count].send(Shared(array, b"%d" % number))
            assert (await receiver.receive(60)).value[-1] == number % 251
            await delivery
    return read("VmHWM") - before

print(*(asyncio.run(peak(sys.argv[1], count)) for count in (1, 1, 8, 64)))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs the peak of the resident set")
def test_resident_memory_does_not_grow_with_the_number_of_senders(tmp_path):
    """96 MiB of images of one, 8 and 64 senders, of which a receiver keeps 32; the first run warms up."""
    command = [sys.executable, "-c", RESIDENT, url(tmp_path, "a")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    peaks = [int(each) for each in done.stdout.split()[1:]]
    assert max(peaks) < 60 << 20
    assert max(peaks) - min(peaks) < 16 << 20
