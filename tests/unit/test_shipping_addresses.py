"""Addresses: every form, what is refused, and which of them another machine can reach."""

import pytest

from kit import error_of
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
    ],
)
def test_a_url_is_read_and_written_back(url, address):
    assert Address.parse(url) == address
    assert str(address) == url


FORMS = {"unix": "unix:///path/to/socket", "tcp": "tcp://host:port"}


@pytest.mark.parametrize(
    "url",
    ["http://a:1", "shm://a", "tcp://a", "tcp://a:1/b", "tcp://u@a:1", "tcp://a:1?x", "unix://a/b"]
    + ["unix:///" + "a" * 107, "unix:///", "tcp://a:99999", "tcp://a:x", 7, None, b"unix:///a", "tcp://[::1"]
    + [
        "tcp://a..b:1",
        "tcp://" + "a" * 64 + ":1",
        "unix:///a\nb",
        "unix:///a\0b",
        "unix:///\ud800",
        "tcp://\ud800:1",
    ],
)
def test_a_malformed_address_is_refused_with_the_form_that_is_right(url):
    problem = error_of(ShippingError, Sender, url)
    scheme = str(url).partition(":")[0]
    assert problem in {
        f"url: malformed address - expected {expected}, got {url!r}"
        for expected in (FORMS.get(scheme), ", ".join(FORMS.values()))
    }
    assert "malformed address" in error_of(ShippingError, Receiver, url)


def test_options_that_cannot_be_are_refused():
    with pytest.raises(
        ShippingError, match="max_unacked_messages: is out of range - expected a whole number, 1 to 4096"
    ):
        Sender("unix:///a", max_unacked_messages=0)
    with pytest.raises(
        ShippingError, match="window_messages: is out of range - expected a whole number, 1 or more"
    ):
        Receiver("unix:///a", window_messages=0)
