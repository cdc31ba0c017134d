"""Addresses: every form, what is refused, and which of them another machine can reach."""

import subprocess
import sys

import pytest

from mmrender.errors import ShippingError
from mmrender.shipping import Receiver, Sender
from mmrender.shipping.address import Address


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("unix:///run/a.sock", Address("unix", path="/run/a.sock")),
        ("tcp://127.0.0.1:80", Address("tcp", host="127.0.0.1", port=80)),
        ("tcp://[::1]:80", Address("tcp", host="::1", port=80)),
        ("tcp://*:0", Address("tcp", host="*", port=0)),
        ("shm://run-7.a", Address("shm", path="run-7.a")),
    ],
)
def test_a_url_is_read_and_written_back(url, address):
    assert Address.parse(url) == address
    assert str(address) == url


FORMS = {"unix": "unix:///path/to/socket", "tcp": "tcp://host:port", "shm": "shm://name"}


@pytest.mark.parametrize(
    "url",
    ["http://a:1", "zmq+tcp://a:1", "tcp://a", "tcp://a:1/b", "tcp://u@a:1", "tcp://a:1?x", "unix://a/b"]
    + ["unix:///" + "a" * 107, "unix:///", "shm://a/b", "shm://../b", "tcp://a:99999", "tcp://a:x", 7, None]
    + ["tcp://[::1"],
)
def test_a_malformed_address_is_refused_with_the_form_that_is_right(url):
    with pytest.raises(ShippingError) as caught:
        Sender(url)
    scheme = str(url).partition(":")[0]
    sound = scheme in FORMS and "99999" not in url and not url.endswith((":x", "[::1"))
    expected = FORMS[scheme] if sound else ", ".join(FORMS.values())
    assert str(caught.value) == f"url: malformed address - expected {expected}, got {url!r}"


def test_options_that_cannot_be_are_refused():
    with pytest.raises(
        ShippingError, match="max_unacked_messages: an option is out of range - expected 1 to 4096"
    ):
        Sender("shm://a", max_unacked_messages=0)
    with pytest.raises(
        ShippingError, match="window_messages: an option is out of range - expected 1 or more"
    ):
        Receiver("shm://a", window_messages=0)


def test_importing_the_package_pulls_in_no_torch_and_no_asyncio():
    code = "import sys, mmrender.shipping; print([m for m in ('torch', 'asyncio') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
