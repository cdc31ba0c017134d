"""Who may connect, and how strangers, liars and breakers of the protocol fare."""

import asyncio
import contextlib
import errno
import os
import random
import resource
import socket
import ssl
import struct
import sys
from typing import Any

import msgspec
import numpy as np
import pytest

from kit import error_of, raised_by, until
from mmcodecs import Encoder, Limits, encode_frames
from mmcodecs.shared import Shared
from mmrender.errors import (
    ShippingConnectionError,
    ShippingError,
    ShippingProtocolError,
    ShippingSecurityError,
)
from mmrender.shipping import Receiver, Sender
from mmrender.shipping.connection import Connection, pack
from mmrender.shipping.protocol import (
    LONG_BYTES,
    VERSION,
    Acked,
    Bye,
    Data,
    Frames,
    Hello,
    Message,
    Ping,
    Refused,
    Want,
    Welcome,
)
from shipping_cases import PATIENT, is_message, message, tls_contexts


@pytest.mark.parametrize("url", ["tcp://0.0.0.0:0", "tcp://*:0"])
async def test_nothing_is_bound_beyond_loopback_without_tls(url, sentence):
    receiver = Receiver(url)
    caught = await raised_by(ShippingSecurityError, receiver.open())
    await receiver.aclose()
    assert str(caught) == sentence


async def test_nothing_is_sent_beyond_loopback_without_tls():
    sender = Sender("tcp://192.0.2.1:9")
    delivery = await sender.send(1)
    with pytest.raises(ShippingSecurityError, match="other machines can reach this address"):
        await sender.connect(60)
    with pytest.raises(ShippingSecurityError):
        await delivery
    with pytest.raises(ShippingSecurityError):
        await sender.aclose()


async def test_tls_contexts_must_ask_for_certificates(tmp_path, sentence):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    assert error_of(ShippingSecurityError, Receiver, "tcp://127.0.0.1:0", ssl=context) == sentence
    with pytest.raises(ShippingError, match="TLS is for tcp:// only"):
        await Receiver(f"unix://{tmp_path}/a", ssl=ssl.create_default_context()).open()


async def test_tls_lets_in_whose_certificate_is_known(tmp_path):
    server, client, stranger = tls_contexts(tmp_path)
    async with Receiver("tcp://0.0.0.0:0", ssl=server) as receiver:
        url = f"tcp://localhost:{receiver.url.rpartition(':')[2]}"
        async with Sender(url, ssl=client) as sender:
            await sender.send(message(1, [1], 3_000_000))
            assert is_message((await receiver.receive(60)).value, 1, [1], 3_000_000)
        outsider = Sender(url, ssl=ssl.create_default_context(), timing=PATIENT)
        with pytest.raises(ShippingSecurityError, match="TLS failed"):
            await outsider.connect(60)  # which does not know the receiver
        await outsider.aclose(0)
        outsider = Sender(url, ssl=stranger, timing=PATIENT)
        await outsider.send("let me in")
        await until(lambda: outsider._last_error is not None or outsider._task.done())
        with pytest.raises(ShippingError, match=r"unknown ca|does not know this side's certificate"):
            await outsider.connect(0.3)
        await outsider.aclose(0)
        plain = Sender(url, timing=PATIENT)
        with pytest.raises(ShippingConnectionError):
            await plain.connect(0.2)
        await plain.aclose(0)
        assert receiver.stats.messages == 1


def hello(version: int = VERSION) -> bytes:
    return pack(Hello(version, os.urandom(16)))


def framed(header: bytes) -> bytes:
    return struct.pack("<4sI", b"mmsp", len(header)) + header


