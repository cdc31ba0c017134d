"""Both ends in threads: the same protocol, plain calls."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mmcodecs import UnsupportedTypeError
from mmrender.errors import ShippingClosedError, ShippingConnectionError, ShippingError
from mmrender.shipping import BlockingReceiver, BlockingSender
from shipping_cases import is_message, message


@pytest.mark.parametrize("scheme", ["unix", "tcp", "zmq+tcp", "shm"])
def test_a_trainer_thread_takes_what_worker_threads_send(scheme, tmp_path):
    url = {"unix": f"unix://{tmp_path}/a", "shm": f"shm://blocking-{os.getpid()}"}.get(scheme, f"{scheme}://127.0.0.1:0")
    threads = threading.active_count()
    with BlockingReceiver(url) as receiver, BlockingSender(receiver.url) as sender:
        with ThreadPoolExecutor(3) as workers:
            list(workers.map(lambda n: sender.send(message(n, [n % 2], 50_000), id=str(n)), range(12)))
        got = [receiver.receive(10) for _ in range(12)]
        assert sorted(int(each.id) for each in got) == list(range(12))
        assert all(is_message(each.value, int(each.id), [int(each.id) % 2], 50_000) for each in got)
        sender.flush(10)
        assert sender.stats.acknowledged == 12
        assert receiver.stats.messages == 12
    assert threading.active_count() == threads


def test_acknowledging_from_another_thread(tmp_path):
    with (
        BlockingReceiver(f"unix://{tmp_path}/a", ack="explicit", folder=tmp_path) as receiver,
        BlockingSender(receiver.url) as sender,
    ):
        delivery = sender.send(np.arange(10), id="x")
        received = receiver.receive(10)
        with pytest.raises(TimeoutError):
            delivery.wait(0.05)
        assert not delivery.acknowledged
        received.ack()
        delivery.wait(10)
        assert delivery.acknowledged
        with pytest.raises(TimeoutError):
            receiver.receive(0.02)
        assert sender.send(1).id != delivery.id
        assert receiver.receive(10).value == 1
        sender.end._outbox.close()


def test_iterating_ends_when_the_receiver_is_closed(tmp_path):
    got = []
    receiver = BlockingReceiver(f"unix://{tmp_path}/a")
    receiver.open()
    reader = threading.Thread(target=lambda: got.extend(each.value for each in receiver))
    reader.start()
    with BlockingSender(receiver.url) as sender:
        for number in range(3):
            sender.send(number)
    receiver.close()
    reader.join(10)
    assert not reader.is_alive()
    assert got == [0, 1, 2]
    receiver.close()


def test_errors_come_through_and_threads_end(tmp_path):
    threads = threading.active_count()
    with pytest.raises(ShippingError, match="not an address"):
        BlockingSender("nowhere")
    sender = BlockingSender(f"unix://{tmp_path}/nobody", max_unacked_messages=1)
    with pytest.raises(ShippingConnectionError, match="the receiver does not answer"):
        sender.open(0.05)
    with pytest.raises(UnsupportedTypeError):
        sender.send(object())
    sender.send(1)
    with pytest.raises(ShippingConnectionError, match=r"too much is unacknowledged - got no room for 0.05 s"):
        sender.send(2, timeout=0.05)
    with pytest.raises(ShippingConnectionError):
        sender.close(0.05)
    sender.close()
    with pytest.raises(ShippingClosedError, match="this end is closed"):
        sender.send(3)
    assert threading.active_count() == threads
