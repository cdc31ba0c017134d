"""Both ends in threads: the same protocol, plain calls."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kit import error_of
from mmcodecs.errors import UnsupportedTypeError
from mmrender.errors import ShippingClosedError, ShippingConnectionError, ShippingError
from mmrender.shipping import BlockingReceiver, BlockingSender
from shipping_cases import is_message, message


@pytest.mark.parametrize("scheme", ["unix", "tcp"])
def test_a_trainer_thread_takes_what_worker_threads_send(scheme, tmp_path):
    url = f"unix://{tmp_path}/a" if scheme == "unix" else "tcp://127.0.0.1:0"
    threads = threading.active_count()
    with BlockingReceiver(url) as receiver, BlockingSender(receiver.url) as sender:
        with ThreadPoolExecutor(3) as workers:
            list(workers.map(lambda n: sender.send(message(n, [n % 2], 50_000)), range(12)))
        got = [receiver.receive(10).value for _ in range(12)]
        assert sorted(each["number"] for each in got) == list(range(12))
        assert all(is_message(each, each["number"], [each["number"] % 2], 50_000) for each in got)
        sender.flush(10)
        assert sender.stats.acknowledged == 12
        assert receiver.stats.messages == 12
    assert threading.active_count() == threads


def test_acknowledging_from_another_thread(tmp_path):
    with (
        BlockingReceiver(f"unix://{tmp_path}/a", ack="explicit") as receiver,
        BlockingSender(receiver.url) as sender,
    ):
        delivery = sender.send(np.arange(10))
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
        last = receiver.receive(10)
        assert last.value == 1
        last.ack()


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
    assert "malformed address" in error_of(ShippingError, BlockingSender, "nowhere")
    sender = BlockingSender(f"unix://{tmp_path}/nobody", max_unacked_messages=1)
    assert "the receiver does not answer" in error_of(ShippingConnectionError, sender.open, 0.05)
    with pytest.raises(UnsupportedTypeError):
        sender.send(object())
    sender.send(1)
    with pytest.raises(ShippingConnectionError, match=r"too much is unacknowledged - got no room for 0.05 s"):
        sender.send(2, timeout=0.05)
    with pytest.raises(ShippingConnectionError):
        sender.close(0.05)
    sender.close()
    assert "this end is closed" in error_of(ShippingClosedError, sender.send, 3)
    assert threading.active_count() == threads


def test_what_is_known_is_told_after_closing_also_to_threads_that_wait(tmp_path):
    receiver = BlockingReceiver(f"unix://{tmp_path}/a", ack="explicit")
    receiver.open()
    sender = BlockingSender(receiver.url)
    sender.open()
    acknowledged, unknown = sender.send(1), sender.send(2)
    receiver.receive(10).ack()
    acknowledged.wait(10)
    sender.close(0)
    receiver.close()
    acknowledged.wait()
    assert acknowledged.acknowledged
    assert error_of(ShippingClosedError, unknown.wait) == "the sender was closed before this was acknowledged"
    assert not unknown.acknowledged
    assert sender.stats.acknowledged == 1
    assert receiver.stats.queued == 1
    with BlockingReceiver(f"unix://{tmp_path}/a", ack="explicit") as receiver:
        sender = BlockingSender(receiver.url)
        sender.open()
        deliveries = [sender.send(number) for number in range(4)]
        with ThreadPoolExecutor(4) as pool:
            waits = [pool.submit(delivery.wait) for delivery in deliveries]
            sender.close(0)
            for wait in waits:
                assert isinstance(wait.exception(10), ShippingClosedError)