ATTACKS = {
    "nothing": b"",
    "noise": random.Random(7).randbytes(5000),
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "a header of two gigabytes": struct.pack("<4sI", b"mmsp", 1 << 31),
    "a million frames": hello() + pack(Data(1, "", [0] * (1 << 14), {})),
    "a terabyte": hello() + pack(Data(1, "", [1 << 40], {})),
    "a frame before the handshake": pack(Data(1, "", [10], {})),
    "a header that is no message": framed(b"\xff" * 40),
    "a deeply nested header": framed(b"\x91" * 100_000),
    "data first": pack(Data(1, "", [], {})),
    "an unknown message": framed(b"\x91\xa3xyz"),
    "half a message": hello()[:-3],
    "another protocol version": hello(1),
    "the protocol before": framed(msgspec.msgpack.encode(["hello", 5, bytes(16)])),
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_strangers_end_their_own_connection_and_nothing_else(attack, tmp_path):
    path = f"{tmp_path}/door"
    async with Receiver(f"unix://{path}") as receiver, Sender(receiver.url, timing=PATIENT) as sender:
        await sender.send("before")
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(ATTACKS[attack])
        if attack in ("nothing", "half a message"):
            writer.write_eof()
        with contextlib.suppress(ConnectionResetError):  # it did not read to the end
            assert len(await asyncio.wait_for(reader.read(), 60)) < 2000
        writer.close()
        await sender.send("after")
        assert [(await receiver.receive(60)).value for _ in range(2)] == ["before", "after"]
        assert sender.stats.connections == 1
        assert all(isinstance(error, ShippingProtocolError) for error in receiver.errors)


@contextlib.asynccontextmanager
async def meet(path: str):
    """A sender that a test plays itself."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_unix_connection(lambda: Connection(path, PATIENT), path)
    connection.post(Hello(VERSION, os.urandom(16)))
    await connection.receive(Welcome)
    yield connection
    connection.close()


async def last_words(connection: Connection) -> str:
    while True:
        try:
            await connection.receive(Message)
        except (ShippingConnectionError, ShippingSecurityError) as error:
            return error.got


def frames_of(seq: int, frames: list[Any], *, kind: str = "") -> tuple[Data, list[memoryview]]:
    views = [memoryview(bytes(frame)) for frame in frames]
    return Data(seq, kind, [view.nbytes for view in views], {}), views


def data(seq: int, value: Any, **options: str) -> tuple[Data, list[memoryview]]:
    return frames_of(seq, encode_frames(value), **options)


def unknown_reference() -> list[Any]:
    """Frames that refer to an array which was never sent."""
    encoder = Encoder(table_bytes=1 << 20)
    named = {"a": Shared(np.zeros(1000, np.uint8), b"k")}
    encoder.encode_frames(named)
    return encoder.encode_frames(named)


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        ([Acked(1)], "a message out of turn"),
        ([Refused(1, "x")], "a message out of turn"),
        ([Want(1, [])], "a message out of turn"),
        ([Frames(1)], "a message out of turn"),
        ([frames_of(1, [b"no codec message"])], "a message that cannot be used"),
        ([frames_of(1, unknown_reference())], "a message that cannot be used"),
        ([data(1, 1, kind="pickle")], "a message that cannot be used"),
        ([data(1, {"x": 1}, kind="trajectory")], "a message that cannot be used"),
        ([data(1, [1, None], kind="group")], "a message that cannot be used"),
        ([frames_of(1, [])], "a message that cannot be used"),
        ([data(1, np.zeros(9000, np.uint8))], "a message is too long"),
    ],
)
async def test_a_peer_that_breaks_the_protocol_is_sent_away(sent, problem, tmp_path):
    url = f"unix://{tmp_path}/breaks"
    async with Receiver(url, limits=Limits(max_bytes=5000)) as receiver:
        async with meet(f"{tmp_path}/breaks") as connection:
            for each in sent:
                if isinstance(each, Message):
                    connection.post(each)
                else:
                    await connection.send(*each)
            reason = await asyncio.wait_for(last_words(connection), 60)
        assert problem in reason
        assert problem in str(receiver.errors[-1])
        async with Sender(url) as sender:
            await sender.send("others go on")
            assert (await receiver.receive(60)).value == "others go on"


WRONG_TURNS = {
    "frames of another message": Frames(2),
    "another message": Data(2, "", [10], {}),
    "a goodbye": Bye("going"),
}


@pytest.mark.parametrize("answer", WRONG_TURNS)
async def test_a_sender_that_does_not_send_the_wanted_frames_is_sent_away(answer, tmp_path):
    url = f"unix://{tmp_path}/breaks"
    async with Receiver(url) as receiver:
        async with meet(f"{tmp_path}/breaks") as connection:
            header = Data(1, "", [10, LONG_BYTES], {1: b"key"})
            await connection.send(header, [memoryview(bytes(10))])
            assert await asyncio.wait_for(connection.receive(Want), 60) == Want(1, [1])
            assert (receiver._messages, receiver._bytes) == (1, 10 + LONG_BYTES)
            connection.post(WRONG_TURNS[answer])
            with contextlib.suppress(ShippingConnectionError):  # a goodbye has no answer
                await asyncio.wait_for(last_words(connection), 60)
        await until(lambda: not receiver._messages)
        assert (receiver._bytes, receiver.stats.messages) == (0, 0)
        assert [error.problem for error in receiver.errors] == ["a message out of turn"] * (
            answer != "a goodbye"
        )


@pytest.mark.parametrize("want", [Want(2, []), Want(1, [0]), Want(1, [7])])
async def test_a_receiver_that_wants_other_frames_is_left(want, tmp_path):
    wants = [want]

    async def serve(reader, writer):
        await reader.read(100)
        writer.write(pack(Welcome(VERSION, 1 << 30)))
        await reader.read(100)
        writer.write(b"".join(map(pack, wants)))
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(serve, f"{tmp_path}/lies")
    sender = Sender(f"unix://{tmp_path}/lies", timing=PATIENT)
    delivery = await sender.send(np.zeros(LONG_BYTES))
    await until(lambda: sender._last_error is not None)
    assert "a message out of turn" in str(sender._last_error)
    assert not delivery.done
    server.close()
    await sender.aclose(0)


async def test_a_peer_that_sends_beyond_the_window_waits_in_its_socket(tmp_path):
    url = f"unix://{tmp_path}/beyond"
    async with Receiver(url, window_messages=3, memory_bytes=5000) as receiver:
        async with meet(f"{tmp_path}/beyond") as connection:
            for number in range(1, 10):
                await connection.send(*data(number, np.full(2000, number, np.uint8)))
            await until(lambda: receiver.stats.queued == 2)
            await asyncio.sleep(0.05)
            assert receiver.stats.queued == 2
            assert [(await receiver.receive(60)).value[0] for _ in range(9)] == list(range(1, 10))
        assert not receiver.errors


@pytest.mark.skipif(sys.platform != "linux", reason="counts the thread's waits")
async def test_slow_senders_never_hold_up_the_event_loop(tmp_path):
    """While sixteen long frames trickle in, the loop waits in no system call."""
    path, turns = f"{tmp_path}/slow", 40
    async with Receiver(f"unix://{path}") as receiver, contextlib.AsyncExitStack() as stack:
        socks = []
        for _ in range(16):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.connect(path)
            sock.sendall(hello() + pack(Data(1, "", [1 << 20], {})) + pack(Frames(1)))
            socks.append(sock)
        while receiver._messages < 16:
            await asyncio.sleep(0.001)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        for _ in range(turns):
            for sock in socks:
                sock.send(bytes(4096))
            for _ in range(3):
                await asyncio.sleep(0)
        waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before
        assert waits < turns
        assert receiver.stats.connections == 16


async def test_a_receiver_that_lies_does_not_stop_a_sender(tmp_path):
    """Whatever a receiver answers, the sender raises shipping errors only, and connects again."""
    answers = [Welcome(VERSION, 1 << 20), Acked(5), Ping(), Data(1, "", [], {})]

    async def lie(reader, writer):
        await reader.read(100)
        writer.write(b"".join(pack(answer) for answer in answers))
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(lie, f"{tmp_path}/lies")
    sender = Sender(f"unix://{tmp_path}/lies", timing=PATIENT)
    await sender.connect()
    delivery = await sender.send("x")
    while sender.stats.connections < 3:
        await asyncio.sleep(0.01)
    assert not delivery.done
    server.close()
    await sender.aclose(0)
    assert "out of turn" in str(sender._last_error)


@pytest.mark.parametrize("seed", range(5))
async def test_headers_of_noise_raise_errors_of_the_tree(seed):
    rng = random.Random(seed)
    for _ in range(200):
        sound = rng.choice([Hello(1, bytes(16)), Data(3, "kind", [5], {0: b"key"}), Refused(2, "text")])
        noise = bytearray(pack(sound))
        for _ in range(rng.randint(1, 4)):
            noise[rng.randrange(len(noise))] = rng.randrange(256)
        noise += rng.randbytes(rng.choice([0, 0, 3]))
        noise[:8] = struct.pack("<4sI", b"mmsp", len(noise) - 8)
        connection = Connection("peer", PATIENT)
        connection.get_buffer(0)[: len(noise)] = noise
        connection.buffer_updated(len(noise))
        with contextlib.suppress(ShippingProtocolError):
            await connection.receive(Message)


async def test_socket_files_are_for_their_owner_and_stale_ones_are_replaced(tmp_path):
    path = tmp_path / "door"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # and nobody listens: what a killed receiver leaves
    async with Receiver(f"unix://{path}") as receiver:
        assert path.stat().st_mode & 0o777 == 0o600
        rival = Receiver(receiver.url)
        caught = await raised_by(ShippingConnectionError, rival.open())
        await rival.aclose()
        assert str(caught) == f"unix://{path}: another receiver listens there"
    assert not path.exists()
    path.write_text("a file of somebody's")
    late = Receiver(f"unix://{path}")
    caught = await raised_by(ShippingConnectionError, late.open())
    await late.aclose()
    assert str(caught) == (
        f"unix://{path}: the path is taken by a file of another kind. Remove it, or take another path"
    )
    assert path.read_text() == "a file of somebody's"


@pytest.mark.parametrize(
    "error", [ConnectionResetError("gone"), OSError(errno.EMFILE, "too many open files")]
)
async def test_a_socket_that_fails_costs_a_connection_and_no_message(tmp_path, monkeypatch, error):
    async with Receiver(f"unix://{tmp_path}/a") as receiver, Sender(receiver.url, timing=PATIENT) as sender:
        loop, failures = asyncio.get_running_loop(), [error, error]
        send = loop.sock_sendall

        async def failing(sock, data):
            if failures:
                raise failures.pop()
            await send(sock, data)

        monkeypatch.setattr(loop, "sock_sendall", failing)
        await sender.send(np.arange(100_000))
        assert (await receiver.receive(60)).value[-1] == 99_999
        assert sender.stats.connections == 3


async def test_a_connection_that_closes_while_it_is_written_to_is_made_again(tmp_path):
    """TLS has no socket any more once its transport closes."""
    server, client, _ = tls_contexts(tmp_path)
    async with Receiver("tcp://127.0.0.1:0", ssl=server, timing=PATIENT) as receiver:
        url = f"tcp://localhost:{receiver.url.rpartition(':')[2]}"
        async with Sender(url, ssl=client, timing=PATIENT) as sender:
            for number in range(6):
                sender._connection.close()
                await sender.send(np.full(200_000, number))
                assert (await receiver.receive(60)).value[-1] == number
                while not sender.connected:
                    await asyncio.sleep(0.001)
