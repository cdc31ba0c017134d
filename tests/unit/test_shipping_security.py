"""Who is let in, what is refused, and what strangers can do: end their own connection."""

import asyncio
import contextlib
import os
import random
import socket
import struct
import sys

import numpy as np
import pytest

from mmrender.errors import (
    MissingDependencyError,
    ShippingConnectionError,
    ShippingError,
    ShippingProtocolError,
    ShippingSecurityError,
)
from mmrender.shipping import CurveKeys, Receiver, Sender, Window
from mmrender.shipping.channel import Channel
from mmrender.shipping.handshake import open_as_sender
from mmrender.shipping.links.memory import MemoryTransport
from mmrender.shipping.messages import (
    Bye,
    Data,
    Hello,
    Missing,
    Ping,
    Progress,
    Resume,
    Welcome,
    pack,
    unpack,
)
from mmrender.shipping.security import SessionKeys, tag
from shipping_cases import PATIENT, is_message, message

KEY, OTHER = "the key of this run, 32 bytes long", "another key that is as long as that"


@pytest.mark.parametrize(
    ("url", "options", "text"),
    [
        (
            "tcp://0.0.0.0:0",
            {},
            "tcp://0.0.0.0:0: binding beyond loopback without a shared secret - expected key=, got none. Pass "
            "the same key= to both sides, such as secrets.token_hex(32), or stay on loopback",
        ),
        (
            "zmq+tcp://0.0.0.0:0",
            {"key": KEY},
            "zmq+tcp://0.0.0.0:0: binding beyond loopback without CURVE keys - expected curve=CurveKeys(...), got a "
            "shared secret only. Pass curve=, take tcp:// with key=, or use a loopback address",
        ),
        (
            "zmq+tcp://*:0",
            {},
            "zmq+tcp://*:0: binding beyond loopback without CURVE keys - expected curve=CurveKeys(...), got none. "
            "Pass curve=, take tcp:// with key=, or use a loopback address",
        ),
    ],
)
def test_nothing_is_bound_beyond_loopback_without_a_guard(url, options, text):
    async def run():
        receiver = Receiver(url, **options)
        with pytest.raises(ShippingSecurityError) as caught:
            await receiver.open()
        assert str(caught.value) == text
        await receiver.aclose()

    asyncio.run(run())


def test_nothing_is_sent_beyond_loopback_without_a_guard():
    async def run():
        sender = Sender("tcp://192.0.2.1:9")
        with pytest.raises(ShippingSecurityError, match="connecting beyond loopback without a shared secret"):
            await sender.connect(5)
        with pytest.raises(ShippingSecurityError):
            await sender.send(1)
        await sender.aclose()

    asyncio.run(run())


def test_with_a_key_it_may_be_bound_anywhere():
    async def run():
        async with Receiver("tcp://0.0.0.0:0", key=KEY) as receiver:
            port = receiver.url.rpartition(":")[2]
            async with Sender(f"tcp://127.0.0.1:{port}", key=KEY) as sender:
                await sender.send(message(1, [1]))
                assert is_message((await receiver.receive(5)).value, 1, [1])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("receiver_key", "sender_key", "text"),
    [
        (KEY, None, "the receiver has a shared secret, and this side has none"),
        (None, KEY, "the receiver has no shared secret, and this side has one"),
        (KEY, OTHER, "a message that the holder of the key did not send"),
    ],
)
@pytest.mark.parametrize("scheme", ["tcp", "zmq+tcp"])
def test_both_sides_need_the_same_key_and_stop_trying_without(scheme, receiver_key, sender_key, text):
    async def run():
        async with Receiver(f"{scheme}://127.0.0.1:0", key=receiver_key) as receiver:
            sender = Sender(receiver.url, key=sender_key)
            with pytest.raises(ShippingSecurityError) as caught:
                await sender.connect(10)
            assert caught.value.problem == text
            assert caught.value.remedy == "Give both sides the same key"
            with pytest.raises(ShippingSecurityError):
                await sender.send(1)
            await sender.aclose()
            while not receiver.stats.refused:
                await asyncio.sleep(0.005)
            assert receiver.stats.messages == 0
            assert receiver.stats.connections == 0

    asyncio.run(run())


def test_what_was_given_before_a_refusal_is_reported_lost_and_not_dropped():
    async def run():
        async with Receiver("memory://refusal", key=KEY):
            sender = Sender("memory://refusal", key=OTHER)
            delivery = await sender.send("x")
            with pytest.raises(ShippingSecurityError):
                await asyncio.wait_for(delivery, 10)
            with pytest.raises(ShippingSecurityError):
                await sender.aclose()

    asyncio.run(run())


