"""Which addresses are public, and which policies can be made."""

import math
import socket
from pathlib import Path
from typing import Any

import pytest

from kit import error_of
from mmrender.errors import InputError, MediaError
from mmrender.media.load import load_image
from mmrender.media.policy import MediaPolicy

PUBLIC = [
    "93.184.215.14",
    "8.8.8.8",
    "2606:4700::1111",
    "::ffff:8.8.8.8",
    "64:ff9b::808:808",
    "2002:808:808::1",
]
NOT_PUBLIC = {
    "unspecified": "0.0.0.0 ::",
    "loopback": "127.0.0.1 127.8.8.8 ::1 ::ffff:127.0.0.1 64:ff9b::7f00:1 2002:7f00:1::",
    "private": "10.1.2.3 172.16.0.1 192.168.1.1 255.255.255.255 240.0.0.1 192.0.2.1 198.18.0.1 fc00::1 fd12::1 "
    "2001:db8::1 ::ffff:10.0.0.1 2002:a00:1::",
    "link-local": "169.254.169.254 fe80::1 fe80::1%eth0 ::ffff:169.254.169.254 64:ff9b::a9fe:a9fe",
    "multicast": "224.0.0.1 ff02::1",
    "site-local": "fec0::1",
    "": "100.64.0.1 2001::1 ::127.0.0.1 64:ff9b:1::1",
}


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_allowed(address: str) -> None:
    assert MediaPolicy().refusal_of(address) is None


@pytest.mark.parametrize(
    ("address", "kind"),
    [(address, kind) for kind, all_of in NOT_PUBLIC.items() for address in all_of.split()],
)
def test_other_addresses_are_refused(address: str, kind: str) -> None:
    reason = MediaPolicy().refusal_of(address)
    assert reason is not None
    assert reason.endswith("not public")
    assert not kind or reason == f"{kind}, not public"
    assert MediaPolicy(allow_private_addresses=True).refusal_of(address) is None


def test_networks_open_and_close() -> None:
    policy = MediaPolicy(allow_networks=("10.2.0.0/16", "::1"), deny_networks=("10.2.3.0/24", "8.8.0.0/16"))
    for address in ("10.2.0.1", "::ffff:10.2.0.1", "64:ff9b::a02:1", "::1"):
        assert policy.refusal_of(address) is None
    for address in ("10.3.0.1", "127.0.0.1"):
        assert policy.refusal_of(address) is not None
    denied = "in 10.2.3.0/24, which MediaPolicy.deny_networks holds"
    assert policy.refusal_of("10.2.3.4") == policy.refusal_of("::ffff:10.2.3.4") == denied
    everything = MediaPolicy(allow_private_addresses=True, deny_networks=("169.254.0.0/16",))
    for address in ("169.254.169.254", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1"):
        assert everything.refusal_of(address) is not None


def test_policies_are_values() -> None:
    first = MediaPolicy(local_roots=(Path("a"),), schemes=frozenset({"https"}))
    assert first == MediaPolicy(local_roots=("a",), schemes={"https"})
    assert len({first, MediaPolicy(), MediaPolicy()}) == 2
    with pytest.raises(AttributeError):
        first.max_bytes = 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("schemes", frozenset({"ftp"})),
        ("local_roots", "/data"),
        ("allow_networks", "10.0.0.0/8"),
        ("deny_networks", ("10.0.0.1/8",)),
        ("max_bytes", 0),
        ("max_items", "many"),
        ("max_redirects", -1),
        ("total_timeout", float("nan")),
    ],
)
def test_policies_that_make_no_sense(field: str, value: Any, sentence) -> None:
    assert error_of(InputError, MediaPolicy, **{field: value}) == sentence


def test_an_infinite_limit_is_none() -> None:
    MediaPolicy(max_pixels=math.inf, max_redirects=0).check("max_pixels", 10**30)


