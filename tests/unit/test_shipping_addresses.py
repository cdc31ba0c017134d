"""Addresses: every form, what is refused, and which of them another machine can reach."""

import subprocess
import sys

import pytest

from mmrender.errors import ShippingError, ShippingSecurityError
from mmrender.shipping import Address, CurveKeys, Receiver, Sender, Window
from mmrender.shipping.address import is_loopback


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("unix:///run/a.sock", Address("unix", path="/run/a.sock")),
        ("tcp://127.0.0.1:80", Address("tcp", host="127.0.0.1", port=80)),
        ("tcp://[::1]:80", Address("tcp", host="::1", port=80)),
        ("tcp://*:0", Address("tcp", host="*", port=0)),
        ("zmq+tcp://trainer:5555", Address("zmq+tcp", host="trainer", port=5555)),
        ("zmq+ipc:///run/b", Address("zmq+ipc", path="/run/b")),
        ("shm://run-7.a", Address("shm", path="run-7.a")),
        ("memory://x", Address("memory", path="x")),
    ],
)
def test_a_url_is_read_and_written_back(url, address):
    assert Address.parse(url) == address
    assert str(address) == url
    assert Address.parse(address) is address


@pytest.mark.parametrize(
    ("url", "text"),
    [
        (
            "http://a:1",
            "url: not an address - expected unix:///path/to/socket, tcp://host:port, zmq+tcp://host:port, "
            "zmq+ipc:///path/to/socket, shm://name, got 'http://a:1'",
        ),
        ("tcp://a", "url: not an address - expected tcp://host:port, got 'tcp://a'"),
        ("tcp://a:1/b", "url: not an address - expected tcp://host:port, got 'tcp://a:1/b'"),
        ("tcp://u@a:1", "url: not an address - expected tcp://host:port, got 'tcp://u@a:1'"),
        (
            "unix://a/b",
            "url: not an address - expected unix:///path/to/socket of at most 107 bytes, got 'unix://a/b'",
        ),
        (
            "unix:///" + "a" * 107,
            "url: not an address - expected unix:///path/to/socket of at most 107 bytes, got 'unix:///"
            + "a" * 107
            + "'",
        ),
        (
            "shm://a/b",
            "url: not an address - expected shm://name of letters, digits, '.', '_' and '-', got 'shm://a/b'",
        ),
        (
            "shm://../b",
            "url: not an address - expected shm://name of letters, digits, '.', '_' and '-', got 'shm://../b'",
        ),
    ],
)
def test_what_is_no_address_is_refused_with_the_form_that_is(url, text):
    with pytest.raises(ShippingError) as caught:
        Address.parse(url)
    assert str(caught.value) == text


@pytest.mark.parametrize("url", ["tcp://a:99999", "tcp://a:x", 7, None, "tcp://[::1"])
def test_nothing_but_a_shipping_error_comes_of_a_bad_address(url):
    with pytest.raises(ShippingError, match="not an address"):
        Sender(url)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_is_known(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "*", "127.0.0.1.example.org", ""])
def test_everything_else_is_not_loopback(host):
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: Sender("memory://a", delivery="twice"),
            "delivery: an unknown guarantee - expected \"at-least-once\" or \"at-most-once\", got 'twice'",
        ),
        (
            lambda: Sender("memory://a", max_unacked_messages=0),
            "max_unacked_messages: a bound out of range - expected 1 to 4096, got 0",
        ),
        (
            lambda: Receiver("memory://a", ack="never"),
            "ack: an unknown way to acknowledge - expected \"taken\" or \"explicit\", got 'never'",
        ),
        (lambda: Window(messages=0), "window.messages: a window lets nothing through - expected 1 or more, got 0"),
        (
            lambda: Sender("memory://a", key="short"),
            "key: the shared secret is too short - expected at least 16 bytes, got 5. "
            "Make one with secrets.token_hex(32)",
        ),
        (
            lambda: Sender("tcp://127.0.0.1:1", curve=CurveKeys(b"", b"", (b"",))),
            "tcp://127.0.0.1:1: CURVE belongs to ZeroMQ - expected zmq+tcp:// or zmq+ipc://. "
            "Pass key=, or take a zmq address",
        ),
        (
            lambda: Sender("zmq+tcp://127.0.0.1:1", curve=CurveKeys(b"", b"", ())),
            "curve.peers: CURVE keys without peers - expected public keys of the other side",
        ),
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_refused(make, text):
    with pytest.raises(ShippingError) as caught:
        make()
    assert str(caught.value) == text


def test_a_secret_is_in_no_repr():
    assert "secret" not in repr(CurveKeys(b"public", b"secret", ()))
    assert issubclass(ShippingSecurityError, ShippingError)


def test_importing_the_package_pulls_in_no_zmq_and_no_asyncio():
    code = (
        "import sys, mmrender.shipping; print([m for m in ('zmq', 'torch', 'asyncio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