def test_curve_lets_in_who_is_listed():
    mine, theirs, stranger = CurveKeys.generate(), CurveKeys.generate(), CurveKeys.generate()

    async def run():
        async with Receiver("zmq+tcp://127.0.0.1:0", curve=mine.knowing(theirs.public)) as receiver:
            outside = Sender(receiver.url, curve=stranger.knowing(mine.public))
            with pytest.raises(ShippingSecurityError) as caught:
                await outside.connect(10)
            assert str(caught.value) == (
                f"{receiver.url}: the receiver does not let us in - expected a public key that the receiver "
                "lists. Add this sender's public key to the receiver's CurveKeys.peers"
            )
            await outside.aclose()
            fooled = Sender(receiver.url, curve=theirs.knowing(stranger.public), timing=PATIENT)
            with pytest.raises(ShippingError):  # it takes the receiver for somebody else
                await fooled.connect(0.5)
            await fooled.aclose()
            async with Sender(receiver.url, curve=theirs.knowing(mine.public)) as inside:
                await inside.send("hello")
                assert (await receiver.receive(5)).value == "hello"
            assert receiver.stats.messages == 1

    asyncio.run(run())


def test_every_byte_of_a_parcel_is_authenticated():
    frames = [memoryview(b"abc"), memoryview(b"defg")]
    key = bytes(range(32))
    right = tag(key, 5, b"header", frames)
    assert tag(key, 5, b"header", [memoryview(b"abc"), memoryview(b"defg")]) == right
    others = [
        tag(bytes(32), 5, b"header", frames),
        tag(key, 6, b"header", frames),
        tag(key, 5, b"headeR", frames),
        tag(key, 5, b"heade", [memoryview(b"rabc"), frames[1]]),
        tag(key, 5, b"header", [memoryview(b"abcd"), memoryview(b"efg")]),
        tag(key, 5, b"header", [memoryview(b"abcdefg")]),
        tag(key, 5, b"header", frames[:1]),
    ]
    assert right not in others
    assert len(set(others)) == len(others)


def test_each_connection_and_direction_has_a_key_of_its_own():
    said = [b"hello", b"challenge"]
    keys = SessionKeys.derive(KEY.encode(), said)
    assert keys == SessionKeys.derive(KEY.encode(), list(said))
    others = [
        SessionKeys.derive(OTHER.encode(), said),
        SessionKeys.derive(KEY.encode(), [b"hello", b"challengf"]),
        SessionKeys.derive(KEY.encode(), [b"hellochalleng", b"e"]),
    ]
    found = {
        keys.sender,
        keys.receiver,
        *(each.sender for each in others),
        *(each.receiver for each in others),
    }
    assert len(found) == 8
    assert repr(keys) == "SessionKeys()"


class Tampering(MemoryTransport):
    """Changes a byte of the fifth parcel and all later ones of the first link."""

    def __init__(self, where: str) -> None:
        super().__init__(f"tampering-{where}")
        self.where = where
        self.links = 0

    async def dial(self):
        link = await super().dial()
        self.links += 1
        if self.links == 1:
            send, sent = link.send, []

            async def tampered(header, frames):
                sent.append(header)
                if len(sent) >= 5:
                    if self.where == "header":
                        header = header[:-1] + bytes([header[-1] ^ 1])
                    else:
                        frames = [bytes(frame) for frame in frames]
                        changed = bytearray(frames[-1])
                        changed[7] ^= 1
                        frames = [memoryview(frame) for frame in [*frames[:-1], bytes(changed)]]
                await send(header, frames)

            link.send = tampered
        return link


@pytest.mark.parametrize("where", ["header", "payload"])
def test_what_was_changed_on_the_way_is_not_taken_and_comes_again(where):
    async def run():
        transport = Tampering(where)
        receiver = Receiver("memory://t", transport=transport, key=KEY)
        async with receiver, Sender("memory://t", transport=transport, key=KEY, timing=PATIENT) as sender:
            for number in range(6):
                await sender.send(message(number, [number], 5_000))
            got = [await receiver.receive(10) for _ in range(6)]
            assert all(is_message(each.value, n, [n], 5_000) for n, each in enumerate(got))
            assert sender.stats.connections == 2
            assert "did not send" in str(receiver.errors[0])

    asyncio.run(run())


# Strangers on a receiver without a key, and peers that have it but do not keep to the protocol


def parcel(header: bytes, *frames: bytes, kind: int = 0, lengths: list[int] | None = None) -> bytes:
    sizes = [len(frame) for frame in frames] if lengths is None else lengths
    start = struct.pack("<4sBBHII", b"mmsp", 1, kind, 0, len(header), len(sizes))
    return start + struct.pack(f"<{len(sizes)}Q", *sizes) + header + b"".join(frames)


def hello() -> bytes:
    return bytes(8) + pack(Hello(1, os.urandom(16), os.urandom(32), False, 0))