LOCAL = "127.0.0.1 127.1 127.0.1 0 0.0.0.0 2130706433 0x7f000001 0x7f.1 0x7f.0.0.1 0177.0.0.1 017700000001 0177.1 127.0.0.01"
LOCAL += " localhost LOCALHOST localhost. 127.0.0.1. [::] [::1] [0:0:0:0:0:0:0:1] [::ffff:127.0.0.1] [::ffff:7f00:1]"
LOCAL += " [::127.0.0.1] [64:ff9b::7f00:1] [64:ff9b:1::7f00:1] [2002:7f00:1::] [2001::1] [fe80::1] [fe80::1%25lo] [fec0::1]"
LOCAL += " 169.254.169.254 2852039166 0xa9fea9fe 0251.0376.0251.0376 169.254.43518 [::ffff:a9fe:a9fe] [fd00:ec2::254]"
LOCAL += " 10.0.0.1 10.1 0xa000001 012.1 172.16.0.1 172.31.255.255 192.168.0.1 192.168.1 192.0.0.1 192.0.2.1 198.18.0.1"
LOCAL += " 100.64.0.1 203.0.113.9 224.0.0.1 240.0.0.1 255.255.255.255 [ff02::1] [fc00::1] [2001:db8::1]"
LOCAL += (
    " %31%32%37.0.0.1 127%2e0%2e0%2e1 ①②⑦.⓪.⓪.① 127。0。0。1 ⑯⑨.254.169.254 ⓛⓞⓒⓐⓛⓗⓞⓢⓣ 127.0.0.1%00.a.test"
)
LOCAL += " me@127.0.0.1 8.8.8.8@127.0.0.1 8.8.8.8:80@127.0.0.1 a.test%40127.0.0.1 127.0.0.1:22 127.0.0.1:0 [::1]:6379"
OTHER = [
    "http://127.0.0.1\\@8.8.8.8/", "http://8.8.8.8\\@127.0.0.1/", "http:\\\\127.0.0.1\\", "http:127.0.0.1/a", "http:/127.0.0.1/",
    "http:///127.0.0.1/", "http:////127.0.0.1/", "//127.0.0.1/a", "http://127.0.0.1\t/", "http://127.0.0.1\n/", "\thttp://127.0.0.1/",
    " http://127.0.0.1/", "http://127.0.0.1#@8.8.8.8/", "http://127.0.0.1?@8.8.8.8/", "http://[::1", "http://::1/", "http://%5B::1%5D/",
    "http://127.0.0.1\r\nHost: a.test/", "hTTp://127.0.0.1/", "https://127.0.0.1/", "url:http://127.0.0.1/", "view-source:http://127.0.0.1/",
    "file:///etc/passwd", "FILE:///etc/passwd", "file:/etc/passwd", "file:etc/passwd", "file://localhost/etc/passwd", "file://127.0.0.1/etc",
    "file:///proc/self/environ", "file://%2fetc/passwd", "/etc/passwd", "../../etc/passwd", "~/.ssh/id_rsa", "\\\\127.0.0.1\\share\\a",
    "ftp://127.0.0.1/a", "gopher://127.0.0.1:6379/_INFO", "dict://127.0.0.1:11211/", "ldap://127.0.0.1/", "unix:///var/run/docker.sock",
    "ws://127.0.0.1/", "jar:http://127.0.0.1/!/", "data:image/png;base64,@/etc/passwd", "data:,file:///etc/passwd",
]  # fmt: skip
FORGED = [*(f"http://{host}/a.png" for host in LOCAL.split()), *OTHER]


def test_no_forged_address_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[Any] = []

    def connect(address: Any, *_: Any, **__: Any) -> None:
        reached.append(address)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", connect)
    # Names of a resolver that lies; it reads all the ways of writing a number, as that of the system does.
    resolve = socket.getaddrinfo

    def lying(host: Any, *given: Any, **options: Any) -> Any:
        try:
            return resolve(host, *given, **{**options, "flags": socket.AI_NUMERICHOST})
        except OSError:
            return resolve("127.0.0.1", *given, **options)

    monkeypatch.setattr(socket, "getaddrinfo", lying)
    assert len(FORGED) >= 100
    for url in FORGED:
        assert "root:" not in error_of(MediaError, load_image, url, MediaPolicy())
    assert {address for address, _ in reached} <= {"8.8.8.8"}  # public, and what some of them say
