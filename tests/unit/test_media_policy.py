"""Which addresses are public, and which policies can be made."""

from pathlib import Path
from typing import Any

import pytest

from mmrender.errors import InputError
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
    assert first == MediaPolicy(local_roots=("a",), schemes={"https"})  # type: ignore[arg-type]
    assert len({first, MediaPolicy(), MediaPolicy()}) == 2
    with pytest.raises(AttributeError):
        first.max_bytes = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("schemes", frozenset({"ftp"}), "a subset of ['data', 'file', 'http', 'https'], got ['ftp']"),
        ("local_roots", "/data", "a tuple of paths, got '/data'"),
        ("allow_networks", "10.0.0.0/8", "a tuple of networks, got '10.0.0.0/8'"),
        ("deny_networks", ("10.0.0.1/8",), "IP networks such as '10.2.0.0/16', got 10.0.0.1/8 has host bits "
         "set"),
        ("max_bytes", 0, "a positive number, got 0"),
        ("total_timeout", float("nan"), "a positive number, got nan"),
    ],
)  # fmt: skip
def test_policies_that_make_no_sense(field: str, value: Any, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        MediaPolicy(**{field: value})
    assert str(caught.value) == f"MediaPolicy.{field}: cannot be used - expected {expected}"