ATTACKS = {
    "nothing": b"",
    "noise": random.Random(7).randbytes(5000),
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "another version": b"mmsp\x02" + bytes(50),
    "a header of two gigabytes": struct.pack("<4sBBHII", b"mmsp", 1, 0, 0, 1 << 31, 0),
    "a million frames": struct.pack("<4sBBHII", b"mmsp", 1, 0, 0, 10, 1 << 20),
    "a payload before the handshake": parcel(hello(), lengths=[1 << 40]),
    "a header that is no message": parcel(bytes(8) + b"\xff" * 40),
    "a deeply nested header": parcel(bytes(8) + b"\x91" * 100_000),
    "a wrong first number": parcel(b"\x01" + hello()[1:]),
    "data first": parcel(bytes(8) + pack(Data(1, "a", ""))),
    "an unknown kind of parcel": parcel(hello(), kind=9),
    "shared memory": parcel(hello(), kind=1),
    "half a parcel": parcel(hello())[:-3],
    "another protocol version": parcel(bytes(8) + pack(Hello(2, bytes(16), bytes(32), False, 0))),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("scheme", ["unix", "shm"])
def test_strangers_end_their_own_connection_and_nothing_else(scheme, attack, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    url = f"unix://{tmp_path}/door" if scheme == "unix" else "shm://door"
    path = f"{tmp_path}/door" if scheme == "unix" else f"{tmp_path}/mmrender/door.sock"

    async def run():
        async with Receiver(url) as receiver, Sender(url, timing=PATIENT) as sender:
            await sender.send("before")
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(ATTACKS[attack])
            if attack in ("nothing", "half a parcel"):
                writer.write_eof()
            with contextlib.suppress(ConnectionResetError):  # it did not read to the end
                assert len(await asyncio.wait_for(reader.read(), 10)) < 2000
            writer.close()
            await sender.send("after")
            assert [(await receiver.receive(5)).value for _ in range(2)] == ["before", "after"]
            assert sender.stats.connections == 1
            assert all(isinstance(error, ShippingProtocolError) for error in receiver.errors)

    asyncio.run(run())


async def meet(name: str) -> tuple[Channel, Welcome]:
    """A sender that a test plays itself."""
    channel = Channel(await MemoryTransport(name).dial())
    return channel, await open_as_sender(
        channel, os.urandom(16), secret=None, table_bytes=1 << 20, unacked=[]
    )


async def last_words(channel: Channel) -> str:
    while True:
        answer, _ = await channel.receive(lambda: 0)
        if isinstance(answer, Bye):
            return answer.reason


def frames_of(value) -> list[memoryview]:
    from mmcodecs import encode_frames

    return [memoryview(bytes(frame)) for frame in encode_frames(value)]


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        ([(Progress([1], [1]), ())], "a message out of turn"),
        ([(Resume([]), ())], "a message out of turn"),
        ([(Missing(1, [b"k"]), ())], "a message out of turn"),
        ([(Ping(), (b"payload",))], "a payload that belongs to nothing"),
        ([(Data(1, "a\nb", ""), frames_of(1))], "not an id"),
        ([(Data(1, "a", ""), [memoryview(b"no codec message")])], "a message that cannot be used"),
        ([(Data(1, "a", "pickle"), frames_of(1))], "a message that cannot be used"),
        ([(Data(1, "a", "trajectory"), frames_of({"x": 1}))], "a message that cannot be used"),
        ([(Data(1, "a", "group"), frames_of([1, None]))], "a message that cannot be used"),
        ([(Data(1, "a", ""), ())], "a message that cannot be used"),
        ([(Data(1, "a", ""), frames_of(1)), (Data(1, "a", ""), frames_of(1))], "a message beyond the window"),
        ([(Data(n, f"{n}", ""), frames_of(n)) for n in range(5)], "a message beyond the window"),
        (
            [(Data(n, f"{n}", ""), frames_of(np.zeros(3000, np.uint8))) for n in range(3)],
            "a message is too long",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_peer_that_breaks_the_protocol_is_sent_away(sent, problem):
    async def run():
        window = Window(messages=3, num_bytes=5000)
        async with Receiver("memory://breaks", window=window) as receiver:
            channel, _ = await meet("breaks")
            for each, frames in sent:
                await channel.send(each, [memoryview(bytes(frame)) for frame in frames])
            reason = await asyncio.wait_for(last_words(channel), 10)
            assert problem in reason
            assert problem in str(receiver.errors[-1])
            async with Sender("memory://breaks") as sender:
                await sender.send("others go on", id="others")
                while (await receiver.receive(5)).id != "others":
                    pass

    asyncio.run(run())


def test_holes_in_the_line_open_no_door_to_memory():
    """A peer that names arrays it never sends may have two messages beyond the window, and no more."""
    from mmcodecs import Encoder, Limits, Shared

    async def run():
        limits = Limits(max_bytes=20_000)
        window = Window(messages=8, num_bytes=10_000)
        async with Receiver("memory://holes", window=window, limits=limits) as receiver:
            channel, _ = await meet("holes")
            encoder = Encoder(table_bytes=1 << 20)
            named = {"a": Shared(np.zeros(1000, np.uint8), b"k")}
            encoder.encode_frames(named)  # as if it had been sent
            await channel.send(Data(0, "0", ""), [memoryview(bytes(f)) for f in encoder.encode_frames(named)])
            answer, _ = await channel.receive(lambda: 0)
            assert answer == Missing(0, [b"k"])
            for number in range(1, 8):
                await channel.send(Data(number, str(number), ""), frames_of(np.zeros(15_000, np.uint8)))
            assert "a message is too long" in await asyncio.wait_for(last_words(channel), 10)
            assert receiver.stats.queued == 0

    asyncio.run(run())


def test_a_receiver_that_lies_does_not_stop_a_sender():
    """Whatever a receiver answers, the sender raises shipping errors only, and connects again."""
    answers = [
        Welcome(1, 1, 1 << 20, 0, [99], [98], [(97, 5)]),
        Progress([5, 6], [7, 8]),
        Missing(12, [b"x"]),
        Data(1, "x", ""),
        Resume([]),
    ]

    async def run():
        from mmrender.shipping.handshake import open_as_receiver

        met = []

        async def lie(link):
            channel = Channel(link)
            await open_as_receiver(channel, secret=None)
            for answer in answers:
                await channel.send(answer)

        def on_link(link):
            met.append(asyncio.ensure_future(lie(link)))

        door = await MemoryTransport("lies").listen(on_link)
        sender = Sender("memory://lies", timing=PATIENT)
        await sender.connect()
        delivery = await sender.send("x")
        while sender.stats.connections < 3:
            await asyncio.sleep(0.01)
        assert not delivery.done
        await door.aclose()
        await sender.aclose(0)
        assert "out of turn" in str(sender._connections.last_error)
        await asyncio.gather(*met, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(5))
def test_headers_of_noise_raise_one_error(seed):
    rng = random.Random(seed)
    for _ in range(200):
        try_noise(rng)


def try_noise(rng: random.Random) -> None:
    sound = pack(
        rng.choice([Hello(1, bytes(16), bytes(32), True, 5), Data(3, "id", ""), Progress([1], [2, 3])])
    )
    noise = bytearray(sound)
    for _ in range(rng.randint(1, 4)):
        noise[rng.randrange(len(noise))] = rng.randrange(256)
    noise += rng.randbytes(rng.choice([0, 0, 3]))
    with contextlib.suppress(ShippingProtocolError):
        unpack(bytes(noise))


@pytest.mark.parametrize("scheme", ["unix", "zmq+ipc"])
def test_socket_files_are_for_their_owner_and_stale_ones_are_replaced(scheme, tmp_path):
    path = tmp_path / "door"

    async def run():
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))  # and nobody listens: what a killed receiver leaves
        async with Receiver(f"{scheme}://{path}") as receiver:
            assert path.stat().st_mode & 0o777 == 0o600
            rival = Receiver(receiver.url)
            with pytest.raises(ShippingConnectionError) as caught:
                await rival.open()
            await rival.aclose()
            assert str(caught.value) == f"{scheme}://{path}: another receiver listens there"
        assert not path.exists()
        path.write_text("a file of somebody's")
        late = Receiver(f"{scheme}://{path}")
        with pytest.raises(ShippingConnectionError) as caught:
            await late.open()
        await late.aclose()
        assert str(caught.value) == (
            f"{scheme}://{path}: the path is taken - expected nothing, or a socket file that nobody listens on, "
            "got another kind of file"
        )
        assert path.read_text() == "a file of somebody's"

    asyncio.run(run())


def test_a_folder_for_sockets_that_others_may_write_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "mmrender").mkdir(mode=0o755)
    (tmp_path / "mmrender").chmod(0o777)

    async def run():
        with pytest.raises(
            ShippingConnectionError, match=r"not this user's alone - expected owner \d+, mode 0700"
        ):
            await Receiver("shm://x").open()

    asyncio.run(run())


def test_what_needs_pyzmq_says_so(monkeypatch):
    for name in [
        name for name in sys.modules if name.split(".")[0] == "zmq" or name.endswith("links.zeromq")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(MissingDependencyError) as caught:
        Receiver("zmq+tcp://127.0.0.1:0")
    assert str(caught.value) == (
        "shipping over ZeroMQ needs pyzmq, which is not installed. Install it with: pip install 'mmrender[zmq]'"
    )
    with pytest.raises(MissingDependencyError, match="CURVE needs pyzmq"):
        CurveKeys.generate()
